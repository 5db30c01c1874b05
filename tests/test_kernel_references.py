"""The torch references of the attention kernels, against torch's own attention and against explicit numbers."""

import math

import pytest
import torch
from paged_attention import HEADS, LAYOUTS, NO_SEGMENTS, Paged, fading, paged, segments
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vtoken.kernels.attention_mass import attention_mass_reference
from vtoken.kernels.decode_attention import decode_attention_reference


def decode(p: Paged, lanes: int = 1, scale: float | None = None) -> tuple[Tensor, Tensor]:
    output = torch.full_like(p.query, torch.nan)
    mass = torch.zeros(lanes, int(p.lengths.sum()))
    decode_attention_reference(
        p.query,
        p.key_cache,
        p.value_cache,
        p.block_table,
        p.lengths,
        p.scale if scale is None else scale,
        output,
        mass,
        p.offsets,
    )
    return output, mass


def explicit_probability(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[Hq, D] and [length, H, D] to [Hq, length], in float64, a head at a time."""
    group = query.shape[0] // keys.shape[1]
    lines = []
    for head in range(query.shape[0]):
        weight = torch.exp(scale * keys[:, head // group].double() @ query[head].double())
        lines.append(weight / weight.sum())
    return torch.stack(lines)


class TestDecodeAttention:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("heads", HEADS)
    def test_output_is_that_of_torchs_attention(self, heads: tuple[int, int], layout: str) -> None:
        p = paged([1, 40, 16, 17, 3], heads, head_size=32, layout=layout)
        output, _ = decode(p)
        for request in range(len(p.lengths)):
            expected = scaled_dot_product_attention(
                p.query[request][None, :, None],
                p.keys[request].transpose(0, 1)[None],
                p.values[request].transpose(0, 1)[None],
                enable_gqa=True,
            )
            torch.testing.assert_close(output[request], expected[0, :, 0], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("heads", HEADS)
    def test_mass_is_the_probability_summed_over_heads(self, heads: tuple[int, int], layout: str) -> None:
        p = paged([5, 1, 33], heads, head_size=80, size=8, layout=layout)
        _, mass = decode(p)
        for request, (offset, length) in enumerate(zip(p.offsets, p.lengths, strict=True)):
            expected = explicit_probability(p.query[request], p.keys[request], p.scale).sum(dim=0)
            torch.testing.assert_close(mass[0, offset : offset + length].double(), expected, rtol=1e-5, atol=1e-6)
            assert abs(mass[0, offset : offset + length].sum() - heads[0]) < 1e-5

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_numbers_are_accumulated_in_float32(self, dtype: torch.dtype) -> None:
        narrow = paged([300, 2], dtype=dtype)
        wide = Paged(
            narrow.query.float(),
            narrow.key_cache.float(),
            narrow.value_cache.float(),
            narrow.block_table,
            narrow.lengths,
            narrow.keys,
            narrow.values,
        )
        (output, mass), (wide_output, wide_mass) = decode(narrow), decode(wide)
        assert output.dtype == dtype and torch.equal(output, wide_output.to(dtype))
        assert torch.equal(mass, wide_mass)

    def test_numbers_worked_out_by_hand(self) -> None:
        """Two positions with weights 1 : 3 for one head, 1 : 1 for the other of the same group."""
        p = paged([2], heads=(2, 1), head_size=32, size=4)
        p.query.zero_()
        p.query[0, 0, 0] = 1
        first, second = p.block_table[0, 0], (0, 1)
        p.key_cache[first, second] = 0
        p.key_cache[first, 1, 0, 0] = 2 * math.log(3)
        p.value_cache[first, 0] = 8
        p.value_cache[first, 1] = 16
        output, mass = decode(p, scale=0.5)
        torch.testing.assert_close(mass, torch.tensor([[0.75, 1.25]]))
        torch.testing.assert_close(output[0, :, 0], torch.tensor([14.0, 12.0]))

    def test_a_lone_position_gets_all_heads(self) -> None:
        output, mass = decode(p := paged([1], heads=(6, 2)))
        assert mass.tolist() == [[6.0]]
        assert torch.equal(output[0], p.values[0][0].repeat_interleave(3, dim=0))

    def test_mass_is_added_to_one_lane(self) -> None:
        p = paged([3, 9])
        _, once = decode(p)
        mass = torch.stack([torch.full((14,), 2.0), torch.full((14,), torch.nan)])
        offsets = torch.tensor([11, 1])  # not in order, with gaps
        decode_attention_reference(
            p.query, p.key_cache, p.value_cache, p.block_table, p.lengths, p.scale, p.query.clone(), mass, offsets
        )
        assert mass[0, [0, 10]].tolist() == [2.0, 2.0] and mass[1].isnan().all()
        assert torch.equal(mass[0, 11:14], 2 + once[0, :3]) and torch.equal(mass[0, 1:10], 2 + once[0, 3:])

    def test_poison_within_the_length_is_seen(self) -> None:
        """The control of all tests here: the unused places do hold what would spoil a result."""
        p = paged([15])
        assert not decode(p)[0].isnan().any()
        p.lengths += 1
        output, mass = decode(p)
        assert output.isnan().all() and mass.isnan().all()

    def test_heads_in_another_order_are_a_difference(self) -> None:
        p = paged([20], heads=(6, 2))
        output, _ = decode(p)
        p.query = p.query[:, [0, 2, 4, 1, 3, 5]]  # as if head h used KV head h % 2
        other, _ = decode(p)
        assert not torch.allclose(output[:, [0, 2, 4, 1, 3, 5]], other, rtol=1e-2)


class TestAttentionMass:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("decay", [1.0, 0.75])
    def test_equals_the_explicit_sum(self, heads: tuple[int, int], layout: str, decay: float) -> None:
        """One segment per way to add, and one whose first query sees a single position."""
        p = paged([30, 7, 20], heads, head_size=32, size=8, layout=layout, queries=25)
        parts = segments(
            first=[3, 18, 9],
            count=[6, 7, 4],
            context=[25, 1, 17],
            row=[0, 1, 2],
            offset=[100, 0, 10],
            stride=[0, 0, 20],
        )
        mass, expected = torch.ones(2, 131), torch.ones(131, dtype=torch.float64)
        attention_mass_reference(p.query, p.key_cache, p.block_table, fading(parts, decay), p.scale, mass)
        for j in range(6):
            probability = explicit_probability(p.query[3 + j], p.keys[0][: 25 + j], p.scale).sum(dim=0)
            expected[100 : 125 + j] += decay ** (5 - j) * probability
        for j in range(7):
            probability = explicit_probability(p.query[18 + j], p.keys[1][: 1 + j], p.scale).sum(dim=0)
            expected[: 1 + j] += decay ** (6 - j) * probability
        for j in range(4):
            probability = explicit_probability(p.query[9 + j], p.keys[2][: 17 + j], p.scale).sum(dim=0)
            expected[10 + 20 * j : 27 + 21 * j] += probability
        torch.testing.assert_close(mass[0].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(mass[1], torch.ones(131))

    def test_uniform_attention_worked_out_by_hand(self) -> None:
        p = paged([4], heads=(4, 2), queries=3)
        p.query.zero_()
        together = segments(first=[0], count=[3], context=[2], row=[0], offset=[0], stride=[0])
        mass = torch.zeros(1, 4)
        attention_mass_reference(p.query, p.key_cache, p.block_table, fading(together, 0.5), 1.0, mass)
        torch.testing.assert_close(mass[0], torch.tensor([13 / 6, 13 / 6, 5 / 3, 1.0]))
        apart = segments(first=[0], count=[3], context=[2], row=[0], offset=[0], stride=[4])
        lines = torch.zeros(1, 12)
        attention_mass_reference(p.query, p.key_cache, p.block_table, fading(apart, 0.5), 1.0, lines)
        expected = torch.tensor([[2, 2, 0, 0], [4 / 3, 4 / 3, 4 / 3, 0], [1, 1, 1, 1]])
        torch.testing.assert_close(lines.view(3, 4), expected)

    def test_each_segment_has_its_own_decay(self) -> None:
        p = paged([4, 4], heads=(4, 2), queries=6)
        p.query.zero_()
        both = segments(first=[0, 3], count=[3, 3], context=[2, 2], row=[0, 1], offset=[0, 4], stride=[0, 0])
        mass = torch.zeros(1, 8)
        attention_mass_reference(p.query, p.key_cache, p.block_table, fading(both, [0.5, 1.0]), 1.0, mass)
        torch.testing.assert_close(mass[0, :4], torch.tensor([13 / 6, 13 / 6, 5 / 3, 1.0]))
        torch.testing.assert_close(mass[0, 4:], torch.tensor([13 / 3, 13 / 3, 7 / 3, 1.0]))

    def test_one_query_is_a_decode(self) -> None:
        p = paged([5, 19], heads=(6, 2))
        _, expected = decode(p)
        lone = segments(first=[0, 1], count=[1, 1], context=[5, 19], row=[0, 1], offset=[0, 5], stride=[0, 0])
        mass = torch.zeros_like(expected)
        attention_mass_reference(p.query, p.key_cache, p.block_table, fading(lone, 0.5), p.scale, mass)
        torch.testing.assert_close(mass, expected)

    def test_the_mass_of_a_query_sums_to_its_heads(self) -> None:
        p = paged([50], heads=(6, 3), queries=4, dtype=torch.bfloat16)
        lines = segments(first=[0], count=[4], context=[47], row=[0], offset=[0], stride=[50])
        mass = torch.zeros(1, 200)
        attention_mass_reference(p.query, p.key_cache, p.block_table, lines, p.scale, mass)
        torch.testing.assert_close(mass.view(4, 50).sum(dim=1), torch.full((4,), 6.0))

    def test_no_segments(self) -> None:
        p = paged([4])
        mass = torch.zeros(1, 4)
        attention_mass_reference(p.query, p.key_cache, p.block_table, NO_SEGMENTS, p.scale, mass)
        assert not mass.any()
