"""Scheduler and worker together, without a model: every forward and every block accounted for."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from stub_worker import S, StubEngine, blocks_for, evicted_in, plan_lengths, same_but

from vtoken.vllm_plugin.compat import plan_of
from vtoken.vllm_plugin.protocol import StepReport
from vtoken.vllm_plugin.scheduler import ScheduledStep

MakeEngine = Callable[..., StubEngine]


def attended(engine: StubEngine, req_id: str) -> list[int]:
    return [f.length for forward in engine.runner.forwards for f in forward if f.req_id == req_id]


def evicted(engine: StubEngine, req_id: str) -> list[int]:
    return [f.evicted for forward in engine.runner.forwards for f in forward if f.req_id == req_id]


class TestResidues:
    """All 16 x 16 residues of prompt length and budget modulo S, until decoding has crossed a block."""

    @pytest.mark.parametrize("budget", [32, 48, 66])
    def test_interval_one(self, make: MakeEngine, budget: int) -> None:
        engine, decoded = make(4000), S + 4
        for i in range(S):
            for j in range(S):
                engine.add(f"r{i}.{j}", prompt=64 + i, outputs=max(budget + S - 64, 0) + decoded, budget=budget + j)
        steady = 0
        while engine.scheduler.has_requests():
            free = engine.pool.get_num_free_blocks()
            begun = [reference.evictions > 0 for reference in engine.runner.references.values()]
            step = engine.step()
            if begun == [True] * 256 and not step.finished and step.output.num_scheduled_tokens:
                steady += 1
                assert step.report.evicted == 256 and step.report.moved == 0
                assert engine.pool.get_num_free_blocks() == free
        engine.check_empty()
        assert steady >= decoded - 3
        for i in range(S):
            for j in range(S):
                lengths = attended(engine, f"r{i}.{j}")
                assert lengths[0] == 64 + i
                assert lengths[-decoded + 1 :] == [budget + j] * (decoded - 1)

    @pytest.mark.parametrize("interval", [2, 3, 5, 16, 17])
    def test_longer_intervals(self, make: MakeEngine, interval: int) -> None:
        engine = make(4000, interval=interval)
        for i in range(S):
            for j in range(S):
                engine.add(f"r{i}.{j}", prompt=64 + i, outputs=S + 4, budget=48 + j)
        steps = engine.run()
        assert sum(step.report.evicted for step in steps) > 0
        for i in range(S):
            for j in range(S):
                lengths, turn = attended(engine, f"r{i}.{j}"), range(48 + j - interval + 1, 48 + j + 1)
                wanted = [64 + i] + [turn[n % interval] for n in range(S + 3)]
                assert lengths == wanted

    def test_prompts_from_below_to_above_the_budget(self, make: MakeEngine) -> None:
        engine = make(4000)
        for prompt in range(1, 70):
            engine.add(f"r{prompt}", prompt=prompt, outputs=60, budget=40)
        engine.run()
        for prompt in range(1, 70):
            grown = [min(prompt + n, 40) for n in range(1, 60)]
            assert attended(engine, f"r{prompt}") == [prompt, *grown]

    def test_a_share_of_the_prompt(self, make: MakeEngine) -> None:
        engine = make(budget=0.3)
        for prompt in (20, 30, 31, 200):
            engine.add(f"r{prompt}", prompt=prompt, outputs=40)
        engine.run()
        assert {p: attended(engine, f"r{p}")[-1] for p in (20, 30, 31, 200)} == {20: 9, 30: 9, 31: 10, 200: 60}


class TestBlocks:
    def test_the_blocks_of_a_burst_are_free_in_the_next_step(self, make: MakeEngine) -> None:
        engine = make(100)
        engine.add("a", prompt=160, outputs=8, budget=40)
        engine.step()
        assert evicted_in(engine.runner) == {"a": 160 - 39}
        assert engine.pool.get_num_free_blocks() == 99 - blocks_for(40)
        assert engine.scheduler.vtoken.stats.blocks_reclaimed == 10 - 3
        engine.run()

    def test_moves_are_never_more_than_evictions(self, make: MakeEngine) -> None:
        engine = make(4000, interval=5)
        for n in range(40):
            engine.add(f"r{n}", prompt=40 + 11 * n, outputs=50, budget=20 + 7 * n)
        engine.run()
        stats = engine.scheduler.vtoken.stats
        assert 0 < stats.tokens_moved <= stats.tokens_evicted

    def test_a_request_without_an_effective_budget_is_left_alone(self, make: MakeEngine) -> None:
        engine = make()
        engine.add("a", prompt=50, outputs=20, budget=70)
        engine.add("b", prompt=50, outputs=20, budget=1.0)
        engine.run()
        assert attended(engine, "a") == list(range(50, 70))
        assert sum(evicted(engine, "a")) == 0
        assert attended(engine, "b") == [50] + [50] * 19


class TestChunkedPrefill:
    @pytest.mark.parametrize("interval", [1, 3])
    @pytest.mark.parametrize("batched", [16, 23, 64])
    def test_chunks_and_decodes_in_one_batch(self, make: MakeEngine, batched: int, interval: int) -> None:
        engine = make(400, batched=batched, seqs=16, interval=interval)
        arrivals = iter([(f"r{n}", 20 + 37 * n % 260, 25 + 5 * n % 40, 20 + 13 * n % 70) for n in range(14)])
        mixed = count = 0
        for req_id, prompt, outputs, budget in arrivals:
            engine.add(req_id, prompt, outputs, budget)
            for _ in range(3):
                step = engine.step()
                mixed += len(set(step.output.num_scheduled_tokens.values())) > 1
                count += 1
        engine.run()
        assert mixed > 10, "no step had chunks and decodes together"
        for n in range(14):
            prompt, outputs, budget = 20 + 37 * n % 260, 25 + 5 * n % 40, 20 + 13 * n % 70
            lengths = attended(engine, f"r{n}")
            chunks = [length for length in lengths if length <= prompt][: len(lengths) - outputs + 1]
            assert chunks == sorted(chunks) and chunks[-1] == prompt, "the prompt is there once as a whole"
            if prompt > budget:
                assert max(lengths[-outputs + 1 :]) == budget

    def test_a_request_is_reduced_at_the_end_of_its_last_chunk_only(self, make: MakeEngine) -> None:
        engine = make(100, batched=50, seqs=4)
        engine.add("a", prompt=170, outputs=4, budget=30)
        engine.run()
        assert attended(engine, "a") == [50, 100, 150, 170, 30, 30, 30]
        assert evicted(engine, "a") == [0, 0, 0, 141, 1, 1, 1]

    def test_a_last_chunk_of_one_token(self, make: MakeEngine) -> None:
        engine = make(100, batched=48, seqs=4)
        engine.add("a", prompt=97, outputs=4, budget=30)
        engine.run()
        assert attended(engine, "a") == [48, 96, 97, 30, 30, 30]


class TestEnding:
    def test_finishing_in_the_step_of_a_burst(self, make: MakeEngine) -> None:
        engine = make(100)
        engine.add("a", prompt=90, outputs=1, budget=40)
        engine.add("b", prompt=90, outputs=9, budget=40)
        step = engine.step()
        assert step.finished == {"a": "length"} and evicted_in(engine.runner) == {"a": 51, "b": 51}
        assert engine.pool.get_num_free_blocks() == 99 - blocks_for(40)
        engine.run()

    def test_finishing_in_steady_state(self, make: MakeEngine) -> None:
        engine = make(100)
        for n in range(5):
            engine.add(f"r{n}", prompt=60 + n, outputs=3 + n, budget=40)
        engine.run()

    @pytest.mark.parametrize("when", [0, 1, 2])
    def test_aborting_between_the_worker_s_result_and_the_update(self, make: MakeEngine, when: int) -> None:
        engine = make(100)
        engine.add("a", prompt=90, outputs=20, budget=40)
        engine.add("b", prompt=95, outputs=20, budget=40)
        for _ in range(when):
            engine.step()
        engine.step(before_update=lambda: engine.abort("a"))
        assert evicted_in(engine.runner)["a"] >= 1
        assert engine.pool.get_num_free_blocks() == 99 - blocks_for(40)
        engine.run()
        assert len(attended(engine, "a")) == when + 1 and len(attended(engine, "b")) == 20

    def test_aborting_all_of_a_step(self, make: MakeEngine) -> None:
        engine = make(100)
        engine.add("a", prompt=90, outputs=20, budget=40)
        engine.step(before_update=lambda: engine.abort("a"))
        engine.run()

    def test_aborting_in_the_middle_of_a_prompt(self, make: MakeEngine) -> None:
        engine = make(100, batched=32, seqs=4)
        engine.add("a", prompt=90, outputs=20, budget=40)
        engine.step()
        engine.step(before_update=lambda: engine.abort("a"))
        engine.run()

    def test_aborting_between_steps_and_while_waiting(self, make: MakeEngine) -> None:
        engine = make(100, seqs=1)
        engine.add("a", prompt=90, outputs=20, budget=40)
        engine.add("b", prompt=90, outputs=20, budget=40)
        engine.step()
        engine.abort("a", "b")
        engine.run()

    @pytest.mark.parametrize("how", ["finish", "abort", "abort in the step"])
    def test_an_id_is_used_again_at_once(self, make: MakeEngine, how: str) -> None:
        engine = make(100)
        engine.add("a", prompt=90, outputs=1 if how == "finish" else 20, budget=40)
        engine.add("b", prompt=80, outputs=12, budget=30)
        engine.step(before_update=lambda: engine.abort("a") if how == "abort in the step" else None)
        if how == "abort":
            engine.abort("a")
        engine.add("a", prompt=33, outputs=12, budget=20)
        step = engine.step()
        assert "a" in step.output.finished_req_ids and plan_lengths(step) == {"b": 30, "a": 33}
        engine.run()
        assert attended(engine, "a")[1:] == [33] + [20] * 11


class TestLeftOut:
    @pytest.mark.parametrize("interval", [1, 3])
    def test_running_requests_that_miss_steps(self, make: MakeEngine, interval: int) -> None:
        """vLLM drops them from the batch and keeps their block ids, which eviction has shortened."""
        engine = make(200, interval=interval)
        for n in range(6):
            engine.add(f"r{n}", prompt=60 + 9 * n, outputs=30, budget=35 + n)
        missed = 0
        for n in range(40):
            engine.scheduler.max_num_scheduled_tokens = 65536 if n % 4 == 0 else 1 + n % 5
            step = engine.step()
            missed += len(engine.scheduler.running) - len(step.output.num_scheduled_tokens) > 0
        engine.scheduler.max_num_scheduled_tokens = 65536
        engine.run()
        assert missed > 20

    def test_a_request_left_out_right_after_its_burst(self, make: MakeEngine) -> None:
        engine = make(100)
        engine.add("a", prompt=60, outputs=6, budget=35)
        engine.add("b", prompt=150, outputs=6, budget=35)
        engine.step()
        engine.scheduler.max_num_scheduled_tokens = 1
        for _ in range(2):
            assert list(engine.step().output.num_scheduled_tokens) == ["a"]
        engine.scheduler.max_num_scheduled_tokens = 65536
        engine.run()
        assert attended(engine, "b") == [150] + [35] * 5


class TestPreemption:
    @pytest.mark.parametrize("interval", [1, 2, 5])
    def test_a_pool_too_small_for_all(self, make: MakeEngine, interval: int) -> None:
        """Requests without an effective budget grow without a promise, and push the others out."""
        engine = make(24, interval=interval)
        for n in range(4):
            engine.add(f"full{n}", prompt=40, outputs=90, budget=1000)
            engine.add(f"cut{n}", prompt=70, outputs=60, budget=30 + n)
        engine.run(limit=4000)
        assert engine.preemptions > 0
        for n in range(4):
            assert attended(engine, f"full{n}")[-1] == 129
            assert max(attended(engine, f"cut{n}")[-4:]) <= 30 + n

    def test_recomputing_goes_back_to_the_budget_fixed_at_first(self, make: MakeEngine) -> None:
        engine = make(100, budget=0.5)
        engine.add("a", prompt=60, outputs=60)
        for _ in range(21):
            engine.step()
        assert attended(engine, "a") == [60] + [30] * 20
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.step()
        assert attended(engine, "a")[-1] == 60 + 21 and evicted_in(engine.runner) == {"a": 81 - 29}
        engine.run()
        assert attended(engine, "a")[22:] == [30] * 38

    @pytest.mark.parametrize("interval", [1, 3])
    def test_preempted_and_resumed_in_one_step(self, make: MakeEngine, interval: int) -> None:
        engine = make(300, interval=interval)
        for n in range(5):
            engine.add(f"r{n}", prompt=50 + 17 * n, outputs=40, budget=40 + n)
        for n in range(30):
            if n in (1, 5, 6, 7, 20):
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            step = engine.step()
            if n in (5, 6, 7):
                assert step.output.preempted_req_ids == step.output.scheduled_cached_reqs.resumed_req_ids != set()
        engine.run()

    def test_preempted_in_the_middle_of_a_prompt(self, make: MakeEngine) -> None:
        engine = make(100, batched=32, seqs=4)
        engine.add("a", prompt=90, outputs=10, budget=40)
        engine.step()
        engine.step()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.run()
        assert attended(engine, "a") == [32, 64, 32, 64, 90] + [40] * 9

    def test_aborted_while_preempted(self, make: MakeEngine) -> None:
        engine = make(100)
        engine.add("a", prompt=90, outputs=10, budget=40)
        engine.step()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.abort("a")
        engine.run()

    @pytest.mark.parametrize("interval", [1, 4])
    def test_requests_with_a_budget_are_admitted_only_if_all_can_grow(self, make: MakeEngine, interval: int) -> None:
        """Prompts above the budget, as in the demo: nobody is preempted, however small the pool."""
        for num_blocks in (13, 17, 25):
            engine = make(num_blocks, interval=interval)
            for n in range(9):
                engine.add(f"r{n}", prompt=100 + 7 * n, outputs=40, budget=33 + 3 * n)
            engine.run(limit=4000)
            assert engine.preemptions == 0

    @pytest.mark.parametrize("spare", [0, 1, 5, 9])
    def test_requests_below_their_budget_are_admitted_only_if_they_can_grow(self, make: MakeEngine, spare: int) -> None:
        """Prompts below the budget: the pool holds two full-grown requests and not quite a third."""
        engine = make(1 + 2 * blocks_for(160) + spare)
        for n in range(6):
            engine.add(f"r{n}", prompt=20, outputs=300, budget=160)
        engine.run(limit=4000)
        assert engine.preemptions == 0


class TestModelLength:
    def test_outputs_beyond_the_model_s_length(self, make: MakeEngine) -> None:
        engine = make(200)
        engine.add("a", prompt=1010, outputs=100, budget=40)
        engine.run()
        assert attended(engine, "a") == [1010] + [40] * 13

    def test_a_budget_beyond_the_model_s_length_does_not_wait_for_ever(self, make: MakeEngine) -> None:
        """No request is longer than the model allows, whatever its max_tokens say: the pool holds one such."""
        engine = make(1 + blocks_for(1024))
        engine.add("a", prompt=1000, outputs=2000, budget=1500)
        engine.run(limit=40)
        assert attended(engine, "a") == list(range(1000, 1024))


class TestSoak:
    """Everything at once, from a seed: arrivals, aborts at every point, missed steps, preemptions, reused ids."""

    @pytest.mark.parametrize("seed", range(6))
    def test_nothing_is_lost_in_the_long_run(self, make: MakeEngine, seed: int) -> None:
        rng = np.random.default_rng(seed)
        interval = int(rng.choice([1, 1, 2, 3, 7]))
        engine = make(int(rng.integers(45, 90)), seqs=12, batched=int(rng.choice([64, 150, 500])), interval=interval)
        names = [f"r{n}" for n in range(20)]

        def living() -> list[str]:
            return sorted(engine.scheduler.requests)

        def abort_some() -> None:
            if living() and rng.random() < 0.06:
                engine.abort(str(rng.choice(living())))

        for _ in range(200):
            for req_id in names:
                if req_id not in engine.scheduler.requests and rng.random() < 0.02:
                    prompt, outputs = int(rng.integers(1, 300)), int(rng.integers(1, 90))
                    floor = engine.config.protected
                    budget = rng.choice([floor, rng.integers(floor, 100), rng.integers(floor, 400), 999])
                    share = float(rng.integers(1, 101)) / 100
                    engine.add(req_id, prompt, outputs, int(budget) if rng.random() < 0.7 else share)
            few = rng.random() < 0.3
            engine.scheduler.max_num_scheduled_tokens = int(rng.choice([1, 3, 40])) if few else 10**5
            if rng.random() < 0.03:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.step(before_update=abort_some)
            abort_some()
        engine.scheduler.max_num_scheduled_tokens = 10**5
        engine.run(limit=4000)
        stats = engine.scheduler.vtoken.stats
        assert stats.blocks_reclaimed > 0 and 0 < stats.tokens_moved < stats.tokens_evicted


class TestTraces:
    def test_a_trace_says_what_each_forward_computed_and_what_died_after_it(self, make: MakeEngine) -> None:
        engine = make(100, batched=32, seqs=4, interval=3, record_trace=True)
        engine.add("a", prompt=40, outputs=9, budget=20)
        for _ in range(6):
            engine.step()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.run()
        first, second = engine.runner.vtoken.take_traces()["a"].incarnations
        assert first.new_tokens == [32, 8, 1, 1, 1, 1]
        # 40 tokens down to 17, the two sinks stay; three decoded tokens later down to 17 again.
        assert first.victims == [[], list(range(2, 25)), [], [], [25, 26, 27], []]
        assert second.new_tokens == [32, 13, 1, 1, 1]
        assert second.victims == [[], list(range(2, 30)), [30], [], []]
        assert engine.runner.vtoken.take_traces() == {}


class TestSettling:
    """Steps and results are paired one to one."""

    def start(self, make: MakeEngine) -> tuple[StubEngine, object, StepReport]:
        engine = make(100)
        engine.add("a", prompt=90, outputs=10, budget=40)
        output = engine.scheduler.schedule()
        return engine, plan_of(output), StepReport(1)

    def test_blocks_are_pending_until_the_result_is_in(self, make: MakeEngine) -> None:
        engine, plan, report = self.start(make)
        vtoken = engine.scheduler.vtoken
        assert vtoken.frees_pending and engine.pool.get_num_free_blocks() == 99 - blocks_for(90)
        (request,) = engine.scheduler.running
        assert engine.scheduler._request_blocks_can_be_freed(request), "an abort never waits"
        engine.scheduler._scheduling = True
        assert not engine.scheduler._request_blocks_can_be_freed(request), "a preemption does"
        assert vtoken.settle(plan, report) == {}
        assert engine.scheduler._request_blocks_can_be_freed(request)
        assert not vtoken.frees_pending and engine.pool.get_num_free_blocks() == 99 - blocks_for(40)

    def test_a_doubled_report(self, make: MakeEngine) -> None:
        engine, plan, report = self.start(make)
        engine.scheduler.vtoken.settle(plan, report)
        with pytest.raises(RuntimeError, match="vtoken: "):
            engine.scheduler.vtoken.settle(plan, report)

    def test_results_out_of_order(self, make: MakeEngine) -> None:
        engine, _, _ = self.start(make)
        second = engine.scheduler.vtoken.plan(ScheduledStep([], [], [], []))
        with pytest.raises(RuntimeError, match="vtoken: step 1 was settled with plan 2 and report 2"):
            engine.scheduler.vtoken.settle(second, StepReport(2))


class TestFaults:
    """What the worker gets wrong ends the request it concerns, or stops the engine where no count can be trusted."""

    def two(self, make: MakeEngine) -> StubEngine:
        engine = make(100)
        engine.add("a", prompt=90, outputs=10, budget=40)
        engine.add("b", prompt=80, outputs=10, budget=30)
        engine.step()
        engine.step()
        return engine

    def a_fails_and_b_goes_on(self, engine: StubEngine, said: str) -> None:
        engine.runner.broken = {"a"}
        step = engine.step()
        assert step.finished == {"a": "error"} and step.tokens["a"] == []
        assert list(step.report.errors) == ["a"] and said in step.report.errors["a"]
        engine.run()
        assert attended(engine, "b") == [80] + [30] * 9

    def test_a_table_that_lost_a_token(self, make: MakeEngine) -> None:
        engine = self.two(make)
        engine.runner.vtoken.table.evict_token("a", 85)
        self.a_fails_and_b_goes_on(
            engine,
            "was scheduled with 39 tokens, 3 blocks and epoch 2, but the worker holds 38 tokens, 3 blocks and epoch 3.",
        )

    def test_counts_that_differ_by_one(self, make: MakeEngine) -> None:
        engine = self.two(make)
        row = int(engine.runner.vtoken.table.rows(["a"])[0])
        engine.runner.vtoken.table.epoch[row] += 1
        self.a_fails_and_b_goes_on(engine, "epoch 2, but the worker holds 39 tokens, 3 blocks and epoch 3.")

    def test_a_block_too_many_in_the_batch(self, make: MakeEngine) -> None:
        engine = self.two(make)
        engine.runner.input_batch.block_table[0].append_row([77], engine.runner.input_batch.req_id_to_index["a"])
        self.a_fails_and_b_goes_on(engine, "3 blocks and epoch 2, but the worker holds 39 tokens, 4 blocks")

    def test_a_truncation_that_was_forgotten(self, make: MakeEngine) -> None:
        engine = make(100)
        engine.add("a", prompt=90, outputs=10, budget=40)
        engine.add("b", prompt=80, outputs=10, budget=30)
        engine.step()
        del engine.runner._vtoken_blocks["a"]
        self.a_fails_and_b_goes_on(engine, "3 blocks and epoch 1, but the worker holds 39 tokens, 6 blocks")

    def test_a_failed_request_writes_into_nobody_else_s_block(self, make: MakeEngine) -> None:
        """Its row still names the blocks that it gave back, and that a newcomer holds by now."""
        engine = make(1 + blocks_for(90) + blocks_for(40))
        engine.add("a", prompt=90, outputs=10, budget=40)
        engine.step()
        kept = engine.runner._vtoken_blocks.pop("a")
        stale = engine.runner.requests["a"].block_ids[0][len(kept) :]
        engine.add("c", prompt=90, outputs=10, budget=40)
        engine.runner.broken = {"a"}
        step = engine.step()
        assert step.finished == {"a": "error"}
        assert set(stale) & set(engine.runner.forwards[-1][0].blocks), "the newcomer should hold such a block"
        engine.run()
        assert attended(engine, "c") == [90] + [40] * 9

    def test_a_table_that_lost_a_whole_request(self, make: MakeEngine) -> None:
        engine = self.two(make)
        engine.runner.vtoken.table.drop_request("a")
        self.a_fails_and_b_goes_on(engine, "the worker holds 0 tokens")

    def test_an_error_of_a_request_that_was_aborted_meanwhile(self, make: MakeEngine) -> None:
        engine = self.two(make)
        engine.runner.vtoken.table.evict_token("a", 85)
        engine.runner.broken = {"a"}
        step = engine.step(before_update=lambda: engine.abort("a"))
        assert step.finished == {} and list(step.report.errors) == ["a"]
        engine.run()

    def test_the_report_of_another_step(self, make: MakeEngine) -> None:
        engine = self.two(make)
        engine.runner.sabotage_report = lambda report: same_but(report, step=report.step - 1)
        with pytest.raises(RuntimeError, match=r"^vtoken: step 3 was settled with plan 3 and report 2$"):
            engine.step()

    def test_no_report(self, make: MakeEngine) -> None:
        engine = self.two(make)
        engine.runner.sabotage_report = lambda report: None
        with pytest.raises(RuntimeError, match=r"^vtoken: the worker's report for step 3 is missing$"):
            engine.step()

    def test_an_empty_step_needs_no_report(self, make: MakeEngine) -> None:
        engine = make(100)
        engine.add("a", prompt=90, outputs=1, budget=40)
        engine.step()
        engine.runner.sabotage_report = lambda report: None
        assert engine.step().output.num_scheduled_tokens == {}
        engine.check_empty()

    @pytest.mark.parametrize("budget", [3, 0, "512", 1.5, True])
    def test_settings_that_got_past_the_front_end(self, make: MakeEngine, budget: object) -> None:
        engine = make(100)
        engine.runner.broken = {"bad"}
        engine.add("bad", prompt=90, outputs=10, budget=budget)
        engine.add("b", prompt=80, outputs=10, budget=30)
        steps = engine.run()
        ends = {req_id: reason for step in steps for req_id, reason in step.finished.items()}
        assert ends == {"bad": "error", "b": "length"}
        assert not any(step.tokens.get("bad") for step in steps), "a refused request must not answer"
        assert attended(engine, "b") == [80] + [30] * 9


class TestTheStubItself:
    """The checks above must be able to fail."""

    def ready(self, make: MakeEngine) -> StubEngine:
        engine = make(100)
        engine.add("a", prompt=90, outputs=10, budget=40)
        engine.step()
        return engine

    def test_a_lost_k_v_is_seen(self, make: MakeEngine) -> None:
        engine = self.ready(make)
        token = engine.runner.references["a"].cells[3]
        engine.runner.cache[1, engine.manager.req_to_blocks["a"][0].block_id, 0, 3, 1] += 1
        with pytest.raises(AssertionError, match=rf"wrong K/V of \['a'\]: \(mark, token\) \[\(1, {token}\)\]"):
            engine.step()

    def test_a_relocation_that_does_nothing_is_seen(self, make: MakeEngine) -> None:
        engine = make(100)
        engine.runner.vtoken._copies._relocate = lambda sources, destinations: None
        engine.add("a", prompt=90, outputs=10, budget=40)
        with pytest.raises(AssertionError, match="wrong K/V"):
            engine.step()

    def test_a_relocation_that_swaps_two_slots_is_seen(self, make: MakeEngine) -> None:
        engine = make(100)
        relocate = engine.runner.relocate
        engine.runner.vtoken._copies._relocate = lambda sources, destinations: relocate(
            sources, destinations[::-1].copy()
        )
        engine.add("a", prompt=90, outputs=10, budget=40)
        with pytest.raises(AssertionError, match="wrong K/V"):
            engine.step()

    def test_a_block_that_leaks_is_seen(self, make: MakeEngine) -> None:
        engine = make(100)
        engine.pool.free_blocks = lambda blocks: None
        engine.add("a", prompt=90, outputs=10, budget=40)
        with pytest.raises(AssertionError, match="lost or doubled"):
            engine.step()

    def test_another_victim_is_seen(self, make: MakeEngine) -> None:
        engine = self.ready(make)
        engine.runner.vtoken._scores._policies[0] = SimpleNamespace(priority=lambda batch: -batch.tokens)
        with pytest.raises(AssertionError):
            engine.step()

    def test_a_block_that_is_freed_twice_is_seen(self, make: MakeEngine) -> None:
        engine = make(100)
        free = engine.pool.free_blocks

        def twice(blocks: list[object]) -> None:
            free(blocks)
            free(blocks)

        engine.pool.free_blocks = twice
        engine.add("a", prompt=90, outputs=10, budget=40)
        with pytest.raises(AssertionError):
            engine.step()
