"""Hashes of blocks for vLLM's prefix cache, from what a trace says about prompts instead of from their tokens."""

from collections.abc import Sequence
from typing import Any

from vtoken.planning.trace import CHUNK, Arrival


class PrefixHashes:
    """A block hasher for requests whose ids are their places in a list of arrivals.

    A block in a chunk of the prompt is named by the chain of chunk ids up to there and its place in the chunk. The last
    chunk may be a part of one: only prompts that end there as well, with the same id and as many tokens, share its
    blocks. All other blocks are their request's own.

    Args:
        arrivals: the requests.
        block_size: tokens per block.

    Raises:
        ValueError: one sentence, where chunks do not consist of whole blocks.
    """

    def __init__(self, arrivals: Sequence[Arrival], block_size: int) -> None:
        if CHUNK % block_size:
            raise ValueError(
                f"--block-size {block_size} does not divide the {CHUNK} tokens that one of a trace's hash_ids stands "
                "for; give 16, 32, 64 or 128, or leave out --enable-prefix-caching."
            )
        self._arrivals = arrivals
        self._block_size = block_size
        self._chains: dict[tuple[int, ...], int] = {}

    def __call__(self, request: Any) -> list[bytes]:
        """Hashes of the request's full blocks that have none yet; vLLM asks whenever it has a token more."""
        known, full = len(request.block_hashes), request.num_tokens // self._block_size
        if full <= known:
            return []
        index = int(request.request_id)
        of_prompt = self._of_prompt(self._arrivals[index]) if not known else []
        return of_prompt + [b"own %d %d" % (index, n) for n in range(known + len(of_prompt), full)]

    def _of_prompt(self, arrival: Arrival) -> list[bytes]:
        hashes: list[bytes] = []
        chain = 0
        for n, chunk in enumerate(arrival.chunks):
            tokens = min(CHUNK, arrival.prompt - n * CHUNK)
            chain = self._chains.setdefault((chain, chunk, tokens), len(self._chains) + 1)
            hashes += [b"%d %d" % (chain, n) for n in range(tokens // self._block_size)]
        return hashes
