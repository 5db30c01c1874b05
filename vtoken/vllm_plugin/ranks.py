"""The workers that share a model's heads: scores are summed over them, and the first one's choice is everyone's."""

from vtoken.core.ragged import Ints
from vtoken.core.token_scores import Floats


class Ranks:
    """A tensor-parallel group of one; the base of larger ones.

    Every rank holds the same tokens of the same requests, and some of the KV heads. Each step takes one sum over all
    layers, and one broadcast, so that rounding can never make two ranks forget different tokens.
    """

    size = 1

    def sum(self, values: Floats) -> Floats:
        """The sum over ranks of what each one measured on its heads, float32, the same on every rank."""
        return values

    def agree(self, victims: Ints) -> Ints:
        """Rank 0's choice, on every rank; equally long on all, since the scheduler fixes how many."""
        return victims
