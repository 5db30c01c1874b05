"""How vLLM's front end is told that it must not take a request."""

from vllm.exceptions import VLLMValidationError


class RequestRefused(VLLMValidationError, ValueError):
    """A 400 of the OpenAI server for that request alone, which any other ValueError is not; in Python a ValueError."""
