"""How a token is chosen is no affair of vtoken: what vLLM's users ask for, alone and in one batch, with eviction.

Every request asks for its raw logits as well. Those must be what its trace implies, and the token must be what its
parameters make of those logits, by a rule that is written down here in plain form.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import oracle
import pytest
import torch
from byte_tokenizer import EOS, save_tokenizer
from engines import prompts
from llms import TIGHT, UNREACHED, Served, Told, hold, plain, serving, told
from tiny_models import tiny_model
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

CHOICES = ["abba", "acdc"]
OUTPUTS = 20
VOCAB = 512
BAD_REQUEST = (ValueError, VLLMClientError)
Rule = Callable[[torch.Tensor, Told, int, SamplingParams], torch.Tensor]
"""(raw logits [vocab], what came of the request, outputs so far, its parameters) -> the logits that decide"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model(tmp_path_factory.mktemp("model"))
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def stock(model: Path) -> Iterator[Served]:
    with serving(model, None) as served:
        yield served


@pytest.fixture(scope="module")
def unreached(model: Path) -> Iterator[Served]:
    with serving(model, UNREACHED) as served:
        yield served


@pytest.fixture(scope="module")
def tight(model: Path) -> Iterator[Served]:
    with serving(model, TIGHT) as served:
        yield served


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return oracle.load_reference(model)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": OUTPUTS, "logprobs": -1, "ignore_eos": True, **options})


# ---- The rules ---------------------------------------------------------------------------------------------


def as_they_are(logits: torch.Tensor, told: Told, n: int, asked: SamplingParams) -> torch.Tensor:
    return logits


def penalized(logits: torch.Tensor, told: Told, n: int, asked: SamplingParams) -> torch.Tensor:
    logits, outputs = logits.clone(), told.token_ids[:n]
    known = torch.tensor(sorted({*told.prompt, *outputs}))
    r = asked.repetition_penalty
    logits[known] = torch.where(logits[known] > 0, logits[known] / r, logits[known] * r)
    count = torch.bincount(torch.tensor(outputs, dtype=torch.int64), minlength=VOCAB)
    return logits - asked.frequency_penalty * count - asked.presence_penalty * (count > 0)


def biased(logits: torch.Tensor, told: Told, n: int, asked: SamplingParams) -> torch.Tensor:
    logits = logits.clone()
    for token, bias in asked.logit_bias.items():
        logits[token] += bias
    if n < asked.min_tokens:
        logits[EOS] = -torch.inf
    return logits


def only(allowed: list[int], logits: torch.Tensor) -> torch.Tensor:
    masked = torch.full_like(logits, -torch.inf)
    masked[allowed] = logits[allowed]
    return masked


def allowed_tokens(logits: torch.Tensor, told: Told, n: int, asked: SamplingParams) -> torch.Tensor:
    return only(asked.allowed_token_ids, logits)


def one_of(*words: str) -> Rule:
    """A grammar of some words: what may come next of them, or the end. vLLM masks the raw logits already."""

    def chosen(logits: torch.Tensor, told: Told, n: int, asked: SamplingParams) -> torch.Tensor:
        texts = token_texts()
        so_far = "".join(texts[token] for token in told.token_ids[:n])
        able = [t for t, text in enumerate(texts) if text and any(word.startswith(so_far + text) for word in words)]
        able += [EOS] if so_far in words else []
        assert logits.isfinite().nonzero().flatten().tolist() == able, "other tokens are allowed by the rule"
        return logits

    return chosen


def token_texts() -> list[str]:
    """ASCII alone: a byte of the tokenizer's that is a letter, or a pair of letters."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    pairs = ["".join(pair) for pair in islice(product(ascii_lowercase, repeat=2), EOS - 256)]
    return [*(c if c.isascii() else "" for c in letters), *pairs, ""]


def top_k_of(logits: torch.Tensor, asked: SamplingParams) -> torch.Tensor:
    logits = logits / asked.temperature
    return only(logits.topk(asked.top_k).indices.tolist() if asked.top_k > 0 else list(range(VOCAB)), logits)


def follow(told: Told, asked: SamplingParams, rule: Rule, child: int = 0) -> None:
    """Every token is the one that the rule takes, with the noise of the request's seed where it is drawn."""
    generator = torch.Generator().manual_seed(asked.seed + child) if asked.seed is not None else None
    for n, (token, row) in enumerate(zip(told.token_ids, told.logits, strict=True)):
        raw = torch.tensor([row.get(t, -torch.inf) for t in range(VOCAB)])
        logits = rule(raw, told, n, asked)
        if generator is not None:
            seed = torch.randint(0, 2**31, (1,), generator=generator)
            expected = int(torch.ops._C.fused_gumbel_argmax(top_k_of(logits, asked)[None], seed))
        else:
            expected = int(logits.argmax())
        assert token == expected, f"output {n}: {token}, and by the rule {expected}"


CASES: dict[str, tuple[dict[str, Any], Rule]] = {
    "greedy": ({}, as_they_are),
    "seed": ({"temperature": 0.8, "seed": 5}, as_they_are),
    "seed, top_k": ({"temperature": 1.3, "seed": 6, "top_k": 9}, as_they_are),
    "n": ({"temperature": 1.0, "seed": 7, "n": 3}, as_they_are),
    "penalties": ({"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 0.4}, penalized),
    "logit_bias, min_tokens": ({"logit_bias": {EOS: 100.0, 7: 2.0}, "min_tokens": 12, "ignore_eos": False}, biased),
    "allowed_token_ids": ({"allowed_token_ids": [5, 17, 200, 300, 444]}, allowed_tokens),
    "structured output": (
        {"structured_outputs": StructuredOutputsParams(choice=CHOICES), "ignore_eos": False},
        one_of(*CHOICES),
    ),
}
OTHERS: dict[str, dict[str, Any]] = {
    "unseeded": {"temperature": 1.0},
    "top_p, min_p": {"temperature": 1.0, "seed": 3, "top_p": 0.8, "min_p": 0.01},
    "stop": {"stop": ["a", "q"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": list(range(0, VOCAB, 9))},
    "bad_words": {"bad_words": ["a", "bc"]},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 3},
    "logprob_token_ids": {"logprobs": None, "logprob_token_ids": [3, 9]},
    "json": {"structured_outputs": StructuredOutputsParams(json={"type": "object"}), "ignore_eos": False},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-f]{9}(x|y)"), "ignore_eos": False},
    "grammar": {
        "structured_outputs": StructuredOutputsParams(grammar='root ::= "ab" | "cd" root'),
        "ignore_eos": False,
    },
    "repetition_detection": {
        "allowed_token_ids": [9],
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=5),
    },
    "skip_reading_prefix_cache": {"skip_reading_prefix_cache": True},
    "detokenize": {"detokenize": False},
    "flat_logprobs": {"logprobs": 2, "flat_logprobs": True},
    "text": {"skip_special_tokens": False, "spaces_between_special_tokens": False, "logit_bias": {EOS: 9.0}},
    "max_tokens": {"max_tokens": 1},
}


def every_case(names: Sequence[str]) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that begin alike by pairs, and parameters."""
    asked = prompts([80 + 7 * n for n in range(len(names))], EOS)
    for n in range(1, len(asked), 2):
        asked[n][:64] = asked[n - 1][:64]
    return asked, [params(**(CASES[name][0] if name in CASES else OTHERS[name])) for name in names]


# ---- What must be so ---------------------------------------------------------------------------------------


GRAMMARS = [name for name, asked in [*CASES.items(), *OTHERS.items()] if "structured_outputs" in str(asked)]
FREE = [name for name in [*CASES, *OTHERS] if name not in GRAMMARS]


def test_with_a_budget_that_nobody_reaches_everything_is_vllm_s(stock: Served, unreached: Served) -> None:
    """Bit for bit. Requests with a grammar come alone: when it is compiled, and who is there then, is chance."""
    outcomes: list[dict[str, Any]] = []
    for served in (stock, unreached):
        torch.manual_seed(0)
        served.llm.reset_prefix_cache()
        outputs = served.generate(*every_case(FREE))
        for name in GRAMMARS:
            outputs += served.generate(*every_case([name]))
        outcomes.append({name: plain(output) for name, output in zip(FREE + GRAMMARS, outputs, strict=True)})
    theirs, ours = outcomes
    for name in ours:
        assert ours[name] == theirs[name], name
    assert unreached.engine.snapshot().tokens_evicted == 0
    assert any(one["cached"] for one in ours.values())
    assert {c[3] for one in ours.values() for c in one["completions"]} == {"stop", "length", "repetition"}


def test_with_eviction_each_is_chosen_from_the_right_logits(tight: Served, reference: Any) -> None:
    names = [*CASES, *OTHERS]
    asked, wanted = every_case(names)
    for each in wanted:  # vLLM gives all requests of a batch the tokens that one has named
        each.logprob_token_ids = None
    tight.llm.reset_prefix_cache()
    answers = tight.tell(asked, wanted)
    for (name, (_, rule)), each, completions in zip(CASES.items(), wanted, answers, strict=False):
        for child, completion in enumerate(completions):
            follow(completion, each, rule, child)
            hold(reference, completion, allow_none=name == "structured output")
    assert [len(completions) for completions in answers] == [each.n for each in wanted]
    first = {name: completions[0] for name, completions in zip(names, answers, strict=True)}
    assert first["logit_bias, min_tokens"].token_ids[12:] == [EOS]
    assert first["structured output"].text in CHOICES
    assert len(first["max_tokens"].token_ids) == 1


def wrongly(name: str, told: Told) -> tuple[SamplingParams, Rule]:
    """Parameters and rule that are not those of the case."""
    options, rule = CASES[name]
    if "seed" in options:
        return params(**{**options, "seed": 99}), rule
    if name == "greedy":
        return params(logit_bias={told.token_ids[0]: -9.0}), biased
    if name == "structured output":
        return params(**options), one_of(*CHOICES, "adze")
    return params(**options), as_they_are


@pytest.mark.parametrize("name", CASES)
def test_a_rule_that_is_not_followed_is_found_out(tight: Served, name: str) -> None:
    options, rule = CASES[name]
    ((answer, *_),) = tight.tell([prompts((150,), EOS, seed=1)[0]], [params(**options)])
    follow(answer, params(**options), rule)
    with pytest.raises(AssertionError, match="by the rule"):
        follow(answer, *wrongly(name, answer))


def test_logits_of_another_trace_are_found_out(tight: Served, reference: Any) -> None:
    ((answer,),) = tight.tell([prompts((150,), EOS, seed=2)[0]], [params(temperature=1.0, seed=1)])
    hold(reference, answer)
    wrong = oracle.worst_control(reference, answer.prompt, answer.token_ids, answer.trace, oracle.drop_victim)
    with pytest.raises(AssertionError, match="logits differ"):
        hold(reference, replace(answer, trace=wrong))


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt_logprob_token_ids": [[1, 2]]},
        {"trace_decode_token_ids": [1, 2]},
        {"thinking_token_budget": 5},
        {"extra_args": {"vtoken.budget": 3}},
        {"structured_outputs": StructuredOutputsParams(json="{")},
        {"allowed_token_ids": [VOCAB]},
        {"logit_bias": {VOCAB: 1.0}},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_cannot_be_had_is_refused_for_that_request_alone(tight: Served, asked: dict[str, Any]) -> None:
    """With an error that vLLM's server answers with 400; the engine serves on."""
    (prompt,) = prompts((70,), EOS)
    with pytest.raises(BAD_REQUEST):
        tight.generate([prompt], params(**asked))
    assert len(tight.generate([prompt], params())[0].outputs[0].token_ids) == OUTPUTS


@pytest.mark.parametrize(
    "prompt, options",
    [
        ({"prompt_embeds": torch.zeros(5, 128)}, {}),
        ({"prompt_token_ids": [3] * 40}, {"lora_request": LoRARequest("none", 1, "/nowhere")}),
        ({"prompt_token_ids": [3] * 400}, {}),
    ],
    ids=["prompt embeddings", "LoRA", "too long a prompt"],
)
def test_what_the_engine_was_not_started_for_is_refused(tight: Served, prompt: Any, options: dict[str, Any]) -> None:
    with pytest.raises(BAD_REQUEST):
        tight.generate([prompt], params(), **options)
    assert not tight.llm.llm_engine.has_unfinished_requests()


def test_cache_salt_keeps_prefixes_apart(tight: Served, reference: Any) -> None:
    (prompt,) = prompts((150,), EOS, seed=4)
    asked = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in ("a", "a", "b")]
    hits = []
    for one in asked:
        (output,) = tight.generate([one], params())
        hits.append(output.num_cached_tokens)
        ((completion,),) = told([output], tight.traces())
        hold(reference, completion)
    assert hits == [0, (150 - 32) // 32 * 32, 0]


def test_a_priority_means_nothing_first_come_first_served(stock: Served, tight: Served) -> None:
    asked = prompts((40, 41, 42), EOS, seed=9)
    few = params(logprobs=None, max_tokens=5)
    both = [served.generate(asked, few, priority=[3, 1, 2]) for served in (stock, tight)]
    assert [plain(output) for output in both[0]] == [plain(output) for output in both[1]]
