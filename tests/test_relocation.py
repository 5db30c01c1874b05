"""Where a token's numbers lie in a block is probed, and a token that moves keeps every bit of them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from vtoken.kernels.layout import BlockLayout, WriteTokens, check_vec_layout, positions_of, probe_layout, vec_views
from vtoken.kernels.relocation import Relocator, relocate_reference

S, H, D = 8, 2, 4
NUMBERS = 2 * H * D

# -- layouts made up for the tests: each writes [S, H, D] keys and values into a cache of blocks ---------------------


def as_rows(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """[blocks, S, 2 * H * D]: a token after the other, K before V."""
    rows = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
    cache.view(-1, NUMBERS)[slots] = rows


def with_keys_transposed(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """[blocks, H, S * 2 * D]: per head K as [D, S], then V as [S, D]."""
    halves = cache.view(-1, H, 2, S * D)
    block, offset = slots // S, slots % S
    halves[:, :, 0].view(-1, H, D, S)[block, :, :, offset] = key
    halves[:, :, 1].view(-1, H, S, D)[block, :, offset] = value


def with_key_pairs_interleaved(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """[blocks, H, S * 2 * D]: per head K as [D / 2, S, 2], then V as [S, D]."""
    halves = cache.view(-1, H, 2, S * D)
    block, offset = slots // S, slots % S
    halves[:, :, 0].view(-1, H, D // 2, S, 2)[block, :, :, offset] = key.view(-1, H, D // 2, 2)
    halves[:, :, 1].view(-1, H, S, D)[block, :, offset] = value


def only_keys(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    as_rows(key, key, cache, slots)


def only_half(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    as_rows(key, torch.zeros_like(value), cache, slots)


def neighbours_mixed(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    as_rows(key, torch.maximum(value, value.roll(1, dims=0)), cache, slots)


def one_scale_for_all(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    as_rows(key, value, cache, slots)
    cache.view(-1)[-1] = key.sum()


LAYOUTS = [as_rows, with_keys_transposed, with_key_pairs_interleaved]
BROKEN = [only_keys, only_half, neighbours_mixed, one_scale_for_all]


def scratch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((1, S * NUMBERS), torch.nan, dtype=dtype)


def elements_of_rows() -> list[list[int]]:
    return [[offset * NUMBERS + number for number in range(NUMBERS)] for offset in range(S)]


def element(layout: BlockLayout, offset: int, value: bool, head: int, dimension: int) -> int:
    return int(layout.elements[offset, (value * H + head) * D + dimension])


class TestProbe:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_rows(self, dtype: torch.dtype) -> None:
        layout = probe_layout(as_rows, scratch(dtype), H, D)
        assert layout.block_size == S and layout.elements.dtype == torch.int64
        assert layout.elements.tolist() == elements_of_rows()

    def test_keys_transposed(self) -> None:
        layout = probe_layout(with_keys_transposed, scratch(), H, D)
        for offset in range(S):
            for head in range(H):
                for d in range(D):
                    assert element(layout, offset, False, head, d) == head * 2 * S * D + d * S + offset
                    assert element(layout, offset, True, head, d) == (head * 2 + 1) * S * D + offset * D + d

    def test_key_pairs_interleaved(self) -> None:
        layout = probe_layout(with_key_pairs_interleaved, scratch(), H, D)
        for offset in range(S):
            for d in range(D):
                assert element(layout, offset, False, 1, d) == 2 * S * D + (d // 2) * 2 * S + 2 * offset + d % 2

    @pytest.mark.parametrize("write", LAYOUTS)
    def test_every_place_of_a_block_belongs_to_one_token(self, write: WriteTokens) -> None:
        elements = probe_layout(write, scratch(), H, D).elements
        assert sorted(elements.flatten().tolist()) == list(range(S * NUMBERS))

    def test_places_are_counted_in_storage_order(self) -> None:
        """A backend may hand out a permuted view of its block."""
        permuted = torch.empty(1, H, S, 2 * D).permute(0, 2, 1, 3)

        def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
            cache[slots // S, slots % S] = torch.cat([key, value], dim=-1)

        layout = probe_layout(write, permuted, H, D)
        assert element(layout, offset=3, value=True, head=1, dimension=2) == (1 * S + 3) * 2 * D + D + 2

    @pytest.mark.parametrize("write", BROKEN)
    def test_tokens_that_cannot_be_moved_alone_are_refused(self, write: WriteTokens) -> None:
        sentence = "^vtoken: the attention backend does not keep the tokens of a KV block in separate places, "
        with pytest.raises(ValueError, match=sentence) as caught:
            probe_layout(write, scratch(), H, D)
        assert "\n" not in str(caught.value) and str(caught.value).endswith("choose another attention backend.")

    def test_a_block_with_padding_is_refused(self) -> None:
        def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
            rows = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
            cache[:, : len(rows) * NUMBERS].view(-1, NUMBERS)[slots] = rows

        with pytest.raises(ValueError, match="separate places"):
            probe_layout(write, torch.empty(1, S * NUMBERS + 5), H, D)


class TestVecViews:
    def test_they_show_what_was_written(self) -> None:
        key, value = torch.randn(2, 11, H, D).unbind()
        cache = torch.full((5, H, S, 2 * D), torch.nan)
        slots = torch.randperm(5 * S)[:11]
        with_keys_transposed(key, value, cache, slots)
        keys, values = vec_views(cache)
        assert keys.shape == values.shape == (5, S, H, D)
        assert torch.equal(keys[slots // S, slots % S], key) and torch.equal(values[slots // S, slots % S], value)
        assert keys.isnan().sum() == values.isnan().sum() == (5 * S - 11) * H * D

    def test_they_share_the_memory_of_a_layer_within_a_larger_cache(self) -> None:
        storage = torch.zeros(3, 2, H * S * 2 * D + 7)
        layer = storage[1, :, :-7].view(2, H, S, 2 * D)
        for view in vec_views(layer):
            view += 1
        assert layer.eq(1).all() and storage.sum() == layer.numel()

    def test_the_layout_is_checked(self) -> None:
        check_vec_layout(probe_layout(with_keys_transposed, scratch(), H, D), H, D)
        for write in (as_rows, with_key_pairs_interleaved):
            with pytest.raises(ValueError, match=r"^vtoken: .* transposed, .* set block_size=16 .*\.$") as caught:
                check_vec_layout(probe_layout(write, scratch(), H, D), H, D)
            assert "\n" not in str(caught.value)

    def test_positions_lie_along_a_row_of_the_table(self) -> None:
        numbers = torch.arange(4 * S).view(4, S, 1, 1)
        row = torch.tensor([2, 0, 99], dtype=torch.int32)
        assert positions_of(numbers, row, S + 2).flatten().tolist() == [*range(2 * S, 3 * S), 0, 1]


# -- moving ---------------------------------------------------------------------------------------------------------


def random_cache(layers: int, blocks: int, numbers: int, dtype: torch.dtype, strided: bool = False) -> Tensor:
    """All layers, [layers, blocks, numbers per block], any bits at all: NaNs with a payload too."""
    generator = torch.Generator().manual_seed(layers * blocks)
    spare = 3 if strided else 0
    raw = torch.randint(
        -128, 128, (layers + 1, blocks, (numbers + spare) * dtype.itemsize), generator=generator, dtype=torch.int8
    )
    cache = raw.view(dtype)
    return cache[:layers, :, :numbers] if not strided else cache.flip(0).contiguous()[1:, :, spare:]


def random_moves(blocks: int, size: int, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """``count`` sources and destinations, no slot named twice."""
    slots = np.random.default_rng(seed).permutation(blocks * size)[: 2 * count]
    return slots[:count].astype(np.int64), slots[count:].astype(np.int64)


def bits(cache: Tensor) -> Tensor:
    return cache.contiguous().view(torch.uint8)


class TestRelocator:
    @pytest.mark.parametrize("strided", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
    @pytest.mark.parametrize("write", LAYOUTS)
    def test_equals_the_reference_bit_for_bit(self, write: WriteTokens, dtype: torch.dtype, strided: bool) -> None:
        layout = probe_layout(write, scratch(), H, D)
        cache = random_cache(3, 11, S * NUMBERS, dtype, strided)
        sources, destinations = random_moves(11, S, 30)
        expected, before = cache.clone(), cache.clone()
        whole = expected.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
        relocate_reference(whole, layout, torch.from_numpy(sources), torch.from_numpy(destinations))
        Relocator(cache, layout)(sources, destinations)
        assert torch.equal(bits(cache), bits(expected))
        assert not torch.equal(bits(cache), bits(before))

    @pytest.mark.parametrize("write", LAYOUTS)
    def test_a_moved_token_is_where_it_would_have_been_written(self, write: WriteTokens) -> None:
        layout = probe_layout(write, scratch(), H, D)
        key, value = torch.randn(2, 40, H, D).unbind()
        sources, destinations = random_moves(9, S, 20)
        kept = np.setdiff1d(np.arange(9 * S), np.concatenate([sources, destinations]))[:20]
        cache, expected = torch.zeros(2, 9, S * NUMBERS)
        write(key, value, cache, torch.from_numpy(np.concatenate([sources, kept])))
        write(key, value, expected, torch.from_numpy(np.concatenate([sources, kept])))
        write(key[:20], value[:20], expected, torch.from_numpy(destinations))
        Relocator(cache[None], layout)(sources, destinations)
        assert torch.equal(cache, expected)

    def test_nothing_to_move(self) -> None:
        layout = probe_layout(as_rows, scratch(), H, D)
        cache = random_cache(2, 5, S * NUMBERS, torch.float32)
        before = bits(cache).clone()
        Relocator(cache, layout)(*random_moves(5, S, 0))
        assert torch.equal(bits(cache), before)

    def test_what_lies_between_the_layers_is_left_alone(self) -> None:
        layout = probe_layout(as_rows, scratch(), H, D)
        storage = torch.arange(2.0 * 5 * (S * NUMBERS + 7)).view(2, 5, -1)
        before = storage.clone()
        Relocator(storage[:, :, : S * NUMBERS], layout)(*random_moves(5, S, 12))
        assert torch.equal(storage[:, :, S * NUMBERS :], before[:, :, S * NUMBERS :])
        assert not torch.equal(storage, before)

    def test_swapped_slots_are_a_difference(self) -> None:
        """The control of the comparisons above: they fail if two destinations change places."""
        layout = probe_layout(with_keys_transposed, scratch(), H, D)
        sources, destinations = random_moves(11, S, 30)
        swapped = destinations.copy()
        swapped[[4, 9]] = swapped[[9, 4]]
        one, other = (random_cache(3, 11, S * NUMBERS, torch.float32) for _ in range(2))
        Relocator(one, layout)(sources, destinations)
        Relocator(other, layout)(sources, swapped)
        different = (one != other) & ~(one.isnan() & other.isnan())
        touched = {int(slot) // S for slot in destinations[[4, 9]]}
        assert set(torch.nonzero(different)[:, 1].tolist()) == touched
        assert set(torch.nonzero(different)[:, 0].tolist()) == {0, 1, 2}

    def test_a_wrong_layout_is_a_difference(self) -> None:
        sources, destinations = random_moves(11, S, 30)
        one, other = (random_cache(3, 11, S * NUMBERS, torch.float32) for _ in range(2))
        Relocator(one, probe_layout(as_rows, scratch(), H, D))(sources, destinations)
        Relocator(other, probe_layout(with_keys_transposed, scratch(), H, D))(sources, destinations)
        assert not torch.equal(bits(one), bits(other))


# -- vLLM's own kernel ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_write() -> Callable[[str], WriteTokens]:
    """What vLLM's CPU backend does with new keys and values, in a cache of shape [blocks, H, S, 2 * D]."""
    from vllm._custom_ops import cpu_attn_reshape_and_cache

    def of(isa: str) -> WriteTokens:
        def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
            blocks, heads, size, _ = cache.shape
            key_cache, value_cache = cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
            cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)

        return write

    return of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("isa", "size"), [("vec", 32), ("vec", 128), ("vec16", 16), ("vec16", 48)])
class TestVllmOnTheCpu:
    HEADS, HEAD = 3, 64

    def test_keys_lie_transposed_and_values_in_rows(
        self, vllm_write: Callable[[str], WriteTokens], isa: str, size: int, dtype: torch.dtype
    ) -> None:
        block = torch.empty(1, self.HEADS, size, 2 * self.HEAD, dtype=dtype)
        layout = probe_layout(vllm_write(isa), block, self.HEADS, self.HEAD)
        assert layout.block_size == size
        check_vec_layout(layout, self.HEADS, self.HEAD)
        elements = layout.elements.view(size, 2, self.HEADS, self.HEAD)
        offset = torch.arange(size)[:, None, None]
        head = torch.arange(self.HEADS)[None, :, None] * 2 * size * self.HEAD
        d = torch.arange(self.HEAD)[None, None, :]
        assert torch.equal(elements[:, 0], head + d * size + offset)
        assert torch.equal(elements[:, 1], head + size * self.HEAD + offset * self.HEAD + d)

    def test_a_moved_token_is_where_the_kernel_would_have_written_it(
        self, vllm_write: Callable[[str], WriteTokens], isa: str, size: int, dtype: torch.dtype
    ) -> None:
        write, blocks, layers = vllm_write(isa), 5, 2
        block = torch.empty(1, self.HEADS, size, 2 * self.HEAD, dtype=dtype)
        layout = probe_layout(write, block, self.HEADS, self.HEAD)
        sources, destinations = random_moves(blocks, size, 2 * size)
        cache, expected = torch.zeros(2, layers, blocks, self.HEADS, size, 2 * self.HEAD, dtype=dtype)
        for layer in range(layers):
            key, value = torch.randn(2, len(sources), self.HEADS, self.HEAD).to(dtype).unbind()
            write(key, value, cache[layer], torch.from_numpy(sources))
            write(key, value, expected[layer], torch.from_numpy(sources))
            write(key, value, expected[layer], torch.from_numpy(destinations))
        Relocator(cache.view(layers, blocks, -1), layout)(sources, destinations)
        assert torch.equal(cache, expected)
