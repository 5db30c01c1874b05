"""The line of the log that says what is on, and what it will save."""

import math

from vtoken import __version__
from vtoken.config import VTokenConfig
from vtoken.core.budget import resolve_budget


def startup_line(config: VTokenConfig, block_size: int, num_blocks: int, max_model_len: int) -> str:
    """What is on, and how many requests of full length the pool holds with it and without.

    Args:
        config: the engine's settings.
        block_size: slots per block.
        num_blocks: blocks that requests can hold.
        max_model_len: tokens of the longest request.
    """
    on = f"vtoken {__version__}: {config.summary()}"
    if config.reclaim == "none":
        return f"{on}, which promises nothing, since a block is freed only when all its tokens are dead."
    if config.protect_prompt:
        return f"{on}, and prompts stay whole, so what is saved depends on the length of the answers."
    tokens, about = min(resolve_budget(config, max_model_len), max_model_len), ""
    if config.reclaim == "pack":  # as much waste as it tolerates
        tokens, about = min(math.ceil(tokens / (1 - config.theta_f)), max_model_len), "about "
    whole, kept = -(-max_model_len // block_size), -(-tokens // block_size)
    return (
        f"{on}: a prompt of {max_model_len} tokens goes from {whole} to {about}{kept} blocks of {block_size}, and "
        f"the pool of {num_blocks} holds {about}{num_blocks // kept} of them at once instead of {num_blocks // whole}."
    )
