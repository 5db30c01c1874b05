"""How vLLM's front end is told that it must not take a request."""

from typing import Any

from prometheus_client import Counter
from vllm.exceptions import VLLMValidationError

SESSIONS = "vtoken: streaming sessions are not supported yet; send the whole prompt at once."
_MARK = "_vtoken_hook"


requests_refused = Counter("vtoken_requests_refused", "Requests answered with 400 for their vtoken settings.")
"""Of this process, and shown among vLLM's metrics; where there are several front ends, vLLM adds up what they count."""


class RequestRefused(VLLMValidationError, ValueError):
    """A 400 of the OpenAI server for that request alone, which any other ValueError is not; in Python a ValueError."""


def refuse_sessions(marker: type) -> None:
    """Refuse prompts that go on where they arrive, at engines whose ``additional_config`` is a ``marker``.

    A scheduler that refused them could answer one part while the next is on its way, and vLLM's front end waits for an
    answer to each. This private name of vLLM's stands here and not in compat.py because a front end has no use for the
    workers that are imported there.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    stock = AsyncLLM._validate_streaming_input_sampling_params
    if hasattr(stock, _MARK):
        return

    def validate(self: AsyncLLM, params: Any) -> None:
        if isinstance(self.vllm_config.additional_config, marker):
            raise RequestRefused(SESSIONS)
        stock(params)

    setattr(validate, _MARK, True)
    AsyncLLM._validate_streaming_input_sampling_params = validate
