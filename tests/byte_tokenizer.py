"""Tokenizers that need no model: one for our own code to call, and one on disk for vLLM to load."""

from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

EOS = 511


class ByteTokenizer:
    """One token per byte, and a chat template in ChatML's manner."""

    chat_template: str | None = "chatml"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], add_generation_prompt: bool, tokenize: bool
    ) -> str:
        if messages[0]["role"] == "tool":
            raise ValueError("a tool may not speak first")
        turns = "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
        return turns + "<assistant>"


def save_tokenizer(directory: Path) -> None:
    """Put a tokenizer of 512 tokens beside a tiny model: 256 bytes, 255 pairs of letters, and an end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = list(islice(product(ascii_lowercase, repeat=2), EOS - 256))
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs), "<eos>"]
    bpe = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, merges=pairs))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}<assistant>"
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", chat_template=template).save_pretrained(directory)
