"""What a workload says about common beginnings becomes hits in vLLM's prefix cache, to the token."""

from dataclasses import replace

import pytest

from vtoken.planning.prefixes import PrefixHashes
from vtoken.planning.replay import Observed, replay
from vtoken.planning.step_time import StepTime
from vtoken.planning.summary import queue
from vtoken.planning.trace import Arrival, Workload
from vtoken.planning.variants import VARIANTS, Setting, make_engine

SECOND = StepTime(0, 0, 0, 0, bandwidth=1.0, flops=1.0, efficiency=1.0, overhead=1.0)
SETTING = Setting({"policy": "random"}, 200, 128, 2048, 8, 4096, True, SECOND)
# One after another, each long after the one before has ended.
TRACE = [
    (Arrival(0.0, 1024, 3, (1, 2)), 0),
    (Arrival(100.0, 1024, 3, (1, 2)), 896),  # all but the block of the last token, which is always computed
    (Arrival(200.0, 1100, 3, (1, 2, 4)), 1024),
    (Arrival(300.0, 700, 3, (1, 3)), 512),
    (Arrival(400.0, 700, 3, (1, 3)), 640),  # of the 188 tokens in the last chunk, one block is full
    (Arrival(500.0, 900, 3, (1, 3)), 512),  # as many ids in common, but that chunk was another one: it ended earlier
    (Arrival(600.0, 1024, 3, (2, 1)), 0),  # the same chunks, but not from the beginning on
    (Arrival(700.0, 1024, 3), 0),
    (Arrival(800.0, 1024, 3), 0),  # nobody said that they are alike
]
ARRIVALS = [arrival for arrival, _ in TRACE]


def run(variant: str, arrivals: list[Arrival], setting: Setting = SETTING) -> Observed:
    workload = Workload(arrivals)
    return replay(make_engine(setting, variant, workload), workload, setting.step_time)


@pytest.mark.parametrize("variant", VARIANTS)
def test_hits_are_the_common_beginning(variant: str) -> None:
    for count in range(1, len(TRACE) + 1):
        seen = run(variant, ARRIVALS[:count])
        assert seen.hits == sum(hit for _, hit in TRACE[:count])
        assert seen.asked == sum(arrival.prompt for arrival, _ in TRACE[:count])
    assert queue(seen, Workload(ARRIVALS))["hit_rate"] == 3584 / 8520


def test_requests_that_run_side_by_side_share() -> None:
    twins = [Arrival(0.0, 1024, 9, (1, 2))] * 3
    seen = run("native", twins)
    assert seen.hits == 2 * 896
    assert seen.steps.held[0] == 8 + 2 * 1  # one block each for the last tokens of two prompts
    assert run("native", twins, replace(SETTING, enable_prefix_caching=False)).steps.held[0] == 24


def test_what_was_forgotten_is_no_hit() -> None:
    others = [Arrival(50.0 + n, 1024, 3, (10 + n, 20 + n)) for n in range(3)]
    trace = [ARRIVALS[0], *others, replace(ARRIVALS[1], time=200.0)]
    assert run("native", trace).hits == 896
    assert run("native", trace, replace(SETTING, num_blocks=17)).hits == 0


class TestItCanTell:
    def test_a_hit_that_is_dropped(self) -> None:
        for n, expected in ((1, 896), (2, 1024), (4, 640)):
            changed = [*ARRIVALS]
            changed[n] = replace(ARRIVALS[n], chunks=tuple(chunk + 50 for chunk in ARRIVALS[n].chunks))
            assert run("native", changed).hits == 3584 - expected

    def test_two_arrivals_swapped(self) -> None:
        changed = [ARRIVALS[3], ARRIVALS[5]]
        assert run("native", [replace(one, time=n * 100.0) for n, one in enumerate(changed)]).hits == 512
        changed = [ARRIVALS[6], ARRIVALS[0], ARRIVALS[1]]
        assert run("native", [replace(one, time=n * 100.0) for n, one in enumerate(changed)]).hits == 896


class TestHashes:
    def test_blocks_must_divide_chunks(self) -> None:
        with pytest.raises(ValueError, match=r"--block-size 48 does not divide the 512 tokens .*; give 16, 32, 64 or"):
            PrefixHashes(ARRIVALS, 48)

    def test_each_block_has_a_name_of_its_own(self) -> None:
        class Request:
            request_id, num_tokens = "0", 1024 + 130
            block_hashes: tuple[bytes, ...] = ()

        hashes = PrefixHashes(ARRIVALS, 128)
        first = hashes(Request())
        assert (len(first), len(set(first))) == (9, 9)
        Request.block_hashes = tuple(first)
        assert hashes(Request()) == []
        Request.num_tokens += 126
        (further,) = hashes(Request())
        assert further not in first
        Request.request_id, Request.block_hashes = "1", ()
        assert [name in first for name in hashes(Request())] == [True] * 8 + [False] * 2
