"""Which row of a table's arrays is whose."""

from collections.abc import Iterable
from itertools import repeat

import numpy as np

from vtoken.core.ragged import Ints


class RowIndex(dict[str, int]):
    """Rows by request: a dictionary, because vLLM asks about one request at a time, and as often as there are requests.

    Looking many up at once runs no Python per request either: it is done several times in every step. Only ``take`` and
    ``give_back`` change it.

    Args:
        capacity: rows; ``grow`` adds some.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self._req_id_in: dict[int, str] = {}
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def full(self) -> bool:
        return not self._free

    def grow(self, capacity: int) -> None:
        """Add the rows up to ``capacity``."""
        self._free.extend(range(capacity - 1, self.capacity - 1, -1))
        self.capacity = capacity

    def take(self, req_id: str) -> int:
        """A row for a request that has none. Raises ValueError if it has one."""
        if req_id in self:
            raise ValueError(f"request {req_id} is already known")
        row = self[req_id] = self._free.pop()
        self._req_id_in[row] = req_id
        return row

    def give_back(self, req_id: str) -> int:
        """The row that the request had, which is free from now on. Raises KeyError if it had none."""
        row = self.pop(req_id)
        del self._req_id_in[row]
        self._free.append(row)
        return row

    def rows(self, req_ids: Iterable[str]) -> Ints:
        """The row of each request, shape [R]. Raises KeyError for a request that has none."""
        return np.fromiter(map(self.__getitem__, req_ids), dtype=np.int64)

    def find(self, req_ids: Iterable[str]) -> Ints:
        """The row of each request, shape [R], -1 for one that has none."""
        return np.fromiter(map(self.get, req_ids, repeat(-1)), dtype=np.int64)

    def req_ids_of(self, rows: Ints) -> list[str]:
        """The requests in these rows, shape [R]."""
        return list(map(self._req_id_in.__getitem__, rows.tolist()))
