"""Every moment belongs to the innermost wrapped call of the timer's own thread, and nothing stays wrapped."""

from collections import Counter
from threading import Thread

from vtoken.vllm_plugin import compat, kv_cache
from vtoken.vllm_plugin.hook_timer import ExclusiveTimer, timed_hooks


class Clock:
    """Moves when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_classes(clock: Clock) -> tuple[type, type]:
    class Stock:
        def work(self) -> str:
            clock.now += 5
            return "done"

        def untouched(self) -> None:
            clock.now += 7

    class Own(Stock):
        def work(self) -> str:
            clock.now += 1
            result = super().work()
            clock.now += 2
            return result

    return Stock, Own


def test_time_belongs_to_the_innermost_call():
    clock = Clock()
    stock, own = make_classes(clock)
    timer = ExclusiveTimer(clock)
    timer.wrap(stock, "work", "vllm")
    timer.wrap(own, "work", "vtoken")
    timer.wrap(own, "untouched", "vtoken")  # not its own
    clock.now += 10
    assert own().work() == "done"
    own().untouched()
    assert timer.take() == {"outside": 17, "vtoken": 3, "vllm": 5}
    assert timer.take() == {"outside": 0}


def test_time_of_a_call_that_raises_is_charged_too():
    clock = Clock()

    class Failing:
        def work(self) -> None:
            clock.now += 4
            raise KeyError

    timer = ExclusiveTimer(clock)
    timer.wrap(Failing, "work", "vtoken")
    try:
        Failing().work()
    except KeyError:
        clock.now += 1
    assert timer.take() == {"outside": 1, "vtoken": 4}


def test_other_threads_are_not_counted():
    clock = Clock()
    stock, _ = make_classes(clock)
    timer = ExclusiveTimer(clock)
    timer.wrap(stock, "work", "vllm")
    thread = Thread(target=stock().work)
    thread.start()
    thread.join()
    assert timer.take() == {"outside": 5}


def test_hooks_are_wrapped_while_the_context_lasts_only():
    owners = (compat.EvictingScheduler, compat.EvictingRunner, kv_cache.EvictableAttentionManager)
    before = [dict(vars(owner)) for owner in owners]
    with timed_hooks(Clock()):
        changed = Counter(
            owner.__name__
            for owner, stock in zip(owners, before, strict=True)
            for name, value in vars(owner).items()
            if stock[name] is not value
        )
        assert vars(compat.EvictingScheduler)["schedule"] is not before[0]["schedule"]
        assert vars(compat.EvictingRunner)["execute_model"] is not before[1]["execute_model"]
    assert set(changed) == {owner.__name__ for owner in owners}
    assert [dict(vars(owner)) for owner in owners] == before
