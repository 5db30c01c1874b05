"""The Triton kernels against their references, run by Triton's interpreter.

It must be switched on before the kernels are imported, so this file is run in a process of its own, by
test_triton_kernels.py: ``TRITON_INTERPRET=1 python -m pytest tests/triton_interpreter.py``.
"""

from typing import Any

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
from test_relocation import as_rows, bits, random_cache, random_moves, with_keys_transposed
from torch import Tensor
from triton.language import bfloat16, float32
from triton.runtime import interpreter

from vtoken.kernels.attention_mass import QuerySegments, attention_mass_reference
from vtoken.kernels.decode_attention import decode_attention_reference
from vtoken.kernels.gpu import decode_attention as decode_module
from vtoken.kernels.gpu.attention_mass import attention_mass
from vtoken.kernels.gpu.decode_attention import decode_attention
from vtoken.kernels.gpu.key_norms import key_norms
from vtoken.kernels.gpu.relocation import relocate
from vtoken.kernels.key_norms import key_norms_reference
from vtoken.kernels.layout import WriteTokens, probe_layout
from vtoken.kernels.relocation import bits_of, relocate_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of an output, in which probabilities are rounded to this dtype. A mass is as exact as float32 for all of them."""


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter of Triton 3.9 keeps bfloat16 as bits, and multiplies those as integers."""
    stock = interpreter.InterpreterBuilder.create_dot

    def widened(handle):  # type: ignore[no-untyped-def]
        if handle.dtype.scalar != bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), float32)

    def create_dot(self, a, b, *others):  # type: ignore[no-untyped-def]
        return stock(self, widened(a), widened(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def decode(function, p: Paged, scale: float | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    output, mass = torch.full_like(p.query, torch.nan), torch.zeros(p.key_cache.shape[2], int(p.lengths.sum()) + 2)
    function(
        p.query,
        p.key_cache,
        p.value_cache,
        p.block_table,
        p.lengths.to(torch.int32),
        scale or p.scale,
        output,
        mass,
        p.offsets + 1,
    )
    return output, mass


@pytest.fixture(autouse=True)
def two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs: the interpreter runs them one after the other."""
    monkeypatch.setattr(decode_module, "PROGRAMS", 12)


class TestDecodeAttention:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("heads", "head_size", "size", "layout", "parts"),
        [
            ((2, 2), 32, 16, "tokens first", 4),
            ((4, 1), 80, 8, "vec", 1),
            ((6, 2), 96, 24, "heads first", 2),
            ((20, 1), 64, 16, "vec", 8),
        ],
    )
    def test_equals_the_reference(
        self,
        monkeypatch: pytest.MonkeyPatch,
        heads: tuple[int, int],
        head_size: int,
        size: int,
        layout: str,
        dtype: torch.dtype,
        parts: int,
    ) -> None:
        """Some parts begin beyond the context."""
        monkeypatch.setattr(decode_module, "PROGRAMS", parts * 4 * heads[1])
        p = paged([1, 150, 64, 33], heads, head_size, size, dtype, layout)
        (output, mass), (expected, expected_mass) = decode(decode_attention, p), decode(decode_attention_reference, p)
        torch.testing.assert_close(output, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(mass.sum(dim=0), expected_mass[0], rtol=1e-5, atol=1e-6)
        assert not mass[:, [0, -1]].any()

    def test_a_lane_holds_the_mass_of_its_kv_head(self) -> None:
        _, mass = decode(decode_attention, paged([9, 70], heads=(6, 3)))
        torch.testing.assert_close(mass.sum(dim=1), torch.tensor([4.0, 4.0, 4.0]))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_poison_changes_no_bit(self, dtype: torch.dtype) -> None:
        results = [
            decode(decode_attention, paged([1, 70, 17], dtype=dtype, size=16, poison=poison))
            for poison in [(0.0, 0.0), (torch.nan, 1e30), (1e4, torch.nan)]
        ]
        for output, mass in results[1:]:
            assert torch.equal(output, results[0][0]) and torch.equal(mass, results[0][1])
        assert not results[0][0].isnan().any()

    def test_another_scale_is_a_difference(self) -> None:
        p = paged([9, 70])
        (output, mass), (other, other_mass) = decode(decode_attention, p), decode(decode_attention_reference, p, 0.2)
        assert not torch.allclose(output, other, rtol=1e-2, atol=1e-2)
        assert not torch.allclose(mass.sum(dim=0), other_mass[0], rtol=1e-2, atol=1e-2)


def several_segments() -> QuerySegments:
    """Of requests of 90, 9, 69 and 1 positions: both ways to add, a prompt's first token, a lone query, all ragged."""
    fields = {
        "first": [30, 3, 12, 2],
        "count": [21, 9, 5, 1],
        "context": [70, 1, 65, 1],
        "row": [0, 1, 2, 3],
        "offset": [360, 1, 10, 455],
        "stride": [0, 0, 70, 0],
    }
    return segments(**fields)


def observe(function, p: Paged, decay: float | list[float], parts: QuerySegments) -> Tensor:  # type: ignore[no-untyped-def]
    mass = torch.full((p.key_cache.shape[2], 460), 0.5)
    function(p.query, p.key_cache, p.block_table, fading(parts, decay), p.scale, mass)
    return mass


def prompts(**options) -> Paged:  # type: ignore[no-untyped-def]
    return paged([90, 9, 69, 1], queries=51, **options)


class TestAttentionMass:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("heads", "head_size", "size", "layout", "decay"),
        [
            ((2, 2), 64, 16, "tokens first", 0.75),
            ((4, 1), 80, 8, "vec", 1.0),
            ((6, 2), 96, 24, "heads first", [0.75, 1.0, 0.5, 0.9]),
        ],
    )
    def test_equals_the_reference(
        self,
        heads: tuple[int, int],
        head_size: int,
        size: int,
        layout: str,
        dtype: torch.dtype,
        decay: float | list[float],
    ) -> None:
        p = prompts(heads=heads, head_size=head_size, size=size, dtype=dtype, layout=layout)
        mass = observe(attention_mass, p, decay, several_segments())
        expected = observe(attention_mass_reference, p, decay, several_segments())
        torch.testing.assert_close(mass.sum(dim=0), expected.sum(dim=0), rtol=1e-5, atol=1e-5)

    def test_a_tiny_decay_is_no_nan(self) -> None:
        p = prompts()
        mass = observe(attention_mass, p, 1e-30, several_segments())
        expected = observe(attention_mass_reference, p, 1e-30, several_segments())
        torch.testing.assert_close(mass.sum(dim=0), expected.sum(dim=0), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_poison_changes_no_bit(self, dtype: torch.dtype) -> None:
        clean, *others = (
            observe(attention_mass, prompts(dtype=dtype, poison=poison), 0.9, several_segments())
            for poison in [(0.0, 0.0), (torch.nan, torch.nan), (1e4, 0.0)]
        )
        assert not clean.isnan().any() and all(torch.equal(clean, other) for other in others)

    def test_no_segments(self) -> None:
        assert observe(attention_mass, prompts(), 1.0, NO_SEGMENTS).eq(0.5).all()

    def test_a_segment_shifted_by_one_is_a_difference(self) -> None:
        shifted = several_segments()
        shifted.context[0] += 1
        p = prompts()
        mass = observe(attention_mass, p, 1.0, several_segments())
        expected = observe(attention_mass_reference, p, 1.0, shifted)
        assert not torch.allclose(mass.sum(dim=0), expected.sum(dim=0), rtol=1e-3, atol=1e-3)


RAGGED = [1, 350, 64, 33]
HOLED = [
    {"heads": (2, 2), "head_size": 32, "size": 16, "layout": "tokens first", "dtype": torch.float16},
    {"heads": (4, 1), "head_size": 80, "size": 8, "layout": "vec", "dtype": torch.float32},
    {"heads": (6, 2), "head_size": 96, "size": 24, "layout": "heads first", "dtype": torch.bfloat16},
]


class TestHoles:
    """Some positions are dead, and everything is as if they had been taken out."""

    def decode(self, p: Paged, live: Tensor | None, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        output, mass = torch.full_like(p.query, torch.nan), torch.zeros(p.key_cache.shape[2], int(p.lengths.sum()))
        arguments = (p.query, p.key_cache, p.value_cache, p.block_table, p.lengths.to(torch.int32), p.scale)
        decode_attention(*arguments, output, mass, p.offsets if offsets is None else offsets, live)
        return output, mass

    @pytest.mark.parametrize("options", HOLED)
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_decode(self, monkeypatch: pytest.MonkeyPatch, pattern: str, options: dict[str, Any]) -> None:
        """Tiles and parts that are dead as a whole among them."""
        monkeypatch.setattr(decode_module, "PROGRAMS", 4 * len(RAGGED) * options["heads"][1])
        p, live = paged(RAGGED, **options), live_mask(pattern, RAGGED)
        fill_dead(p, live, torch.nan, torch.nan)
        output, mass = self.decode(p, live)
        for request, (length, offset) in enumerate(zip(RAGGED, p.offsets.tolist(), strict=True)):
            seen = live[request, :length]
            expected, expected_mass = attention_of_the_live(p, request, request, seen)
            tolerance = TOLERANCE[options["dtype"]]
            torch.testing.assert_close(output[request].double(), expected, rtol=tolerance, atol=tolerance)
            own = mass[:, offset : offset + length]
            torch.testing.assert_close(own.sum(dim=0).double(), expected_mass, rtol=1e-5, atol=1e-6)
            assert (own[:, ~seen] == 0).all()

    def test_all_live_is_no_mask(self) -> None:
        p = paged(RAGGED)
        for masked, dense in zip(self.decode(p, live_mask("all", RAGGED)), self.decode(p, None), strict=True):
            assert torch.equal(masked, dense)

    @pytest.mark.parametrize("pattern", PATTERNS[:-1])
    def test_what_dead_slots_hold_changes_no_bit(self, pattern: str) -> None:
        live, results = live_mask(pattern, RAGGED), []
        for key, value in [(0.0, 0.0), (torch.nan, torch.nan), (torch.inf, 1e30), (1e30, -torch.inf)]:
            p = paged(RAGGED)
            fill_dead(p, live, key, value)
            results.append(self.decode(p, live))
        for output, mass in results[1:]:
            assert torch.equal(output, results[0][0]) and torch.equal(mass, results[0][1])

    @pytest.mark.parametrize("logit", [-(2.0**17), -(2.0**100), 2.0**100])
    def test_live_logits_of_any_size(self, logit: float) -> None:
        """After tiles of nothing but dead ones; the last live position is far above the others and gets everything."""
        p, live = paged(RAGGED, head_size=64), live_mask("late", RAGGED)
        top = last_live(p, live)
        p.query.fill_(1)
        fill_dead(p, ~live, logit / 8, 1.0)
        fill_dead(p, ~top, (logit / 2 if logit < 0 else 2 * logit) / 8, 2.0)
        output, mass = self.decode(p, live)
        torch.testing.assert_close(output, torch.full_like(output, 2))
        torch.testing.assert_close(mass[:, 1:351].sum(dim=0), 4.0 * top[1, :350])

    def test_an_offset_of_minus_one_wants_no_mass(self) -> None:
        p, live = paged(RAGGED), live_mask("half", RAGGED)
        whole_output, whole_mass = self.decode(p, live)
        output, mass = self.decode(p, live, torch.tensor([-1, 1, -1, 415]))
        assert torch.equal(output, whole_output) and torch.equal(mass[:, 1:351], whole_mass[:, 1:351])
        assert torch.equal(mass[:, 415:], whole_mass[:, 415:])
        assert not mass[:, 0].any() and not mass[:, 351:415].any()
        output, mass = self.decode(p, None, torch.full((4,), -1))
        assert not output.isnan().any() and not mass.any()

    @pytest.mark.parametrize("options", HOLED)
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_mass(self, pattern: str, options: dict[str, Any]) -> None:
        p, kv_heads = prompts(**options), options["heads"][1]
        parts = fading(several_segments(), [0.75, 0.5, 1.0, 0.9])
        live = live_mask(pattern, p.lengths.tolist())
        live[parts.row, parts.context - 1] = True
        fill_dead(p, live, torch.nan, torch.nan)
        mass = torch.full((kv_heads, 460), 0.5)
        attention_mass(p.query, p.key_cache, p.block_table, parts, p.scale, mass, live)
        expected = torch.full((460,), 0.5 * kv_heads, dtype=torch.float64)
        reached = torch.zeros(460, dtype=torch.bool)
        fields = (parts.first, parts.count, parts.context, parts.row, parts.offset, parts.stride, parts.decay)
        for first, count, context, row, offset, stride, decay in zip(*fields, strict=True):
            for j in range(count):
                seen = live[row, : context + j]
                own = slice(offset + j * stride, offset + j * stride + len(seen))
                _, of_query = attention_of_the_live(p, first + j, row, seen)
                expected[own] += of_query * (1 if stride else decay ** (count - 1 - j))
                reached[own] |= seen
        torch.testing.assert_close(mass.sum(dim=0).double(), expected, rtol=1e-5, atol=1e-5)
        assert (mass[:, ~reached] == 0.5).all()

    @pytest.mark.parametrize("pattern", PATTERNS[:-1])
    def test_keys_of_dead_slots_change_no_bit_of_mass(self, pattern: str) -> None:
        results = []
        for key in (0.0, torch.nan, 1e30):
            p, parts = prompts(), fading(several_segments(), 0.9)
            live = live_mask(pattern, p.lengths.tolist())
            live[parts.row, parts.context - 1] = True
            fill_dead(p, live, key, torch.nan)
            mass = torch.zeros(2, 460)
            attention_mass(p.query, p.key_cache, p.block_table, parts, p.scale, mass, live)
            results.append(mass)
        assert all(torch.equal(mass, results[0]) for mass in results[1:])


@pytest.mark.parametrize("write", [as_rows, with_keys_transposed])
class TestSlots:
    """What runs over slots, in caches of 2 KV heads of size 4 in blocks of 8."""

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
    @pytest.mark.parametrize("strided", [False, True])
    def test_relocation_equals_the_reference(self, write: WriteTokens, dtype: torch.dtype, strided: bool) -> None:
        layout = probe_layout(write, torch.empty(1, 128), 2, 4)
        cache = random_cache(3, 11, 128, dtype, strided)
        expected, before = cache.clone(), cache.clone()
        moves = [torch.from_numpy(slots) for slots in random_moves(11, 8, 30)]
        relocate_reference(bits_of(expected), layout, *moves)
        relocate(bits_of(cache), layout, *moves)
        assert torch.equal(bits(cache), bits(expected)) and not torch.equal(bits(cache), bits(before))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_key_norms_equal_the_reference(self, write: WriteTokens, dtype: torch.dtype) -> None:
        layout = probe_layout(write, torch.empty(1, 128), 2, 4)
        cache = torch.randn(3, 11, 131, generator=torch.Generator().manual_seed(0)).to(dtype)[:, :, 3:]
        slots = torch.tensor([5, 87, 0, 5, 44])
        unused = torch.tensor([slot for slot in range(88) if slot not in slots])
        cache[:, (unused // 8)[:, None], layout.elements[unused % 8]] = torch.nan
        norms = key_norms(cache, layout, 2, 4, slots)
        torch.testing.assert_close(norms, key_norms_reference(cache, layout, 2, 4, slots), rtol=1e-6, atol=0)
        assert norms.dtype == torch.float32 and key_norms(cache, layout, 2, 4, slots[:0]).shape == (0,)

    def test_key_norms_with_another_layout_are_a_difference(self, write: WriteTokens) -> None:
        right, wrong = (
            probe_layout(each, torch.empty(1, 128), 2, 4)
            for each in sorted([as_rows, with_keys_transposed], key=lambda each: each is not write)
        )
        cache, slots = torch.randn(3, 11, 128), torch.arange(1, 7)
        norms, other = key_norms(cache, right, 2, 4, slots), key_norms_reference(cache, wrong, 2, 4, slots)
        assert not torch.isclose(norms, other, rtol=1e-3).all()
