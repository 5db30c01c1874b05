"""The observer on the CPU: many queries, layers and heads in one sum."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vtoken.core.observed import NO_QUERIES, AttendedQueries, ObservedRuns, QueryRuns
from vtoken.kernels.cpu.observer import AttentionObserver
from vtoken.kernels.decode_attention import decode_attention_reference
from vtoken.kernels.layout import vec_views

S, D, HEADS, QUERY_HEADS = 32, 32, 1, 8


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def observed(runs: ObservedRuns, total: int) -> AttendedQueries:
    """Some of a forward's queries, of requests without holes."""
    return AttendedQueries(runs, QueryRuns(ints(), ints(), ints(), ints()), np.empty((0, 0), dtype=np.bool_), total)


def observer_over(tokens: int, layers: int, sink: float) -> tuple[AttentionObserver, torch.Tensor, torch.Tensor]:
    """A cache in which every query gives most of its attention to token 0, and queries for it."""
    blocks = tokens // S
    cache = 0.1 * torch.randn(blocks, HEADS, S, 2 * D)
    keys, _ = vec_views(cache)
    keys[0, 0, :, 0] = sink
    query = torch.rand(tokens, QUERY_HEADS, D) + 0.5
    observer = AttentionObserver(*vec_views(cache), QUERY_HEADS, layers, 1.0)
    return observer, cache, query


@pytest.mark.parametrize("sink", [0.0, 8.0, 20.0])
def test_a_sum_over_thousands_of_queries_and_all_layers_is_exact(sink: float) -> None:
    """Added one by one in float32, such a sum is off by more than the tolerance of 1e-3."""
    tokens, layers = 4096, 64
    observer, cache, query = observer_over(tokens, layers, sink)
    queries = observed(ObservedRuns(ints(0), ints(0), ints(tokens), ints(tokens)), total=tokens)
    observer.begin(queries, np.arange(tokens // S, dtype=np.int32)[None])
    assert observer.active and not observer.replaces_backend
    output = torch.empty_like(query)
    for _ in range(layers):
        observer.attend(query, *vec_views(cache), output)
    mass = observer.take()
    assert not observer.active
    assert mass.dtype == np.float32
    assert mass.sum(dtype=np.float64) == pytest.approx(observer.heads * tokens, rel=1e-4)


def test_single_queries_replace_the_backend_and_others_do_not_touch_the_output() -> None:
    observer, cache, query = observer_over(128, 1, 1.0)
    table = np.array([[0, 1, 9], [2, 3, 9]], dtype=np.int32)
    lone = observed(ObservedRuns(ints(1, 0), ints(1, 0), ints(1, 1), ints(40, 33)), total=2)
    observer.begin(lone, table)
    assert observer.replaces_backend
    output = torch.full((3, QUERY_HEADS, D), 7.0)
    observer.attend(query[:3], *vec_views(cache), output)
    assert (output[2] == 7).all() and not (output[:2] == 7).any()
    mass = observer.take()
    assert mass[:40].sum() == pytest.approx(QUERY_HEADS, rel=1e-5)  # in the order asked, not in the batch's
    assert mass[40:].sum() == pytest.approx(QUERY_HEADS, rel=1e-5) and len(mass) == 73

    observer.begin(observed(ObservedRuns(ints(0), ints(1), ints(2), ints(30)), total=3), table)
    assert not observer.replaces_backend
    output.fill_(7)
    observer.attend(query[:3], *vec_views(cache), output)
    assert (output == 7).all()
    assert observer.take().sum() == pytest.approx(2 * QUERY_HEADS, rel=1e-5)


@pytest.mark.parametrize("seen", [[0, 2], [1], []])
def test_queries_that_the_backend_is_spared(seen: list[int]) -> None:
    """Attended like those beside them that are observed, and without a mass."""
    observer, cache, query = observer_over(96, 1, 1.0)
    table, lengths = np.array([[2], [0], [1]], dtype=np.int32), ints(30, 25, 20)
    runs = [
        (ints(*some), ints(*some), np.ones(len(some), dtype=np.int64), lengths[some].reshape(-1))
        for some in (seen, [n for n in range(3) if n not in seen])
    ]
    queries = replace(observed(ObservedRuns(*runs[0]), total=3), spared=QueryRuns(*runs[1]))
    observer.begin(queries, table)
    assert observer.active and observer.replaces_backend
    output, expected, mass = torch.empty(3, QUERY_HEADS, D), torch.empty(3, QUERY_HEADS, D), torch.zeros(1, 75)
    observer.attend(query[:3], *vec_views(cache), output)
    starts = torch.tensor([0, 30, 55])
    decode_attention_reference(
        query[:3], *vec_views(cache), torch.from_numpy(table), torch.from_numpy(lengths), 1.0, expected, mass, starts
    )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    wanted = [mass[0, starts[n] : starts[n] + lengths[n]] for n in seen]
    np.testing.assert_allclose(observer.take(), np.concatenate([np.empty(0), *wanted]), rtol=1e-4)

    observer.begin(NO_QUERIES, table)
    assert not observer.active


def test_each_run_is_observed_in_its_own_manner() -> None:
    """Two prompts' sums that fade, a third's queries one by one, and a lone query, in one forward."""
    observer, cache, query = observer_over(128, 2, 1.0)
    table = np.array([[0], [1], [2], [3]], dtype=np.int32)
    runs = (ints(0, 1, 2, 3), ints(0, 3, 5, 9), ints(3, 2, 4, 1), ints(30, 20, 10, 25))
    mixed = ObservedRuns(*runs, np.array([False, False, True, True]), np.array([0.5, 0.9, 1.0, 1.0]))
    assert mixed.lines.tolist() == [1, 1, 4, 1]

    def observe(these: ObservedRuns) -> np.ndarray:
        observer.begin(observed(these, total=10), table)
        for _ in range(2):
            observer.attend(query[:10], *vec_views(cache), torch.empty(10, QUERY_HEADS, D))
        return observer.take()

    alone = [
        observe(ObservedRuns(*(part[n : n + 1] for part in runs), bool(mixed.each_query[n]), float(decay)))
        for n, decay in enumerate([0.5, 0.9, 1.0, 1.0])
    ]
    together = observe(mixed)
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-6)
    sums = [part.sum() / observer.heads for part in np.split(together, np.cumsum([30, 20, 10, 10, 10, 10]))]
    assert sums == pytest.approx([1.75, 1.9, 1, 1, 1, 1, 1], rel=1e-5)
