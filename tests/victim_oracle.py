"""Were the victims the right ones? Attention from a dense Hugging Face pass, the policies' formulas in plain form.

The victims of a trace were chosen by the code under test from its own scores. Here the probabilities come from the
eager attention of the reference model under the replayed mask, and each policy's score is written out over them.
Rounding may decide a near tie, so a score is an interval, and a victim must not lie clearly above a survivor.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from oracle import length, visibility

from vtoken.core.trace import Incarnation

RELATIVE = 1e-4


@dataclass(frozen=True)
class Measured:
    """a[q, t]: what query q gave token t, summed over heads and layers; norm[t]: of t's keys, summed likewise."""

    a: np.ndarray
    norm: np.ndarray


@dataclass(frozen=True)
class Settings:
    """What the formulas need to know.

    Attributes:
        parts: the places at which the prefill is reduced.
        window: queries before them that are looked at.
        hit: the request's first own query; those before it were an earlier request's. ``check_victims`` fills it in.
    """

    prompt: list[int]
    parts: list[int]
    sinks: int
    recent: int
    window: int = 32
    hit: int = 0


Score = Callable[[Measured, Settings, int], tuple[np.ndarray, np.ndarray]]
"""(measured, settings, n) -> the least and the greatest priority of each of the first n tokens when n are there"""


@torch.inference_mode()
def measure(model: Any, token_ids: Sequence[int], visible: torch.Tensor) -> Measured:
    """One dense pass with eager attention; ``visible``: bool [tokens, tokens]."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    total = torch.zeros(visible.shape, dtype=torch.float64)

    def add(module: Any, args: Any, output: Any) -> None:
        total.add_(output[1][0].double().sum(dim=0))

    hooks = [layer.self_attn.register_forward_hook(add) for layer in model.model.layers]
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    cache = model.model(
        input_ids=torch.tensor([token_ids]),
        position_ids=torch.arange(len(token_ids))[None],
        attention_mask=mask[None, None],
        use_cache=True,
    ).past_key_values
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation(before)
    norm = sum(layer.keys[0].double().norm(dim=-1).sum(dim=0) for layer in cache.layers)
    return Measured(total.numpy(), norm.numpy())


def check_victims(model: Any, token_ids: Sequence[int], life: Incarnation, score: Score, settings: Settings) -> int:
    """Raise AssertionError unless at each eviction the victims were the unprotected tokens of the lowest priority.

    Returns:
        how many victims were compared with a survivor.
    """
    total, settings = length(life), replace(settings, hit=life.prefix_hit)
    measured = measure(model, token_ids[:total], visibility(life))
    compared = 0
    for forward, (n, live, victims) in enumerate(evictions(life)):
        least, greatest = score(measured, settings, n)
        free = live[(live >= settings.sinks) & (live < n - settings.recent)]
        survivors = np.setdiff1d(free, victims)
        assert np.isin(victims, free).all(), f"eviction {forward}: a protected token or a dead one was taken"
        if len(survivors):
            worst, best = least[victims].max(), greatest[survivors].min()
            assert worst <= best, (
                f"eviction {forward} at length {n}: token {victims[least[victims].argmax()]} with priority {worst:.6g} "
                f"was taken, and {survivors[greatest[survivors].argmin()]} with {best:.6g} was kept"
            )
            compared += len(victims)
    return compared


def evictions(life: Incarnation) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(tokens in the sequence, live tokens before, victims) of every eviction."""
    n, live = life.prefix_hit, np.arange(life.prefix_hit)
    for new, victims in zip(life.new_tokens, life.victims, strict=True):
        live = np.concatenate([live, np.arange(n, n + new)])
        n += new
        if victims:
            yield n, live, np.array(victims)
            live = np.setdiff1d(live, victims)


def _near(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    slack = RELATIVE * np.abs(values)
    return values - slack, values + slack


def _windows(settings: Settings, n: int) -> Iterator[range]:
    """The last queries of each part of the prefill that is over at length n; all of them are the request's own."""
    start = 0
    for end in (part for part in settings.parts if part <= n):
        queries = range(max(start, end - settings.window), end)
        assert queries.start >= settings.hit, f"query {queries.start} is looked at, and a hit reaches to {settings.hit}"
        yield queries
        start = end


def streaming_llm(measured: Measured, settings: Settings, n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(n), np.arange(n)


def random(measured: Measured, settings: Settings, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The hash of policies/random.py in Python's own integers."""
    import zlib

    def mix(x: int) -> int:
        for odd in (0x2C1B3C6D, 0x297A2D39, 0x1B56C4E9):
            x = (x + 0x1E3779B9) % 2**31
            x = ((x ^ (x >> 15)) * odd) % 2**31
        return x ^ (x >> 16)

    prompt_hash = zlib.crc32(b"".join(t.to_bytes(8, "little") for t in settings.prompt)) % 2**31
    values = np.array([mix(mix(mix(0) ^ prompt_hash) ^ t) for t in range(n)])
    return values, values


def key_norm(measured: Measured, settings: Settings, n: int) -> tuple[np.ndarray, np.ndarray]:
    return _near(-measured.norm[:n])


def _since(settings: Settings, n: int) -> np.ndarray:
    """Per token, the first query that was seen and could see it."""
    return np.maximum(np.arange(n), settings.hit)


def h2o(measured: Measured, settings: Settings, n: int) -> tuple[np.ndarray, np.ndarray]:
    return _near(measured.a[settings.hit : n, :n].sum(axis=0) / (n - _since(settings, n)))


def h2o_sum(measured: Measured, settings: Settings, n: int) -> tuple[np.ndarray, np.ndarray]:
    return _near(measured.a[settings.hit : n, :n].sum(axis=0))


def h2o_fading(measured: Measured, settings: Settings, n: int) -> tuple[np.ndarray, np.ndarray]:
    weight = np.where(np.arange(n) >= settings.hit, 0.9 ** (n - 1 - np.arange(n)), 0)
    return _near(weight @ measured.a[:n, :n] / np.array([weight[t:].sum() for t in range(n)]))


def tova(measured: Measured, settings: Settings, n: int) -> tuple[np.ndarray, np.ndarray]:
    return _near(measured.a[n - 1, :n])


def snapkv(measured: Measured, settings: Settings, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Average pooling of 5; a dead token between two live ones does not keep them apart."""
    state, w = np.zeros(n), settings.window
    for queries in _windows(settings, n):
        end = queries.stop
        mass = measured.a[queries.start : end, :n].sum(axis=0)
        seen = np.flatnonzero(measured.a[end - 1, : end - w] > 0) if end > w else np.empty(0, dtype=int)
        pooled = mass.copy()
        padded = np.concatenate([[0, 0], mass[seen], [0, 0]])
        pooled[seen] = sum(padded[shift : shift + len(seen)] for shift in range(5)) / 5
        state = (1 - 1 / w) ** len(queries) * state + pooled
    for q in range(settings.parts[-1], n):
        state = (1 - 1 / w) * state + measured.a[q, :n]
    return _near(state)


def scissorhands(measured: Measured, settings: Settings, n: int) -> tuple[np.ndarray, np.ndarray]:
    most, least = np.zeros(n), np.zeros(n)
    for q in [*chain.from_iterable(_windows(settings, n)), *range(settings.parts[-1], n)]:
        row = measured.a[q, :n]
        seen = np.arange(n) <= q
        mean = row.sum() / (row > 0).sum()
        most = (1 - 1 / 400) * most + (seen & (row < mean * (1 + RELATIVE)))
        least = (1 - 1 / 400) * least + (seen & (row < mean * (1 - RELATIVE)))
    return -most - RELATIVE, -least + RELATIVE


SCORES: dict[str, Score] = {
    "streaming_llm": streaming_llm,
    "random": random,
    "key_norm": key_norm,
    "h2o": h2o,
    "tova": tova,
    "snapkv": snapkv,
    "scissorhands": scissorhands,
}
