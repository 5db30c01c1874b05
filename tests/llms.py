"""vLLM's ``LLM`` as users have it, and its answers held to stock vLLM and to the oracles."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
from engines import ENGINE_ARGS

from vtoken.core.trace import Trace
from vtoken.vllm_plugin.engine import Engine

BUDGET = 64
UNREACHED = {"policy": "h2o", "budget": 10**6}
TIGHT = {"policy": "h2o", "budget": BUDGET, "sinks": 4, "recent": 16, "record_trace": True}
ARGS: dict[str, Any] = {**ENGINE_ARGS, "enable_prefix_caching": True, "max_model_len": 320}


@dataclass(frozen=True)
class Told:
    """One completion, the trace of how it came about, and its raw logits (with ``logprobs=-1``)."""

    prompt: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    logits: list[dict[int, float]]
    trace: Trace


class Served:
    """An ``LLM`` in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.engine = Engine(llm.llm_engine, {})

    def generate(self, prompts: Sequence[Any], params: Any, **options: Any) -> list[Any]:
        """vLLM's outputs; afterwards nobody holds anything."""
        asked = [prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(asked, params, use_tqdm=False, **options)
        snapshot = self.engine.snapshot()
        assert (snapshot.held_blocks, snapshot.live_tokens, snapshot.running, snapshot.waiting) == (0, 0, 0, 0)
        return outputs

    def tell(self, prompts: Sequence[Any], params: Any, **options: Any) -> list[list[Told]]:
        """The completions of each prompt, with their traces."""
        outputs = self.generate(prompts, params, **options)
        return told(outputs, self.traces())

    def traces(self) -> dict[str, Trace]:
        """By vLLM's own id for users; of several completions the n-th has "n_" before it."""
        return {req_id.rpartition("-")[0]: trace for req_id, trace in self.engine.take_traces().items()}


def told(outputs: Sequence[Any], traces: dict[str, Trace]) -> list[list[Told]]:
    every = []
    for output in outputs:
        completions = []
        for one in output.outputs:
            several = len(output.outputs) > 1
            trace = traces[f"{one.index}_{output.request_id}" if several else output.request_id]
            logits = [{token: entry.logprob for token, entry in row.items()} for row in one.logprobs or []]
            completions.append(
                Told(
                    list(output.prompt_token_ids),
                    list(one.token_ids),
                    one.text,
                    one.finish_reason,
                    one.stop_reason,
                    logits,
                    trace,
                )
            )
        every.append(completions)
    return every


@contextmanager
def serving(model: Path, vtoken: dict[str, Any] | None, **engine_args: Any) -> Iterator[Served]:
    from vllm import LLM

    additional = {} if vtoken is None else {"additional_config": {"vtoken": vtoken}}
    llm = LLM(str(model), **{**ARGS, **engine_args}, **additional)
    try:
        yield Served(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


def plain(output: Any) -> dict[str, Any]:
    """Everything that a user gets of a request, in terms that can be compared."""
    return {
        "prompt": output.prompt_token_ids,
        "cached": output.num_cached_tokens,
        "prompt_logprobs": _rows(output.prompt_logprobs),
        "completions": [
            (c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason, c.cumulative_logprob, _rows(c.logprobs))
            for c in output.outputs
        ],
    }


def _rows(rows: Any) -> Any:
    return rows and [row and {token: (entry.logprob, entry.rank) for token, entry in row.items()} for row in rows]


def hold(reference: Any, completion: Told, *, allow_none: bool = False) -> None:
    """The logits from which the tokens were sampled are those that the trace implies, where no grammar has a say."""
    logits = [{token: logit for token, logit in row.items() if logit > -math.inf} for row in completion.logits]
    oracle.check(
        reference,
        completion.prompt,
        completion.token_ids,
        completion.trace,
        logits,
        allow_none=allow_none,
        greedy=False,
    )
