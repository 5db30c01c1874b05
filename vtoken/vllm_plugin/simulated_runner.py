"""A runner without a model: it follows vLLM's scheduler as vLLM's own runner does, and each output is token 0."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import ModelRunnerOutput

from vtoken.core.ragged import Ints
from vtoken.kernels.copy_engine import CopyEngine


@dataclass
class _Request:
    """What vLLM's runner keeps of a request; one group of block ids, as vLLM passes them."""

    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]


class NoCopies(CopyEngine):
    """There is nothing to copy: no slot has any content."""

    def launch(self, sources: Ints, destinations: Ints) -> None: ...

    def wait(self) -> None: ...

    def finish(self) -> None: ...


class SimulatedRunner:
    """The parts of vLLM's runner that ours hooks into, as far as they are bookkeeping.

    A request keeps its row of the block table until it is left out of a step. Rows may lie anywhere, with free ones in
    between: nothing is computed over the batch.

    Args:
        requests: rows of the batch.
        blocks: width of a row of the block table.
        tokens: most tokens per step.
        block_size: slots per block.
    """

    def __init__(self, requests: int, blocks: int, tokens: int, block_size: int) -> None:
        self.device = torch.device("cpu")
        self.requests: dict[str, _Request] = {}
        table = SimpleNamespace(
            block_size=block_size,
            block_table=SimpleNamespace(np=np.zeros((requests, blocks), dtype=np.int32)),
            num_blocks_per_row=np.zeros(requests, dtype=np.int32),
            slot_mapping=SimpleNamespace(gpu=torch.zeros(tokens, dtype=torch.int64)),
        )
        self.input_batch = SimpleNamespace(block_table=[table], req_id_to_index={})
        self.query_start_loc = SimpleNamespace(np=np.zeros(requests + 1, dtype=np.int32))
        self.seq_lens = torch.zeros(requests, dtype=torch.int32)
        self.optimistic_seq_lens_cpu = torch.zeros(requests, dtype=torch.int32)
        self._free_rows = list(range(requests - 1, -1, -1))
        self._computed = np.zeros(requests, dtype=np.int64)
        self._known = np.zeros(requests, dtype=np.int64)
        self._req_ids: list[str] = []  # of the step under way, and their rows
        self._rows: Ints = np.empty(0, dtype=np.int64)

    def follow(self, output: Any) -> NDArray[np.int32]:
        """Take up a step's requests and their new blocks; returns the tokens that each row computes, [rows]."""
        cached, row_of = output.scheduled_cached_reqs, self.input_batch.req_id_to_index
        for req_id in output.finished_req_ids:
            self.requests.pop(req_id, None)
        staying = output.num_scheduled_tokens.keys() - cached.resumed_req_ids - output.finished_req_ids
        for req_id in row_of.keys() - staying:
            self._free_rows.append(row_of.pop(req_id))
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = _Request(new.prompt_token_ids, new.block_ids)
            self._enter(new.req_id, new.num_computed_tokens, len(new.prompt_token_ids))
        for n, req_id in enumerate(cached.req_ids):
            blocks, request = cached.new_block_ids[n], self.requests[req_id]
            if req_id in cached.resumed_req_ids:
                request.block_ids = blocks
            elif blocks is not None:
                request.block_ids[0].extend(blocks[0])
            if req_id not in row_of:
                known = len(request.prompt_token_ids) + cached.num_output_tokens[n]
                self._enter(req_id, cached.num_computed_tokens[n], known)
            elif blocks is not None:
                self._append(row_of[req_id], blocks[0])
        counts = output.num_scheduled_tokens
        self._req_ids = list(counts)
        self._rows = np.fromiter(map(row_of.__getitem__, counts), dtype=np.int64, count=len(counts))
        new_tokens = np.zeros(len(self._known), dtype=np.int32)
        new_tokens[self._rows] = np.fromiter(counts.values(), dtype=np.int32, count=len(counts))
        return new_tokens

    def lay_out(self, new_tokens: NDArray[np.int32]) -> None:
        """Where each row's tokens begin in the step's flat arrays, and how long its request is, were nobody to evict.

        Args:
            new_tokens: of each row, [rows].
        """
        np.cumsum(new_tokens, out=self.query_start_loc.np[1:])
        self._computed += new_tokens
        self.seq_lens.copy_(torch.from_numpy(self._computed))
        self.optimistic_seq_lens_cpu.copy_(self.seq_lens)

    def answer(self) -> ModelRunnerOutput:
        """A token for each request of which all tokens have been computed."""
        done = self._computed[self._rows] == self._known[self._rows]
        self._known[self._rows[done]] += 1
        return ModelRunnerOutput(
            req_ids=self._req_ids,
            req_id_to_index={req_id: n for n, req_id in enumerate(self._req_ids)},
            sampled_token_ids=[[0] if one else [] for one in done.tolist()],
        )

    # -- inside -----------------------------------------------------------------------------------------------

    def _enter(self, req_id: str, computed: int, known: int) -> None:
        row = self.input_batch.req_id_to_index[req_id] = self._free_rows.pop()
        table = self.input_batch.block_table[0]
        table.block_table.np[row] = 0
        table.num_blocks_per_row[row] = 0
        self._append(row, self.requests[req_id].block_ids[0])
        self._computed[row], self._known[row] = computed, known

    def _append(self, row: int, blocks: list[int]) -> None:
        table = self.input_batch.block_table[0]
        held = int(table.num_blocks_per_row[row])
        table.block_table.np[row, held : held + len(blocks)] = blocks
        table.num_blocks_per_row[row] = held + len(blocks)
