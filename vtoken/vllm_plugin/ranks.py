"""The workers that share a model's heads: scores are summed over them, and the first one's choice is everyone's.

Every rank holds the same tokens of the same requests, and some of the heads; one of them answers the scheduler. What
they say to each other here is a collective, which all of them must enter, with arrays of the same shape. So the shape
may only depend on what the scheduler's plan says of requests that no rank refuses.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed import get_tp_group

from vtoken.core.ragged import Ints
from vtoken.core.token_scores import Floats


class Ranks:
    """A model on one worker; the base of tensor-parallel groups."""

    size = 1

    def sum(self, values: Floats) -> Floats:
        """The sum over ranks of what each one measured on its heads, float32, the same bits on every rank."""
        return values

    def agree(self, victims: Ints) -> Ints:
        """Rank 0's choice, on every rank, so that rounding can never make two ranks forget different tokens."""
        return victims

    def differ(self, marks: Ints) -> NDArray[np.bool_]:
        """Where any two ranks have different numbers, the same answer on every rank; shape [N] to [N]."""
        return np.zeros(len(marks), dtype=np.bool_)

    def gather(self, value: Any) -> list[Any]:
        """What every rank has to say, by rank, on every rank. Pickled, and so only for what happens rarely."""
        return [value]


class TensorParallelRanks(Ranks):
    """vLLM's tensor-parallel group, over its group for arrays on the host."""

    def __init__(self) -> None:
        group = get_tp_group()
        self.size: int = group.world_size
        self._group, self._first = group.cpu_group, group.first_rank

    def sum(self, values: Floats) -> Floats:
        total = torch.from_numpy(values.copy())
        torch.distributed.all_reduce(total, group=self._group)
        return total.numpy()

    def agree(self, victims: Ints) -> Ints:
        chosen = torch.from_numpy(victims.copy())
        torch.distributed.broadcast(chosen, src=self._first, group=self._group)
        return chosen.numpy()

    def differ(self, marks: Ints) -> NDArray[np.bool_]:
        mine = torch.from_numpy(marks)
        of_ranks = [torch.empty_like(mine) for _ in range(self.size)]
        torch.distributed.all_gather(of_ranks, mine, group=self._group)
        return torch.stack(of_ranks).ne(of_ranks[0]).any(dim=0).numpy()

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values
