"""Victims: sinks and recent tokens are safe, the lowest priorities go, and among equals the older one."""

from itertools import pairwise

import numpy as np
import pytest
from policy_driver import observation

from vtoken.core.ragged import offsets_of
from vtoken.core.selection import select_victims
from vtoken.policies.streaming_llm import StreamingLLM


def ints(values: object) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def select(
    requests: list[tuple[list[int], list[float]]],
    lengths: list[int],
    counts: list[int],
    sinks: int,
    recent: int,
) -> list[list[int]]:
    """Requests as (tokens, priorities); victims per request, in the order in which they were chosen."""
    victims = select_victims(
        np.array([p for _, priorities in requests for p in priorities], dtype=np.float64),
        ints([t for tokens, _ in requests for t in tokens]),
        ints([len(tokens) for tokens, _ in requests]),
        ints(lengths),
        ints(counts),
        sinks,
        recent,
    )
    bounds = offsets_of(ints(counts))
    return [victims[a:b].tolist() for a, b in pairwise(bounds)]


def by_the_definition(
    tokens: list[int], priorities: list[float], length: int, count: int, sinks: int, recent: int
) -> list[int]:
    free = [(p, t) for t, p in zip(tokens, priorities, strict=True) if sinks <= t < length - recent]
    if len(free) < count:
        raise ValueError
    return [t for _, t in sorted(free)[:count]]


class TestSelection:
    def test_the_lowest_priorities_go(self) -> None:
        tokens, priorities = [0, 1, 2, 3, 4, 5], [9.0, 1.0, 5.0, 2.0, 4.0, 3.0]
        assert select([(tokens, priorities)], [6], [3], 0, 0) == [[1, 3, 5]]

    def test_among_equals_the_older_goes_first(self) -> None:
        assert select([([7, 3, 5, 1], [2.0, 2.0, 2.0, 2.0])], [8], [2], 0, 0) == [[1, 3]]
        assert select([([7, 3, 5, 1], [2.0, 2.0, 2.0, 2.0])], [8], [1], 0, 0) == [[1]]
        assert select([([7, 3, 5, 1], [2.0, 1.0, 1.0, 2.0])], [8], [3], 0, 0) == [[3, 5, 1]]

    def test_sinks_and_recent_tokens_stay_whatever_their_priority(self) -> None:
        tokens = list(range(10))
        lowest_at_the_ends = [-9.0, -8.0, 1.0, 2.0, 3.0, 4.0, 5.0, -7.0, -6.0, -5.0]
        assert select([(tokens, lowest_at_the_ends)], [10], [2], 2, 3) == [[2, 3]]
        assert select([(tokens, lowest_at_the_ends)], [10], [5], 2, 3) == [[2, 3, 4, 5, 6]]

    def test_recent_is_counted_by_logical_length_not_by_what_is_left(self) -> None:
        # Tokens 4 ... 7 are gone; the newest two of a sequence of 10 are 8 and 9.
        assert select([([0, 1, 2, 3, 8, 9], [5.0, 4.0, 3.0, 2.0, 1.0, 0.0])], [10], [2], 0, 2) == [[3, 2]]

    def test_negative_priorities_are_ordinary(self) -> None:
        assert select([([0, 1, 2], [-1.0, -3.0, -2.0])], [3], [2], 0, 0) == [[1, 2]]

    def test_ragged_batches_are_taken_apart(self) -> None:
        requests = [
            ([0, 1, 2], [3.0, 2.0, 1.0]),
            ([5, 0, 9, 2, 4], [0.0, 1.0, 0.0, 1.0, -1.0]),
            ([0], [0.0]),
            ([3, 2, 1, 0], [0.0, 0.0, 0.0, 0.0]),
        ]
        assert select(requests, [3, 10, 1, 4], [1, 3, 0, 2], 0, 0) == [[2], [4, 5, 9], [], [0, 1]]

    def test_a_request_that_forgets_nothing_yields_nothing(self) -> None:
        assert select([([0, 1], [0.0, 1.0])], [2], [0], 0, 0) == [[]]
        assert select([], [], [], 4, 32) == []

    def test_the_policy_s_own_array_is_left_alone(self) -> None:
        priority = np.arange(6.0)
        select_victims(priority, ints(range(6)), ints([6]), ints([6]), ints([1]), 2, 2)
        assert priority.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    def test_integer_priorities_as_streaming_llm_gives_them(self) -> None:
        tokens = ints([0, 1, 2, 3, 9, 8, 7, 6])
        priority = StreamingLLM().priority(observation(tokens=tokens))
        assert select_victims(priority, tokens, ints([8]), ints([10]), ints([3]), 2, 2).tolist() == [2, 3, 6]


class TestRefusal:
    @pytest.mark.parametrize("counts", [[1, 3], [3, 1], [1, 1]])
    def test_more_than_is_unprotected(self, counts: list[int]) -> None:
        requests = [([0, 1, 2, 3, 4, 5], [0.0] * 6), ([0, 1, 2, 3, 4, 5], [0.0] * 6)]
        recent = 4 if counts == [1, 1] else 2
        with pytest.raises(ValueError, match="unprotected"):
            select(requests, [6, 6], counts, 2, recent)

    def test_more_than_there_is_does_not_spill_into_the_next_request(self) -> None:
        with pytest.raises(ValueError, match="unprotected"):
            select([([0, 1], [0.0, 0.0]), ([0, 1, 2], [0.0, 0.0, 0.0])], [2, 3], [3, 1], 0, 0)

    def test_more_than_there_is_in_the_last_request(self) -> None:
        with pytest.raises(ValueError, match="unprotected"):
            select([([0, 1], [0.0, 0.0])], [2], [3], 0, 0)

    @pytest.mark.parametrize("position", [0, 1])
    def test_one_victim_of_a_request_without_tokens(self, position: int) -> None:
        requests: list[tuple[list[int], list[float]]] = [([4, 5], [0.0, 1.0])]
        requests.insert(position, ([], []))
        lengths = [6, 6]
        with pytest.raises(ValueError, match="unprotected"):
            select(requests, lengths, [1, 1], 0, 0)


class TestOneVictimPath:
    @pytest.mark.parametrize("seed", range(40))
    def test_equals_the_definition_and_the_general_path(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        requests, lengths = [], []
        for _ in range(int(rng.integers(1, 9))):
            length = int(rng.integers(8, 60))
            live = rng.permutation(length)[: int(rng.integers(8, length + 1))]
            # Few distinct values, so that ties are common.
            requests.append((live.tolist(), rng.integers(-3, 4, len(live)).astype(float).tolist()))
            lengths.append(length)
        sinks, recent = int(rng.integers(0, 4)), int(rng.integers(0, 4))
        ones = [1] * len(requests)
        fast = select(requests, lengths, ones, sinks, recent)
        assert fast == [
            by_the_definition(*request, length, 1, sinks, recent)
            for request, length in zip(requests, lengths, strict=True)
        ]
        # One more request that forgets two tokens keeps the others off the fast path.
        general = select([*requests, ([0, 1], [0.0, 0.0])], [*lengths, 9], [*ones, 2], 0, 0)
        assert general[:-1] == select(requests, lengths, ones, 0, 0)

    @pytest.mark.parametrize("seed", range(40))
    def test_any_counts_equal_the_definition(self, seed: int) -> None:
        rng = np.random.default_rng(1000 + seed)
        sinks, recent = int(rng.integers(0, 4)), int(rng.integers(0, 4))
        requests, lengths, counts = [], [], []
        for _ in range(int(rng.integers(1, 9))):
            length = int(rng.integers(1, 60))
            live = rng.permutation(length)[: int(rng.integers(1, length + 1))]
            requests.append((live.tolist(), rng.integers(-3, 4, len(live)).astype(float).tolist()))
            lengths.append(length)
            free = int(((live >= sinks) & (live < length - recent)).sum())
            counts.append(int(rng.integers(0, free + 1)))
        assert select(requests, lengths, counts, sinks, recent) == [
            by_the_definition(*request, length, count, sinks, recent)
            for request, length, count in zip(requests, lengths, counts, strict=True)
        ]

    @pytest.mark.parametrize("counts", [[1], [2]])
    def test_a_priority_of_minus_infinity_is_the_first_to_go(self, counts: list[int]) -> None:
        victims = select([([0, 1, 2, 3], [0.0, -np.inf, 2.0, 3.0])], [4], counts, 0, 0)
        assert victims == [[1, 0][: counts[0]]]


def test_streaming_llm_keeps_sinks_and_the_newest() -> None:
    tokens = ints([3, 0, 7, 1, 5, 2, 6, 4, 0, 2, 1])
    live, length = ints([8, 3]), ints([8, 3])
    priority = StreamingLLM().priority(observation(tokens=tokens, counts=live, length=length))
    assert priority.tolist() == tokens.tolist()
    victims = select_victims(priority, tokens, live, length, ints([4, 1]), 2, 0)
    assert victims.tolist() == [2, 3, 4, 5, 2]
