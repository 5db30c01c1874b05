"""Victims that were recorded in one run, taken again in another, so that two ways of reclaiming can be compared."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vtoken.core.ragged import offsets_of
from vtoken.core.token_scores import prompt_hash
from vtoken.core.trace import Trace
from vtoken.policies import Policy, PolicyBatch

POLICY = "vtoken.evaluation.recorded_victims:RecordedVictims"


@dataclass(frozen=True)
class RecordedVictims(Policy):
    """Evict what a file says: with ``policy=POLICY``, and otherwise the settings of the run that was recorded.

    A request is known by its prompt, and an eviction by the request's length then. For comparisons, not for speed.

    Attributes:
        file: written by ``write_victims``.
    """

    file: str

    def priority(self, batch: PolicyBatch) -> Any:
        victims = _read(self.file, os.stat(self.file).st_mtime_ns)
        priority = np.zeros(len(batch.tokens), dtype=np.int64)
        bounds = offsets_of(batch.counts)
        for n, (prompt, length) in enumerate(zip(batch.prompt_hash.tolist(), batch.length.tolist(), strict=True)):
            recorded = victims.get((prompt, length))
            if recorded is None:
                raise ValueError(
                    f"vtoken: {self.file} holds no eviction at {length} tokens for this prompt; record the same "
                    "prompts with the same settings, and enough memory that nothing is preempted."
                )
            part = slice(bounds[n], bounds[n + 1])
            priority[part] = ~np.isin(batch.tokens[part], recorded)
        return priority


def write_victims(file: Path, requests: Iterable[tuple[Sequence[int], Trace]]) -> None:
    """Write the victims of requests, given by prompt and trace, that were never preempted.

    Raises:
        ValueError: one of them was, so that its evictions cannot be told apart by length; or two requests with the
            same prompt forgot different tokens.
    """
    entries: dict[tuple[int, int], list[int]] = {}
    for prompt, trace in requests:
        if len(trace.incarnations) != 1:
            raise ValueError("a request that was preempted cannot be replayed; give the engine more blocks")
        (life,) = trace.incarnations
        lengths = np.cumsum(life.new_tokens).tolist()
        for length, victims in zip(lengths, life.victims, strict=True):
            if victims and entries.setdefault((prompt_hash(prompt), length), victims) != victims:
                raise ValueError("two requests with the same prompt forgot different tokens; record one of them")
    file.write_text(json.dumps([[*key, victims] for key, victims in entries.items()]), encoding="utf-8")


@lru_cache(maxsize=1)
def _read(file: str, written: int) -> dict[tuple[int, int], list[int]]:
    entries = json.loads(Path(file).read_text(encoding="utf-8"))
    return {(prompt, length): victims for prompt, length, victims in entries}
