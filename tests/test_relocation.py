"""Where a token's numbers lie in a block is probed, and a token that moves keeps every bit of them."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from vtoken.kernels.cpu.relocation import pieces_of
from vtoken.kernels.layout import BlockLayout, WriteTokens, check_vec_layout, positions_of, probe_layout, vec_views
from vtoken.kernels.relocation import Relocator, bits_of, relocate_reference

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


def packed(blocks: int, size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Half of the slots of some blocks to consecutive ones of others; the last token again wherever its block ends."""
    random = np.random.default_rng(seed)
    order = random.permutation(blocks)
    slots = (order[: 2 * blocks // 3, None] * size + np.arange(size))[random.random((2 * blocks // 3, size)) < 0.5]
    full = -(-len(slots) // size)
    sources = np.concatenate([slots, np.full(full * size - len(slots), slots[-1])])
    return sources, (order[-full:, None] * size + np.arange(size)).ravel()


def filled(blocks: int, size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of some blocks to holes of others, in order, so that many moves have the same two blocks."""
    slots = np.random.default_rng(seed).random((blocks, size)) < 0.5
    slots = [block * size + np.flatnonzero(slots[block]) for block in range(blocks)]
    sources, holes = np.concatenate(slots[blocks // 2 :]), np.concatenate(slots[: blocks // 2])
    count = min(len(sources), len(holes))
    return sources[:count], holes[:count]


MOVES = {
    "anywhere": lambda blocks, size: random_moves(blocks, size, 30),
    "packed": packed,
    "filled": filled,
    "one": lambda blocks, size: random_moves(blocks, size, 1),
    "all of a block but one": lambda blocks, size: (np.arange(size - 1) + size, np.arange(size - 1) + 3 * size),
    "within one block": lambda blocks, size: (np.array([1, 2, 2]) + size, np.array([0, 3, size - 1]) + size),
}


def bits(cache: Tensor) -> Tensor:
    return cache.contiguous().view(torch.uint8)


class TestRelocator:
    @pytest.mark.parametrize("strided", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
    @pytest.mark.parametrize("write", LAYOUTS)
    @pytest.mark.parametrize("moves", MOVES)
    def test_equals_the_reference_bit_for_bit(
        self, write: WriteTokens, moves: str, dtype: torch.dtype, strided: bool
    ) -> None:
        layout = probe_layout(write, scratch(), H, D)
        cache = random_cache(3, 11, S * NUMBERS, dtype, strided)
        sources, destinations = MOVES[moves](11, S)
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

    @pytest.mark.parametrize("moves", MOVES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize(("size", "heads", "head"), [(16, 3, 64), (32, 2, 64), (48, 1, 80), (128, 1, 32)])
    def test_shapes_of_models(self, size: int, heads: int, head: int, dtype: torch.dtype, moves: str) -> None:
        """Blocks whose rows are whole cache lines, and blocks that are moved in several pieces."""
        block = torch.arange(size * 2 * heads * head)
        keys, values = vec_views(block.view(1, heads, size, 2 * head))
        layout = BlockLayout(torch.stack([keys[0], values[0]], dim=1).flatten(1))
        cache = random_cache(2, 7, len(block), dtype)
        sources, destinations = MOVES[moves](7, size)
        expected = cache.clone()
        relocate_reference(bits_of(expected), layout, torch.from_numpy(sources), torch.from_numpy(destinations))
        Relocator(cache, layout)(sources, destinations)
        assert torch.equal(bits(cache), bits(expected))

    @pytest.mark.parametrize("moves", MOVES)
    @pytest.mark.parametrize("apart", [1, 2])
    def test_any_map_and_numbers_apart(self, moves: str, apart: int) -> None:
        """The general way: a layout without any order, or a cache whose numbers are not adjacent."""
        elements = torch.randperm(S * NUMBERS, generator=torch.Generator().manual_seed(3)).view(S, NUMBERS)
        layout = BlockLayout(elements) if apart == 1 else probe_layout(with_keys_transposed, scratch(), H, D)
        cache = random_cache(3, 11, S * NUMBERS * apart, torch.float32)[:, :, ::apart]
        sources, destinations = MOVES[moves](11, S)
        expected = cache.clone()
        relocate_reference(bits_of(expected), layout, torch.from_numpy(sources), torch.from_numpy(destinations))
        Relocator(cache, layout)(sources, destinations)
        assert torch.equal(bits(cache), bits(expected))

    def test_a_source_may_go_to_several_places(self) -> None:
        layout = probe_layout(with_keys_transposed, scratch(), H, D)
        cache = random_cache(2, 5, S * NUMBERS, torch.float32)
        sources, destinations = np.full(S, 3), np.arange(S) + 2 * S
        Relocator(cache, layout)(sources, destinations)
        tokens = cache[:, (torch.from_numpy(destinations) // S)[:, None], layout.elements]
        assert torch.equal(bits(tokens), bits(cache[:, 0, layout.elements[3]][:, None].expand_as(tokens)))

    def test_the_cache_lives_as_long_as_what_moves_tokens_in_it(self) -> None:
        """The compiled function knows it by address alone."""

        class Memory(np.ndarray):
            """Of a kind that can be watched."""

        memory = np.zeros((2, 5, S * NUMBERS), dtype=np.float32).view(Memory)
        alive = weakref.ref(memory)
        relocator = Relocator(torch.from_numpy(memory), probe_layout(as_rows, scratch(), H, D))
        del memory
        gc.collect()
        assert alive() is not None
        del relocator
        gc.collect()
        assert alive() is None

    def test_another_thread_runs_meanwhile(self) -> None:
        """It does not hold the interpreter's lock: one that did would let nobody count until it is through."""
        layout = BlockLayout(torch.arange(16 * 1024).view(16, 1024))
        relocate = Relocator(torch.zeros(8, 120, 16 * 1024), layout)
        sources, destinations = packed(120, 16)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)  # nobody is asked to give the lock away, so who gets it was given it
        try:
            copying, counted = threading.Event(), threading.Event()

            def count() -> None:
                copying.wait()
                counted.set()

            thread = threading.Thread(target=count)
            thread.start()
            seen = False
            for _ in range(50):
                copying.set()
                relocate(sources, destinations)
                seen = seen or counted.is_set()
            thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert seen

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


class TestPieces:
    """How the map is split decides the speed alone, so it is tested apart."""

    @staticmethod
    def of(write: WriteTokens, most: int = 1000) -> list[tuple[int, int, int, int]] | None:
        pieces = pieces_of(probe_layout(write, scratch(), H, D).elements.numpy(), most)
        return None if pieces is None else pieces.tolist()

    def test_rows_are_one(self) -> None:
        assert self.of(as_rows) == [(0, NUMBERS, 1, NUMBERS)]

    def test_transposed_keys_are_one_per_head_and_so_are_values(self) -> None:
        head = 2 * S * D
        expected = [[(h * head, D, S, 1), (h * head + S * D, D, 1, D)] for h in range(H)]
        assert self.of(with_keys_transposed) == [piece for pieces in expected for piece in pieces]

    def test_transposed_keys_are_cut_so_that_a_piece_is_small(self) -> None:
        pieces = self.of(with_keys_transposed, most=2 * S)
        assert pieces is not None and pieces[:3] == [(0, 2, S, 1), (2 * S, 2, S, 1), (S * D, D, 1, D)]

    def test_interleaved_pairs(self) -> None:
        pieces = self.of(with_key_pairs_interleaved)
        assert pieces is not None and pieces[:3] == [(0, 2, 1, 2), (2 * S, 2, 1, 2), (S * D, D, 1, D)]

    def test_what_lies_unevenly_has_none(self) -> None:
        elements = np.arange(S * NUMBERS).reshape(S, NUMBERS)
        elements[3, [4, 5]] = elements[3, [5, 4]]
        assert pieces_of(elements, 1000) is None


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
