"""vLLM with vtoken computes what the policy's victims imply: the dense replay agrees, and could have disagreed."""

from pathlib import Path

import oracle
import pytest
from engines import ForwardWatch, Job, generate, prompts, running

from vtoken.config import VTokenConfig

S = 32


@pytest.mark.parametrize(
    "config, engine_args",
    [
        (VTokenConfig(policy="streaming_llm", budget=64, sinks=4, recent=16), {}),
        (VTokenConfig(policy="streaming_llm", budget=0.3, sinks=2, recent=8, interval=5), {}),
        (VTokenConfig(policy="streaming_llm", budget=50, sinks=4, recent=16), {"max_num_batched_tokens": 96}),
    ],
    ids=["steady", "bursts", "chunked prefill"],
)
def test_the_oracle_agrees_on_a_tiny_model(tiny_gqa: Path, config: VTokenConfig, engine_args: dict) -> None:
    jobs = [Job(f"r{n}", p, 24) for n, p in enumerate(prompts((300, 77, 129, 128, 40), 512))]
    with running(
        tiny_gqa, config.model_copy(update={"record_trace": True}), skip_tokenizer_init=True, **engine_args
    ) as engine:
        answers = generate(engine, jobs, logprobs=-1)
        traces = engine.take_traces()
    model = oracle.load_reference(tiny_gqa)
    for job in jobs:
        answer = answers[job.name]
        report = oracle.check(
            model, job.prompt, answer.token_ids, traces[job.name], answer.logits, allow_none=job.name == "r4"
        )
        assert report.entries == 24 * 512
    longest = jobs[0]
    oracle.check_sensitivity(model, longest.prompt, answers["r0"].token_ids, traces["r0"], answers["r0"].logits)


@pytest.mark.slow
def test_the_oracle_agrees_on_the_real_model(smollm2: Path) -> None:
    config = VTokenConfig(policy="streaming_llm", budget=128, record_trace=True)
    jobs = [Job(f"r{n}", p, 24) for n, p in enumerate(prompts((300, 213), 40000))]
    with running(smollm2, config) as engine:
        answers = generate(engine, jobs, logprobs=20)
        traces = engine.take_traces()
    model = oracle.load_reference(smollm2)
    for job in jobs:
        answer = answers[job.name]
        report = oracle.check(model, job.prompt, answer.token_ids, traces[job.name], answer.logits)
        assert report.evictions == len(job.prompt) - 127 + 23
    oracle.check_sensitivity(model, job.prompt, answer.token_ids, traces[job.name], answer.logits, candidates=3)


def test_every_forward_is_dense_at_true_positions(tiny_gqa: Path) -> None:
    """Prompt length and budget run through all residues of the block size together, one request each."""
    decoded = 6
    jobs = [Job(f"r{i}", p, decoded, budget=64 + i) for i, p in enumerate(prompts([128 + i for i in range(S)], 512))]
    with running(
        tiny_gqa, VTokenConfig(policy="streaming_llm", budget=64), skip_tokenizer_init=True, num_gpu_blocks_override=257
    ) as engine:
        watch = ForwardWatch(engine)
        generate(engine, jobs)
        snapshot = engine.snapshot()
    assert (snapshot.held_blocks, snapshot.live_tokens, snapshot.preemptions) == (0, 0, 0)
    assert snapshot.tokens_moved <= snapshot.tokens_evicted == sum(128 - 63 + decoded - 1 for _ in jobs)

    seen: dict[str, list] = {job.name: [] for job in jobs}
    for forward in watch.forwards:
        held = [block for part in forward for block in part.block_ids]
        assert len(held) == len(set(held))
        for part in forward:
            seen[part.request_id].append(part)
    for job in jobs:
        prompt, budget = len(job.prompt), job.budget
        prefill = [part for part in seen[job.name] if part.positions[-1] < prompt]
        assert [p for part in prefill for p in part.positions] == list(range(prompt))
        for part in prefill:
            assert part.seq_len == part.positions[-1] + 1
        decodes = seen[job.name][len(prefill) :]
        assert [part.positions for part in decodes] == [[prompt + i] for i in range(decoded - 1)]
        assert [part.seq_len for part in decodes] == [budget] * (decoded - 1)
        for part in seen[job.name]:
            assert len(part.block_ids) == -(-part.seq_len // S)
            assert {slot // S for slot in part.slots} <= set(part.block_ids)
        # Steady state: the same blocks throughout, and each new token in the slot of the token that just died.
        assert len({tuple(part.block_ids) for part in decodes}) == 1


def test_steady_decoding_moves_nothing_and_allocates_nothing(tiny_gqa: Path) -> None:
    (prompt,) = prompts([200], 512)
    with running(tiny_gqa, VTokenConfig(policy="streaming_llm", budget=64), skip_tokenizer_init=True) as engine:
        engine.add_request("r", prompt, 100)
        engine.step()
        first = engine.snapshot()
        pool = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        allocations: list[int] = []
        stock = pool.get_new_blocks
        pool.get_new_blocks = lambda n: allocations.append(n) or stock(n)
        for step in range(1, 99):
            engine.step()
            now = engine.snapshot()
            assert now.tokens_evicted == first.tokens_evicted + step
            assert (now.tokens_moved, now.held_blocks, now.live_tokens) == (first.tokens_moved, 2, 63)
    assert allocations == []
    assert (first.tokens_evicted, first.tokens_moved, first.blocks_reclaimed) == (200 - 63, 59, 5)
