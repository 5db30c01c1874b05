"""A tokenizer that needs no model: one token per byte, and a chat template in ChatML's manner."""

from collections.abc import Sequence


class ByteTokenizer:
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
