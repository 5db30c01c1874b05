"""Frames of an engine while it runs a load, for the page that shows the pool."""

import base64
import json
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from vtoken.core.history import Frame, Holding, Recording


class Recorded(Protocol):
    """An engine that can tell what its pool looks like."""

    def step(self) -> object: ...
    def frame(self, number: int, time: float) -> Frame: ...


class Recorder:
    """Takes a frame now and then; when there are too many, every second one goes, and they are taken half as often.

    Args:
        engine: whose pool it is.
        most: frames, at least 2.
        seconds: from one frame to the next; 0 takes one after every step.
        clock: seconds since the epoch.
    """

    def __init__(
        self, engine: Recorded, most: int, seconds: float = 0.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._engine, self._most, self._clock = engine, most, clock
        self._by_step = seconds == 0
        self._apart = 1.0 if self._by_step else seconds
        self._due = 0.0
        self._steps = 0
        self._frames: list[Frame] = []

    def look(self) -> None:
        """To be called after every step."""
        now = self._clock()
        place = self._steps if self._by_step else now
        self._steps += 1
        if place < self._due:
            return
        if len(self._frames) == self._most - 1:  # one is left for the end
            del self._frames[1::2]
            self._apart *= 2
        self._due = place + self._apart
        self._frames.append(self._engine.frame(self._steps, now))

    def finish(self) -> list[Frame]:
        """All frames, with one of the pool as the load left it; numbered from 1. To be called when all has ended."""
        self._engine.step()  # in which the worker hears that the last requests have ended
        frames = [*self._frames, self._engine.frame(0, self._clock())]
        return [replace(frame, number=number) for number, frame in enumerate(frames, 1)]


def read_frame(told: dict[str, Any]) -> Frame:
    """The frame that ``Frame.to_json`` was made of. Raises TypeError or KeyError for anything else."""
    return Frame(**{**told, "holdings": [Holding(**one) for one in told["holdings"]]})


def packed(recording: Recording) -> str:
    """A recording as a short text, for a JSON file: base64 of its compressed JSON."""
    text = json.dumps(recording.to_json(), separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpacked(text: str) -> Recording:
    """What ``packed`` was given. Raises ValueError, TypeError, KeyError or zlib.error for any other text."""
    told = json.loads(zlib.decompress(base64.b64decode(text)))
    return Recording(**{**told, "frames": list(map(read_frame, told["frames"]))})
