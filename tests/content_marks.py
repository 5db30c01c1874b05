"""What a token's K/V is a function of, as a number: two tokens have one mark exactly if their K/V must be the same."""

from collections.abc import Callable, Sequence
from typing import Any

from reference_cache import S
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_block_hash, get_request_block_hasher, init_none_hash

START = 0


class ContentMarks:
    """Numbers for token sequences, and for the blocks of the prefix cache.

    A token that is computed while everything before it is attended has the number of the sequence that ends with it:
    whoever finds it in a cached block under another sequence's hash is found out. One that is computed when its request
    has lost a token is like no other; it has a number of that life of the request alone.
    """

    def __init__(self) -> None:
        init_none_hash(sha256)
        self._hash = get_request_block_hasher(S, sha256)
        self._numbers: dict[tuple[int, int], int] = {}
        self._lives = 0
        self._of_hash: dict[bytes, list[int]] = {}

    def after(self, prefix: int, tokens: Sequence[int]) -> list[int]:
        """Marks of tokens that come after the sequence with the number ``prefix``, whole and attended."""
        marks = []
        for token in tokens:
            prefix = self._numbers.setdefault((prefix, token), len(self._numbers) + 1)
            marks.append(prefix)
        return marks

    def of_a_life(self) -> int:
        """A mark that no sequence has, and no other life."""
        self._lives += 1
        return -100 - self._lives

    @property
    def block_hasher(self) -> Callable[[Any], list[Any]]:
        """vLLM's own, as ``Request`` takes it, which also notes what a block with such a hash has to hold."""

        def hashes(request: Any) -> list[Any]:
            known, new = len(request.block_hashes), self._hash(request)
            prefix = self._of_hash[request.block_hashes[-1]][-1] if known else START
            for n, block_hash in enumerate(new, start=known):
                tokens = request.all_token_ids[n * S : (n + 1) * S]
                self._of_hash[block_hash] = self.after(prefix, tokens)
                prefix = self._of_hash[block_hash][-1]
            return new

        return hashes

    def promised(self, block: Any) -> list[int]:
        """What a block of the prefix cache must hold, slot by slot, as its hash says."""
        return self._of_hash[get_block_hash(block.block_hash)]
