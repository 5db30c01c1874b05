"""Attention over a cache with holes: the same as if the dead positions had been taken out."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_attention import (
    NO_SEGMENTS,
    PATTERNS,
    Paged,
    attention_of_the_live,
    fading,
    fill_dead,
    last_live,
    live_mask,
    paged,
    segments,
)
from torch import Tensor

from vtoken.kernels.attention_mass import attention_mass_reference
from vtoken.kernels.cpu.attention_mass import AttentionMass
from vtoken.kernels.cpu.decode_attention import DecodeAttention
from vtoken.kernels.cpu.parts import live_exponentials, live_maximum
from vtoken.kernels.decode_attention import decode_attention_reference

LENGTHS = [1, 15, 16, 17, 300, 256, 257, 1000]
SHAPES = [
    # query heads, KV heads, head size, block size
    (9, 3, 64, 32),
    (4, 4, 32, 16),  # MHA
    (7, 1, 80, 16),  # MQA
]


@pytest.fixture(params=[False, True], ids=["reference", "compiled"])
def compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def problem(
    shape: tuple[int, int, int, int] = SHAPES[0],
    lengths: list[int] = LENGTHS,
    dtype: torch.dtype = torch.float32,
    queries: int | None = None,
) -> Paged:
    query_heads, heads, head_size, size = shape
    return paged(lengths, (query_heads, heads), head_size, size, dtype, "vec", queries)


def decode(compiled: bool, p: Paged, live: Tensor | None, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output, and mass with five numbers that belong to nobody before and after."""
    offsets = p.offsets + 5 if offsets is None else offsets
    output, numbers = torch.full_like(p.query, torch.nan), int(p.lengths.sum()) + 10
    if not compiled:
        mass = torch.zeros(1, numbers)
        arguments = (p.query, p.key_cache, p.value_cache, p.block_table, p.lengths, p.scale, output, mass, offsets)
        decode_attention_reference(*arguments, live)
        return output, mass[0]
    attention = DecodeAttention(p.key_cache, p.value_cache, p.query.shape[1], masked=True)
    # What is planned with is dropped here: the object must keep it.
    attention.plan(p.lengths, p.block_table, offsets, None if live is None else live.numpy().copy())
    mass = torch.zeros(attention.lanes, numbers)
    attention(p.query, p.key_cache, p.value_cache, p.scale, output, mass)
    return output, mass.sum(dim=0)


def decode_expected(p: Paged, live: Tensor) -> tuple[Tensor, Tensor]:
    """Output and mass of one query per request, all in float64."""
    mass = torch.zeros(int(p.lengths.sum()) + 10, dtype=torch.float64)
    outputs = []
    for request, (length, offset) in enumerate(zip(p.lengths.tolist(), (p.offsets + 5).tolist(), strict=True)):
        output, mass[offset : offset + length] = attention_of_the_live(p, request, request, live[request, :length])
        outputs.append(output)
    return torch.stack(outputs), mass


def in_a_row(p: Paged, live: Tensor) -> Tensor:
    """The mask as the mass is laid out; what belongs to nobody is dead."""
    rows = [row[:length] for row, length in zip(live, p.lengths.tolist(), strict=True)]
    nobody = torch.zeros(5, dtype=torch.bool)
    return torch.cat([nobody, *rows, nobody])


def assert_equals_expected(p: Paged, live: Tensor, output: Tensor, mass: Tensor) -> None:
    expected, expected_mass = decode_expected(p, live)
    narrow = output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=2**-8 if narrow else 1e-5, atol=1e-5)
    torch.testing.assert_close(mass.double(), expected_mass, rtol=1e-5, atol=1e-6)
    assert (mass[~in_a_row(p, live)] == 0).all()


class TestDecodeAttention:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_equals_attention_without_the_dead(
        self, compiled: bool, shape: tuple[int, int, int, int], pattern: str
    ) -> None:
        p, live = problem(shape), live_mask(pattern, LENGTHS)
        fill_dead(p, live, torch.nan, 1e30)
        assert_equals_expected(p, live, *decode(compiled, p, live))

    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_bfloat16(self, compiled: bool, pattern: str) -> None:
        p, live = problem(dtype=torch.bfloat16), live_mask(pattern, LENGTHS)
        fill_dead(p, live, torch.nan, 1e30)
        output, mass = decode(compiled, p, live)
        assert output.dtype == torch.bfloat16
        assert_equals_expected(p, live, output, mass)

    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_any_number_of_threads(self, threads: Callable[[int], None], pattern: str) -> None:
        """A softmax's pieces may be dead as a whole, the first, all but one, or all but the last."""
        lengths = [2, 1500, 1]
        p, live = problem(lengths=lengths), live_mask(pattern, lengths)
        fill_dead(p, live, torch.nan, 1e30)
        for count in (1, 2, 3, 8):
            threads(count)
            assert_equals_expected(p, live, *decode(True, p, live))

    def test_the_same_output_without_mass(self) -> None:
        p, live = problem(), live_mask("half", LENGTHS)
        expected, _ = decode(True, p, live)
        attention = DecodeAttention(p.key_cache, p.value_cache, 9, masked=True)
        attention.plan(p.lengths, p.block_table, live=live)
        output = torch.full_like(p.query, torch.nan)
        attention(p.query, p.key_cache, p.value_cache, p.scale, output)
        assert torch.equal(output, expected)

    def test_all_live_is_no_mask(self, compiled: bool) -> None:
        p = problem()
        (output, mass), (unmasked, unmasked_mass) = (
            decode(compiled, p, live_mask("all", LENGTHS)),
            decode(compiled, p, None),
        )
        assert torch.equal(output, unmasked) and torch.equal(mass, unmasked_mass)

    def test_without_holes_the_masked_kernel_is_the_other(self) -> None:
        p = problem()
        output, mass = decode(True, p, None)
        dense, dense_mass = torch.empty_like(p.query), torch.zeros_like(mass)
        attention = DecodeAttention(p.key_cache, p.value_cache, 9)
        attention.plan(p.lengths, p.block_table, p.offsets + 5)
        lanes = torch.zeros(attention.lanes, len(mass))
        attention(p.query, p.key_cache, p.value_cache, p.scale, dense, lanes)
        dense_mass = lanes.sum(dim=0)
        torch.testing.assert_close(output, dense, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(mass, dense_mass, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("pattern", PATTERNS[:-1])
    def test_what_dead_slots_hold_changes_no_bit(self, compiled: bool, pattern: str) -> None:
        live = live_mask(pattern, LENGTHS)
        poisons = [(0.0, 0.0), (torch.nan, 1e30), (torch.inf, -1e30), (-torch.inf, 1.0), (1e30, 0.0)]
        results = []
        for key, value in poisons if compiled else [*poisons, (torch.nan, torch.nan), (0.0, torch.inf)]:
            p = problem()
            fill_dead(p, live, key, value)
            results.append(decode(compiled, p, live))
        for output, mass in results[1:]:
            assert torch.equal(output, results[0][0]) and torch.equal(mass, results[0][1])

    def test_what_a_live_slot_holds_is_seen(self, compiled: bool) -> None:
        """The control of the tests with poison: one hole less, and it spoils the request, but no other."""
        p, live = problem(lengths=[300, 40]), live_mask("half", [300, 40])
        fill_dead(p, live, torch.nan, 1e30)
        live[0, (~live[0]).nonzero()[7]] = True
        output, mass = decode(compiled, p, live)
        assert output[0].isnan().all() and not output[1].isnan().any()
        assert mass[5:305][live[0, :300]].isnan().all() and not mass[305:].isnan().any()

    @pytest.mark.parametrize("pattern", PATTERNS[:-1])
    def test_dead_logits_far_above_the_live(self, compiled: bool, pattern: str) -> None:
        p, live = problem(), live_mask(pattern, LENGTHS)
        p.query.abs_()
        fill_dead(p, live, 1e4, 0.0)
        assert_equals_expected(p, live, *decode(compiled, p, live))

    @pytest.mark.parametrize("pattern", PATTERNS[:-1])
    @pytest.mark.parametrize("logit", [-(2.0**17), -(2.0**100), 2.0**100])
    def test_live_logits_of_any_size(self, compiled: bool, pattern: str, logit: float) -> None:
        """The last live position is far above the others: it gets everything."""
        p, live = problem(), live_mask(pattern, LENGTHS)
        top = last_live(p, live)
        p.query.fill_(1)
        fill_dead(p, ~live, logit / 8, 1.0)
        fill_dead(p, ~top, (logit / 2 if logit < 0 else 2 * logit) / 8, 2.0)
        fill_dead(p, live, 0.0, 1e30)
        output, mass = decode(compiled, p, live)
        torch.testing.assert_close(output, torch.full_like(output, 2))
        torch.testing.assert_close(mass, 9.0 * in_a_row(p, top))

    def test_an_offset_of_minus_one_wants_no_mass(self, compiled: bool) -> None:
        p, live = problem(), live_mask("half", LENGTHS)
        whole_output, whole_mass = decode(compiled, p, live)
        offsets = p.offsets + 5
        unwanted = torch.tensor([0, 4, 7])
        offsets[unwanted] = -1
        output, mass = decode(compiled, p, live, offsets)
        assert torch.equal(output, whole_output)
        for request, (length, offset) in enumerate(zip(LENGTHS, (p.offsets + 5).tolist(), strict=True)):
            own = slice(offset, offset + length)
            expected = torch.zeros(length) if request in unwanted else whole_mass[own]
            torch.testing.assert_close(mass[own], expected, rtol=1e-6, atol=1e-7)
        assert not mass[:5].any() and not mass[-5:].any() and not mass[5].any()

    def test_unwanted_mass_needs_no_room(self) -> None:
        p = problem()
        for masked in (False, True):
            attention = DecodeAttention(p.key_cache, p.value_cache, 9, masked=masked)
            attention.plan(p.lengths, p.block_table, np.full(len(LENGTHS), -1))
            mass = torch.zeros(attention.lanes, 0)
            attention(p.query, p.key_cache, p.value_cache, p.scale, torch.empty_like(p.query), mass)
        offsets = (p.offsets + 5).numpy()
        offsets[-1] = -1
        attention.plan(p.lengths, p.block_table, offsets)
        room = int(p.lengths[:-1].sum()) + 5
        arguments = (p.query, p.key_cache, p.value_cache, p.scale, torch.empty_like(p.query))
        attention(*arguments, torch.zeros(attention.lanes, room))
        with pytest.raises(ValueError, match="no room"):
            attention(*arguments, torch.zeros(attention.lanes, room - 1))

    @pytest.mark.parametrize("context", [1, 250])
    def test_a_chunk_is_a_row_per_query(self, compiled: bool, context: int) -> None:
        """Rows that share a request's table and mask, of which the last one's mass is wanted."""
        count, longest = 40, context + 39
        p = problem(lengths=[longest], queries=count)
        live = live_mask("half", [longest])
        live[0, context - 1] = True
        fill_dead(p, live, torch.nan, 1e30)
        lengths = torch.arange(context, context + count)
        rows = replace(p, block_table=p.block_table.expand(count, -1), lengths=lengths)
        offsets = torch.full((count,), -1)
        offsets[-1] = 3
        output, mass = decode(compiled, rows, live.expand(count, -1), offsets)
        for query in range(count):
            expected, last = attention_of_the_live(p, query, 0, live[0, : context + query])
            torch.testing.assert_close(output[query].double(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mass[3 : 3 + longest].double(), last, rtol=1e-5, atol=1e-6)
        assert not mass[:3].any() and not mass[3 + longest :].any()
        assert (mass[3 : 3 + longest][~live[0, :longest]] == 0).all()

    def test_masks_of_any_strides(self) -> None:
        p, live = problem(), live_mask("half", LENGTHS)
        expected, _ = decode(True, p, live)
        wide = np.ones((2 * len(LENGTHS), 2000), dtype=np.bool_)
        wide[::2, 7 : 7 + live.shape[1]] = live
        attention = DecodeAttention(p.key_cache, p.value_cache, 9, masked=True)
        for mask in (wide[::2, 7:], np.asfortranarray(live.numpy()), live):
            output = torch.full_like(p.query, torch.nan)
            attention.plan(p.lengths, p.block_table, live=mask)
            attention(p.query, p.key_cache, p.value_cache, p.scale, output)
            assert torch.equal(output, expected)

    def test_masks_that_cannot_be_read_are_refused(self) -> None:
        p, live = problem(), live_mask("half", LENGTHS)
        plain = DecodeAttention(p.key_cache, p.value_cache, 9)
        with pytest.raises(ValueError, match="build it with masked=True"):
            plain.plan(p.lengths, p.block_table, live=live)
        masked = DecodeAttention(p.key_cache, p.value_cache, 9, masked=True)
        for small in (live[:-1], live[:, :999], live[0]):
            with pytest.raises(ValueError, match="has no room for 8 rows of 1000"):
                masked.plan(p.lengths, p.block_table, live=small)

    def test_no_requests(self) -> None:
        p = problem(lengths=[1], queries=0)
        attention = DecodeAttention(p.key_cache, p.value_cache, 9, masked=True)
        attention.plan([], p.block_table, live=np.empty((0, 0), dtype=np.bool_))
        attention(p.query, p.key_cache, p.value_cache, p.scale, torch.empty_like(p.query))


FIELDS = {
    # many queries of a long context, a few that keep apart, a prompt's beginning, one on its own, a part's boundary
    "first": [0, 100, 40, 39, 120],
    "count": [39, 5, 33, 1, 7],
    "context": [900, 290, 1, 7, 251],
    "row": [7, 4, 5, 3, 6],
    "offset": [3, 1000, 3000, 3100, 3200],
    "stride": [0, 300, 0, 0, 0],
}
SEGMENTS = segments(**FIELDS)
QUERIES, NUMBERS = 130, 3500


def observed_mask(pattern: str) -> Tensor:
    """The pattern, with something live for the first query of each segment."""
    live = live_mask(pattern, LENGTHS)
    live[SEGMENTS.row, SEGMENTS.context - 1] = True
    return live


def observe(compiled: bool, p: Paged, live: Tensor | None, decay: float = 0.875) -> Tensor:
    if not compiled:
        mass = torch.zeros(1, NUMBERS)
        attention_mass_reference(p.query, p.key_cache, p.block_table, fading(SEGMENTS, decay), p.scale, mass, live)
        return mass[0]
    attention = AttentionMass(p.key_cache, p.query.shape[1], masked=True)
    attention.plan(p.block_table, fading(SEGMENTS, decay), None if live is None else live.numpy().copy())
    mass = torch.zeros(attention.lanes, NUMBERS)
    attention(p.query, p.key_cache, p.scale, mass)
    return mass.sum(dim=0)


def assert_mass_equals_expected(p: Paged, live: Tensor, decay: float, mass: Tensor) -> None:
    expected = torch.zeros(NUMBERS, dtype=torch.float64)
    reached = torch.zeros(NUMBERS, dtype=torch.bool)
    for first, count, context, row, offset, stride in zip(*FIELDS.values(), strict=True):
        for j in range(count):
            seen = live[row, : context + j]
            own = slice(offset + j * stride, offset + j * stride + len(seen))
            _, of_query = attention_of_the_live(p, first + j, row, seen)
            expected[own] += of_query * (1 if stride else decay ** (count - 1 - j))
            reached[own] |= seen
    torch.testing.assert_close(mass.double(), expected, rtol=1e-5, atol=1e-6)
    assert (mass[~reached] == 0).all()


class TestAttentionMass:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("pattern", PATTERNS)
    @pytest.mark.parametrize("decay", [1.0, 0.875])
    def test_equals_the_mass_without_the_dead(
        self, compiled: bool, shape: tuple[int, int, int, int], pattern: str, decay: float
    ) -> None:
        p, live = problem(shape, queries=QUERIES), observed_mask(pattern)
        fill_dead(p, live, torch.nan, 1e30)
        assert_mass_equals_expected(p, live, decay, observe(compiled, p, live, decay))

    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_bfloat16(self, compiled: bool, pattern: str) -> None:
        p, live = problem(dtype=torch.bfloat16, queries=QUERIES), observed_mask(pattern)
        fill_dead(p, live, torch.nan, 1e30)
        assert_mass_equals_expected(p, live, 0.875, observe(compiled, p, live))

    def test_any_number_of_threads(self, threads: Callable[[int], None]) -> None:
        p, live = problem(queries=QUERIES), observed_mask("late")
        for count in (1, 2, 3, 8):
            threads(count)
            assert_mass_equals_expected(p, live, 0.875, observe(True, p, live))

    def test_all_live_is_no_mask(self, compiled: bool) -> None:
        p = problem(queries=QUERIES)
        assert torch.equal(observe(compiled, p, live_mask("all", LENGTHS)), observe(compiled, p, None))

    def test_without_holes_the_masked_kernel_is_the_other(self) -> None:
        p = problem(queries=QUERIES)
        attention = AttentionMass(p.key_cache, 9)
        attention.plan(p.block_table, fading(SEGMENTS, 0.875))
        dense = torch.zeros(attention.lanes, NUMBERS)
        attention(p.query, p.key_cache, p.scale, dense)
        torch.testing.assert_close(observe(True, p, None), dense.sum(dim=0), rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("pattern", PATTERNS[:-1])
    def test_what_dead_slots_hold_changes_no_bit(self, compiled: bool, pattern: str) -> None:
        live, results = observed_mask(pattern), []
        for key in (0.0, torch.nan, torch.inf, -torch.inf, 1e30):
            p = problem(queries=QUERIES)
            fill_dead(p, live, key, torch.nan)
            results.append(observe(compiled, p, live))
        assert all(torch.equal(mass, results[0]) for mass in results[1:])

    def test_what_a_live_slot_holds_is_seen(self, compiled: bool) -> None:
        p, live = problem(queries=QUERIES), observed_mask("half")
        fill_dead(p, live, torch.nan, 0.0)
        live[4, (~live[4]).nonzero()[7]] = True
        mass = observe(compiled, p, live)
        assert mass[1000:1290][live[4, :290]].isnan().all() and not mass[:1000].isnan().any()

    @pytest.mark.parametrize("pattern", PATTERNS[:-1])
    def test_dead_logits_far_above_the_live(self, compiled: bool, pattern: str) -> None:
        p, live = problem(queries=QUERIES), observed_mask(pattern)
        p.query.abs_()
        fill_dead(p, live, 1e4, 0.0)
        assert_mass_equals_expected(p, live, 0.875, observe(compiled, p, live))

    def test_masks_that_cannot_be_read_are_refused(self) -> None:
        p, live = problem(queries=QUERIES), observed_mask("half")
        with pytest.raises(ValueError, match="build it with masked=True"):
            AttentionMass(p.key_cache, 9).plan(p.block_table, SEGMENTS, live)
        attention = AttentionMass(p.key_cache, 9, masked=True)
        for small in (live[:-1], live[:, :937]):
            with pytest.raises(ValueError, match="has no room for 8 rows of 938"):
                attention.plan(p.block_table, SEGMENTS, small)

    def test_no_segments(self) -> None:
        p = problem(queries=QUERIES)
        attention = AttentionMass(p.key_cache, 9, masked=True)
        attention.plan(p.block_table, NO_SEGMENTS, live_mask("half", LENGTHS))
        mass = torch.zeros(attention.lanes, 3)
        attention(p.query, p.key_cache, p.scale, mass)
        assert not mass.any()


class TestArithmetic:
    """Of the live numbers of an array; lengths that fill vectors and that do not."""

    @pytest.mark.parametrize("count", [1, 7, 8, 100])
    def test_maximum(self, count: int) -> None:
        rng = np.random.default_rng(count)
        for shift in (-50, 0, 50):
            numbers = (rng.standard_normal(count) * 10 + shift).astype(np.float32)
            live = rng.random(count) < 0.5
            numbers[~live] = rng.choice([np.nan, np.inf, 1e30, -np.inf], (~live).sum())
            for least in (-np.inf, -50.0, 55.5):
                expected = max(numbers[live].max(initial=-np.inf), np.float32(least))
                assert live_maximum(numbers.ctypes.data, live.ctypes.data, count, np.float32(least)) == expected
            live[count // 2], numbers[count // 2] = True, np.nan
            assert np.isnan(live_maximum(numbers.ctypes.data, live.ctypes.data, count, np.float32(0)))

    @pytest.mark.parametrize("count", [1, 7, 8, 100])
    def test_exponentials(self, count: int) -> None:
        rng = np.random.default_rng(count)
        logits = -rng.random(count).astype(np.float32) * 20
        live = rng.random(count) < 0.5
        expected = np.where(live, np.exp2(logits.astype(np.float64)), 0)
        logits[~live] = rng.choice([np.nan, np.inf, 1e30, -np.inf], (~live).sum())
        total = live_exponentials(logits.ctypes.data, live.ctypes.data, count, np.float32(0))
        np.testing.assert_allclose(logits, expected, rtol=3e-7)
        np.testing.assert_allclose(total, expected.sum(), rtol=1e-6)

    def test_nothing_live(self) -> None:
        """The maximum stays what it was, minus infinity included, and nothing is added."""
        dead = np.zeros(20, dtype=np.bool_)
        for least in (-np.inf, -3.0):
            numbers = np.full(20, 5, dtype=np.float32)
            assert live_maximum(numbers.ctypes.data, dead.ctypes.data, 20, np.float32(least)) == least
            assert live_exponentials(numbers.ctypes.data, dead.ctypes.data, 20, np.float32(least)) == 0
            assert not numbers.any()
