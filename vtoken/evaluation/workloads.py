"""What the demo asks: what modules of Python's own library do, and which numbers are hidden in their text."""

import importlib.util
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any

DEMO_REQUESTS = 32
DEMO_OUTPUT_TOKENS = 256
DEMO_PROMPT_TOKENS = range(1536, 1665)
NEEDLE_OUTPUT_TOKENS = 24
NEEDLE_PROMPT_TOKENS = range(512, 1537)
NEEDLE_DEPTHS = (0.05, 0.25, 0.45, 0.65, 0.8, 0.95)

# Pure-Python modules of Python 3.11 to 3.14, each with more text than one prompt takes.
MODULES = """
argparse ast bdb calendar cmd collections configparser contextlib csv dataclasses difflib dis enum fileinput
fractions ftplib functools gettext gzip heapq imaplib ipaddress locale logging mailbox mimetypes optparse pdb
pickle pickletools pkgutil platform plistlib poplib pprint profile pstats queue random selectors shlex shutil
smtplib socket socketserver ssl statistics subprocess tarfile tempfile textwrap threading tokenize trace
traceback tracemalloc typing uuid wave weakref webbrowser
"""

WORDS = ("Cairo", "Oslo", "Lima", "Kyoto", "Quebec", "Nairobi", "London", "Lisbon")

MARK = "@@TEXT@@"
EXPLAIN = (
    "Here is the beginning of the source code of the Python standard-library module `{name}`:\n\n"
    f"```python\n{MARK}\n```\n\n"
    "Explain what this module is for, what its main classes and functions do, and how they work together."
)
NEEDLE_INTRO = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
NEEDLE = "\nOne of the special magic numbers for {word} is: {number}.\n"
NEEDLE_QUESTION = (
    "\nWhat is the special magic number for {word} mentioned in the provided text? "
    "The special magic number for {word} mentioned in the provided text is"
)


@dataclass(frozen=True)
class Workload:
    """One request: its prompt, how many tokens to produce, for a needle the answers that count, and own settings."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    answers: list[str] | None = None
    extra_args: dict[str, Any] | None = None

    @property
    def total_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.max_tokens


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer in a local model directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model), local_files_only=True)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of the text alone, without the markers a tokenizer may add around it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a conversation that waits for a reply; without a chat template, of its plain text."""
    return encode(tokenizer, render_chat(tokenizer, messages))


def render_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return "\n\n".join(message["content"] for message in messages) + "\n\n"
    return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))


def explain_requests(
    tokenizer: Any, count: int = DEMO_REQUESTS, max_tokens: int = DEMO_OUTPUT_TOKENS
) -> list[Workload]:
    """Requests to explain a module each, with prompts of exactly known length in ``DEMO_PROMPT_TOKENS``.

    The lengths step through that range so that they fall on many residues of a block. Nothing is random: the
    same Python and tokenizer give the same requests.
    """
    texts = passages(tokenizer, max(DEMO_PROMPT_TOKENS))
    workloads = []
    for index in range(count):
        length = DEMO_PROMPT_TOKENS[(index * 37) % len(DEMO_PROMPT_TOKENS)]
        name, part, passage = next(texts)
        chat = render_chat(tokenizer, [{"role": "user", "content": EXPLAIN.format(name=name)}])
        head, tail = (encode(tokenizer, piece) for piece in chat.split(MARK))
        prompt = head + passage[: length - len(head) - len(tail)] + tail
        workloads.append(Workload(f"{name}-{part}", prompt, max_tokens))
    return workloads


def needle_requests(tokenizer: Any, prompt_tokens: int, seed: int = 0) -> list[Workload]:
    """One hidden number each, at the depths of ``NEEDLE_DEPTHS``, in prompts of ``prompt_tokens`` tokens.

    The prompt ends in the first words of the answer, so that a small base model has only to continue it.
    """
    draw = random.Random(seed)
    workloads = []
    texts = passages(tokenizer, prompt_tokens)
    for index, depth in enumerate(NEEDLE_DEPTHS):
        word, number = WORDS[index % len(WORDS)], str(draw.randrange(1_000_000, 10_000_000))
        intro = encode(tokenizer, NEEDLE_INTRO)
        needle = encode(tokenizer, NEEDLE.format(word=word, number=number))
        question = encode(tokenizer, NEEDLE_QUESTION.format(word=word))
        room = prompt_tokens - len(intro) - len(needle) - len(question)
        if room < 0:
            raise ValueError(
                f"a needle prompt of {prompt_tokens} tokens is too short for its question; use 128 or more."
            )
        haystack = next(texts)[2][:room]
        cut = round(depth * room)
        prompt = intro + haystack[:cut] + needle + haystack[cut:] + question
        workloads.append(Workload(f"needle-{index}", prompt, NEEDLE_OUTPUT_TOKENS, [number]))
    return workloads


def needle_length(workloads: Sequence[Workload]) -> int:
    """Prompt length of the needles that go with this load: as its longest prompt, within sensible bounds."""
    longest = max(len(work.prompt_token_ids) for work in workloads)
    return min(max(longest, min(NEEDLE_PROMPT_TOKENS)), max(NEEDLE_PROMPT_TOKENS))


def passages(tokenizer: Any, length: int) -> Iterator[tuple[str, int, list[int]]]:
    """(module, part, ``length`` token ids): the first part of every module, then the second of each, ..."""
    part, found = 0, True
    while found:
        found = False
        for name in MODULES.split():
            text = _source(name)
            # A token is at most a few characters; cutting the text first keeps large modules cheap.
            tokens = encode(tokenizer, text[: (part + 1) * length * 8])
            passage = tokens[part * length : (part + 1) * length]
            if len(passage) == length:
                found = True
                yield name, part, passage
        part += 1
    raise ValueError(
        "this Python's standard library has too little source text for so many requests; use --prompts FILE."
    )


def _source(name: str) -> str:
    """A module's text, read without running the module; empty where only compiled files are installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or not isinstance(spec.loader, InspectLoader):
        return ""
    try:
        return spec.loader.get_source(name) or ""
    except (OSError, ImportError, SyntaxError, UnicodeDecodeError):
        return ""
