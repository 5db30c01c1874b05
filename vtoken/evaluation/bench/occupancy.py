"""The task that looks into every block that a request holds, after every step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vtoken.core.history import Recording
from vtoken.evaluation.load import Engine, RunError, drive
from vtoken.evaluation.recorded_victims import write_victims
from vtoken.evaluation.recorder import Recorder, packed
from vtoken.evaluation.workloads import Workload

WATCH_BLOCKS = "vtoken.evaluation.bench.occupancy:watch_blocks"
WASTE_BINS = 20


class BlockWatch:
    """An engine that is looked into after every step.

    Steady decoding, which all averages are about, is every (request, step) after which the request runs and has
    produced something. That a request is dense is looked at in all steps, its prompt's included.

    Attributes:
        full: blocks seen in steady decoding by the number of their live tokens, int64 [S + 1].
        held, live, needed: by output tokens produced, sums over requests of the blocks held, of their live tokens, and
            of the blocks that these would fill, int64 [outputs]; ``seen`` requests each.
        waste: (request, step) of steady decoding by the request's waste ratio F, int64 [WASTE_BINS]: equal parts of 0
            to 1, without their upper bounds; ``ratios`` are these F themselves.
        looked: (request, step) seen in all.
        not_dense: of these, how many held another number of blocks than their live tokens fill.
        wasteful: how many left more than S / (n + S) of their slots unused.
        pool_differs: steps after which requests together held another number of blocks than are missing from the pool.
    """

    def __init__(self, engine: Any, outputs: int) -> None:
        self._engine = engine
        self._produced: dict[str, int] = {}
        self.block_size: int = engine.block_size
        self.full = np.zeros(self.block_size + 1, dtype=np.int64)
        self.held, self.live, self.needed, self.seen = (np.zeros(outputs, dtype=np.int64) for _ in range(4))
        self.waste = np.zeros(WASTE_BINS, dtype=np.int64)
        self.ratios: list[float] = []
        self.looked = self.not_dense = self.wasteful = self.pool_differs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Sequence[Any]:
        entries: Sequence[Any] = self._engine.step()
        self._produced |= {entry.request_id: len(entry.token_ids) for entry in entries}
        blocks = self._engine.live_per_block()
        for request_id, counts in blocks.items():
            self._look(counts, self._produced.get(request_id, 0))
        self.pool_differs += sum(map(len, blocks.values())) != self._engine.snapshot().held_blocks
        return entries

    def _look(self, counts: list[int], produced: int) -> None:
        size, held, live = self.block_size, len(counts), sum(counts)
        slots, unused = held * size, held * size - live
        needed = -(-live // size)
        self.looked += 1
        self.not_dense += held != needed
        # F = 1 - n / (held S) <= S / (n + S), in whole numbers.
        self.wasteful += unused * (live + size) > size * slots
        if produced:
            self.full += np.bincount(counts, minlength=size + 1)
            self.waste[unused * WASTE_BINS // slots] += 1
            self.ratios.append(unused / slots)
            for sums, value in ((self.held, held), (self.live, live), (self.needed, needed), (self.seen, 1)):
                sums[produced] += value


def watch_blocks(
    engine: Engine,
    workloads: list[dict[str, Any]],
    concurrency: int | None = None,
    record: str | None = None,
    outputs: bool = False,
    frames: int = 0,
) -> dict[str, Any]:
    """Run a load (see ``drive``) and tell what its requests' blocks held.

    Args:
        engine: with no unfinished request, and nobody's prefixes in its cache.
        workloads: fields of ``Workload``; only what produces two tokens or more is seen decoding.
        concurrency: so many requests at a time; else all at once.
        record: a file to write the victims to, for ``RecordedVictims``; the engine must record traces.
        outputs: also return the tokens of every request, by id.
        frames: also return at most so many pictures of the pool, as ``recording`` (see ``packed``).

    Returns:
        The attributes of ``BlockWatch``, with ``waste_quartiles`` in place of ``ratios``, and over all of steady
        decoding: ``utilization``, live tokens over slots held, ``waste_ratio``, 1 less that, ``blocks_per_request`` and
        ``needed_per_request``.

    Raises:
        RunError: as ``drive``, and where no request has decoded.
    """
    works = [Workload(**work) for work in workloads]
    watch = BlockWatch(engine, max(work.max_tokens for work in works))
    if record is not None:
        watch.take_traces()  # those of earlier requests
    before = engine.snapshot()
    recorder = Recorder(watch, frames) if frames else None
    load = drive(watch, works, concurrency, look=False, after_step=recorder.look if recorder else None)
    after = engine.snapshot()
    if not watch.seen.any():
        raise RunError("no request decodes for long enough to be looked at; let them produce 2 tokens or more.")
    slots, seen = watch.held.sum() * watch.block_size, watch.seen.sum()
    found: dict[str, Any] = {
        "requests": len(works),
        "block_size": watch.block_size,
        "utilization": float(watch.live.sum() / slots),
        "waste_ratio": float(1 - watch.live.sum() / slots),
        "waste_quartiles": np.percentile(watch.ratios, [25, 50, 75]).tolist(),
        "blocks_per_request": float(watch.held.sum() / seen),
        "needed_per_request": float(watch.needed.sum() / seen),
        "looked": watch.looked,
        "not_dense": watch.not_dense,
        "wasteful": watch.wasteful,
        "pool_differs": watch.pool_differs,
    }
    found |= {name: getattr(watch, name).tolist() for name in ("full", "waste", "held", "live", "needed", "seen")}
    for name in ("preemptions", "tokens_evicted", "tokens_moved", "blocks_reclaimed"):
        found[name] = getattr(after, name) - getattr(before, name)
    if record is not None:
        traces = watch.take_traces()
        write_victims(Path(record), ((work.prompt_token_ids, traces[work.request_id]) for work in works))
    if recorder is not None:
        found["recording"] = packed(Recording("", "", watch.block_size, watch.num_blocks, recorder.finish()))
    if outputs:
        found["outputs"] = {work.request_id: timing.token_ids for work, timing in zip(works, load.timings, strict=True)}
    return found


def at_most_half_full(full: Sequence[int]) -> float:
    """The share of blocks that are at most half full, of counts by the number of live tokens, 0 to S."""
    return sum(full[: (len(full) - 1) // 2 + 1]) / sum(full)
