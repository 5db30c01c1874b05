"""vLLM's KV-cache spec and manager for requests whose physical length is not their logical length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from vtoken.config import VTokenConfig
from vtoken.core.budget import longest_request
from vtoken.core.ledger import LengthLedger
from vtoken.core.reclamation import BlockChange


@dataclass(frozen=True, kw_only=True)
class EvictableAttentionSpec(FullAttentionSpec):
    """Full attention over the tokens that are still there. Carries no settings: merging specs would reset them."""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """What one request of full length takes at its peak; vLLM refuses to start with less."""
        config: VTokenConfig = vllm_config.additional_config.vtoken
        longest = longest_request(config, vllm_config.model_config.max_model_len)
        return -(-longest // self.block_size) * self.page_size_bytes


class EvictableAttentionManager(FullAttentionManager):
    """Allocates by physical length: vLLM counts logical tokens, the ledger knows how many of them are gone."""

    ledger: LengthLedger
    reserve: Callable[[int], int]
    """Blocks that an admission which wants so many must leave free."""
    lose: Callable[[str], None]
    """Told that vLLM takes all blocks of a request."""

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks to allocate; at admission all that the request will ever take, and what others were promised.

        In ``fill`` a request with a budget never outgrows it, so what it and the running ones will still take is known.
        Keeping that free means that no admission leads to a preemption, as long as every running request has one.
        """
        returned = self.ledger.returned_positions(request_id)
        tokens = num_tokens - returned
        peak = shared = 0
        if apply_admission_cap:
            # Hit blocks that others hold are there already; those that nobody holds are taken out of the free ones.
            shared = len(new_computed_blocks) - self._get_num_evictable_blocks(new_computed_blocks)
            peak = self.ledger.expect_prefill(request_id, num_tokens, shared)
        if peak:
            tokens = min(tokens, peak * self.block_size)
        needed = super().get_num_blocks_to_allocate(
            request_id,
            tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model - returned,
            apply_admission_cap=apply_admission_cap,
            prefill_end=prefill_end,
        )
        if not apply_admission_cap:
            return needed
        wanted = max(needed, peak - shared) + self.ledger.committed_growth()
        return wanted + self.reserve(wanted)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        returned = self.ledger.returned_positions(request_id)
        blocks = super().allocate_new_blocks(request_id, num_tokens - returned, num_tokens_main_model - returned)
        if blocks:
            self.ledger.hold_blocks(request_id, len(self.req_to_blocks[request_id]))
        return blocks

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Register full blocks for later requests, as long as every token's forward attended all earlier ones.

        vLLM asks when a step is scheduled, and what is evicted goes after it: the tokens of that step still count.
        """
        if self.ledger.is_whole(request.request_id):
            super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """The request finished or was preempted: vLLM takes its blocks, and its lengths start anew."""
        if request_id in self.ledger:
            self.ledger.reset(request_id)
        self.lose(request_id)
        return super().pop_blocks_for_free(request_id)

    def forget_uncomputed(self, request_id: str, computed: int) -> None:
        """Nobody may find what is registered of the request beyond the tokens that a forward has computed, or will.

        vLLM registers a step's blocks when it schedules the request, and under priority scheduling the request may lose
        its place in that very step.
        """
        if request_id in self.ledger and self.ledger.is_whole(request_id):
            blocks = self.blocks_of(request_id)[computed // self.block_size :]
            self.block_pool.evict_blocks({block.block_id for block in blocks})

    def blocks_of(self, request_id: str) -> list[KVCacheBlock]:
        """The request's own list, in the order of its positions."""
        return self.req_to_blocks.get(request_id, [])

    def truncate(self, request_id: str, keep: int) -> list[KVCacheBlock]:
        """Take all but the first ``keep`` blocks from the request, without returning them to the pool yet."""
        blocks = self.req_to_blocks[request_id]
        tail = blocks[keep:]
        del blocks[keep:]
        return tail

    def exchange(self, request_id: str, change: BlockChange, adopted: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """Do to the request's blocks what the worker has done to its own list; returns those that left it.

        Raises:
            RuntimeError: the request does not hold one of them, so that no list can be trusted.
        """
        blocks, gone = self.req_to_blocks[request_id], set(change.freed)
        held = [block.block_id for block in blocks]
        if not gone <= set(held):
            raise RuntimeError(
                f"vtoken: the worker freed blocks {sorted(gone - set(held))} of request {request_id}, "
                "which does not hold them"
            )
        read_only = int(self.ledger.read_only_blocks([request_id])[0])
        left = sum(block_id in gone for block_id in held[:read_only])
        place = held.index(change.freed[0])
        blocks[place:place] = adopted
        freed = [block for block in blocks if block.block_id in gone]
        blocks[:] = [block for block in blocks if block.block_id not in gone]
        self.ledger.hold_blocks(request_id, len(blocks))
        if left:
            self.ledger.keep_read_only(request_id, read_only - left)
        return freed
