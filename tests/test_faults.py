"""Copies that fail, workers that give up, reports that go astray: who ends, who goes on, and that no block is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import Job, generate, prompts, running
from stub_worker import StubEngine, same_but

from vtoken.config import VTokenConfig
from vtoken.core.ragged import Ints
from vtoken.kernels.copy_engine import CopyEngine, ForcedSync, InlineCopyEngine
from vtoken.kernels.cpu.copy_engine import ThreadCopyEngine
from vtoken.kernels.relocation import Relocate
from vtoken.vllm_plugin.compat import plan_of

MakeEngine = Callable[..., StubEngine]

KINDS: dict[str, Callable[[Relocate], CopyEngine]] = {
    "async": ThreadCopyEngine,
    "inline": InlineCopyEngine,
    "force_sync": lambda relocate: ForcedSync(ThreadCopyEngine(relocate)),
}
MODES: dict[str, dict[str, Any]] = {
    "fill": {},
    "fill, cached": {"caching": True},
    "pack": {"reclaim": "pack", "theta_f": 0.0, "low_watermark": 1.0, "check_interval": 1, "headroom": 0.05},
}


class Failing(CopyEngine):
    """An engine whose first copy fails when half of it is made; all others are as good as those of the inner one.

    Args:
        kind: makes the inner engine.
        relocate: of the stub.
        when_launched: called in the launch of the copy that will fail.
        failure: what is raised in the middle of it.
    """

    def __init__(
        self,
        kind: Callable[[Relocate], CopyEngine],
        relocate: Relocate,
        when_launched: Callable[[], None],
        failure: BaseException,
    ) -> None:
        self._inner = kind(self._copy)
        self._relocate, self._when_launched, self._failure = relocate, when_launched, failure
        self._launched = self._made = 0

    def launch(self, sources: Ints, destinations: Ints) -> None:
        if len(sources):
            self._launched += 1
            if self._launched == 1:
                self._when_launched()
        self._inner.launch(sources, destinations)

    def wait(self) -> None:
        self._inner.wait()

    def finish(self) -> None:
        self._inner.finish()

    def _copy(self, sources: Ints, destinations: Ints) -> None:
        self._made += 1
        if self._made > 1:
            return self._relocate(sources, destinations)
        half = len(sources) // 2
        assert half, "one token cannot be half copied"
        self._relocate(sources[:half], destinations[:half])
        raise self._failure


class OneByOne(CopyEngine):
    """Launches every token by itself, so that several copies are under way when somebody waits."""

    def __init__(self, inner: CopyEngine) -> None:
        self._inner = inner

    def launch(self, sources: Ints, destinations: Ints) -> None:
        for n in range(len(sources)):
            self._inner.launch(sources[n : n + 1], destinations[n : n + 1])

    def wait(self) -> None:
        self._inner.wait()

    def finish(self) -> None:
        self._inner.finish()


def next_copy_fails(engine: StubEngine, kind: str, *whose: str, failure: BaseException | None = None) -> None:
    """The next copy fails, and the stub is told that it spoils the K/V of these requests."""
    failure = failure or ZeroDivisionError("halfway")

    def spoil() -> None:
        engine.runner.broken |= set(whose)

    engine.runner.use_copies(lambda relocate: Failing(KINDS[kind], relocate, spoil, failure))


def sentence(req_id: str) -> str:
    return (
        f"vtoken: the K/V of request {req_id} can no longer be trusted, since a copy of its tokens to other slots "
        "failed (ZeroDivisionError('halfway'))."
    )


def steady(make: MakeEngine, mode: str = "fill", num_blocks: int = 101, **options: object) -> StubEngine:
    """Request b decodes at its budget, where nothing has to be copied for it."""
    engine = make(num_blocks, **MODES[mode], **options)
    engine.add("b", prompt=46, outputs=10, budget=41)
    engine.step()
    engine.step()
    return engine


def forwards_of(engine: StubEngine, req_id: str) -> int:
    return sum(f.req_id == req_id for forward in engine.runner.forwards for f in forward)


def ends(steps: list[Any]) -> dict[str, str]:
    return {req_id: reason for step in steps for req_id, reason in step.finished.items()}


def said(steps: list[Any]) -> dict[str, str]:
    return {req_id: error for step in steps for req_id, error in step.report.errors.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
class TestACopyThatFails:
    """Request a forgets 57 of 96 tokens and tokens are copied for it; that fails halfway. Request b goes on."""

    def burst(self, engine: StubEngine, kind: str, outputs: int = 10, **options: Any) -> Any:
        engine.add("a", prompt=96, outputs=outputs, budget=40)
        next_copy_fails(engine, kind, "a")
        step = engine.step(**options)
        assert step.report.moved > 1 and step.report.errors == {}
        return step

    def test_its_request_ends_and_the_others_go_on(self, make: MakeEngine, kind: str, mode: str) -> None:
        engine = steady(make, mode)
        step = self.burst(engine, kind)
        assert step.finished == {} and len(step.tokens["a"]) == 1, "this token was computed from what is right"
        step = engine.step()
        assert step.report.errors == {"a": sentence("a")}
        assert step.finished == {"a": "error"} and step.tokens["a"] == []
        assert step.report.evicted == 1, "only b still forgets tokens"
        steps = engine.run()
        assert ends(steps) == {"b": "length"} and said(steps) == {}
        assert forwards_of(engine, "b") == 10

    def test_all_requests_of_the_copy_end_and_no_other(self, make: MakeEngine, kind: str, mode: str) -> None:
        engine = steady(make, mode)
        engine.add("c", prompt=97, outputs=10, budget=40)
        engine.add("a", prompt=96, outputs=10, budget=40)
        next_copy_fails(engine, kind, "a", "c")
        engine.step()
        step = engine.step()
        assert step.report.errors == {"a": sentence("a"), "c": sentence("c")}
        assert step.finished == {"a": "error", "c": "error"} and step.tokens["a"] == step.tokens["c"] == []
        assert ends(engine.run()) == {"b": "length"} and forwards_of(engine, "b") == 10

    def test_a_request_that_the_next_step_leaves_out(self, make: MakeEngine, kind: str, mode: str) -> None:
        engine = steady(make, mode)
        self.burst(engine, kind)
        engine.scheduler.max_num_scheduled_tokens = 1
        step = engine.step()
        assert list(step.output.num_scheduled_tokens) == ["b"]
        assert step.report.errors == {"a": sentence("a")} and step.finished == {"a": "error"}
        engine.scheduler.max_num_scheduled_tokens = 1000
        assert ends(engine.run()) == {"b": "length"} and forwards_of(engine, "b") == 10

    def test_it_is_said_again_until_the_request_is_over(self, make: MakeEngine, kind: str, mode: str) -> None:
        engine = steady(make, mode, verify=True)
        self.burst(engine, kind)
        engine.runner.sabotage_report = lambda report: same_but(report, errors={})
        assert engine.step().finished == {}
        engine.runner.sabotage_report = lambda report: report
        step = engine.step()
        assert step.finished == {"a": "error"} and step.report.errors == {"a": sentence("a")}
        assert ends(engine.run()) == {"b": "length"} and forwards_of(engine, "b") == 10

    def test_a_request_that_is_over_has_lost_nothing(self, make: MakeEngine, kind: str, mode: str) -> None:
        engine = steady(make, mode)
        step = self.burst(engine, kind, outputs=1)
        assert step.finished == {"a": "length"} and len(step.tokens["a"]) == 1
        steps = engine.run()
        assert ends(steps) == {"b": "length"} and said(steps) == {}

    @pytest.mark.parametrize("how", ["finish", "abort", "abort in the step"])
    def test_an_id_that_is_used_again(self, make: MakeEngine, kind: str, mode: str, how: str) -> None:
        engine = steady(make, mode)
        in_the_step = (lambda: engine.abort("a")) if how == "abort in the step" else (lambda: None)
        self.burst(engine, kind, outputs=1 if how == "finish" else 10, before_update=in_the_step)
        if how == "abort":
            engine.abort("a")
        engine.runner.broken.clear()
        engine.add("a", prompt=33, outputs=12, budget=20)
        steps = engine.run()
        assert ends(steps) == {"a": "length", "b": "length"} and said(steps) == {}
        assert forwards_of(engine, "a") == 1 + 12 and forwards_of(engine, "b") == 10

    def test_a_preempted_request_is_computed_anew(self, make: MakeEngine, kind: str, mode: str) -> None:
        engine = steady(make, mode)
        self.burst(engine, kind)
        engine.runner.broken.clear()
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        steps = engine.run()
        assert steps[0].output.preempted_req_ids == {"a", "b"}
        assert ends(steps) == {"a": "length", "b": "length"} and said(steps) == {}

    @pytest.mark.parametrize("when", ["in the step", "after it"])
    def test_an_aborted_request(self, make: MakeEngine, kind: str, mode: str, when: str) -> None:
        """In ``pack``, what was granted goes back at once, although a token may still be on its way there."""
        engine = steady(make, mode)
        in_the_step = (lambda: engine.abort("a")) if when == "in the step" else (lambda: None)
        step = self.burst(engine, kind, before_update=in_the_step)
        assert bool(plan_of(step.output).granted) == (mode == "pack")
        if when == "after it":
            engine.abort("a")
        steps = engine.run()
        assert ends(steps) == {"b": "length"} and said(steps) == {}

    def test_the_blocks_of_the_failed_request_serve_others(self, make: MakeEngine, kind: str, mode: str) -> None:
        """The pool holds b and one more prompt: what the failed request had is what the next one gets."""
        engine = steady(make, mode, num_blocks=1 + 4 + 7)
        self.burst(engine, kind)
        had = set(engine.block_ids("a"))
        engine.add("c", prompt=90, outputs=10, budget=40)
        assert ends(engine.run()) == {"a": "error", "b": "length", "c": "length"}
        first = next(f for forward in engine.runner.forwards for f in forward if f.req_id == "c")
        assert had & set(first.blocks)

    @pytest.mark.parametrize("failure", [KeyboardInterrupt(), SystemExit(3)])
    def test_an_exit_is_no_fault_of_a_request(
        self, make: MakeEngine, kind: str, mode: str, failure: BaseException
    ) -> None:
        engine = steady(make, mode)
        engine.add("a", prompt=96, outputs=10, budget=40)
        next_copy_fails(engine, kind, "a", failure=failure)

        def two_steps() -> None:
            engine.step()
            engine.step()

        with pytest.raises(type(failure)) as raised:
            two_steps()
        assert raised.value is failure


class TestCachedBlocks:
    """All prompts here begin with the same tokens."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_what_a_failed_copy_was_made_from_is_still_there_for_others(self, make: MakeEngine, kind: str) -> None:
        """Request b holds 32 tokens of the prefix that c finds, and a has computed the other 48 before it failed."""
        engine = steady(make, "fill, cached")
        engine.add("a", prompt=96, outputs=10, budget=40)
        next_copy_fails(engine, kind, "a")
        step = engine.step()
        assert step.output.num_scheduled_tokens["a"] == 96 - 32 and plan_of(step.output).copy_out.keys() == {"a"}
        assert engine.step().finished == {"a": "error"}
        engine.add("c", prompt=96, outputs=10, budget=40)
        steps = engine.run()
        assert steps[0].output.num_scheduled_tokens["c"] == 96 - 80
        assert ends(steps) == {"b": "length", "c": "length"} and said(steps) == {}

    def test_what_a_failed_request_never_wrote_is_not_found_by_others(self, make: MakeEngine) -> None:
        """Its blocks are registered when it is scheduled; then the worker finds that its table has lost it."""
        engine = make(101, caching=True, batched=32, seqs=4)
        engine.add("a", prompt=96, outputs=10, budget=40)
        engine.step()
        engine.runner.vtoken.table.drop_request("a")
        engine.runner.broken = {"a"}
        assert engine.step().finished == {"a": "error"}
        engine.add("c", prompt=96, outputs=10, budget=40)
        steps = engine.run()
        assert steps[0].output.num_scheduled_tokens["c"] == 32 and ends(steps) == {"c": "length"}

    def test_who_has_found_it_in_the_same_step_ends_as_well(self, make: MakeEngine) -> None:
        """And who has found what that one was to compute."""
        engine = make(101, caching=True, batched=64, seqs=4)
        engine.add("a", prompt=96, outputs=10, budget=40)
        engine.step()
        engine.add("b", prompt=112, outputs=10, budget=40)
        engine.add("other", tokens=[9] * 10, outputs=4, budget=40)
        engine.runner.vtoken.table.drop_request("a")
        engine.runner.broken = {"a", "b"}
        step = engine.step()
        assert step.output.num_scheduled_tokens == {"a": 32, "b": 16, "other": 10}
        assert step.finished == {"a": "error", "b": "error"} and list(step.report.errors) == ["a"]
        assert not step.tokens.get("b")
        engine.add("c", prompt=112, outputs=2, budget=40)
        # Of the four blocks that were right, b has just given up three: those are forgotten too.
        assert engine.step().output.scheduled_new_reqs[0].num_computed_tokens == 16
        engine.run()

    def test_a_refused_request_that_is_aborted_before_its_step_is_over(self, make: MakeEngine) -> None:
        """Its blocks are gone by the time that the report comes in, and so must be their hashes."""
        engine = make(101, caching=True, batched=64, seqs=4)
        engine.add("a", prompt=96, outputs=10, budget=40)
        engine.step()
        engine.add("b", prompt=96, outputs=10, budget=40)
        engine.runner.vtoken.table.drop_request("a")
        engine.runner.broken = {"a", "b"}
        step = engine.step(before_update=lambda: engine.abort("a"))
        assert list(step.report.errors) == ["a"] and step.finished == {"b": "error"}
        engine.add("c", prompt=96, outputs=2, budget=40)
        assert engine.step().output.scheduled_new_reqs[0].num_computed_tokens <= 64
        engine.run()


class TestSeveralCopiesBeforeAWait:
    def engine(self, make: MakeEngine, fails: Callable[[list[str]], bool]) -> StubEngine:
        """Requests a and c are reduced in one step, and every token is a copy of its own; ``fails`` says which do."""
        engine = steady(make)
        owner_of = engine.runner.vtoken.table

        def relocate_or_fail(relocate: Relocate) -> Relocate:
            def copy(sources: Ints, destinations: Ints) -> None:
                block = int(destinations[0]) // owner_of.block_size
                if fails([r for r in ("a", "c") if block in owner_of.block_ids(r)]):
                    raise ZeroDivisionError("halfway")
                relocate(sources, destinations)

            return copy

        engine.runner.use_copies(lambda relocate: OneByOne(ThreadCopyEngine(relocate_or_fail(relocate))))
        engine.add("a", prompt=96, outputs=10, budget=40)
        engine.add("c", prompt=97, outputs=10, budget=40)
        step = engine.step()
        assert step.report.moved > 4
        return engine

    @pytest.mark.parametrize("one, other", [("a", "c"), ("c", "a")])
    def test_only_the_requests_of_those_that_fail_end(self, make: MakeEngine, one: str, other: str) -> None:
        """Whether the copies that fail were launched first or last."""
        engine = self.engine(make, lambda owners: owners == [one])
        engine.runner.broken = {one}
        step = engine.step()
        assert step.report.errors == {one: sentence(one)} and step.finished == {one: "error"}
        assert ends(engine.run()) == {"b": "length", other: "length"}
        assert forwards_of(engine, other) == forwards_of(engine, "b") == 10

    def test_every_copy_that_fails_is_looked_at(self, make: MakeEngine) -> None:
        engine = self.engine(make, lambda owners: True)
        engine.runner.broken = {"a", "c"}
        step = engine.step()
        assert step.report.errors == {"a": sentence("a"), "c": sentence("c")}
        assert step.finished == {"a": "error", "c": "error"}
        assert ends(engine.run()) == {"b": "length"}


class TestSomethingElseStopsTheEngine:
    """Where nobody can tell whose fault it is, the sentence reaches the engine core, which stops."""

    def stopped(self, engine: StubEngine, kind: type[Exception], said: str) -> None:
        """A step of which no result comes: vLLM ends all requests, and no block is lost in the scheduler's books."""
        with pytest.raises(kind, match=said):
            engine.step()
        engine.abort("a", "b")
        engine.check_pool()
        held = sum(len(blocks) for blocks in engine.manager.req_to_blocks.values())
        assert held == 0 and not engine.scheduler.requests

    @pytest.mark.parametrize("mode", MODES)
    def test_a_worker_that_gives_up_in_an_eviction(self, make: MakeEngine, mode: str) -> None:
        engine = steady(make, mode)
        engine.add("a", prompt=96, outputs=10, budget=40)

        def give_up(*args: object) -> None:
            raise ArithmeticError("no victims today")

        engine.runner.vtoken._choose_victims = give_up
        self.stopped(engine, ArithmeticError, "^no victims today$")

    @pytest.mark.parametrize("mode", MODES)
    def test_a_table_that_refuses_what_is_planned(self, make: MakeEngine, mode: str) -> None:
        engine = steady(make, mode)
        engine.add("a", prompt=96, outputs=10, budget=40)
        choose = engine.runner.vtoken._choose_victims

        def twice_the_first(*args: Any) -> Ints:
            victims = choose(*args)
            victims[-1] = victims[-2]
            return victims

        engine.runner.vtoken._choose_victims = twice_the_first
        self.stopped(engine, ValueError, "^a token that is evicted must be live, and named once$")

    @pytest.mark.parametrize("mode", MODES)
    def test_an_engine_whose_wait_itself_fails(self, make: MakeEngine, mode: str) -> None:
        """As a CUDA error does: it stays, and whatever touches the device next would raise it again."""
        engine = steady(make, mode)
        copies = engine.runner.use_copies(InlineCopyEngine)

        def wait() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        copies.wait = wait  # type: ignore[method-assign]
        self.stopped(engine, RuntimeError, "^CUDA error: an illegal memory access was encountered$")

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        "changes, said",
        [
            (None, "the worker's report for step 3 is missing"),
            ({"step": 2}, "step 3 was settled with plan 3 and report 2"),
        ],
        ids=["lost", "late"],
    )
    def test_a_report_that_is_lost_or_late(
        self, make: MakeEngine, changes: dict[str, int] | None, said: str, mode: str
    ) -> None:
        engine = steady(make, mode)
        engine.add("a", prompt=96, outputs=10, budget=40)
        engine.runner.sabotage_report = lambda report: same_but(report, **changes) if changes else None
        with pytest.raises(RuntimeError, match=rf"^vtoken: {said}$"):
            engine.step()

    @pytest.mark.parametrize("mode", MODES)
    def test_a_report_that_comes_twice(self, make: MakeEngine, mode: str) -> None:
        engine = steady(make, mode)
        engine.add("a", prompt=96, outputs=10, budget=40)
        step = engine.step()
        with pytest.raises(RuntimeError, match=r"^vtoken: a result of step 3 arrived when no step was under way$"):
            engine.scheduler.vtoken.settle(plan_of(step.output), step.report)
        assert ends(engine.run()) == {"a": "length", "b": "length"}


def test_a_copy_that_fails_on_the_real_engine(tiny_gqa: Path) -> None:
    """Request r0 is reduced after its first token; r1 never needs a copy."""
    config = VTokenConfig(policy="random", budget=64)
    jobs = [Job(f"r{n}", prompt, 20) for n, prompt in enumerate(prompts((300, 50), 512))]
    with running(tiny_gqa, config, skip_tokenizer_init=True) as engine:
        expected = generate(engine, jobs)
    with running(tiny_gqa, config, skip_tokenizer_init=True) as engine:
        worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.vtoken
        relocate = worker._copies._copies._relocate
        worker._copies = Failing(ThreadCopyEngine, relocate, lambda: None, ZeroDivisionError("halfway"))
        answers = generate(engine, jobs)
        snapshot = engine.snapshot()
    assert answers["r0"].token_ids == expected["r0"].token_ids[:1]
    assert answers["r1"].token_ids == expected["r1"].token_ids
    assert (snapshot.running, snapshot.held_blocks, snapshot.live_tokens) == (0, 0, 0)
