"""docs/vllm-behaviour.md names every test of vLLM's behaviour, in its place, and sources that this vLLM has."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import SchedulerConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import PriorityRequestQueue, RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, FinishReason
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "vllm-behaviour.md").read_text(encoding="utf-8")
NOT_LISTED = {"test_vllm_behaviour_controls.py", Path(__file__).name}
FILES = sorted({path.name for path in HERE.glob("test_vllm_behaviour_*.py")} - NOT_LISTED)
OWNERS: list[Any] = [
    *(SamplingParams, SchedulerConfig, BlockPool, KVCacheManager, AsyncScheduler, PauseState, SchedulerOutput),
    *(
        PriorityRequestQueue,
        RequestQueue,
        Scheduler,
        EngineCoreEventType,
        FinishReason,
        PrefixCacheStats,
        RequestStatus,
    ),
]
LAST_COLUMN = {"same", "blocks", "differs", "—"}


def rows(page: str, file: str) -> list[list[str]]:
    """The cells of one file's table."""
    (section,) = [part for part in page.split("\n## ") if f"\n`tests/{file}`" in part]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def asked_in(source: str) -> dict[str, bool]:
    """Each test of a file, and whether it is asked of evicting schedulers as well."""
    found = {}

    def visit(node: Any, whole: bool) -> None:
        whole |= any(getattr(mark, "id", "") == "whole_kinds" for mark in getattr(node, "decorator_list", []))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            arguments = {argument.arg for argument in node.args.args}
            found[node.name] = "kind" in arguments and not whole
        for child in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
            visit(child, whole)

    visit(ast.parse(source), False)
    return found


def check(page: str, file: str, source: str) -> None:
    listed = {test.strip("`"): evicting for _, _, test, evicting in rows(page, file)}
    tests = asked_in(source)
    assert list(listed) == list(tests), f"{file}: the list and the tests differ"
    assert set(listed.values()) <= LAST_COLUMN
    assert {name for name, evicting in listed.items() if evicting != "—"} == {name for name in tests if tests[name]}


@pytest.mark.parametrize("file", FILES)
def test_every_test_is_listed_in_its_place(file: str) -> None:
    check(PAGE, file, (HERE / file).read_text(encoding="utf-8"))


def test_every_source_is_there() -> None:
    owners = {owner.__name__: owner for owner in OWNERS}
    named = {name for file in FILES for _, source, *_ in rows(PAGE, file) for name in re.findall(r"`([^`]+)`", source)}
    assert len(named) > 30
    for name in sorted(named):
        owner, _, member = name.partition(".")
        there = {*dir(owners[owner]), *getattr(owners[owner], "__annotations__", {})}
        assert not member or member in there, f"{name} is not in this vLLM"


def test_a_list_that_is_not_complete_is_noticed() -> None:
    file = FILES[0]
    source = (HERE / file).read_text(encoding="utf-8")
    for page, changed in (
        (PAGE.replace("`test_first_come_first_served`", "`test_first_come`"), source),
        (PAGE, source + "\n\ndef test_another(start: Start, kind: Kind) -> None: ...\n"),
        (PAGE, source.replace("class TestBlocks", "@whole_kinds\nclass TestBlocks")),
    ):
        with pytest.raises(AssertionError):
            check(page, file, changed)
