"""What is kept of the past: how much, in which order, and that a frame is what the pool was."""

from dataclasses import dataclass, replace

import pytest

from vtoken.core.history import Frame, History, Holding

FRAME = Frame(0, 100.0, 1, 2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class Held:
    blocks: list[int]

    @property
    def nbytes(self) -> int:
        return 10 * len(self.blocks)

    def listed(self) -> list[Holding]:
        return [Holding("a", self.blocks, [1] * len(self.blocks))]


def filled(history: History, times: list[float], blocks: int = 2) -> History:
    for now in times:
        history.append(now, replace(FRAME, time=1000.0 + now), Held(list(range(blocks))))
    return history


def numbers(history: History, since: int = 0, most_blocks: int = 1000) -> list[int]:
    return [frame.number for frame in history.since(since, most_blocks)]


def test_a_frame_is_due_once_per_interval() -> None:
    history = History(10, interval=1.0)
    assert history.due(0.0)
    filled(history, [0.0])
    assert [history.due(now) for now in (0.0, 0.999, 1.0, 5.0)] == [False, False, True, True]
    filled(history, [5.0])
    assert not history.due(5.9) and history.due(6.0)


def test_the_oldest_give_way() -> None:
    history = filled(History(3), [0.0, 1.0, 2.0, 3.0, 4.0])
    assert numbers(history) == [3, 4, 5]
    assert [frame.time for frame in history.since(3, 1000)] == [1003.0, 1004.0]
    assert numbers(history, since=5) == []


def test_what_comes_early_takes_the_place_of_the_last_one() -> None:
    history = filled(History(10), [0.0, 1.0, 1.25, 1.5])
    assert numbers(history) == [1, 4]
    assert [frame.time for frame in history.since(0, 1000)] == [1000.0, 1001.5]
    assert history.due(2.0)  # the place was that of 1.0


def test_memory_is_bounded_whatever_the_length() -> None:
    history = filled(History(1000, most_bytes=100), [float(now) for now in range(20)], blocks=3)
    assert numbers(history) == [18, 19, 20]


def test_an_answer_is_cut_and_the_rest_comes_next_time() -> None:
    history = filled(History(10), [float(now) for now in range(7)], blocks=4)
    assert numbers(history, most_blocks=8) == [1, 2]
    assert numbers(history, since=2, most_blocks=9) == [3, 4, 5]
    assert numbers(history, since=5, most_blocks=1) == [6]


def test_none_are_kept_if_none_are_wanted() -> None:
    history = History(0)
    assert not history.due(1e9) and not history.keeps


@pytest.mark.parametrize("most_blocks", [1, 2, 1000])
def test_frames_carry_who_holds_what(most_blocks: int) -> None:
    history = filled(History(10), [0.0])
    assert history.since(0, most_blocks) == [
        replace(FRAME, number=1, time=1000.0, holdings=[Holding("a", [0, 1], [1, 1])])
    ]
