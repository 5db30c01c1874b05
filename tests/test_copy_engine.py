"""Copies between two forwards: behind the one, before the other, in every order that a device may choose."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken.core.ragged import Ints
from vtoken.kernels.copy_engine import (
    CPUS,
    CopyEngine,
    CopyFailed,
    CopyMode,
    ForcedSync,
    InlineCopyEngine,
    copy_engine_for,
)
from vtoken.kernels.cpu.copy_engine import ThreadCopyEngine
from vtoken.kernels.gpu.copy_engine import CudaCopyEngine

MANY = 30.0
"""Seconds after which a thread counts as stuck; nothing waits that long unless a test fails."""


def slots(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


# -- a device that delays what it may --------------------------------------------------------------------------------


@dataclass(eq=False)
class Event:
    """Recorded several times, perhaps: ``ordered`` times by the host, ``reached`` times by the device."""

    device: "Device"
    ordered: int = 0
    reached: int = 0

    def record(self, stream: "Stream") -> None:
        self.ordered += 1
        number = self.ordered

        def reach() -> None:
            self.reached = max(self.reached, number)

        stream.operations.append((lambda: True, reach))

    def synchronize(self) -> None:
        number = self.ordered
        while self.reached < number:
            assert self.device.run_one(), "the host waits for an event that cannot come"


@dataclass(eq=False)
class Stream:
    operations: list[tuple[Callable[[], bool], Callable[[], None]]] = field(default_factory=list)
    """(may it run, what it does), in order"""

    def wait_event(self, event: Event) -> None:
        number = event.ordered  # what is recorded later is not waited for
        self.operations.append((lambda: event.reached >= number, lambda: None))


class Device:
    """Two streams or more. Nothing runs before the host waits for it, and then ``choose`` says what runs next."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self._choose = choose
        self._streams = [Stream()]
        self._current = self._streams[0]

    # What stands in for torch.cuda.

    def Stream(self) -> Stream:
        self._streams.append(Stream())
        return self._streams[-1]

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    # What a test does with it.

    def order(self, operation: Callable[[], None]) -> None:
        self._current.operations.append((lambda: True, operation))

    def run_one(self) -> bool:
        ready = [each for each in self._streams if each.operations and each.operations[0][0]()]
        if ready:
            _, operation = ready[self._choose(len(ready))].operations.pop(0)
            operation()
        return bool(ready)

    def run_all(self) -> None:
        while self.run_one():
            pass
        assert not any(each.operations for each in self._streams), "streams wait for each other"


def all_orders(scenario: Callable[[Callable[[int], int]], object], at_most: int = 200_000) -> list[object]:
    """What a scenario comes to, for every sequence of choices that it can ask for."""
    outcomes, prefix = [], list[int]()
    for _ in range(at_most):
        asked: list[tuple[int, int]] = []

        def choose(count: int, asked: list[tuple[int, int]] = asked, prefix: list[int] = prefix) -> int:
            chosen = prefix[len(asked)] if len(asked) < len(prefix) else 0
            asked.append((chosen, count))
            return chosen

        outcomes.append(scenario(choose))
        while asked and asked[-1][0] + 1 == asked[-1][1]:
            asked.pop()
        if not asked:
            return outcomes
        prefix = [chosen for chosen, _ in asked[:-1]] + [asked[-1][0] + 1]
    raise AssertionError(f"more than {at_most} orders")


class Cache:
    """Slots with a payload on a device. What a forward reads is what it would have computed with."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self.payload = [0] * size
        self.read: list[tuple[int, ...]] = []

    def write(self, slot: int, value: int) -> None:
        self._device.order(lambda: self.payload.__setitem__(slot, value))

    def forward(self, *slots: int) -> None:
        self._device.order(lambda: self.read.append(tuple(self.payload[slot] for slot in slots)))

    def relocate(self, sources: Ints, destinations: Ints) -> None:
        """Token by token: a copy that is under way is neither before nor after."""
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            held: list[int] = []
            self._device.order(lambda source=source, held=held: held.append(self.payload[source]))
            self.write_from(held, destination)

    def write_from(self, held: list[int], slot: int) -> None:
        self._device.order(lambda: self.payload.__setitem__(slot, held[0]))


class NotBehindTheForward(CudaCopyEngine):
    """The control without the first edge."""

    def launch(self, sources: Ints, destinations: Ints) -> None:
        with self._cuda.stream(self._stream):
            self._relocate(sources, destinations)
        self._copied.record(self._stream)


class NotBeforeTheNextForward(CudaCopyEngine):
    """The control without the second edge."""

    def wait(self) -> None:
        pass


class NotBehindTheCopies(CudaCopyEngine):
    """The control whose host does not wait."""

    def finish(self) -> None:
        pass


class ForgetsWhatFailed(CudaCopyEngine):
    """The control that does not order what was begun of a copy that failed."""

    def launch(self, sources: Ints, destinations: Ints) -> None:
        self._computed.record(self._cuda.current_stream())
        self._stream.wait_event(self._computed)
        with self._cuda.stream(self._stream):
            self._relocate(sources, destinations)
        self._copied.record(self._stream)


def two_forwards(engine_class: type[CudaCopyEngine], choose: Callable[[int], int]) -> object:
    """Blocks of two slots. A request's tokens lie in slots 0, 2, 3; slot 1 is a hole. The forward writes token 3.

    Token 3 moves into the hole, while the device samples. Its block is freed and at once another request's, who zeroes
    it and writes there.
    """
    device = Device(choose)
    cache = Cache(device, 4)
    engine = engine_class(cache.relocate, device)
    for slot, value in [(0, 10), (2, 12)]:
        cache.write(slot, value)
    cache.write(3, 13)
    cache.forward(0, 2, 3)
    engine.launch(slots(3), slots(1))
    cache.forward(0)

    engine.wait()
    cache.write(2, 0)
    cache.write(3, 0)
    cache.write(2, 22)
    cache.forward(0, 1)
    cache.forward(2, 3)
    device.run_all()
    return cache.read, cache.payload


RIGHT = ([(10, 12, 13), (10,), (10, 13), (22, 0)], [10, 13, 22, 0])


class TestCudaCopyEngine:
    def test_every_order_is_right(self) -> None:
        outcomes = all_orders(lambda choose: two_forwards(CudaCopyEngine, choose))
        assert len(outcomes) > 1 and all(outcome == RIGHT for outcome in outcomes)

    @pytest.mark.parametrize("control", [NotBehindTheForward, NotBeforeTheNextForward])
    def test_without_either_edge_some_order_is_wrong(self, control: type[CudaCopyEngine]) -> None:
        outcomes = all_orders(lambda choose: two_forwards(control, choose))
        assert len(outcomes) > 1
        assert any(outcome == RIGHT for outcome in outcomes) and any(outcome != RIGHT for outcome in outcomes)

    def test_the_next_forward_overtakes_a_copy_only_without_the_second_edge(self) -> None:
        """What goes wrong is the very thing: another owner's numbers, or none, where the token should be."""
        found = {outcome[0][2] for outcome in all_orders(lambda each: two_forwards(NotBeforeTheNextForward, each))}
        assert found == {(10, 13), (10, 0)}
        found = {outcome[0][2] for outcome in all_orders(lambda each: two_forwards(NotBehindTheForward, each))}
        assert found == {(10, 13), (10, 0)}

    @pytest.mark.parametrize(("engine_class", "right"), [(CudaCopyEngine, True), (NotBehindTheCopies, False)])
    def test_the_host_sees_the_copies_when_it_has_waited(self, engine_class: type[CudaCopyEngine], right: bool) -> None:
        def scenario(choose: Callable[[int], int]) -> object:
            device = Device(choose)
            cache = Cache(device, 4)
            engine = engine_class(cache.relocate, device)
            cache.write(3, 13)
            engine.launch(slots(3), slots(1))
            engine.launch(slots(1), slots(0))
            engine.finish()
            return tuple(cache.payload)

        outcomes = all_orders(scenario)
        assert all(outcome == (13, 13, 0, 13) for outcome in outcomes) is right

    def test_neither_launch_nor_wait_blocks_the_host(self) -> None:
        device = Device(lambda _: pytest.fail("the host waited"))
        engine = CudaCopyEngine(Cache(device, 4).relocate, device)
        engine.launch(slots(3), slots(1))
        engine.wait()

    def test_copies_beside_each_other_and_beside_the_host(self) -> None:
        """Between launch and wait the device is free to do other work first: that is what the stream is for."""

        def scenario(choose: Callable[[int], int]) -> object:
            device, order = Device(choose), list[str]()
            engine = CudaCopyEngine(lambda *_: device.order(lambda: order.append("copy")), device)
            engine.launch(slots(3), slots(1))
            device.order(lambda: order.append("sampling"))
            engine.wait()
            device.order(lambda: order.append("forward"))
            device.run_all()
            return tuple(order)

        assert set(all_orders(scenario)) == {("copy", "sampling", "forward"), ("sampling", "copy", "forward")}

    def test_the_stream_that_was_current_is_current_again(self) -> None:
        device = Device(lambda _: 0)
        compute = device.current_stream()
        seen = list[Stream]()
        engine = CudaCopyEngine(lambda *_: seen.append(device.current_stream()), device)
        engine.launch(slots(3), slots(1))
        assert device.current_stream() is compute and seen[0] is not compute

    @pytest.mark.parametrize(("engine_class", "right"), [(CudaCopyEngine, True), (ForgetsWhatFailed, False)])
    def test_what_was_begun_of_a_failed_copy_is_over_before_the_next_forward(
        self, engine_class: type[CudaCopyEngine], right: bool
    ) -> None:
        """The request that it was made for ends, and slot 1, into which it still writes, is somebody else's."""

        def scenario(choose: Callable[[int], int]) -> object:
            device = Device(choose)
            cache = Cache(device, 4)

            def relocate(sources: Ints, destinations: Ints) -> None:
                cache.relocate(sources[:1], destinations[:1])
                raise MemoryError

            engine = engine_class(relocate, device)
            cache.write(3, 13)
            compute = device.current_stream()
            with pytest.raises((CopyFailed, MemoryError)):
                engine.launch(slots(3, 2), slots(1, 0))
            assert device.current_stream() is compute
            cache.forward(3)
            engine.wait()
            cache.write(1, 21)
            device.run_all()
            return cache.payload[1]

        outcomes = all_orders(scenario)
        assert len(outcomes) > 1 and set(outcomes) == ({21} if right else {13, 21})

    def test_before_anything_was_launched(self) -> None:
        device = Device(lambda _: 0)
        engine = CudaCopyEngine(Cache(device, 4).relocate, device)
        engine.launch(slots(), slots())
        engine.wait()
        engine.finish()
        device.run_all()

    @settings(max_examples=150, deadline=None)
    @given(st.randoms(use_true_random=False), st.data())
    def test_many_steps_in_any_order_are_what_one_stream_would_do(self, random, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
        size = 8
        steps = data.draw(st.lists(st.tuples(st.permutations(range(size)), st.integers(0, 3)), min_size=1, max_size=5))
        assert self._steps(CudaCopyEngine, steps, random.randrange) == self._steps(None, steps, random.randrange)

    def _steps(
        self,
        engine_class: type[CudaCopyEngine] | None,
        steps: list[tuple[list[int], int]],
        choose: Callable[[int], int],
    ) -> object:
        device = Device(choose)
        cache = Cache(device, 8)
        engine = engine_class(cache.relocate, device) if engine_class else InlineCopyEngine(cache.relocate)
        for step, (permuted, count) in enumerate(steps):
            engine.wait()
            for slot in permuted[: count + 1]:
                cache.write(slot, 100 * step + slot + 1)
            cache.forward(*range(8))
            engine.launch(slots(*permuted[:count]), slots(*permuted[count : 2 * count]))
        engine.wait()
        cache.forward(*range(8))
        device.run_all()
        return cache.read, cache.payload


# -- a thread ---------------------------------------------------------------------------------------------------------


class Gated:
    """A relocation that begins when it is told to."""

    def __init__(self) -> None:
        self.started, self.gate = threading.Event(), threading.Event()
        self.made: list[tuple[list[int], list[int]]] = []

    def __call__(self, sources: Ints, destinations: Ints) -> None:
        self.started.set()
        assert self.gate.wait(MANY)
        self.made.append((sources.tolist(), destinations.tolist()))


@contextmanager
def gated() -> Iterator[tuple[Gated, ThreadCopyEngine]]:
    relocate = Gated()
    engine = ThreadCopyEngine(relocate)
    try:
        yield relocate, engine
    finally:
        relocate.gate.set()
        engine.close()


class Waiting:
    """A call on a thread of its own, and what it raised."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.failure: BaseException | None = None
        self.called, self.returned = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()
        assert self.called.wait(MANY)

    def _run(self, call: Callable[[], None]) -> None:
        self.called.set()
        try:
            call()
        except BaseException as failure:
            self.failure = failure
        self.returned.set()


class NeverWaits(ThreadCopyEngine):
    """The control: what would be found if `wait` returned at once."""

    def finish(self) -> None:
        pass


class TestThreadCopyEngine:
    def test_launch_returns_while_the_copy_is_under_way(self) -> None:
        with gated() as (relocate, engine):
            engine.launch(slots(1), slots(2))
            assert relocate.started.wait(MANY) and not relocate.made
            relocate.gate.set()
            engine.wait()
            assert relocate.made == [([1], [2])]

    @pytest.mark.parametrize("call", ["wait", "finish"])
    def test_waiting_ends_with_the_copies(self, call: str) -> None:
        """Two copies behind one gate each: whoever waits is there until the second is through."""
        with gated() as (relocate, engine):
            engine.launch(slots(1), slots(2))
            engine.launch(slots(3), slots(4))
            waiting = Waiting(getattr(engine, call))
            assert relocate.started.wait(MANY)
            assert not waiting.returned.wait(0.05)
            relocate.gate.set()
            assert waiting.returned.wait(MANY)
            assert relocate.made == [([1], [2]), ([3], [4])]

    def test_an_engine_that_does_not_wait_is_found_out(self) -> None:
        relocate = Gated()
        engine = NeverWaits(relocate)
        engine.launch(slots(1), slots(2))
        assert relocate.started.wait(MANY)
        assert Waiting(engine.wait).returned.wait(MANY) and not relocate.made
        relocate.gate.set()
        engine.close()

    def test_copies_are_made_in_order(self) -> None:
        with gated() as (relocate, engine):
            for number in range(20):
                engine.launch(slots(number), slots(number + 100))
            relocate.gate.set()
            engine.wait()
            assert [sources for sources, _ in relocate.made] == [[number] for number in range(20)]

    def test_the_arrays_are_free_when_launch_returns(self) -> None:
        with gated() as (relocate, engine):
            sources, destinations = slots(1, 2), slots(5, 6)
            engine.launch(sources, destinations)
            sources[:], destinations[:] = -1, -1
            relocate.gate.set()
            engine.wait()
            assert relocate.made == [([1, 2], [5, 6])]

    @pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin threads")
    def test_it_may_use_every_processor_although_its_maker_is_pinned(self) -> None:
        """vLLM pins the thread that computes before it has its cache, and threads inherit that."""
        found: list[set[int]] = []
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(mine)})
        try:
            engine = ThreadCopyEngine(lambda *_: found.append(os.sched_getaffinity(0)))
            engine.launch(slots(1), slots(2))
            engine.finish()
            engine.close()
            assert found == [CPUS] and os.sched_getaffinity(0) == {min(mine)}
        finally:
            os.sched_setaffinity(0, mine)

    def test_it_is_another_thread(self) -> None:
        threads: list[threading.Thread] = []
        engine = ThreadCopyEngine(lambda *_: threads.append(threading.current_thread()))
        for number in range(3):
            engine.launch(slots(number), slots(number + 100))
        engine.close()
        assert len(set(threads)) == 1 and threads[0] is not threading.current_thread()

    @pytest.mark.parametrize("call", ["wait", "finish"])
    def test_failures_are_raised_once_and_together_and_the_other_copies_are_made(self, call: str) -> None:
        made: list[int] = []
        gate = threading.Event()

        def relocate(sources: Ints, destinations: Ints) -> None:
            assert gate.wait(MANY)
            if sources[0] in (1, 3):
                raise ZeroDivisionError(f"of {sources[0]}")
            made.append(int(sources[0]))

        engine = ThreadCopyEngine(relocate)
        for number in range(5):
            engine.launch(slots(number, 50), slots(number + 100, number + 200))
        gate.set()
        with pytest.raises(CopyFailed) as failed:
            getattr(engine, call)()
        assert failed.value.destinations.tolist() == [101, 201, 103, 203]
        assert repr(failed.value.__cause__) == "ZeroDivisionError('of 1')"
        engine.wait()
        engine.finish()
        engine.launch(slots(7), slots(8))
        engine.wait()
        assert made == [0, 2, 4, 7]
        engine.close()

    def test_even_an_exit_in_a_copy_does_not_leave_the_host_waiting(self) -> None:
        made: list[int] = []

        def relocate(sources: Ints, destinations: Ints) -> None:
            if sources[0] == 1:
                raise SystemExit
            made.append(int(sources[0]))

        engine = ThreadCopyEngine(relocate)
        engine.launch(slots(1), slots(2))
        engine.launch(slots(3), slots(4))
        waiting = Waiting(engine.wait)
        assert waiting.returned.wait(MANY) and isinstance(waiting.failure, SystemExit)
        engine.wait()
        engine.launch(slots(5), slots(6))
        engine.wait()
        assert made == [5]
        engine.close()

    def test_closing_makes_what_was_launched_and_ends_the_thread(self) -> None:
        relocate = Gated()
        engine = ThreadCopyEngine(relocate)
        engine.launch(slots(1), slots(2))
        closing = Waiting(engine.close)
        assert relocate.started.wait(MANY)
        relocate.gate.set()
        assert closing.returned.wait(MANY)
        assert relocate.made == [([1], [2])] and not engine._thread.is_alive()
        engine.close()
        engine.wait()
        with pytest.raises(RuntimeError, match=r"^vtoken: .* closed\.$"):
            engine.launch(slots(1), slots(2))

    def test_a_forgotten_engine_ends_its_thread(self) -> None:
        engine = ThreadCopyEngine(lambda *_: None)
        thread = engine._thread
        del engine
        gc.collect()
        thread.join(MANY)
        assert not thread.is_alive()

    def test_a_copy_that_hangs_does_not_keep_the_interpreter_from_exiting(self) -> None:
        program = (
            "import threading, numpy as np\n"
            "from vtoken.kernels.cpu.copy_engine import ThreadCopyEngine\n"
            "started = threading.Event()\n"
            "engine = ThreadCopyEngine(lambda *_: (started.set(), threading.Event().wait()))\n"
            "engine.launch(np.ones(1, dtype=np.int64), np.ones(1, dtype=np.int64))\n"
            "assert started.wait()\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=MANY)


# -- any of them ------------------------------------------------------------------------------------------------------


class TestEngines:
    @pytest.mark.parametrize("mode", ["async", "inline", "force_sync"])
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_they_copy_and_nothing_is_no_copy(
        self, monkeypatch: pytest.MonkeyPatch, device: str, mode: CopyMode
    ) -> None:
        monkeypatch.setattr("torch.accelerator.synchronize", lambda: None)
        calls = 0
        payload = np.arange(6)

        def relocate(sources: Ints, destinations: Ints) -> None:
            nonlocal calls
            calls += 1
            payload[destinations] = payload[sources]

        engine = copy_engine_for(device, relocate, mode)
        engine.launch(slots(), slots())
        engine.wait()
        engine.finish()
        assert calls == 0
        engine.launch(slots(4, 5), slots(0, 1))
        engine.launch(slots(0), slots(3))
        engine.wait()
        assert payload.tolist() == [4, 5, 2, 4, 4, 5] and calls == 2
        engine.finish()
        engine.close()

    @pytest.mark.parametrize(
        ("device", "mode", "noticed"),
        [
            ("cpu", "async", "wait"),
            ("cpu", "inline", "launch"),
            ("cpu", "force_sync", "launch"),
            ("meta", "async", "launch"),
        ],
    )
    def test_a_copy_that_fails(self, device: str, mode: CopyMode, noticed: str) -> None:
        payload = np.arange(6)

        def relocate(sources: Ints, destinations: Ints) -> None:
            payload[destinations[:1]] = payload[sources[:1]]
            if len(sources) > 1:
                raise ZeroDivisionError("halfway")

        engine = copy_engine_for(device, relocate, mode)
        destinations = slots(0, 1)
        if noticed == "launch":
            with pytest.raises(CopyFailed) as failed:
                engine.launch(slots(4, 5), destinations)
        else:
            engine.launch(slots(4, 5), destinations)
            with pytest.raises(CopyFailed) as failed:
                engine.wait()
        destinations[:] = -1
        assert failed.value.destinations.tolist() == [0, 1]
        assert repr(failed.value.__cause__) == "ZeroDivisionError('halfway')"
        engine.wait()
        engine.launch(slots(3), slots(2))
        engine.wait()
        assert payload.tolist() == [4, 1, 3, 3, 4, 5]
        engine.close()

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("mode", ["async", "inline", "force_sync"])
    def test_somebody_who_wants_the_process_to_end_is_not_held_up(
        self, mode: CopyMode, kind: type[BaseException]
    ) -> None:
        def relocate(sources: Ints, destinations: Ints) -> None:
            raise kind

        engine = copy_engine_for("cpu", relocate, mode)

        def copy() -> None:
            engine.launch(slots(1), slots(2))
            engine.wait()

        with pytest.raises(kind):
            copy()
        engine.close()

    def test_which_is_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.Stream", lambda: None)
        monkeypatch.setattr("torch.cuda.Event", lambda: None)

        def chosen(device: str, mode: CopyMode) -> list[type]:
            engine = copy_engine_for(device, lambda *_: None, mode)
            within = [type(engine._engine)] if isinstance(engine, ForcedSync) else []
            engine.close()
            return [type(engine), *within]

        assert chosen("cpu", "async") == [ThreadCopyEngine] and chosen("cuda", "async") == [CudaCopyEngine]
        assert chosen("cpu", "force_sync") == [ForcedSync, ThreadCopyEngine]
        assert chosen("cuda", "force_sync") == [ForcedSync, CudaCopyEngine]
        assert chosen("cpu", "inline") == chosen("cuda", "inline") == chosen("xpu", "async") == [InlineCopyEngine]
        with pytest.raises(ValueError, match=r"^vtoken: there is no copy mode 'later'; choose .*\.$"):
            copy_engine_for("cpu", lambda *_: None, "later")  # type: ignore[arg-type]

    def test_inline_on_a_device_finishes_when_the_device_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        synchronized: list[bool] = []
        monkeypatch.setattr("torch.accelerator.synchronize", lambda: synchronized.append(True))
        for device, times in [("cpu", 0), ("cuda", 1)]:
            engine = copy_engine_for(device, lambda *_: None, "inline")
            engine.launch(slots(1), slots(2))
            engine.wait()
            assert not synchronized
            engine.finish()
            assert len(synchronized) == times

    def test_forced_sync_finishes_at_once(self) -> None:
        class Recorded(CopyEngine):
            def __init__(self) -> None:
                self.calls: list[str] = []

            def launch(self, sources: Ints, destinations: Ints) -> None:
                self.calls.append(f"launch {sources} {destinations}")

            def wait(self) -> None:
                self.calls.append("wait")

            def finish(self) -> None:
                self.calls.append("finish")

        recorded = Recorded()
        engine = ForcedSync(recorded)
        engine.launch(slots(1), slots(2))
        assert recorded.calls == ["launch [1] [2]", "finish"]
        engine.wait()
        engine.finish()
        assert recorded.calls[2:] == ["wait", "finish"]
