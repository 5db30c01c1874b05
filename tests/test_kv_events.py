"""KV cache events tell the truth: whoever follows them knows, after every step, which blocks can be found."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from reference_cache import S
from soak_driver import Soak
from stub_worker import StubEngine
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

MakeEngine = Callable[..., StubEngine]
EVENTS = {"events": True}


class Follower:
    """Knows of an engine's prefix cache what its events say; how many blocks with each hash there are."""

    def __init__(self, engine: StubEngine) -> None:
        self.cached: Counter[Any] = Counter()
        self.seen: Counter[str] = Counter()
        self._engine = engine
        check = engine.check

        def check_events_too() -> None:
            check()
            self.compare()

        engine.check = check_events_too
        engine.scheduler.kv_event_publisher.publish = self.follow

    def follow(self, batch: Any) -> None:
        for event in batch.events:
            self.seen[type(event).__name__] += 1
            if isinstance(event, BlockStored):
                self._check_content(event)
                self.cached.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.cached.subtract(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.cached.clear()

    def _check_content(self, event: Any) -> None:
        """The tokens are those that the hash stands for, after those of its parent."""
        content = self._engine.content
        assert len(event.token_ids) == S * len(event.block_hashes)
        promised = {maybe_convert_block_hash(known): marks for known, marks in content._of_hash.items()}
        prefix = promised[event.parent_block_hash][-1] if event.parent_block_hash is not None else 0
        marks = content.after(prefix, event.token_ids)
        assert marks == [mark for block_hash in event.block_hashes for mark in promised[block_hash]]

    def compare(self) -> None:
        pool = self._engine.pool
        hashes = (block.block_hash for block in pool.blocks if block.block_hash is not None)
        there = Counter(maybe_convert_block_hash(get_block_hash(one)) for one in hashes)
        assert +self.cached == there and min(self.cached.values(), default=0) >= 0, "the events do not tell the truth"


def drops_hashes(make: MakeEngine, spoil: Callable[[StubEngine], None] = lambda engine: None) -> Follower:
    """Three requests whose cached prompts are reduced when no block is free to copy survivors into."""
    engine = make(19, caching=True, seqs=8, batched=200, scheduling=EVENTS)
    spoil(engine)
    follower = Follower(engine)
    dropped: list[set[int]] = []
    evict = engine.pool.evict_blocks
    engine.pool.evict_blocks = lambda block_ids: dropped.append(block_ids) or evict(block_ids)
    for n in range(3):
        engine.add(f"r{n}", tokens=[n] * 6 * S, outputs=10, budget=3 * S)
    engine.run()
    assert sum(map(len, dropped)) > 3
    return follower


def test_hashes_that_are_dropped_are_told(make: MakeEngine) -> None:
    follower = drops_hashes(make)
    assert follower.seen["BlockRemoved"] > 3


def test_one_that_is_not_told_is_found_out(make: MakeEngine) -> None:
    def silent(engine: StubEngine) -> None:
        pool = engine.pool
        pool.evict_blocks = lambda ids: [pool._remove_cached_block_hashes(pool.blocks[n]) for n in ids]

    with pytest.raises(AssertionError, match="do not tell the truth"):
        drops_hashes(make, silent)


def test_a_reset_is_told(make: MakeEngine) -> None:
    engine = make(100, caching=True, seqs=8, batched=200, scheduling=EVENTS)
    follower = Follower(engine)
    engine.add("r", tokens=range(100), outputs=30, budget=3 * S)
    for _ in range(10):
        engine.step()
    assert not engine.scheduler.reset_prefix_cache()  # blocks are in use
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert follower.seen["AllBlocksCleared"] == 1 and engine.preemptions == 1


@pytest.mark.parametrize("seed, policy", [(0, "fcfs"), (1, "fcfs"), (4, "priority"), (7, "fcfs")])
def test_in_the_long_run(make: MakeEngine, seed: int, policy: str) -> None:
    load = Soak(make, seed, policy=policy, **EVENTS)
    follower = Follower(load.engine)
    assert load.run(100)["hits"] > 0
    assert min(follower.seen[name] for name in ("BlockStored", "BlockRemoved")) > 10
