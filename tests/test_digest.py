"""A digest is the same for the same bits, wherever a token lies, and another one for anything else."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from test_relocation import LAYOUTS, as_rows, random_cache, random_moves, with_keys_transposed
from torch import Tensor

from vtoken.kernels import digest as module
from vtoken.kernels.digest import digest
from vtoken.kernels.layout import BlockLayout, probe_layout
from vtoken.kernels.relocation import Relocator

S, H, D = 8, 2, 4
NUMBERS = 2 * H * D
ROWS = probe_layout(as_rows, torch.empty(1, S * NUMBERS), H, D)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64]
MASK = 2**64 - 1


def in_python(words: list[int]) -> int:
    """The same hash, with Python's integers: words of 64 bits in, a signed number out."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        return x ^ x >> 31

    total = sum(mix(word + mix((place + 1) * 0x9E3779B97F4A7C15 & MASK) & MASK) for place, word in enumerate(words))
    result = mix(total & MASK)
    return result - 2**64 if result >= 2**63 else result


def of_tokens(tokens: Tensor, layout: BlockLayout = ROWS, numbers: int = S * NUMBERS) -> Tensor:
    """Digests of tokens [M, 2 * H * D], written to slots in a cache of one layer."""
    size = layout.block_size
    cache = torch.zeros(1, -(-len(tokens) // size), numbers, dtype=tokens.dtype)
    slots = torch.arange(len(tokens))
    cache[0, (slots // size)[:, None], layout.elements[slots % size]] = tokens
    return digest(cache, layout, slots)[0]


def token(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(1)).to(dtype)


class TestEqual:
    @pytest.mark.parametrize("strided", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_token_that_moved(self, dtype: torch.dtype, strided: bool) -> None:
        for write in LAYOUTS:
            layout = probe_layout(write, torch.empty(1, S * NUMBERS), H, D)
            cache = random_cache(3, 11, S * NUMBERS, dtype, strided)
            sources, destinations = random_moves(11, S, 30)
            before = digest(cache, layout, torch.from_numpy(sources))
            Relocator(cache, layout)(sources, destinations)
            after = digest(cache, layout, torch.from_numpy(destinations))
            assert torch.equal(before, after)
            assert before.shape == (3, 30) and before.dtype == torch.int64 and before.unique().numel() == 90

    def test_other_layouts_and_block_sizes(self) -> None:
        tokens = torch.randn(40, NUMBERS)
        expected = of_tokens(tokens)
        for size in (8, 4, 16):
            rows = BlockLayout(torch.arange(size * NUMBERS).view(size, NUMBERS))
            assert torch.equal(of_tokens(tokens, rows, size * NUMBERS), expected)
        transposed = probe_layout(with_keys_transposed, torch.empty(1, S * NUMBERS), H, D)
        key, value = tokens.view(40, 2, H, D).unbind(dim=1)
        cache = torch.full((1, 7, S * NUMBERS), torch.nan)
        slots = torch.randperm(7 * S)[:40]
        with_keys_transposed(key, value, cache, slots)
        assert torch.equal(digest(cache, transposed, slots)[0], expected)

    def test_it_is_the_hash_that_it_says(self) -> None:
        """On every device and with every version: nothing here comes from a generator of random numbers."""
        for dtype, bits in [(torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float64, torch.int64)]:
            numbers = token(dtype)
            words = [word & MASK for word in numbers.view(bits).tolist()]
            assert of_tokens(numbers[None]).tolist() == [in_python(words)]

    def test_other_tokens_have_no_influence(self) -> None:
        cache = random_cache(2, 5, S * NUMBERS, torch.float32)
        slots = torch.tensor([0, 9, 38, 9])
        before = digest(cache, ROWS, slots)
        others = torch.tensor([slot for slot in range(5 * S) if slot not in slots])
        cache[:, (others // S)[:, None], ROWS.elements[others % S]] = torch.nan
        assert torch.equal(digest(cache, ROWS, slots), before)
        assert torch.equal(before[:, 1], before[:, 3]) and not torch.equal(before[:, 0], before[:, 1])

    def test_chunks_are_bounded_and_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = random_cache(3, 11, S * NUMBERS, torch.float32)
        slots = torch.from_numpy(np.random.default_rng(0).permutation(11 * S))
        expected = digest(cache, ROWS, slots)
        mixed: list[int] = []
        stock = module._mix
        monkeypatch.setattr(module, "_mix", lambda values: mixed.append(values.numel()) or stock(values))
        for chunk in (1, 7 * 3 * NUMBERS, 7 * 3 * NUMBERS + 5):
            monkeypatch.setattr(module, "CHUNK", chunk)
            mixed.clear()
            assert torch.equal(digest(cache, ROWS, slots), expected)
            assert max(mixed) == max(chunk // (3 * NUMBERS), 1) * 3 * NUMBERS

    def test_no_tokens_and_no_layers(self) -> None:
        cache = random_cache(3, 5, S * NUMBERS, torch.float32)
        assert digest(cache, ROWS, torch.empty(0, dtype=torch.int64)).shape == (3, 0)
        assert digest(cache[:0], ROWS, torch.tensor([1, 2])).shape == (0, 2)


def swapped(numbers: Tensor) -> None:
    numbers[[3, 9]] = numbers[[9, 3]]


def neighbours_swapped(numbers: Tensor) -> None:
    numbers[[0, 1]] = numbers[[1, 0]]


def keys_and_values_exchanged(numbers: Tensor) -> None:
    numbers.copy_(numbers.roll(H * D))


def heads_exchanged(numbers: Tensor) -> None:
    numbers[:D], numbers[D : 2 * D] = numbers[D : 2 * D].clone(), numbers[:D].clone()


def two_signs(numbers: Tensor) -> None:
    """In a plain weighted sum of 64-bit words these two would cancel."""
    numbers[[2, 5]] = -numbers[[2, 5]]


CHANGES = [swapped, neighbours_swapped, keys_and_values_exchanged, heads_exchanged, two_signs]


class TestDifferent:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("change", CHANGES)
    def test_changes(self, change: Callable[[Tensor], None], dtype: torch.dtype) -> None:
        changed = token(dtype)
        change(changed)
        one, other = of_tokens(torch.stack([token(dtype), changed])).tolist()
        assert one != other

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_any_bit(self, dtype: torch.dtype) -> None:
        bits = token(dtype).view(torch.uint8)
        places = torch.arange(8 * len(bits))
        flipped = bits.repeat(len(places), 1)
        flipped[places, places // 8] ^= (1 << places % 8).to(torch.uint8)
        digests = of_tokens(torch.cat([flipped, bits[None]]).view(dtype))
        assert digests.unique().numel() == len(places) + 1

    def test_zeros_of_different_sign_and_nans_of_different_payload(self) -> None:
        numbers = torch.zeros(5, NUMBERS)
        numbers[1, 0] = -0.0
        numbers.view(torch.int32)[2:, 0] = torch.tensor([0x7FC00000, 0x7FC00001, -0x400000])
        assert numbers[2:, 0].isnan().all()
        assert of_tokens(numbers).unique().numel() == 5

    def test_every_layer_has_its_own(self) -> None:
        cache = random_cache(3, 5, S * NUMBERS, torch.float32)
        slots = torch.arange(5 * S)
        before = digest(cache, ROWS, slots)
        cache.view(torch.int32)[1, 2, ROWS.elements[4, 6]] ^= 1
        different = (digest(cache, ROWS, slots) != before).nonzero()
        assert different.tolist() == [[1, 2 * S + 4]]
