"""How a request's bad settings are told."""

from vllm.exceptions import VLLMValidationError


class BadRequest(VLLMValidationError, ValueError):
    """A ValueError, as all our refusals are, that vLLM's asynchronous engine takes for the client's error, too.

    From any other it would make an error of the engine's, without our sentence.
    """
