"""Reading a user's prompts from a file with one JSON object per line."""

import json
from pathlib import Path
from typing import Any

from vtoken.evaluation.workloads import Workload, encode_chat


def read_prompt_file(
    path: Path, tokenizer: Any, context: int, max_tokens: int, limit: int | None = None
) -> list[Workload]:
    """The requests of a JSON-lines file; blank lines are ignored.

    Args:
        path: each line holds ``prompt`` (text to be continued as it is) or ``messages`` (a conversation for
            the model's chat template), and optionally ``max_tokens``.
        tokenizer: of the model that will be asked.
        context: tokens that the model can hold, prompt and output together.
        max_tokens: for lines that name none.
        limit: read only so many requests.

    Raises:
        ValueError: one sentence with file, line and remedy.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ValueError(f"prompt file {path} does not exist; give the path of a JSON-lines file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"prompt file {path} cannot be read as UTF-8 text ({error}); give a JSON-lines file."
        ) from None
    workloads: list[Workload] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and len(workloads) == limit:
            break
        try:
            workloads.append(_request(line, f"line-{number}", tokenizer, context, max_tokens))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not workloads:
        raise ValueError(f'prompt file {path} holds no request; write one per line, such as {{"prompt": "Hello"}}.')
    return workloads


def _request(line: str, request_id: str, tokenizer: Any, context: int, max_tokens: int) -> Workload:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno}); write one object per line.") from None
    if not isinstance(record, dict):
        raise ValueError('must be a JSON object such as {"prompt": "Hello"}.')
    max_tokens = record.get("max_tokens", max_tokens)
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"'max_tokens' is {max_tokens!r}; it must be a positive integer.")
    tokens = tokens_of(record, tokenizer)
    if len(tokens) + max_tokens > context:
        raise ValueError(
            f"{len(tokens)} prompt tokens and {max_tokens} output tokens exceed the model's context of "
            f"{context} tokens; shorten the prompt or lower max_tokens."
        )
    return Workload(request_id, tokens, max_tokens)


def tokens_of(record: dict[str, Any], tokenizer: Any) -> list[int]:
    """The prompt's tokens of one line. Raises ValueError, without naming the line."""
    if ("prompt" in record) == ("messages" in record):
        raise ValueError("must have either 'prompt' or 'messages'; add one of them and not both.")
    if "prompt" in record:
        return _prompt_tokens(record["prompt"], tokenizer)
    return _message_tokens(record["messages"], tokenizer)


def _prompt_tokens(prompt: Any, tokenizer: Any) -> list[int]:
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("'prompt' must be a text that is not empty.")
    return list(tokenizer(prompt)["input_ids"])


def _message_tokens(messages: Any, tokenizer: Any) -> list[int]:
    well_formed = isinstance(messages, list) and bool(messages)
    if not well_formed or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise ValueError("'messages' must be a list of objects with the texts 'role' and 'content', and not empty.")
    try:
        return encode_chat(tokenizer, messages)
    except Exception as error:  # templates are programs of the model's authors and raise what they like
        raise ValueError(f"the model's chat template refuses these messages ({error}); check the roles.") from None
