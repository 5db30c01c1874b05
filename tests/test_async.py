"""Results one step late, on vLLM's asynchronous scheduler over the stub worker: what comes when, and what is void."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bare_runner import sampled_token
from lagging_engine import LaggingEngine
from reference_cache import blocks_for
from stub_copies import LazyCopyEngine
from stub_worker import LINGERING

from vtoken.core.ledger import LengthLedger
from vtoken.vllm_plugin.compat import ReportedOutput, plan_of
from vtoken.vllm_plugin.protocol import StepReport
from vtoken.vllm_plugin.read_only import LOOK_AGAIN
from vtoken.vllm_plugin.scheduler import EvictionScheduler
from vtoken.vllm_plugin.worker import EvictionWorker

MakeEngine = Callable[..., LaggingEngine]
TRUNK = np.random.default_rng(5).integers(0, 61, 200).tolist()
both = pytest.mark.parametrize("lag", ["early", "late"])


def said(steps: list[Any]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for step in steps:
        for req_id, new in (step.tokens if step else {}).items():
            tokens.setdefault(req_id, []).extend(new)
    return tokens


def sharing(make: MakeEngine, lag: str, *, outputs: int = 60, **options: object) -> LaggingEngine:
    """Requests a and b share five blocks and forget 68 tokens each; some of the blocks stay, with holes."""
    engine = make(60, caching=True, lag=lag, **{"shared_blocks": "keep", **options})
    for req_id in "ab":
        engine.add(req_id, tokens=TRUNK[:90] + [ord(req_id) % 61] * 17, outputs=outputs, budget=40)
    engine.step()
    engine.step()
    assert engine.config.reclaim != "fill" or engine.manager.ledger.by_report[:2].all()
    return engine


class TestWhatComesWhen:
    @both
    def test_blocks_come_back_with_the_result_and_not_before(self, make: MakeEngine, lag: str) -> None:
        engine = make(100, lag=lag)
        engine.add("a", prompt=90, outputs=10, budget=40)
        assert engine.step() is None
        vtoken = engine.scheduler.vtoken
        assert vtoken.frees_pending and engine.pool.get_num_free_blocks() == 99 - blocks_for(90)
        step = engine.step()
        assert step is not None and (step.report.step, step.report.evicted) == (1, 90 - 39)
        assert engine.pool.get_num_free_blocks() == 99 - blocks_for(40) and vtoken.settled == 1
        assert [pending.number for pending in engine.queue] == [2]
        engine.run()
        assert vtoken.stats.tokens_evicted == 51 + 9 and vtoken.stats.blocks_reclaimed == 3

    @both
    @pytest.mark.parametrize("mode", ["fill", "none", "pack"])
    def test_victims_and_answers_are_those_of_the_synchronous_engine(
        self, make: MakeEngine, lag: str, mode: str
    ) -> None:
        """They are those of the synchronous engine: which tokens die depends on the request alone."""
        packing = {"theta_f": 0.1, "check_interval": 1, "low_watermark": 1.0} if mode == "pack" else {}
        runs = []
        for kind in ("sync", lag):
            engine = make(200, lag=kind, reclaim=mode, caching=True, policy="random", interval=2, **packing)
            for n in range(4):
                engine.add(f"r{n}", tokens=TRUNK[: 40 * n] + [n] * 17, outputs=20 + n, budget=30)
            answers, traces = said(engine.run()), engine.runner.vtoken.take_traces()
            victims = {r: [v for life in t.incarnations for v in life.victims] for r, t in traces.items()}
            runs.append((answers, victims, engine.scheduler.vtoken.stats.tokens_evicted))
        assert runs[0] == runs[1] and runs[0][2] > 0

    def test_a_report_waits_for_an_output_that_is_on_its_way(self) -> None:
        class OnItsWay:
            def get_output(self) -> Any:
                return output

        output, report = StepReport(7), StepReport(8)  # any object will do for the first
        assert ReportedOutput(OnItsWay(), report).get_output().vtoken_report is report
        assert not hasattr(output, "vtoken_report")


class TestTheEnd:
    @both
    @pytest.mark.parametrize("mode", ["fill", "none"])
    def test_a_stop_token_with_the_next_step_under_way(self, make: MakeEngine, lag: str, mode: str) -> None:
        """That step's report about it is void; then its id is used again in the next but one."""
        engine = make(60, lag=lag, reclaim=mode, caching=True)
        engine.add("a", tokens=TRUNK[:90], outputs=50, budget=40, stop_after=6)
        engine.add("b", tokens=TRUNK[:60], outputs=50, budget=40)
        steps = [engine.step() for _ in range(7)]
        assert len(said(steps)["a"]) == 6 and "a" not in engine.scheduler.requests
        assert "a" in engine.queue[0].output.num_scheduled_tokens and engine.in_flight("a")
        evicted = engine.scheduler.vtoken.stats.tokens_evicted
        engine.step()
        assert engine.scheduler.vtoken.stats.tokens_evicted == evicted + 2 and not engine.in_flight("a")
        engine.add("a", tokens=TRUNK[:90], outputs=20, budget=40)
        assert len(said(engine.run())["a"]) == 20

    @both
    def test_preempted_and_resumed_at_once(self, make: MakeEngine, lag: str) -> None:
        """Whatever a step under way says of the life that is over is void, and its blocks are back at once."""
        engine = sharing(make, lag, reclaim="none", outputs=20)
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert engine.pool.get_num_free_blocks() == 59
        steps = engine.run()
        assert steps[1].output.scheduled_cached_reqs.resumed_req_ids == {"a", "b"}
        assert {len(tokens) for tokens in said(steps).values()} == {20 - 1}

    @both
    def test_a_reset_takes_back_what_steps_under_way_were_granted(self, make: MakeEngine, lag: str) -> None:
        packing = {"theta_f": 0.0, "check_interval": 1, "low_watermark": 1.0, "headroom": 0.05}
        engine = make(60, caching=True, lag=lag, reclaim="pack", **packing)
        engine.add("a", tokens=TRUNK[:107], outputs=20, budget=40)
        for _ in range(20):
            engine.step()
            if plan_of(engine.queue[-1].output).granted:
                break
        assert plan_of(engine.queue[-1].output).granted and engine.scheduler.vtoken.frees_pending
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert engine.pool.get_num_free_blocks() == 59
        engine.run()

    @both
    def test_a_pool_in_which_everybody_wants_a_block(self, make: MakeEngine, lag: str) -> None:
        """Four grow and shrink by turns, so that blocks are on their way back all the time; all get to their end."""
        engine = make(17, lag=lag, interval=20)
        for n in range(4):
            engine.add(f"r{n}", prompt=50 + 3 * n, outputs=100 + n, budget=10**6 if n % 2 else 60)
        steps = engine.run(limit=1200)
        assert {r: len(tokens) for r, tokens in said(steps).items()} == {f"r{n}": 100 + n for n in range(4)}
        assert engine.preemptions > 0

    def test_who_waits_for_blocks_waits_once(self, make: MakeEngine) -> None:
        """For what was under way when one was first missing, and not for what comes later."""
        engine = make(100, lag="early")
        vtoken = engine.scheduler.vtoken
        for n in range(3):
            engine.add(f"r{n}", prompt=90, outputs=10, budget=40)
        engine.scheduler.max_num_scheduled_tokens = 90
        engine.step()
        assert vtoken.waits_for_frees() and vtoken.waits_for_frees()
        engine.step()  # whatever was asked before is forgotten with a step in which nobody asks
        engine.step()
        assert vtoken.frees_pending and vtoken.waits_for_frees()
        vtoken._waits, vtoken._wait_for = True, vtoken.settled
        assert vtoken.frees_pending and not vtoken.waits_for_frees()


class TestLeavingSharedBlocks:
    @both
    @pytest.mark.parametrize("copies", ["eager", "lazy"])
    def test_the_last_holder_is_left_out_of_one_step(self, make: MakeEngine, lag: str, copies: str) -> None:
        engine = sharing(make, lag)
        if copies == "lazy":
            engine.runner.use_copies(LazyCopyEngine)
        for _ in range(LOOK_AGAIN):
            engine.step()
        engine.abort("b")
        plans = []
        for _ in range(LOOK_AGAIN + 3):
            engine.step()
            plans.append(plan_of(engine.queue[-1].output))
        (left,) = [n for n, plan in enumerate(plans) if plan.copy_out]
        assert plans[left].copy_out["a"].keep == 0 and not plans[left].counts.late.any()
        assert [plan.req_ids for plan in plans].count([]) == 1 and not plans[left - 1].req_ids
        assert engine.manager.ledger.read_only_blocks(["a"]).tolist() == [0]
        assert len(said(engine.run())["a"]) > 30

    @both
    def test_two_that_leave_together_are_left_out_together(self, make: MakeEngine, lag: str) -> None:
        engine = make(100, caching=True, policy="random", lag=lag)
        for n in range(2):
            engine.add(f"r{n}", tokens=[*TRUNK, *TRUNK, n], outputs=30, budget=40)
        engine.add("other", tokens=[1] * 10, outputs=60, budget=500)
        plans = []
        for _ in range(2 * LOOK_AGAIN):
            engine.step()
            plans.append(plan_of(engine.queue[-1].output))
        (left,) = [n for n, plan in enumerate(plans) if plan.copy_out]
        assert sorted(plans[left].copy_out) == ["r0", "r1"] and plans[left - 1].req_ids == ["other"]
        engine.run()

    @both
    def test_a_request_whose_last_shared_block_died_goes_by_counts_again(self, make: MakeEngine, lag: str) -> None:
        """The worker is the first to know."""
        engine = sharing(make, lag, sinks=0, outputs=100)
        row = engine.manager.ledger._row_of["a"]
        reported = []
        for _ in range(LINGERING + 40):
            engine.step()
            reported.append(bool(engine.manager.ledger.by_report[row]))
        assert reported[0] and not reported[-1] and reported == sorted(reported, reverse=True)
        engine.run()


class TestFaults:
    @both
    def test_who_has_found_it_in_a_later_step_ends_as_well(self, make: MakeEngine, lag: str) -> None:
        """What a was to compute is registered; b finds it in the next step, before the report is in."""
        engine = make(101, caching=True, batched=64, seqs=4, lag=lag)
        engine.add("a", prompt=160, outputs=10, budget=40)
        engine.add("other", tokens=[9] * 10, outputs=12, budget=40)
        engine.step()
        engine.step()
        engine.runner.vtoken.table.drop_request("a")
        engine.runner.broken = {"a", "b"}
        if lag == "early":  # the second step has been executed
            engine.step()
        engine.add("b", prompt=176, outputs=10, budget=40)
        steps = [engine.step() for _ in range(3)]
        ended = {req_id: why for step in steps if step for req_id, why in step.finished.items()}
        assert ended == {"a": "error", "b": "error"}
        assert not said(steps)["b"]
        steps = engine.run()
        assert {req_id for step in steps for req_id in step.finished} == {"other"}

    @both
    def test_what_a_refused_request_said_is_dropped_if_it_was_preempted_meanwhile(
        self, make: MakeEngine, lag: str
    ) -> None:
        """vLLM would hand out what it said in the step that was under way; it is computed anew instead."""
        engine = make(100, lag=lag)
        engine.add("a", prompt=60, outputs=20, budget=40)
        engine.add("other", prompt=60, outputs=30, budget=40)
        steps = [engine.step() for _ in range(4)]
        engine.runner.vtoken.table.drop_request("a")
        engine.runner.broken = {"a"}
        if lag == "early":
            steps.append(engine.step())
        request = engine.scheduler.requests["a"]
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, 0.0)
        steps.append(engine.step())
        assert list(steps[-1].report.errors) == ["a"] and steps[-1].tokens == {"other": steps[-1].tokens["other"]}
        engine.runner.broken = set()
        steps += engine.run()
        assert said(steps)["a"] == [sampled_token("a", 60 + n) for n in range(20)]


class TestThatTheChecksCanFail:
    """Each is shown a fault that only a late result can bring about."""

    def load(self, make: MakeEngine, lag: str = "early", **options: object) -> None:
        engine = sharing(make, lag, **options)
        for _ in range(3):
            engine.step()
        engine.abort("b")
        engine.add("c", tokens=TRUNK[:80] + [3] * 9, outputs=40, budget=40)
        engine.run()

    @both
    @pytest.mark.parametrize("mode", ["fill", "none"])
    def test_without_a_fault(self, make: MakeEngine, lag: str, mode: str) -> None:
        self.load(make, lag, reclaim=mode)

    @pytest.mark.parametrize("mode", ["fill", "none"])
    def test_the_worker_forgets_what_was_not_settled(
        self, make: MakeEngine, monkeypatch: pytest.MonkeyPatch, mode: str
    ) -> None:
        """So it refuses what is right, and computes nothing."""
        monkeypatch.setattr(EvictionWorker, "_unsettled_growth", lambda self, ids: np.zeros(len(ids), dtype=np.int64))
        with pytest.raises(AssertionError, match=r"\d+ blocks for \d+ tokens"):
            self.load(make, reclaim=mode)

    @pytest.mark.parametrize("policy", ["streaming_llm", "random"])
    def test_decisions_on_a_stale_list(self, make: MakeEngine, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
        schedule = LengthLedger.schedule

        def never_late(*args: Any, **kwargs: Any) -> Any:
            counts = schedule(*args, **kwargs)
            counts.late[:] = False
            return counts

        monkeypatch.setattr(LengthLedger, "schedule", never_late)
        with pytest.raises(AssertionError, match="takes other positions than reported"):
            self.load(make, policy=policy)

    def test_a_hash_for_what_was_computed_after_an_eviction(self, make: MakeEngine) -> None:
        """vLLM registers blocks when a result comes in, with the next step scheduled."""
        engine = make(60, caching=True, lag="early")
        engine.manager.ledger.is_whole = lambda req_id: True
        engine.add("a", tokens=TRUNK[:60], outputs=20, budget=60)
        with pytest.raises(AssertionError, match=r"hold what their hash does not say|writes into a cached block"):
            engine.run()

    @pytest.mark.parametrize("mode", ["fill", "none"])
    @pytest.mark.parametrize("fault", [False, True])
    def test_a_void_report_is_applied(
        self, make: MakeEngine, monkeypatch: pytest.MonkeyPatch, mode: str, fault: bool
    ) -> None:
        """The scheduler does not note that vLLM has taken a request's blocks."""
        if fault:
            monkeypatch.setattr(EvictionScheduler, "lose", lambda *args: None)

        def load() -> None:
            engine = sharing(make, "late", reclaim=mode, sinks=0, outputs=30)
            for _ in range(12):
                engine.step()
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
                engine.step()
            engine.run()

        if fault:
            what = {"fill": "a's positions are not those of the report", "none": "request a, which does not hold them"}
            with pytest.raises((AssertionError, RuntimeError), match=what[mode]):
                load()
        else:
            load()

    @pytest.mark.parametrize("fault", [False, True])
    def test_a_prompt_goes_on_before_it_is_known_what_it_holds(
        self, make: MakeEngine, monkeypatch: pytest.MonkeyPatch, fault: bool
    ) -> None:
        options = {"prefill_evict": "chunked", "prefill_chunk": 33, "policy": "random"}
        engine = make(80, caching=True, lag="early", **options)
        for n in range(3):
            engine.add(f"r{n}", tokens=TRUNK[:150] + [n] * 20, outputs=5, budget=64)
        if not fault:
            engine.run()
            return
        monkeypatch.setattr(LengthLedger, "is_prefilled_blindly", lambda *args: False)
        with pytest.raises(ValueError, match="the blocks of a request do not hold its new tokens"):
            engine.run()

    def test_blocks_are_waited_for_for_ever(self, make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(EvictionScheduler, "waits_for_frees", lambda self: bool(self._under_way))
        with pytest.raises(AssertionError, match="the requests do not come to an end"):
            TestTheEnd().test_a_pool_in_which_everybody_wants_a_block(make, "early")
