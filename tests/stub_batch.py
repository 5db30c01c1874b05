"""What vLLM's runner keeps: requests, and a batch of block-table rows."""

from dataclasses import dataclass, field

import torch
from reference_cache import S
from vllm import SamplingParams
from vllm.v1.worker.block_table import BlockTable


@dataclass
class RequestState:
    """What vLLM's runner keeps of a request."""

    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.tokens[: self.prompt_length]


@dataclass
class Forward:
    """One request's part of one forward: logical positions and physical length, and what it forgot afterwards."""

    req_id: str
    positions: range
    length: int
    blocks: list[int]
    slots: list[int]
    victims: list[int] = field(default_factory=list)

    @property
    def evicted(self) -> int:
        return len(self.victims)


class Batch:
    """vLLM's persistent batch, as far as block tables go: rows without gaps, in an order of their own."""

    def __init__(self, rows: int, width: int, tokens: int) -> None:
        table = BlockTable(S, rows, width, tokens, False, torch.device("cpu"), 1)
        for buffer in (table.block_table, table.slot_mapping):
            buffer.gpu = buffer.cpu  # as vLLM's CPU runner has it
        self.block_table = [table]
        self.req_id_to_index: dict[str, int] = {}

    @property
    def req_ids(self) -> list[str]:
        return sorted(self.req_id_to_index, key=self.req_id_to_index.__getitem__)

    def add(self, req_id: str, block_ids: list[int]) -> None:
        row = self.req_id_to_index[req_id] = len(self.req_id_to_index)
        self.block_table[0].add_row(block_ids, row)

    def remove(self, req_id: str) -> None:
        if req_id not in self.req_id_to_index:
            return
        last = self.req_ids[-1]
        row = self.req_id_to_index.pop(req_id)
        self.block_table[0].clear_row(row)
        if last != req_id:
            self.block_table[0].move_row(self.req_id_to_index[last], row)
            self.req_id_to_index[last] = row

    def swap(self, one: str, other: str) -> None:
        index = self.req_id_to_index
        self.block_table[0].swap_row(index[one], index[other])
        index[one], index[other] = index[other], index[one]
