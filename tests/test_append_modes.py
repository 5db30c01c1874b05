"""Naive eviction and packing on the stub engine: requests with holes, blocks that leave from the middle."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from reference_cache import S
from stub_copies import EagerCopyEngine, LazyCopyEngine
from stub_worker import StubEngine, same_but

from vtoken.core import reclamation
from vtoken.core.observed import AttendedQueries, QueryRuns
from vtoken.core.planner import Packing
from vtoken.kernels.cpu.copy_engine import ThreadCopyEngine
from vtoken.vllm_plugin.compat import plan_of
from vtoken.vllm_plugin.protocol import StepReport

MakeEngine = Callable[..., StubEngine]
MODES = ["none", "pack"]
READY = {"theta_f": 0.0, "low_watermark": 1.0, "check_interval": 1, "headroom": 0.05}
"""Packs whenever there is anything to gain."""


def engine_for(make: MakeEngine, mode: str, *args: int, **options: object) -> StubEngine:
    return make(*args, **{"reclaim": mode, **(READY if mode == "pack" else {}), **options})


def packed(engine: StubEngine) -> int:
    return engine.scheduler.vtoken.stats.tokens_moved


class TestRuns:
    """Every forward and every block is checked by the stub itself."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("interval", [1, 5, 17])
    def test_decoding(self, make: MakeEngine, mode: str, interval: int) -> None:
        engine = engine_for(make, mode, 300, interval=interval)
        for n in range(6):
            engine.add(f"r{n}", prompt=60 + 9 * n, outputs=70, budget=40 + 3 * n)
        engine.run()
        assert engine.scheduler.vtoken.stats.tokens_evicted > 0
        assert engine.scheduler.vtoken.stats.blocks_reclaimed > 0

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("batched", [23, 64])
    def test_chunks_of_requests_with_holes(self, make: MakeEngine, mode: str, batched: int) -> None:
        engine = engine_for(make, mode, 300, batched=batched, seqs=6, prefill_evict="chunked", prefill_chunk=48)
        for n in range(6):
            engine.add(f"r{n}", prompt=150 + 31 * n, outputs=12, budget=20 + 5 * n)
        engine.run()
        chunks = [f for forward in engine.runner.forwards for f in forward if len(f.positions) > 1]
        assert any(f.positions.start > 0 and f.length < f.positions.stop for f in chunks)

    @pytest.mark.parametrize("mode", MODES)
    def test_a_budget_of_one(self, make: MakeEngine, mode: str) -> None:
        """Nothing stays between two forwards: a request whose blocks are all full holds none at all."""
        engine = engine_for(make, mode, 100, sinks=0, recent=0)
        for n in (S, 2 * S - 1, 2 * S):
            engine.add(f"r{n}", prompt=n, outputs=40, budget=1)
        engine.run()

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("seed", range(3))
    def test_everything_at_once(self, make: MakeEngine, mode: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        engine = engine_for(
            make,
            mode,
            int(rng.integers(30, 50)),
            seqs=10,
            batched=int(rng.choice([64, 150, 500])),
            interval=int(rng.choice([1, 3])),
            prefill_evict=str(rng.choice(["end", "chunked"])),
            prefill_chunk=32,
            **({"check_interval": int(rng.choice([1, 3])), "theta_f": 0.1} if mode == "pack" else {}),
        )
        if seed % 2:
            engine.runner.use_copies(LazyCopyEngine)

        def abort_some() -> None:
            living = sorted(engine.scheduler.requests)
            if living and rng.random() < 0.08:
                engine.abort(str(rng.choice(living)))

        for _ in range(120):
            for n in range(10):
                if f"r{n}" not in engine.scheduler.requests and rng.random() < 0.05:
                    budget = int(rng.integers(engine.config.protected, 60))
                    engine.add(f"r{n}", int(rng.integers(1, 200)), int(rng.integers(1, 70)), budget)
            few = rng.random() < 0.3
            engine.scheduler.max_num_scheduled_tokens = int(rng.choice([1, 3, 40])) if few else 10**5
            if rng.random() < 0.02:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.step(before_update=abort_some)
            abort_some()
        engine.scheduler.max_num_scheduled_tokens = 10**5
        engine.run(limit=2000)
        assert engine.scheduler.vtoken.stats.blocks_reclaimed > 0
        assert mode == "none" or packed(engine) > 0


def holed(make: MakeEngine, *args: int, outputs: int = 12, **options: object) -> StubEngine:
    """Request a forgets 57 of 96 tokens: two blocks die, and the two beside them keep 2 and 5 tokens."""
    engine = engine_for(make, "pack", *args, **options)
    engine.add("a", prompt=96, outputs=outputs, budget=40)
    return engine


class TestOnePacking:
    def test_two_sparse_blocks_become_one(self, make: MakeEngine) -> None:
        engine = holed(make, 101)
        step = engine.step()
        before = engine.runner.forwards[0][0].blocks
        change = step.report.changes["a"]
        assert change.adopted == plan_of(step.output).granted[:1] and len(plan_of(step.output).granted) == 5
        assert change.freed == [before[0], before[3], before[1], before[2]]
        assert engine.runner.references["a"].blocks == [*change.adopted, *before[4:]]
        assert step.report.moved == 2 + 5
        assert engine.scheduler.vtoken.stats.blocks_reclaimed == 3 and engine.pool.get_num_free_blocks() == 97
        engine.run()

    def test_without_packing_they_stay(self, make: MakeEngine) -> None:
        engine = holed(make, 101, theta_f=0.9)
        step = engine.step()
        before = engine.runner.forwards[0][0].blocks
        assert (step.report.changes["a"].freed, step.report.changes["a"].adopted) == (before[1:3], [])
        assert engine.pool.get_num_free_blocks() == 96
        engine.run()

    @pytest.mark.parametrize("reuse", [False, True])
    def test_aborted_in_the_step_in_which_it_was_packed(self, make: MakeEngine, reuse: bool) -> None:
        engine = holed(make, 101)
        engine.add("b", prompt=70, outputs=9, budget=30)
        step = engine.step(before_update=lambda: engine.abort("a"))
        assert step.report.changes["a"].adopted
        if reuse:
            engine.add("a", prompt=90, outputs=9, budget=40)
        engine.run()

    def test_finished_in_the_step_in_which_it_was_packed(self, make: MakeEngine) -> None:
        engine = holed(make, 101, outputs=1)
        step = engine.step()
        assert step.finished == {"a": "length"} and step.report.changes["a"].adopted
        engine.run()

    def test_preempted_right_after_it_was_packed(self, make: MakeEngine) -> None:
        engine = holed(make, 101)
        assert engine.step().report.changes["a"].adopted
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.run()
        assert [f.positions.start for forward in engine.runner.forwards for f in forward][:3] == [0, 0, 97]

    def test_a_request_that_misses_the_step_is_packed_all_the_same(self, make: MakeEngine) -> None:
        engine = engine_for(make, "pack", 101, check_interval=3)
        engine.add("first", prompt=20, outputs=9, budget=500)
        engine.add("a", prompt=96, outputs=9, budget=40)
        engine.step()
        engine.step()
        engine.scheduler.max_num_scheduled_tokens = 1
        step = engine.step()
        assert list(step.output.num_scheduled_tokens) == ["first"] and step.report.changes["a"].adopted
        engine.step()
        engine.scheduler.max_num_scheduled_tokens = 10**5
        engine.run()

    def test_granted_blocks_that_nobody_takes_come_back(self, make: MakeEngine) -> None:
        engine = engine_for(make, "pack", 101)
        engine.add("a", prompt=50, outputs=5, budget=500)
        step = engine.step()
        assert len(plan_of(step.output).granted) == 5 and step.report.changes == {}
        assert engine.pool.get_num_free_blocks() == 96
        engine.run()

    def test_a_packing_that_frees_nothing_is_seen(self, make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Control: the stub must not accept as many destinations as sources."""
        choose = reclamation.choose_packings

        def generous(*args: object) -> list[Packing]:
            return [replace(packing, destinations=len(packing.sources)) for packing in choose(*args)]

        monkeypatch.setattr(reclamation, "choose_packings", generous)
        engine = holed(make, 101)
        with pytest.raises((AssertionError, ValueError)):
            engine.run()


class TestSameVictims:
    def test_in_all_three_modes(self, make: MakeEngine) -> None:
        """Where a token lies does not matter to the policy: the same ones die after the same forwards."""
        traces = []
        for mode in ("fill", "none", "pack"):
            engine = engine_for(make, mode, 400, record_trace=True, interval=3, prefill_evict="chunked")
            for n in range(5):
                engine.add(f"r{n}", prompt=100 + 37 * n, outputs=40, budget=30 + 7 * n)
            engine.run()
            taken = engine.runner.vtoken.take_traces()
            traces.append({r: [(i.new_tokens, i.victims) for i in trace.incarnations] for r, trace in taken.items()})
            assert mode != "pack" or packed(engine) > 0
        assert traces[0] == traces[1] == traces[2]
        assert sum(map(len, traces[0]["r4"][0][1])) > 200


class TestAdmission:
    def several(self, make: MakeEngine, num_blocks: int, **options: object) -> StubEngine:
        """Four requests with holes, and a headroom that lets one of them be packed at a time."""
        engine = engine_for(make, "pack", num_blocks, headroom=0.01, **options)
        for n in range(4):
            engine.add(f"r{n}", prompt=96, outputs=30, budget=40)
        return engine

    def test_who_fits_is_admitted_while_reclaiming_gains(self, make: MakeEngine) -> None:
        engine = self.several(make, 101)
        engine.step()
        for n in range(3):  # one packing in each of the first steps
            engine.add(f"new{n}", prompt=96, outputs=5, budget=40)
            step = engine.step()
            assert [new.req_id for new in step.output.scheduled_new_reqs] == [f"new{n}"]
            assert len(step.report.changes) >= 1 and step.report.packed > 0
        engine.run()

    def test_who_does_not_fit_waits_for_what_is_trapped(self, make: MakeEngine) -> None:
        """It would take all free blocks, the headroom included. The others end after 30 steps: it waits for less."""
        engine = self.several(make, 1 + 24 + 5)
        engine.step()
        engine.add("new", prompt=engine.pool.get_num_free_blocks() * S, outputs=2, budget=500)
        waited = 0
        while not engine.step().output.scheduled_new_reqs:
            waited += 1
        assert 0 < waited < 20 and packed(engine) > 0 and engine.preemptions == 0
        engine.run()

    @pytest.mark.parametrize("looks", [True, False], ids=["looked at", "control"])
    def test_blocks_are_looked_for_before_anybody_is_preempted(self, make: MakeEngine, looks: bool) -> None:
        """All requests grow, and the next regular look is far away."""
        options = {"theta_f": 0.1, "low_watermark": 0.0, "check_interval": 1000, "headroom": 0.1}
        engine = engine_for(make, "pack", 1 + 45, **options)
        if not looks:
            engine.scheduler.vtoken._packing.grant = lambda *counts: 0
        for n in range(12):
            engine.add(f"r{n}", prompt=17 + n, outputs=90, budget=24 + n)
        engine.run()
        assert (engine.preemptions == 0) == (packed(engine) > 0) == looks

    def test_where_nothing_can_be_gained_they_are(self, make: MakeEngine) -> None:
        """A few dead slots in every request, never a block's worth: waste without anything to do about it."""
        engine = engine_for(make, "pack", 101)
        for n in range(4):
            engine.add(f"r{n}", prompt=45, outputs=4, budget=40)
        engine.step()
        engine.add("new", prompt=96, outputs=3, budget=500)
        step = engine.step()
        assert [new.req_id for new in step.output.scheduled_new_reqs] == ["new"]
        assert engine.scheduler.vtoken._packing.grants == 2 and packed(engine) == 0
        engine.run()

    def test_where_nothing_runs_the_headroom_is_nobody_s(self, make: MakeEngine) -> None:
        engine = engine_for(make, "pack", 1 + 6, headroom=0.5)
        engine.add("a", prompt=96, outputs=1, budget=500)
        engine.add("b", prompt=96, outputs=1, budget=500)
        engine.run(limit=4)

    @pytest.mark.parametrize(("blocks", "admitted"), [(11, True), (12, False)])
    def test_the_headroom_stays_free(self, make: MakeEngine, blocks: int, admitted: bool) -> None:
        engine = engine_for(make, "pack", 1 + 20, theta_f=0.9, headroom=0.1)
        engine.add("a", prompt=6 * S, outputs=3, budget=500)
        engine.step()
        engine.add("b", prompt=blocks * S, outputs=3, budget=500)
        step = engine.step()  # a takes its seventh block before b is asked about
        assert bool(step.output.scheduled_new_reqs) == admitted
        assert engine.pool.get_num_free_blocks() == (2 if admitted else 13)
        engine.run()

    def test_a_refusal_lets_reclaiming_begin(self, make: MakeEngine) -> None:
        """There is enough free for the watermark, and not for the next request."""
        engine = engine_for(make, "pack", 1 + 20, low_watermark=0.0, headroom=0.1)
        engine.add("a", prompt=96, outputs=30, budget=40)
        engine.step()
        assert packed(engine) == 0
        engine.add("b", prompt=16 * S, outputs=3, budget=500)
        step = engine.step()
        assert not step.output.scheduled_new_reqs and step.report.changes["a"].adopted
        engine.run()


class TestWhen:
    def test_deferred_while_no_block_is_free(self, make: MakeEngine) -> None:
        """In the second step, the first that is looked at, five requests take the five free blocks."""
        engine = holed(make, 1 + 13, check_interval=2)
        manager = engine.scheduler.vtoken._packing
        for req_id in ("b", "c", "d", "e"):
            engine.add(req_id, prompt=S, outputs=3, budget=500)
        engine.step()
        assert engine.pool.get_num_free_blocks() == 5
        second = engine.step()
        assert plan_of(second.output).granted == [] and (manager.looks, manager.grants, manager.deferrals) == (1, 0, 1)
        engine.step()
        fourth = engine.step()
        assert fourth.report.changes["a"].adopted == plan_of(fourth.output).granted != []
        engine.run()

    @pytest.mark.parametrize(("interval", "looks"), [(1, 12), (4, 3), (5, 2), (13, 0)])
    def test_looks_are_amortised(self, make: MakeEngine, interval: int, looks: int) -> None:
        engine = holed(make, 101, theta_f=0.99, check_interval=interval)
        for _ in range(12):
            engine.step()
        assert engine.scheduler.vtoken._packing.looks == looks
        engine.run()

    def test_steps_that_compute_nothing_do_not_count(self, make: MakeEngine) -> None:
        engine = holed(make, 101, outputs=1, check_interval=2)
        engine.step()
        engine.step()
        assert engine.scheduler.vtoken._packing.looks == 0

    @pytest.mark.parametrize(("rise", "at_once"), [(0.5, True), (0.6, False)])
    def test_a_burst_is_answered_at_once(self, make: MakeEngine, rise: float, at_once: bool) -> None:
        """39 of 96 slots are alive after it."""
        engine = holed(make, 101, check_interval=1000, low_watermark=0.0, sudden_rise=rise)
        step = engine.step()
        assert bool(step.report.changes["a"].adopted) == at_once
        assert engine.scheduler.vtoken._packing.looks == at_once
        engine.run()


class TestCopiesBesideTheHost:
    """A copy may be made as late as the next wait, and as early as its launch: both must give the same cache."""

    def crowded(self, make: MakeEngine, mode: str) -> StubEngine:
        """In the second step all blocks that a has left belong to others, who write into them."""
        spare = 2 if mode == "pack" else 1  # one is granted
        engine = engine_for(make, mode, 1 + 6 + 4 * 2 + spare)
        engine.add("a", prompt=96, outputs=12, budget=40)
        for n in range(4):
            engine.add(f"grows{n}", prompt=2 * S, outputs=5, budget=500)
        engine.runner.use_copies(LazyCopyEngine)
        return engine

    @pytest.mark.parametrize("mode", ["fill", "pack"])
    def test_blocks_change_hands_in_the_very_next_step(self, make: MakeEngine, mode: str) -> None:
        engine = self.crowded(make, mode)
        engine.step()
        (first,) = (forward for forward in engine.runner.forwards[0] if forward.req_id == "a")
        left = set(first.blocks) - set(engine.block_ids("a"))
        assert len(left) == (4 if mode == "pack" else 3)
        assert engine.scheduler.vtoken.stats.tokens_moved > 0
        engine.step()
        others = {block for n in range(4) for block in engine.block_ids(f"grows{n}")}
        assert len(left - others) == (1 if mode == "pack" else 0)  # a's own new block, in pack
        assert engine.preemptions == 0 and engine.pool.get_num_free_blocks() == 0
        engine.run()

    @pytest.mark.parametrize("mode", ["fill", "pack"])
    @pytest.mark.parametrize("when", ["never", "after blocks were cleared", "after tokens were written"])
    def test_waiting_too_late_is_seen(self, make: MakeEngine, mode: str, when: str) -> None:
        engine = self.crowded(make, mode)
        runner, copies = engine.runner, engine.runner.vtoken._copies
        runner.vtoken.wait_for_copies = lambda: None
        if when == "after blocks were cleared":
            update = runner._update_states
            runner._update_states = lambda output: (update(output), copies.wait())
        elif when == "after tokens were written":
            runner.clear_new_blocks = lambda blocks: None
            check = runner.check_contents
            runner.check_contents = lambda blocks: (copies.wait(), check(blocks))
        engine.step()
        with pytest.raises(AssertionError, match=r"wrong K/V of \['a'"):
            engine.step()

    @pytest.mark.parametrize("mode", ["fill", "pack"])
    def test_copying_before_the_forward_has_written_is_seen(self, make: MakeEngine, mode: str) -> None:
        """Only by an engine that copies at once: for the lazy one the order of the calls makes no difference."""
        for kind, wrong in ((LazyCopyEngine, False), (EagerCopyEngine, True)):
            engine = self.crowded(make, mode)
            runner, forward, evict = engine.runner, engine.runner._forward, engine.runner.vtoken.evict
            runner.use_copies(kind)

            def early(output: object, *, runner=runner, forward=forward, evict=evict) -> None:  # type: ignore[no-untyped-def]
                changed = evict()
                runner.vtoken.evict = lambda: changed
                forward(output)

            runner._forward = early
            if wrong:
                with pytest.raises(AssertionError, match=r"wrong K/V of \['a'"):
                    engine.run()
            else:
                engine.run()

    @pytest.mark.parametrize("mode", ["fill", "pack"])
    def test_with_the_thread_that_copies_on_a_cpu(self, make: MakeEngine, mode: str) -> None:
        engine = self.crowded(make, mode)
        copies = engine.runner.use_copies(ThreadCopyEngine)
        engine.run()
        copies.close()


class TestFaults:
    def test_a_table_that_lost_a_token_ends_its_request_alone(self, make: MakeEngine) -> None:
        engine = holed(make, 101)
        engine.add("b", prompt=80, outputs=10, budget=30)
        engine.step()
        engine.step()
        engine.runner.vtoken.table.evict_token("a", 85)
        engine.runner.broken = {"a"}
        step = engine.step()
        assert step.finished == {"a": "error"} and "the worker holds 38 tokens" in step.report.errors["a"]
        engine.run()

    def spoil(self, engine: StubEngine, **changes: list[int]) -> None:
        def spoiled(report: StepReport) -> StepReport:
            return same_but(report, changes={"a": replace(report.changes["a"], **changes)})

        engine.runner.sabotage_report = spoiled

    def test_blocks_that_the_request_does_not_hold(self, make: MakeEngine) -> None:
        engine = holed(make, 101)
        self.spoil(engine, freed=[1, 77])
        with pytest.raises(RuntimeError, match=r"^vtoken: the worker freed blocks \[77\] of request a, which does not"):
            engine.step()

    def test_blocks_that_were_not_granted(self, make: MakeEngine) -> None:
        engine = holed(make, 101)
        self.spoil(engine, adopted=[77])
        with pytest.raises(
            RuntimeError, match=r"^vtoken: the worker gave request a blocks \[77\], which nobody granted"
        ):
            engine.step()


class TestTheStubItself:
    """What is checked above must be able to fail."""

    def tells(self, engine: StubEngine, change: Callable[[AttendedQueries], AttendedQueries]) -> None:
        """Let the forward be told something else about its holes."""
        begin = engine.runner.recorder.begin
        engine.runner.vtoken._observer.begin = lambda queries, table: begin(change(queries), table)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("place", [0, 5])
    def test_a_live_mask_that_is_wrong_by_one_is_seen(self, make: MakeEngine, mode: str, place: int) -> None:
        """A sink is left out, or a dead token or the copy that pads a packed block is read."""
        engine = engine_for(make, mode, 101)
        engine.add("a", prompt=96, outputs=12, budget=40)
        engine.step()

        def flipped(queries: AttendedQueries) -> AttendedQueries:
            live = queries.live.copy()
            live[0, place] ^= True
            return replace(queries, live=live)

        self.tells(engine, flipped)
        with pytest.raises(AssertionError, match="a reads other tokens than it should"):
            engine.step()

    @pytest.mark.parametrize("mode", MODES)
    def test_a_request_whose_holes_are_forgotten_is_seen(self, make: MakeEngine, mode: str) -> None:
        engine = engine_for(make, mode, 101)
        engine.add("a", prompt=96, outputs=12, budget=40)
        engine.step()
        none = np.empty(0, dtype=np.int64)
        nobody = QueryRuns(none, none, none, none)
        self.tells(engine, lambda queries: replace(queries, holed=nobody, live=queries.live[:0]))
        with pytest.raises(AssertionError):
            engine.step()

    def test_a_dead_block_that_stays_is_seen(self, make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reclamation.NaiveReclamation, "_free_empty", lambda self, rows: {})
        engine = engine_for(make, "none", 101)
        engine.add("a", prompt=96, outputs=12, budget=40)
        with pytest.raises(AssertionError, match="a dead block stayed"):
            engine.step()

    @pytest.mark.parametrize("mode", MODES)
    def test_a_freed_block_that_leaks_is_seen(self, make: MakeEngine, mode: str) -> None:
        engine = engine_for(make, mode, 101)
        exchange = engine.manager.exchange
        engine.manager.exchange = lambda *args: exchange(*args)[1:]
        engine.add("a", prompt=96, outputs=12, budget=40)
        with pytest.raises(AssertionError, match="lost or doubled"):
            engine.step()

    def test_an_adopted_block_that_also_goes_back_is_seen(self, make: MakeEngine) -> None:
        engine = holed(make, 101)
        exchange = engine.manager.exchange
        engine.manager.exchange = lambda req_id, change, adopted: exchange(req_id, change, adopted) + adopted
        with pytest.raises(AssertionError, match="lost or doubled"):
            engine.step()

    def test_blocks_of_an_aborted_request_that_are_freed_twice_are_seen(self, make: MakeEngine) -> None:
        engine = holed(make, 101)
        engine.manager.lose = lambda req_id: None
        with pytest.raises(RuntimeError, match="of request a, which does not hold them"):
            engine.step(before_update=lambda: engine.abort("a"))


class TestFailedRequests:
    def test_are_not_packed(self, make: MakeEngine) -> None:
        """The table of `a` is damaged: it ends with an error, and nothing of it is moved or reported any more."""
        engine = engine_for(make, "pack", 101)
        engine.add("a", prompt=96, outputs=12, budget=40)
        engine.add("b", prompt=80, outputs=10, budget=30)
        grant = engine.scheduler.vtoken._packing.grant
        engine.scheduler.vtoken._packing.grant = lambda *counts: 0
        engine.step()
        engine.step()
        engine.scheduler.vtoken._packing.grant = grant
        engine.runner.vtoken.table.evict_token("a", 85)
        engine.runner.broken = {"a"}
        step = engine.step()
        assert step.finished == {"a": "error"} and list(step.report.errors) == ["a"]
        assert "a" not in step.report.changes and step.report.changes["b"].adopted
        engine.run()
