"""What a worker tells: counts that agree with vLLM's own pool and with what the requests were told at their end."""

from typing import Any

import pytest

from vtoken.config import VTokenConfig
from vtoken.core.history import Frame, Holding
from vtoken.vllm_plugin import make_simulated_engine
from vtoken.vllm_plugin.monitor import Counts, Monitor

BLOCKS = 40


class Watched:
    """A simulated engine in blocks of 4 and its monitor."""

    def __init__(self, reclaim: str, history: int = 100, **options: Any) -> None:
        config = VTokenConfig(
            policy="streaming_llm", budget=13, sinks=2, recent=4, reclaim=reclaim, history=history, **options
        )
        self.engine = make_simulated_engine(config, num_blocks=BLOCKS, block_size=4, max_model_len=64)
        self.monitor: Monitor = self.engine.runner.vtoken.monitor  # type: ignore[attr-defined]

    def run(self, steps: int = 1000) -> None:
        while steps and self.engine.has_unfinished():
            self.engine.step()
            steps -= 1

    def counts(self) -> Counts:
        return self.monitor.counts()

    def pool(self) -> int:
        """Free blocks, as vLLM's own pool has it."""
        return int(self.engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


@pytest.mark.parametrize("reclaim", ["fill", "pack", "none"])
def test_an_engine_at_rest_holds_nothing_and_has_all_its_blocks(reclaim: str) -> None:
    watched = Watched(reclaim)
    for n in range(5):
        watched.engine.add_request(str(n), [1] * 20, 10)
    watched.run()
    watched.engine.step()  # vLLM tells the workers who is over
    counts = watched.counts()
    assert (counts.held_blocks, counts.held_tokens, counts.live_tokens, counts.dead_tokens) == (0, 0, 0, 0)
    assert (counts.free_blocks, counts.num_blocks) == (BLOCKS, BLOCKS) and watched.pool() == BLOCKS
    assert (counts.running, counts.waiting, counts.requests_failed) == (0, 0, 0)
    assert counts.tokens_evicted == 5 * (20 + 9 - 12)
    assert counts.tokens_evicted == watched.engine.snapshot().tokens_evicted
    assert counts.blocks_reclaimed == watched.engine.snapshot().blocks_reclaimed


def test_in_fill_what_is_dead_is_filled_by_the_next_step() -> None:
    """Two requests of 20 tokens are reduced to 12, with room for the 13th; then one dies as one comes."""
    watched = Watched("fill")
    for name in "ab":
        watched.engine.add_request(name, [1] * 20, 10)
    watched.run(1)
    counts = watched.counts()
    assert (counts.held_blocks, counts.held_tokens, counts.live_tokens, counts.tokens_evicted) == (8, 32, 24, 16)
    assert (counts.running, counts.waiting) == (2, 0)
    watched.run(1)
    counts = watched.counts()
    assert (counts.held_blocks, counts.live_tokens, counts.dead_tokens) == (8, 24, 2)
    assert (counts.blocks_reclaimed, counts.free_blocks, watched.pool()) == (2 * 1, BLOCKS - 8, BLOCKS - 8)
    assert counts.relocations == 1 and counts.tokens_moved > 0


def test_in_none_the_dead_stay_where_they_are() -> None:
    """StreamingLLM keeps 2 sinks and the last 10 of 20 tokens: the eight between lie in blocks 0 to 2."""
    watched = Watched("none")
    watched.engine.add_request("a", [1] * 20, 10)
    watched.run(1)
    counts = watched.counts()
    assert (counts.held_blocks, counts.live_tokens, counts.dead_tokens) == (4, 12, 4)  # one of five was empty
    assert counts.tokens_moved == counts.relocations == 0


def test_bytes_are_those_of_the_tokens_moved() -> None:
    monitor = Monitor(Watched("fill").engine.runner.vtoken.table, 1000, 0, "")  # type: ignore[attr-defined]
    monitor._moved = 7
    assert monitor.counts().copied_bytes == 7000


def test_phases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that goes on by one whenever it is looked at, each phase takes one per step."""
    from vtoken.core import phase

    clock = iter(range(10**6))
    monkeypatch.setattr(phase, "perf_counter", lambda: float(next(clock)))
    watched = Watched("fill")
    watched.engine.add_request("a", [1] * 20, 10)
    watched.run()
    spent = watched.counts().phase_seconds
    assert {name: spent[name] for name in ("wait", "begin", "place", "evict")} == dict.fromkeys(
        ("wait", "begin", "place", "evict"), 10.0
    )
    assert spent["plan"] == spent["settle"] == 9.0  # as of when the last step was planned


def test_a_request_that_fails_is_counted() -> None:
    watched = Watched("fill")
    watched.engine.add_request("a", [1] * 20, 10)
    watched.run(2)
    watched.engine.runner.vtoken._faults["a"] = "vtoken: request a is broken."  # type: ignore[attr-defined]
    watched.run()
    watched.engine.step()
    assert watched.counts().requests_failed == 1 and watched.pool() == BLOCKS


class TestHistory:
    def frames(self, watched: Watched, since: int = 0) -> list[Frame]:
        return watched.monitor.recording(since).frames

    def test_the_first_step_and_the_last(self) -> None:
        watched = Watched("fill")
        watched.engine.add_request("a", [1] * 20, 3)
        watched.run()
        (first,) = self.frames(watched)
        assert (first.number, first.running, first.held_blocks, first.live_tokens) == (1, 1, 4, 12)
        (held,) = first.holdings
        assert held.request == "a" and len(held.blocks) == 4 and sum(held.live) == 12
        watched.engine.step()
        (last,) = self.frames(watched)  # within the same second: in the place of the first
        assert (last.number, last.running, last.held_blocks, last.holdings) == (2, 0, 0, [])
        assert last.tokens_evicted == 20 + 2 - 12 and last.blocks_reclaimed == watched.counts().blocks_reclaimed

    def test_a_frame_now_is_what_the_table_has(self) -> None:
        watched = Watched("none")
        watched.engine.add_request("a", [1] * 20, 10)
        watched.run(1)
        frame = watched.monitor.frame(5, 123.0)
        assert (frame.number, frame.time) == (5, 123.0)
        assert frame.holdings == [Holding("a", watched.engine.blocks_of("a"), [2, 2, 4, 4])]
        assert (frame.live_tokens, frame.dead_tokens) == (12, 4)

    def test_none_are_kept_if_none_are_asked_for(self) -> None:
        watched = Watched("fill", history=0)
        watched.engine.add_request("a", [1] * 20, 3)
        watched.run()
        watched.engine.step()
        recording = watched.monitor.recording(0)
        assert recording.frames == [] and recording.num_blocks == BLOCKS
        assert (
            recording.settings == "requests are kept to 13 tokens by policy streaming_llm, and blocks freed by 'fill'"
        )


def test_shared_blocks_count_once() -> None:
    """Two prompts with 32 tokens in common, in blocks of 16, the second one served from the cache of the first."""
    config = VTokenConfig(policy="streaming_llm", budget=10**6)
    engine = make_simulated_engine(config, num_blocks=BLOCKS, max_model_len=64, enable_prefix_caching=True)
    for name, more in (("a", 3), ("b", 5)):
        engine.add_request(name, [1] * 32 + [2] * more, 5)
        engine.step()
    counts = engine.runner.vtoken.monitor.counts()  # type: ignore[attr-defined]
    assert counts.held_blocks == 2 + 1 + 1 and counts.live_tokens == 32 + 3 + 1 + 5
