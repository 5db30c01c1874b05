"""Every length at which something begins or ends, with prompts reduced in chunks, and the logits of the prompts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from engines import prompts
from llms import ARGS, BUDGET, TIGHT, Served, Told, hold, plain, serving
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

S, CHUNK, OUTPUTS = 32, 80, 12
LONGEST = ARGS["max_model_len"]
LENGTHS = [1, 2, *(n + d for n in (S, BUDGET, 3 * S, CHUNK, 2 * CHUNK) for d in (-1, 0, 1)), LONGEST - OUTPUTS]
NO_TOKENIZER = {"skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def tight(tiny_gqa: Path) -> Iterator[Served]:
    options = {**TIGHT, "policy": "snapkv", "observation_window": 8, "prefill_evict": "chunked", "prefill_chunk": CHUNK}
    with serving(tiny_gqa, options, max_num_batched_tokens=96, **NO_TOKENIZER) as served:
        yield served


@pytest.fixture(scope="module")
def stock(tiny_gqa: Path) -> Iterator[Served]:
    with serving(tiny_gqa, None, max_num_batched_tokens=96, **NO_TOKENIZER) as served:
        yield served


@pytest.fixture(scope="module")
def reference(tiny_gqa: Path) -> Any:
    return oracle.load_reference(tiny_gqa)


def params(max_tokens: int = OUTPUTS, **options: Any) -> SamplingParams:
    settings = {"temperature": 0.0, "logprobs": -1, "detokenize": False, "ignore_eos": True, **options}
    return SamplingParams(max_tokens=max_tokens, **settings)


def evicted(told: Told) -> int:
    return sum(1 for _ in oracle.victims_of(told.trace))


@pytest.mark.parametrize("outputs", [1, OUTPUTS])
def test_lengths_at_which_something_begins_or_ends(tight: Served, reference: Any, outputs: int) -> None:
    tight.llm.reset_prefix_cache()
    answers = tight.tell(prompts(LENGTHS, 512), params(outputs))
    for length, (told,) in zip(LENGTHS, answers, strict=True):
        assert (len(told.token_ids), told.finish_reason) == (outputs, "length")
        assert evicted(told) == max(length + outputs - 1 - (BUDGET - 1), 0), length
        hold(reference, told, allow_none=not oracle.felt_victims(told.trace))
        oracle.check(reference, told.prompt, told.token_ids, told.trace, told.logits, allow_none=True)


def test_at_the_longest_length_a_request_ends(stock: Served, tight: Served, reference: Any) -> None:
    lengths = [LONGEST - OUTPUTS, LONGEST - 2, LONGEST - 1]
    asked = prompts(lengths, 512, seed=1)
    ends = [[o.outputs[0].finish_reason for o in stock.generate(asked, params(10 * OUTPUTS))]]
    answers = tight.tell(asked, params(10 * OUTPUTS))
    ends.append([told.finish_reason for (told,) in answers])
    assert ends == [["length"] * 3] * 2
    for (told,) in answers:
        assert len(told.prompt) + len(told.token_ids) == LONGEST
        assert evicted(told) == LONGEST - 1 - (BUDGET - 1)
        hold(reference, told)
    for served in (stock, tight):
        with pytest.raises(VLLMValidationError, match="maximum context length is 320 tokens"):
            served.generate(prompts([LONGEST + 1], 512), params())


def prompt_logits(reference: Any, told: Told, life: Any) -> torch.Tensor:
    """The logits [tokens of the prompt - 1, vocab] of a dense pass in which victims are hidden."""
    tokens = [*told.prompt, *told.token_ids][: oracle.length(life)]
    return oracle.masked_logits(reference, tokens, oracle.visibility(life), torch.arange(len(told.prompt) - 1))


def test_prompt_logprobs_are_of_the_reduced_prompt(tight: Served, reference: Any) -> None:
    """A prompt that is reduced in chunks says of its later tokens what is left says of them, whatever is cached."""
    (asked,) = prompts([300], 512, seed=2)
    tight.llm.reset_prefix_cache()
    first = tight.generate([asked], params())
    outputs = tight.generate([asked, asked[:290]], params(prompt_logprobs=3))
    assert [output.num_cached_tokens for output in first + outputs] == [0, 0, 0]
    traces = tight.traces()
    for output in outputs:
        life = traces[output.request_id].incarnations[0]
        told = Told(list(output.prompt_token_ids), list(output.outputs[0].token_ids), "", "", None, [], Any)
        logits = prompt_logits(reference, told, life)
        assert output.prompt_logprobs[0] is None
        rows = output.prompt_logprobs[1:]
        for n, row in enumerate(rows):
            assert told.prompt[n + 1] in row
            for token, entry in row.items():
                assert abs(logits[n, token] - entry.logprob) < 1e-3, n
        whole = oracle.masked_logits(
            reference, told.prompt, torch.ones(len(told.prompt), len(told.prompt)).tril() > 0, torch.arange(len(rows))
        )
        far = [max(abs(whole[n, t].item() - e.logprob) for t, e in row.items()) for n, row in enumerate(rows)]
        assert max(far[:CHUNK]) < 1e-3 and max(far[CHUNK:]) > 0.1, "it could not have failed"


def test_prompt_logprobs_below_the_budget_are_vllm_s(stock: Served, tight: Served) -> None:
    asked = prompts([5, 50], 512, seed=3)
    both = [
        [plain(output) for output in served.generate(asked, params(4, prompt_logprobs=2, logprobs=1))]
        for served in (stock, tight)
    ]
    assert both[0] == both[1]
