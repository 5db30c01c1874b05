"""The real engine on a pool that is too small: random requests that share beginnings, aborted and preempted at random.

After every step the books of the block pool add up, and afterwards finished requests are held to the exactness oracle
on what their own traces say: hit or miss, preempted or not.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from engines import Answer, Job, running

from vtoken.config import VTokenConfig
from vtoken.core import audit

Tiny = Callable[[str], Path]
VOCAB = 512
REQUESTS = 45
SAMPLE = 12
ENGINE = {
    "skip_tokenizer_init": True,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 13,
    "max_model_len": 320,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 12,
}


def jobs(rng: np.random.Generator) -> list[Job]:
    """Half of them without an effective budget: nobody knows how much these will take, so somebody is preempted."""
    trunks = [rng.integers(3, VOCAB, 160).tolist() for _ in range(2)]
    made = []
    for n in range(REQUESTS):
        trunk, branch = trunks[rng.integers(2)], 32 * int(rng.integers(0, 6))
        prompt = trunk[:branch] + rng.integers(3, VOCAB, int(rng.integers(1, 60))).tolist()
        budget = None if n % 2 else 10_000
        made.append(Job(f"r{n}", prompt, int(rng.integers(10, 40)) if budget is None else 90, budget))
    return made


def check_books(engine: Any) -> None:
    """Each block is held as often as it is counted, free if nobody holds it, and the worker's table is sound."""
    scheduler = engine._scheduler
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    pool = manager.block_pool
    assert not scheduler.vtoken.frees_pending
    held = Counter(block.block_id for blocks in manager.req_to_blocks.values() for block in blocks)
    assert all(block.ref_cnt == held[block.block_id] for block in pool.blocks if not block.is_null)
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert sorted([*free, *held]) == list(range(1, pool.num_gpu_blocks))
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.vtoken
    audit.check_mapping(worker.table)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "snapkv"},
        {"policy": "h2o", "prefill_evict": "chunked", "prefill_chunk": 48, "interval": 3},
        {"policy": "random", "reclaim": "pack", "check_interval": 1, "low_watermark": 1.0, "headroom": 0.1},
    ],
    ids=["fill", "chunked", "pack"],
)
def test_what_finished_is_exact(tiny: Tiny, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    settings = {"budget": 60, "sinks": 4, "recent": 16, "observation_window": 16, "record_trace": True}
    config = VTokenConfig(**settings, **options)
    model, work, answers, done, aborted = tiny("llama-gqa"), jobs(rng), {}, set[str](), 0
    with running(model, config, **ENGINE) as engine:
        waiting = list(work)
        while waiting or engine.has_unfinished():
            while waiting and rng.random() < 0.4:
                job = waiting.pop(0)
                extra = None if job.budget is None else {"vtoken.budget": job.budget}
                engine.add_request(job.name, job.prompt, job.max_tokens, extra_args=extra, logprobs=-1)
            for progress in engine.step():
                answers[progress.request_id] = Answer(progress.token_ids, progress.logprobs or [])
                if progress.finished:
                    assert progress.finish_reason == "length"
                    done.add(progress.request_id)
            check_books(engine)
            now = engine.snapshot()
            assert now.live_tokens <= now.held_blocks * 32
            living = sorted(set(answers) - done)
            if living and rng.random() < 0.012:
                gone = str(rng.choice(living))
                engine.abort(gone)
                del answers[gone]
                aborted += 1
        snapshot, traces = engine.snapshot(), engine.take_traces()
    assert snapshot.held_blocks == 0 and snapshot.live_tokens == 0
    assert snapshot.preemptions > 0 and snapshot.tokens_evicted > 500
    finished = [job for job in work if job.name in done]
    assert len(finished) + aborted == REQUESTS and 0 < aborted < REQUESTS // 2
    lives = {job.name: traces[job.name].incarnations for job in finished}
    assert any(life.prefix_hit for each in lives.values() for life in each)
    # Those with most to tell come first: preempted ones, then those that took something from the cache.
    told = sorted(finished, key=lambda job: (-len(lives[job.name]), -max(life.prefix_hit for life in lives[job.name])))
    reference = oracle.load_reference(model)
    for job in told[:: max(len(told) // SAMPLE, 1)] + told[:4]:
        answer = answers[job.name]
        oracle.check(reference, job.prompt, answer.token_ids, traces[job.name], answer.logits, allow_none=True)
