"""The norms of keys in a cache, of every layout and dtype that they are read from."""

import numpy as np
import pytest
import torch
from test_relocation import LAYOUTS, as_rows, scratch, with_keys_transposed
from torch import Tensor

from vtoken.kernels.key_norms import KeyNorms, key_norms_reference
from vtoken.kernels.layout import BlockLayout, WriteTokens, probe_layout

LAYERS, BLOCKS, S, H, D = 3, 6, 8, 2, 4


def cache_of(
    write: WriteTokens, dtype: torch.dtype, slots: np.ndarray, seed: int = 0
) -> tuple[Tensor, Tensor, BlockLayout]:
    """A cache that holds NaN but for the tokens at these slots, and their keys [layers, M, H, D]."""
    generator = torch.Generator().manual_seed(seed)
    storage = torch.full((LAYERS, BLOCKS * S * 2 * H * D + 5), torch.nan, dtype=dtype)  # layers with a gap between
    keys = torch.randn(LAYERS, len(slots), H, D, generator=generator).to(dtype)
    cache = storage[:, :-5].view(LAYERS, BLOCKS, -1)
    for layer in range(LAYERS):
        whole = cache[layer].clone()
        write(keys[layer], torch.full_like(keys[layer], 1e30), whole, torch.from_numpy(slots))
        cache[layer] = whole
    return cache, keys, probe_layout(write, scratch(dtype), H, D)


@pytest.fixture
def slots() -> np.ndarray:
    return np.random.default_rng(0).permutation(BLOCKS * S)[:19].astype(np.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", LAYOUTS)
class TestKeyNorms:
    def test_equals_the_norms_of_the_keys_written(
        self, write: WriteTokens, dtype: torch.dtype, slots: np.ndarray
    ) -> None:
        cache, keys, layout = cache_of(write, dtype, slots)
        norms = KeyNorms(cache, layout, H, D)(slots)
        assert norms.dtype == np.float32 and norms.shape == (19,)
        expected = keys.double().square().sum(dim=-1).sqrt().sum(dim=(0, 2))
        np.testing.assert_allclose(norms, expected.numpy(), rtol=1e-6)

    def test_equals_the_reference(self, write: WriteTokens, dtype: torch.dtype, slots: np.ndarray) -> None:
        cache, _, layout = cache_of(write, dtype, slots)
        some = slots[[3, 3, 0]]  # a slot may be asked for twice
        reference = key_norms_reference(cache, layout, H, D, torch.from_numpy(some))
        assert reference.dtype == torch.float32
        norms = KeyNorms(cache, layout, H, D)(some)
        np.testing.assert_allclose(norms, reference.numpy(), rtol=1e-6)
        assert norms[0] == norms[1] != norms[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_worked_out_by_hand(dtype: torch.dtype) -> None:
    """3-4-5 triangles of other sizes in each layer and head; bfloat16 holds them exactly."""
    layout = probe_layout(as_rows, scratch(dtype), H, D)
    cache = torch.full((2, 2, S * 2 * H * D), torch.nan, dtype=dtype)
    slot = S + 2
    for layer, head, size in [(0, 0, 1), (0, 1, -2), (1, 0, 4), (1, 1, 8)]:
        places = layout.elements[2, head * D : (head + 1) * D]
        cache[layer, 1, places] = torch.tensor([0, 3 * size, 4 * size, 0], dtype=dtype)
    assert KeyNorms(cache, layout, H, D)(np.array([slot])).tolist() == [5.0 * (1 + 2 + 4 + 8)]


def test_no_slots() -> None:
    cache, _, layout = cache_of(as_rows, torch.float32, np.arange(3))
    assert KeyNorms(cache, layout, H, D)(np.empty(0, dtype=np.int64)).shape == (0,)
    assert key_norms_reference(cache, layout, H, D, torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_what_is_written_later_is_read(slots: np.ndarray) -> None:
    cache, _, layout = cache_of(as_rows, torch.float32, slots)
    norms_of = KeyNorms(cache, layout, H, D)
    before = norms_of(slots)
    cache *= 2
    assert np.array_equal(norms_of(slots), 2 * before)


def test_neighbours_and_wrong_layouts_are_a_difference(slots: np.ndarray) -> None:
    """The control of the comparisons above: what is not a token's key is NaN, 1e30 or another key."""
    cache, _, layout = cache_of(with_keys_transposed, torch.float32, slots)
    rows = probe_layout(as_rows, scratch(), H, D)
    right, wrong = KeyNorms(cache, layout, H, D)(slots), KeyNorms(cache, rows, H, D)(slots)
    assert not np.isclose(right, wrong).any()
    unused = np.setdiff1d(np.arange(BLOCKS * S), slots)
    assert np.isnan(KeyNorms(cache, layout, H, D)(unused)).all()


def test_other_dtypes_are_refused_on_the_cpu() -> None:
    layout = probe_layout(as_rows, scratch(), H, D)
    sentence = (
        r"^vtoken: key norms cannot be taken on the CPU of a KV cache of torch.float16 yet; set dtype='bfloat16' "
    )
    with pytest.raises(ValueError, match=sentence) as caught:
        KeyNorms(torch.zeros(1, 1, S * 2 * H * D, dtype=torch.float16), layout, H, D)
    assert "\n" not in str(caught.value)
