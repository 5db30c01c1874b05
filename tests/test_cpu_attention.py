"""The CPU's attention kernels, against the torch references and down to the pieces that they are made of."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from paged_attention import NO_SEGMENTS, Paged, fading, paged, segments
from torch import Tensor

from vtoken.kernels.attention_mass import QuerySegments, attention_mass_reference
from vtoken.kernels.cpu.attention_mass import AttentionMass
from vtoken.kernels.cpu.decode_attention import DecodeAttention
from vtoken.kernels.cpu.decode_plan import SHORTEST, divide
from vtoken.kernels.cpu.parts import exponentials, maximum
from vtoken.kernels.cpu.vectors import LANES, tile_product, tile_shape
from vtoken.kernels.decode_attention import decode_attention_reference
from vtoken.kernels.jit import njit

LENGTHS = [1, 15, 16, 17, 300, 256, 257, 1000]
SHAPES = [
    # query heads, KV heads, head size, block size
    (9, 3, 64, 32),
    (4, 4, 32, 16),  # MHA
    (7, 1, 80, 16),  # MQA; rows that do not fill the last tile, a width of five vectors
    (26, 2, 16, 48),  # more rows than a tile of registers has
]
POISONS = [(torch.nan, 1e30), (1e30, torch.nan), (-torch.inf, torch.inf), (0.0, 0.0)]


def problem(
    shape: tuple[int, int, int, int],
    lengths: list[int] = LENGTHS,
    dtype: torch.dtype = torch.float32,
    poison: tuple[float, float] = POISONS[0],
    queries: int | None = None,
) -> Paged:
    query_heads, heads, head_size, size = shape
    return paged(lengths, (query_heads, heads), head_size, size, dtype, "vec", queries, poison)


def decode(p: Paged, with_mass: bool = True) -> tuple[Tensor, Tensor]:
    """Output, and mass per lane with five numbers that belong to nobody before and after."""
    attention = DecodeAttention(p.key_cache, p.value_cache, p.query.shape[1])
    attention.plan(p.lengths, p.block_table, p.offsets + 5)
    output = torch.full_like(p.query, torch.nan)
    mass = torch.zeros(attention.lanes, int(p.lengths.sum()) + 10)
    attention(p.query, p.key_cache, p.value_cache, p.scale, output, mass if with_mass else None)
    return output, mass


def decode_expected(p: Paged) -> tuple[Tensor, Tensor]:
    output = torch.full(p.query.shape, torch.nan)
    mass = torch.zeros(1, int(p.lengths.sum()) + 10)
    decode_attention_reference(
        p.query, p.key_cache, p.value_cache, p.block_table, p.lengths, p.scale, output, mass, p.offsets + 5
    )
    return output, mass[0]


SEGMENTS = segments(
    # many queries of a long context, a few that keep apart, a prompt's beginning, one on its own, a part's boundary
    first=[0, 100, 40, 39, 120],
    count=[39, 5, 33, 1, 7],
    context=[900, 290, 1, 7, 251],
    row=[7, 4, 5, 3, 6],
    offset=[3, 1000, 3000, 3100, 3200],
    stride=[0, 300, 0, 0, 0],
)
SEGMENTS_MASS = 3500
QUERIES = 130


def observe(p: Paged, parts: QuerySegments = SEGMENTS, decay: float | list[float] = 0.875) -> Tensor:
    attention = AttentionMass(p.key_cache, p.query.shape[1])
    attention.plan(p.block_table, fading(parts, decay))
    mass = torch.zeros(attention.lanes, SEGMENTS_MASS)
    attention(p.query, p.key_cache, p.scale, mass)
    return mass


def observe_expected(p: Paged, parts: QuerySegments = SEGMENTS, decay: float | list[float] = 0.875) -> Tensor:
    mass = torch.zeros(1, SEGMENTS_MASS)
    attention_mass_reference(p.query, p.key_cache, p.block_table, fading(parts, decay), p.scale, mass)
    return mass[0]


class TestDecodeAttention:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_equals_the_reference(self, shape: tuple[int, int, int, int]) -> None:
        p = problem(shape)
        (output, mass), (expected, expected_mass) = decode(p), decode_expected(p)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=3e-6)
        torch.testing.assert_close(mass.sum(dim=0), expected_mass, rtol=1e-5, atol=1e-6)
        assert not mass[:, :5].any() and not mass[:, -5:].any()

    def test_bfloat16(self) -> None:
        p = problem(SHAPES[0], dtype=torch.bfloat16)
        (output, mass), (expected, expected_mass) = decode(p), decode_expected(p)
        assert output.dtype == torch.bfloat16
        torch.testing.assert_close(output.float(), expected, rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(mass.sum(dim=0), expected_mass, rtol=1e-5, atol=1e-6)

    def test_the_same_output_without_mass(self) -> None:
        p = problem(SHAPES[0])
        (with_mass, _), (without, mass) = decode(p), decode(p, with_mass=False)
        assert torch.equal(with_mass, without) and not mass.any()

    @pytest.mark.parametrize("lengths", [[5], [1000], [2, 700, 1], LENGTHS])
    def test_any_number_of_threads(self, threads: Callable[[int], None], lengths: list[int]) -> None:
        """Softmaxes of one piece and of several, pieces of one thread and of several, threads without any."""
        p = problem(SHAPES[0], lengths)
        expected, expected_mass = decode_expected(p)
        for count in (1, 2, 3, 5, 8):
            threads(count)
            output, mass = decode(p)
            assert len(mass) == count
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=3e-6)
            torch.testing.assert_close(mass.sum(dim=0), expected_mass, rtol=1e-5, atol=1e-6)
            again, mass_again = decode(p)
            assert torch.equal(output, again) and torch.equal(mass, mass_again)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nothing_unused_has_an_influence(self, dtype: torch.dtype) -> None:
        finite = [(1e38, 1e38), *POISONS]
        results = [decode(problem(SHAPES[0], dtype=dtype, poison=poison)) for poison in finite]
        for output, mass in results[1:]:
            assert torch.equal(output, results[0][0]) and torch.equal(mass, results[0][1])

    def test_poison_within_the_length_is_seen(self) -> None:
        p = problem(SHAPES[0], [15, 300])
        p.lengths += 1
        output, mass = decode(p)
        assert output.isnan().all() and mass[:, 5:-5].sum(dim=0).isnan().all()

    def test_logits_beyond_the_range_of_exponentials(self) -> None:
        p = problem(SHAPES[0])
        p.query *= 300
        (output, mass), (expected, expected_mass) = decode(p), decode_expected(p)
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(mass.sum(dim=0), expected_mass, rtol=1e-3, atol=1e-3)
        assert not output.isnan().any()

    def test_a_growing_maximum(self) -> None:
        """Each part's largest logit exceeds the one before by far: what was summed up must shrink to nothing."""
        p = problem(SHAPES[1], [1024])
        p.query.fill_(1)
        for block in range(64):
            p.key_cache[p.block_table[0, block]] = 10.0 * block
        output, mass = decode(p)
        expected, expected_mass = decode_expected(p)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mass.sum(dim=0), expected_mass)
        assert abs(mass[:, -21:-5].sum() - 4) < 1e-5

    def test_queries_in_a_larger_tensor(self) -> None:
        """As they come out of a layer that computes queries, keys and values at once, and go into a padded output."""
        p = problem(SHAPES[0])
        expected, _ = decode(p)
        rows, heads, head_size = p.query.shape
        together = torch.full((rows, 15 * head_size), torch.nan)
        together[:, : heads * head_size] = p.query.flatten(1)
        p.query = together[:, : heads * head_size].view(rows, heads, head_size)
        assert not p.query.is_contiguous()
        output, _ = decode(p)
        assert torch.equal(output, expected)

    def test_heads_that_are_not_contiguous(self) -> None:
        p = problem(SHAPES[0])
        expected, _ = decode(p)
        p.query = p.query.transpose(1, 2).contiguous().transpose(1, 2)  # and so the output, made like it
        assert p.query.stride(2) == 9
        output, _ = decode(p)
        assert output.stride(2) == 9 and torch.equal(output, expected)

    def test_mass_is_added(self) -> None:
        p = problem(SHAPES[0])
        _, once = decode(p)
        attention = DecodeAttention(p.key_cache, p.value_cache, 9)
        attention.plan(p.lengths, p.block_table, p.offsets + 5)
        mass = torch.full_like(once, 64)
        attention(p.query, p.key_cache, p.value_cache, p.scale, torch.empty_like(p.query), mass)
        torch.testing.assert_close(mass - 64, once, rtol=0, atol=5e-5)
        assert (mass[:, :5] == 64).all() and (mass[:, -5:] == 64).all()

    def test_plans_of_growing_and_shrinking_steps(self) -> None:
        attention = DecodeAttention(*(problem(SHAPES[0]).key_cache, problem(SHAPES[0]).value_cache), 9)
        for lengths in ([5], LENGTHS, [1000, 1], []):
            p = problem(SHAPES[0], lengths) if lengths else problem(SHAPES[0], [1], queries=0)
            output = torch.full_like(p.query, torch.nan)
            attention.plan(p.lengths[: len(lengths)], p.block_table)
            attention(p.query, p.key_cache, p.value_cache, p.scale, output)
            if lengths:
                torch.testing.assert_close(output, decode_expected(p)[0], rtol=1e-5, atol=3e-6)

    def test_what_was_not_planned_is_refused(self) -> None:
        p = problem(SHAPES[0])
        attention = DecodeAttention(p.key_cache, p.value_cache, 9)
        arguments = (p.query, p.key_cache, p.value_cache, p.scale, torch.empty_like(p.query))
        with pytest.raises(ValueError, match="call plan for each step"):
            attention(*arguments)
        attention.plan(p.lengths, p.block_table)
        with pytest.raises(ValueError, match="no room"):
            attention(*arguments, torch.zeros(attention.lanes, 10_000))
        attention.plan(p.lengths, p.block_table, p.offsets)
        for lanes, numbers in ((attention.lanes, int(p.lengths.sum()) - 1), (attention.lanes - 1, 10_000)):
            with pytest.raises(ValueError, match="no room"):
                attention(*arguments, torch.zeros(lanes, numbers))
        with pytest.raises(ValueError, match="no room"):
            attention(*arguments, torch.zeros(attention.lanes, 10_000, dtype=torch.float64))


class TestAttentionMass:
    @pytest.mark.parametrize("shape", [SHAPES[0], *SHAPES[2:]])
    @pytest.mark.parametrize("decay", [1.0, [0.875, 0.5, 1.0, 0.9, 0.99]])
    def test_equals_the_reference(self, shape: tuple[int, int, int, int], decay: float | list[float]) -> None:
        p = problem(shape, queries=QUERIES)
        mass = observe(p, decay=decay)
        torch.testing.assert_close(mass.sum(dim=0), observe_expected(p, decay=decay), rtol=1e-5, atol=1e-6)

    def test_bfloat16(self) -> None:
        p = problem(SHAPES[0], dtype=torch.bfloat16, queries=QUERIES)
        torch.testing.assert_close(observe(p).sum(dim=0), observe_expected(p), rtol=1e-5, atol=1e-6)

    def test_any_number_of_threads(self, threads: Callable[[int], None]) -> None:
        p = problem(SHAPES[0], queries=QUERIES)
        expected = observe_expected(p)
        for count in (1, 2, 3, 8):
            threads(count)
            mass = observe(p)
            assert len(mass) == count
            torch.testing.assert_close(mass.sum(dim=0), expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(mass, observe(p))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nothing_unused_has_an_influence(self, dtype: torch.dtype) -> None:
        results = [observe(problem(SHAPES[0], dtype=dtype, poison=poison, queries=QUERIES)) for poison in POISONS]
        for mass in results[1:]:
            assert torch.equal(mass, results[0])

    def test_poison_within_the_context_is_seen(self) -> None:
        p = problem(SHAPES[0], [15], queries=2)
        lone = segments(first=[0], count=[2], context=[15], row=[0], offset=[0], stride=[15])
        mass = observe(p, lone).sum(dim=0)
        assert not mass[:15].isnan().any() and mass[15:31].isnan().all()

    def test_one_query_is_a_decode(self) -> None:
        p = problem(SHAPES[0])
        _, expected = decode_expected(p)
        rows, ones = list(range(len(LENGTHS))), [1] * len(LENGTHS)
        lone = segments(
            first=rows, count=ones, context=LENGTHS, row=rows, offset=p.offsets.tolist(), stride=[0] * len(rows)
        )
        mass = observe(p, lone, decay=0.5).sum(dim=0)
        torch.testing.assert_close(mass[: len(expected) - 10], expected[5:-5], rtol=1e-5, atol=1e-6)

    def test_queries_in_a_larger_tensor(self) -> None:
        p = problem(SHAPES[0], queries=QUERIES)
        expected = observe(p)
        together = torch.full((QUERIES, 15 * 64), torch.nan)
        together[:, : 9 * 64] = p.query.flatten(1)
        p.query = together[:, : 9 * 64].view(QUERIES, 9, 64)
        assert torch.equal(observe(p), expected)

    def test_no_segments(self) -> None:
        assert not observe(problem(SHAPES[0]), NO_SEGMENTS).any()

    def test_what_was_not_planned_is_refused(self) -> None:
        p = problem(SHAPES[0], queries=QUERIES)
        attention = AttentionMass(p.key_cache, 9)
        attention.plan(p.block_table, SEGMENTS)
        with pytest.raises(ValueError, match="call plan for each step"):
            attention(p.query[:126], p.key_cache, p.scale, torch.zeros(attention.lanes, SEGMENTS_MASS))
        with pytest.raises(ValueError, match="no room"):
            attention(p.query, p.key_cache, p.scale, torch.zeros(attention.lanes, 3200))


class TestRefusals:
    @pytest.mark.parametrize("build", [lambda k, v: DecodeAttention(k, v, 4), lambda k, v: AttentionMass(k, 4)])
    def test_other_caches(self, build: Callable[[Tensor, Tensor], object]) -> None:
        for dtype in (torch.float16, torch.float64):
            p = paged([3], (4, 2), dtype=dtype, layout="vec")
            with pytest.raises(ValueError, match=f"a {dtype} KV cache is not read on the CPU; use"):
                build(p.key_cache, p.value_cache)
        for layout in ("tokens first", "heads first"):
            p = paged([3], (4, 2), layout=layout)
            with pytest.raises(ValueError, match="a key cache with strides"):
                build(p.key_cache, p.value_cache)
        for size, head_size in ((8, 32), (16, 40)):
            p = paged([3], (4, 2), head_size, size, layout="vec")
            with pytest.raises(ValueError, match="must be multiples of 16"):
                build(p.key_cache, p.value_cache)

    def test_values_in_another_layout(self) -> None:
        p = paged([3], (4, 2), layout="vec")
        other = paged([3], (4, 2))
        with pytest.raises(ValueError, match="a value cache with strides"):
            DecodeAttention(p.key_cache, other.value_cache, 4)


class TestDivision:
    """How a decode step's softmaxes are cut into pieces; size 4, parts of 3 blocks."""

    def test_one_softmax_between_two_threads(self) -> None:
        plan = divide(np.array([43]), heads=1, lanes=2, size=4, per_part=3)
        pieces = plan.pieces
        assert pieces["block"].tolist() == [0, 5] and pieces["tokens"].tolist() == [20, 23]
        assert plan.lane_pieces.tolist() == [0, 1, 2] and plan.divided
        assert pieces["state"].tolist() == [2, 3]
        assert pieces["first_state"].tolist() == [2, 2] and pieces["states"].tolist() == [2, 2]
        assert (plan.parts, plan.states) == (2, 4)

    def test_no_cut_near_an_end(self) -> None:
        plan = divide(np.array([24, 40]), heads=1, lanes=2, size=4, per_part=3)
        assert plan.pieces["block"].tolist() == [0, 0] and plan.pieces["tokens"].tolist() == [24, 40]
        assert not plan.divided and plan.lane_pieces.tolist() == [0, 1, 2]

    def test_nothing_to_divide(self) -> None:
        plan = divide(np.array([], dtype=np.int64), heads=2, lanes=3, size=4, per_part=3)
        assert len(plan.pieces) == 0 and plan.lane_pieces.tolist() == [0, 0, 0, 0] and not plan.divided

    @pytest.mark.parametrize("seed", range(40))
    def test_every_token_once_and_the_load_even(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, int(rng.choice([3, 50, 900])), rng.integers(1, 9))
        heads, lanes, size = int(rng.integers(1, 4)), int(rng.integers(1, 7)), 4
        plan = divide(lengths, heads, lanes, size, per_part=3)
        seen = [[0] * int(length) for length in np.repeat(lengths, heads)]
        load = np.zeros(lanes, dtype=np.int64)
        states: dict[int, tuple[int, int]] = {}
        for lane in range(lanes):
            places = set()
            for n in range(plan.lane_pieces[lane], plan.lane_pieces[lane + 1]):
                request, head, block, tokens, part, state, first_state, count = plan.pieces[n].tolist()
                softmax = request * heads + head
                assert tokens > 0
                for token in range(block * size, block * size + tokens):
                    seen[softmax][token] += 1
                parts = -(-tokens // (3 * size))
                load[lane] += -(-tokens // size)
                assert part + parts <= plan.parts
                if count == 1:
                    assert block == 0 and tokens == lengths[request] and part == 0 and state == lane
                else:
                    mine = set(range(part, part + parts))
                    assert not places & mine
                    places |= mine
                    assert first_state <= state < first_state + count <= plan.states and state not in states
                    states[state] = (softmax, first_state)
        assert seen == [[1] * len(tokens) for tokens in seen]
        assert len(set(states.values())) == len({softmax for softmax, _ in states.values()})
        assert plan.divided == bool(states) and plan.states == lanes + len(states)
        blocks = int((-(-lengths // size)).sum()) * heads
        assert load.max() <= -(-blocks // lanes) + 2 * SHORTEST


class TestArithmetic:
    @pytest.mark.parametrize(
        "rows, width, narrow",
        [(1, 64, False), (2, 32, False), (3, 32, False), (3, 32, True), (6, 16, False), (4, 48, True)],
    )
    @pytest.mark.parametrize("accumulate", [False, True])
    def test_product_of_a_tile(self, rows: int, width: int, narrow: bool, accumulate: bool) -> None:
        tile_rows, vectors = tile_shape(rows, width)
        columns = vectors * LANES
        n = 37
        product = tile_product(tile_rows, vectors, 50, width, 70, narrow, accumulate)

        @njit
        def call(a, b, c, n):  # type: ignore[no-untyped-def]
            product(a, b, c, n, b)

        generator = torch.Generator().manual_seed(rows)
        a = torch.randn(tile_rows, 50, generator=generator)
        b = torch.randn(n, width, generator=generator).to(torch.bfloat16 if narrow else torch.float32)
        c = torch.randn(tile_rows, 70, generator=generator)
        expected = c.clone()
        expected[:, :columns] = a[:, :n] @ b[:, :columns].float() + accumulate * c[:, :columns]
        call(a.data_ptr(), b.data_ptr(), c.data_ptr(), n)
        torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(c[:, columns:], expected[:, columns:])

    @pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 12, 13, 71])
    @pytest.mark.parametrize("width", [16, 32, 48, 64, 128])
    def test_tiles_cover_the_rows_and_fit_registers(self, rows: int, width: int) -> None:
        tile_rows, vectors = tile_shape(rows, width)
        assert width % (vectors * LANES) == 0 and tile_rows <= rows
        assert tile_rows * vectors <= 12
        assert -(-rows // tile_rows) * tile_rows - rows < -(-rows // tile_rows)

    def test_exponentials(self) -> None:
        logits = np.concatenate([np.linspace(-125.9, 0, 200_001), np.arange(-126, 1)]).astype(np.float32)
        values = logits.copy()
        total = exponentials(values.ctypes.data, len(values), np.float32(0))
        exact = np.exp2(logits.astype(np.float64))
        assert np.abs(values / exact - 1).max() < 3e-7
        assert abs(total / exact.sum() - 1) < 1e-6
        assert (values[-127:] == np.exp2(np.arange(-126.0, 1))).all()

    def test_exponentials_of_very_small_numbers_are_nearly_nothing(self) -> None:
        values = np.array([-127, -1e30, -np.inf], dtype=np.float32)
        exponentials(values.ctypes.data, 3, np.float32(0))
        assert (values == 2.0**-126).all()

    def test_exponential_of_no_number(self) -> None:
        values = np.array([np.nan, -1], dtype=np.float32)
        assert np.isnan(exponentials(values.ctypes.data, 2, np.float32(0)))
        assert np.isnan(values[0]) and values[1] == 0.5

    @pytest.mark.parametrize("count", [1, 7, 8, 100])
    def test_maximum(self, count: int) -> None:
        rng = np.random.default_rng(count)
        for shift in (-50, 0, 50):
            numbers = (rng.standard_normal(count) * 10 + shift).astype(np.float32)
            for least in (-np.inf, -50.0, 0.0, 55.5):
                expected = max(numbers.max(), np.float32(least))
                assert maximum(numbers.ctypes.data, count, np.float32(least)) == expected
            numbers[count // 2] = np.nan
            assert np.isnan(maximum(numbers.ctypes.data, count, np.float32(0)))
