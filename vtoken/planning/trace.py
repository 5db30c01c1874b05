"""Workloads: when requests come, how long they are, and what their prompts have in common."""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

CHUNK = 512
"""Tokens that one of ``hash_ids`` stands for."""
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class Arrival:
    """One request.

    Attributes:
        time: seconds after the first one.
        prompt, outputs: tokens.
        chunks: ids of the prompt's chunks of ``CHUNK`` tokens; prompts with equal leading ids begin alike.
    """

    time: float
    prompt: int
    outputs: int
    chunks: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return self.prompt + self.outputs


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival, and how many were left out for being longer than the model allows."""

    arrivals: list[Arrival]
    left_out: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(arrival.prompt for arrival in self.arrivals)

    @property
    def output_tokens(self) -> int:
        return sum(arrival.outputs for arrival in self.arrivals)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].time

    @property
    def shares(self) -> bool:
        """Whether it says what prompts have in common."""
        return any(arrival.chunks for arrival in self.arrivals)

    def at_once(self, requests: int) -> "Workload":
        """So many requests, all of them there from the beginning: taken evenly from this one, or over and over."""
        have = len(self.arrivals)
        if requests <= have:
            taken = [self.arrivals[n * have // requests] for n in range(requests)]
            return Workload([replace(arrival, time=0.0) for arrival in taken])
        apart = 1 + max((max(arrival.chunks, default=0) for arrival in self.arrivals), default=0)
        return Workload([_copy(self.arrivals[n % have], n // have * apart) for n in range(requests)])


def read_workload(path: Path, requests: int | None = None, speed_up: float = 1.0) -> list[Arrival]:
    """The requests of a file, in the order of their arrival, the first one at 0 s.

    Either CSV with the columns TIMESTAMP (a date and time), ContextTokens and GeneratedTokens, or JSON lines with
    ``input_length``, ``output_length`` and, where they are known, ``timestamp`` (ms, else 0) and ``hash_ids``.

    Args:
        requests: only the first so many.
        speed_up: they come so many times as fast.

    Raises:
        ValueError: one sentence with file, line and remedy.
    """
    found: list[Arrival] = []
    for number, record, read in _records(path):
        if requests is not None and len(found) == requests:
            break
        try:
            found.append(read(record))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"workload {path} holds no request; write one per line, such as {_EXAMPLE}.")
    found.sort(key=lambda arrival: arrival.time)
    first = found[0].time
    return [replace(arrival, time=(arrival.time - first) / speed_up) for arrival in found]


def within(arrivals: Sequence[Arrival], max_model_len: int) -> Workload:
    """Those that the model can hold.

    Raises:
        ValueError: one sentence, if there are none.
    """
    kept = [arrival for arrival in arrivals if arrival.total <= max_model_len]
    if not kept:
        shortest = min(arrival.total for arrival in arrivals)
        raise ValueError(
            f"no request of the workload fits into {max_model_len} tokens; the shortest takes {shortest}, so raise "
            "--max-model-len or choose a model with a longer context."
        )
    return Workload(kept, len(arrivals) - len(kept))


_EXAMPLE = '{"input_length": 800, "output_length": 200}'


def _records(path: Path) -> Iterator[tuple[int, Any, Callable[[Any], Arrival]]]:
    """(line, what it says, how to read it)"""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"workload {path} cannot be read ({reason}); give a CSV or JSON-lines file.") from None
    if path.suffix.lower() == ".csv":
        rows = csv.DictReader(lines)
        missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {missing[0]}; its first line must name {', '.join(COLUMNS)}.")
        for row in rows:
            yield rows.line_num, row, _of_row
        return
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line, _of_line


def _of_row(row: Mapping[str, Any]) -> Arrival:
    try:
        moment = datetime.fromisoformat(str(row["TIMESTAMP"]).strip())
    except ValueError:
        raise ValueError(f"TIMESTAMP {row['TIMESTAMP']!r} is no date and time; write 2023-11-16 18:15:46.68.") from None
    seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    prompt, outputs = (_count(name, _number(row[name])) for name in COLUMNS[1:])
    return Arrival(seconds, prompt, outputs)


def _of_line(line: str) -> Arrival:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno}); write {_EXAMPLE}.") from None
    if not isinstance(record, dict):
        raise ValueError(f"must be a JSON object such as {_EXAMPLE}.")
    milliseconds = record.get("timestamp", 0)
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float) or not math.isfinite(milliseconds):
        raise ValueError(f"'timestamp' is {milliseconds!r}; it must be a number of milliseconds.")
    prompt, outputs = (_count(name, record.get(name)) for name in ("input_length", "output_length"))
    return Arrival(milliseconds / 1e3, prompt, outputs, _chunks(record.get("hash_ids"), prompt))


def _chunks(ids: Any, prompt: int) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
        raise ValueError("'hash_ids' must be a list of numbers, one for each 512 tokens of the prompt.")
    if len(ids) != -(-prompt // CHUNK):
        raise ValueError(
            f"'hash_ids' has {len(ids)} ids, but a prompt of {prompt} tokens has {-(-prompt // CHUNK)} chunks of "
            f"{CHUNK}; give one for each, or leave them out."
        )
    return tuple(ids)


def _number(text: Any) -> Any:
    try:
        return int(text)
    except (TypeError, ValueError):
        return text


def _count(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"'{name}' is {value!r}; it must be a number of tokens, at least 1.")
    return value


def _copy(arrival: Arrival, shift: int) -> Arrival:
    """The same, now, with nothing in common with other copies."""
    return replace(arrival, time=0.0, chunks=tuple(chunk + shift for chunk in arrival.chunks))
