"""Each theme of vLLM's behaviour is shown schedulers that break it: the tests must notice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_vllm_behaviour_admission as admission
import test_vllm_behaviour_blocks as blocks
import test_vllm_behaviour_finish as finish
import test_vllm_behaviour_preemption as preemption
import test_vllm_behaviour_prefix_cache as prefix_cache
import test_vllm_behaviour_queues as queues
from behaviour import KINDS, Kind, Start
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import Request, RequestStatus


class LastComeFirstServed:
    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.waiting.remove_request(request)
        self.waiting.prepend_request(request)


class RunsFromTheBack:
    def schedule(self, *args: Any) -> Any:
        self.running.reverse()
        return super().schedule(*args)


class OneRequestMore:
    def schedule(self, *args: Any) -> Any:
        self.max_num_active_reqs = self.max_num_running_reqs = 3
        return super().schedule(*args)


class EightTokensMore:
    def schedule(self, *args: Any) -> Any:
        self.max_num_scheduled_tokens = self.scheduler_config.max_num_batched_tokens = 88
        return super().schedule(*args)


class NoThreshold:
    def schedule(self, *args: Any) -> Any:
        self.scheduler_config.long_prefill_token_threshold = 0
        return super().schedule(*args)


class NoWatermark:
    def schedule(self, *args: Any) -> Any:
        self.kv_cache_manager.watermark_blocks = 0
        return super().schedule(*args)


class FirstChunkOnly:
    def schedule(self, *args: Any) -> Any:
        self.scheduler_reserve_full_isl = False
        return super().schedule(*args)


class NeverThrottled:
    def schedule(self, *args: Any) -> Any:
        return super().schedule()


class ToTheEndOfTheQueue:
    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.waiting.remove_request(request)
        self.waiting.add_request(request)


class ForgetsItsLastToken:
    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        request._output_token_ids.pop()
        request._all_token_ids.pop()


class PreemptsInSilence:
    def schedule(self, *args: Any) -> Any:
        output = super().schedule(*args)
        output.preempted_req_ids = set()
        return output


class IgnoresStopTokens:
    def _update_request_with_output(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        tokens, stopped = super()._update_request_with_output(request, *args, **kwargs)
        if request.status == RequestStatus.FINISHED_STOPPED:
            request.status, stopped = RequestStatus.RUNNING, False
        return tokens, stopped


class ReportsNoEnd:
    def schedule(self, *args: Any) -> Any:
        output = super().schedule(*args)
        output.finished_req_ids = set()
        return output


class ReportsEndsTwice:
    before: frozenset[str] = frozenset()

    def schedule(self, *args: Any) -> Any:
        output = super().schedule(*args)
        output.finished_req_ids, self.before = output.finished_req_ids | self.before, output.finished_req_ids
        return output


class KeepsBlocks:
    def _free_blocks(self, request: Request) -> None:
        del self.requests[request.request_id]


class OneClientOnly:
    def add_request(self, request: Request) -> None:
        request.client_index = 0
        super().add_request(request)


class RegistersPartialBlocks:
    def schedule(self, *args: Any) -> Any:
        output, pool = super().schedule(*args), self.kv_cache_manager.block_pool
        for req_id in output.num_scheduled_tokens:
            block = self.kv_cache_manager.get_blocks(req_id).blocks[0][-1]
            if block.block_hash is None:
                made_up = make_block_hash_with_group_id(block.block_id.to_bytes(32, "big"), 0)
                pool._insert_block_hash(made_up, block, num_tokens=1)
        return output


class NoSalt:
    def add_request(self, request: Request) -> None:
        request.cache_salt = None
        request.block_hashes.clear()
        request.update_block_hashes()
        super().add_request(request)


class NoAdapter:
    def add_request(self, request: Request) -> None:
        request.lora_request = None
        request.block_hashes.clear()
        request.update_block_hashes()
        super().add_request(request)


class OneBlockLess:
    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        found, hit, *rest = super()._get_local_prefix_cache_hit(request)
        shorter = max(hit - 16, 0)
        return self.kv_cache_manager.truncate_computed_blocks(found, shorter), shorter, *rest


class CountsTwice:
    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        found, hit, *rest = super()._get_local_prefix_cache_hit(request)
        self.kv_cache_manager.record_prefix_cache_stats(request, hit)
        return found, hit, *rest


class ResetsAnyway:
    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        pool = self.kv_cache_manager.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks})
        return super().reset_prefix_cache(*args, **kwargs)


class HeadFirst:
    """A request's blocks go back in the order of its tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pool = self.kv_cache_manager.block_pool
        free_blocks = pool.free_blocks
        pool.free_blocks = lambda blocks: free_blocks(list(blocks)[::-1])


class UseDoesNotCount:
    """A hit does not take its blocks out of the order in which they are evicted."""

    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        found, hit, *rest = super()._get_local_prefix_cache_hit(request)
        self._old = [block for block in found.blocks[0] if block.ref_cnt == 0]
        return found, hit, *rest

    def _free_blocks(self, request: Request) -> None:
        super()._free_blocks(request)
        queue = self.kv_cache_manager.block_pool.free_block_queue
        for block in self._old:
            queue.remove(block)
        queue.prepend_n(self._old)


class IgnoresPauses:
    def set_pause_state(self, state: Any) -> None:
        pass


class WaitsForNoGrammar:
    def add_request(self, request: Request) -> None:
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = queues.Grammar()
        super().add_request(request)


class ByArrival:
    def add_request(self, request: Request) -> None:
        request.priority = 0
        super().add_request(request)


VICTIM = preemption.TestTheVictim()
STOPS = {"sampling": {"stop_token_ids": [14]}, "eos": None, "said": 4, "reason": "stop", "stop_reason": 14}

CONTROLS: list[tuple[type, Callable[..., None], dict[str, Any]]] = [
    (LastComeFirstServed, admission.test_first_come_first_served, {}),
    (RunsFromTheBack, admission.test_first_come_first_served, {}),
    (OneRequestMore, admission.test_no_more_requests_run_than_max_num_seqs, {}),
    (EightTokensMore, admission.test_the_token_budget_of_a_step, {}),
    (NoThreshold, admission.TestLongPrompts().test_none_takes_more_than_the_threshold, {}),
    (NoWatermark, admission.TestBlocks().test_the_watermark_stays_free, {}),
    (FirstChunkOnly, admission.TestBlocks().test_a_prompt_is_admitted_if_all_of_it_fits, {"whole": True}),
    (NeverThrottled, admission.test_prompts_can_be_held_back_while_others_decode, {}),
    (ToTheEndOfTheQueue, VICTIM.test_goes_to_the_head_of_the_queue, {}),
    (ForgetsItsLastToken, VICTIM.test_comes_back_with_all_its_tokens, {}),
    (PreemptsInSilence, VICTIM.test_is_named_to_the_worker_once, {}),
    (LastComeFirstServed, preemption.test_the_queue_keeps_the_order_of_arrival, {}),
    (ForgetsItsLastToken, preemption.test_all_running_requests_can_be_reset, {}),
    (IgnoresStopTokens, finish.TestStop().test_at_the_token_that_says_so, STOPS),
    (ReportsNoEnd, finish.TestAfterwards().test_the_worker_is_told_once_in_the_next_step, {}),
    (ReportsEndsTwice, finish.TestAfterwards().test_the_worker_is_told_once_in_the_next_step, {}),
    (KeepsBlocks, finish.TestAfterwards().test_blocks_are_free_at_once, {}),
    (KeepsBlocks, finish.TestAbort().test_frees_its_blocks_at_once, {}),
    (OneClientOnly, finish.TestClients().test_each_hears_of_its_own_requests, {}),
    (RegistersPartialBlocks, blocks.TestHashes().test_full_blocks_are_registered_in_the_step_that_fills_them, {}),
    (NoSalt, blocks.TestHashes().test_a_hash_is_of_the_parent_s_the_tokens_and_what_else_counts, {}),
    (NoSalt, prefix_cache.TestHits().test_only_with_the_same_salt, {}),
    (NoAdapter, prefix_cache.TestHits().test_only_with_the_same_adapter, {}),
    (OneBlockLess, prefix_cache.TestHits().test_whole_blocks_only, {}),
    (CountsTwice, prefix_cache.TestStats().test_who_had_to_wait_is_counted_once, {}),
    (CountsTwice, prefix_cache.TestStats().test_queries_and_hits_in_tokens, {}),
    (ResetsAnyway, prefix_cache.TestReset().test_is_refused_while_somebody_holds_a_block, {}),
    (HeadFirst, blocks.TestTheQueueOfFreeBlocks().test_a_request_loses_its_tail_first, {}),
    (UseDoesNotCount, blocks.TestTheQueueOfFreeBlocks().test_use_makes_young, {}),
    (IgnoresPauses, queues.TestPause().test_of_new_requests, {}),
    (IgnoresPauses, queues.TestPause().test_of_everybody, {}),
    (WaitsForNoGrammar, queues.TestGrammars().test_a_request_waits_for_its_grammar, {}),
    (ByArrival, queues.TestPriority().test_orders_the_queue, {}),
]


@pytest.mark.parametrize("kind", [k for k in KINDS if k.name in ("vLLM", "vtoken")], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("fault", "test", "more"), CONTROLS, ids=[f"{fault.__name__}-{test.__name__}" for fault, test, _ in CONTROLS]
)
def test_a_fault_is_noticed(
    start: Start, kind: Kind, fault: type, test: Callable[..., None], more: dict[str, Any]
) -> None:
    """By the test itself; over our worker by what is checked there in each step, or it breaks on what it is given."""
    stock = kind.budget is None
    with pytest.raises(AssertionError if stock else (AssertionError, LookupError, ValueError)) as noticed:
        test(start, kind.sabotaged(fault), **more)
    assert not stock or noticed.traceback[-1].path.parent == Path(__file__).parent
