"""Blocks that several requests hold: when is it worth that each of them has a copy of what it still needs?"""

from collections import Counter
from collections.abc import Mapping, Sequence


def worth_leaving(
    shared: Mapping[str, Sequence[int]], references: Mapping[int, int], copies: Mapping[str, int]
) -> list[list[str]]:
    """The groups of requests that should leave their shared blocks, because fewer blocks are held in the end.

    Requests that share a block, directly or through others, decide together: a block becomes free only when the last
    of its holders has left it. A holder that cannot leave (it still needs the whole block) keeps it from counting.

    Args:
        shared: by request that could leave, the blocks that it would leave.
        references: by block, how many requests hold it, those that cannot leave included.
        copies: by request, how many blocks its copy would take.
    """
    worth: list[list[str]] = []
    for group in _groups(shared):
        left = Counter(block for req_id in group for block in shared[req_id])
        freed = sum(count == references[block] for block, count in left.items())
        if freed > sum(copies[req_id] for req_id in group):
            worth.append(group)
    return worth


def _groups(shared: Mapping[str, Sequence[int]]) -> list[list[str]]:
    """Requests by whom they share a block with."""
    parent = {req_id: req_id for req_id in shared}

    def root(req_id: str) -> str:
        while parent[req_id] != req_id:
            parent[req_id] = req_id = parent[parent[req_id]]
        return req_id

    first_holder: dict[int, str] = {}
    for req_id, blocks in shared.items():
        for block in blocks:
            parent[root(req_id)] = root(first_holder.setdefault(block, req_id))
    groups: dict[str, list[str]] = {}
    for req_id in shared:
        groups.setdefault(root(req_id), []).append(req_id)
    return list(groups.values())
