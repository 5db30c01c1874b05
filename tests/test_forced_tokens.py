"""Forced tokens: exactly those come out, and their log-probabilities are the model's own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from engines import prompts, running
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import BatchUpdateBuilder, MoveDirectionality

from vtoken.config import VTokenConfig
from vtoken.vllm_plugin.engine import FORCED_TOKENS, FORCED_TOKENS_PROCESSOR
from vtoken.vllm_plugin.forced_tokens import ForcedTokens, forced_tokens

VOCAB = 512
FORCING = {
    "logits_processors": [FORCED_TOKENS_PROCESSOR],
    "logprobs_mode": "raw_logprobs",
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 96,
}
# Prompt, forced and free tokens of each request: they end at different steps, and two are never forced.
RAGGED = ((40, 9, 0), (130, 3, 4), (77, 0, 6), (200, 12, 2), (33, 1, 0), (64, 0, 11), (65, 5, 5))


def questions() -> dict[str, tuple[list[int], list[int], int]]:
    """By request id: prompt, forced tokens, output tokens."""
    given = prompts([size for size, _, _ in RAGGED], VOCAB)
    forced = prompts([size for _, size, _ in RAGGED], VOCAB, seed=1)
    return {f"r{i}": (given[i], forced[i], count + free) for i, (_, count, free) in enumerate(RAGGED)}


def ask(engine: Any) -> dict[str, tuple[list[int], list[float]]]:
    """Output tokens and their log-probabilities, of all questions at once."""
    answers = {}
    for name, (prompt, forced, count) in questions().items():
        engine.add_request(name, prompt, count, logprobs=0, forced_tokens=forced)
    while engine.has_unfinished():
        for entry in engine.step():
            tables = entry.logprobs or []
            assert all(len(table) == 1 for table in tables)
            logprobs = [table[token] for token, table in zip(entry.token_ids, tables, strict=True)]
            answers[entry.request_id] = (entry.token_ids, logprobs)
    return answers


def own_logprobs(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Log-probability of each output token, by a dense pass."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0]


@pytest.fixture(scope="module")
def native(tiny_gqa: Path) -> dict[str, tuple[list[int], list[float]]]:
    with running(tiny_gqa, None, **FORCING) as engine:
        return ask(engine)


def test_forced_tokens_come_first_and_the_rest_is_the_models_choice(tiny_gqa: Path, native: Any) -> None:
    model = oracle.load_reference(tiny_gqa)
    for name, (prompt, forced, count) in questions().items():
        output, _ = native[name]
        assert len(output) == count
        assert output[: len(forced)] == forced
        for step in range(len(forced), count):
            with torch.inference_mode():
                best = model(torch.tensor([prompt + output[:step]])).logits[0, -1].argmax()
            assert output[step] == best


def test_log_probabilities_are_the_models_own(tiny_gqa: Path, native: Any) -> None:
    model = oracle.load_reference(tiny_gqa)
    for name, (prompt, _, _) in questions().items():
        output, logprobs = native[name]
        expected = own_logprobs(model, prompt, output)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-3, rtol=0)
        shifted = own_logprobs(model, prompt[1:], output)
        assert (shifted - expected).abs().max() > 1e-2, "the comparison could not have failed"


def test_vtoken_that_evicts_nothing_changes_nothing(tiny_gqa: Path, native: Any) -> None:
    with running(tiny_gqa, VTokenConfig(policy="streaming_llm", budget=1.0, recent=64, sinks=500), **FORCING) as engine:
        answers = ask(engine)
        assert engine.snapshot().tokens_evicted == 0
    for name in questions():
        assert answers[name][0] == native[name][0]
        assert answers[name][1] == pytest.approx(native[name][1], abs=1e-3)


def test_with_eviction_the_same_tokens_get_other_probabilities(tiny_gqa: Path, native: Any) -> None:
    with running(tiny_gqa, VTokenConfig(policy="streaming_llm", budget=40, sinks=2, recent=8), **FORCING) as engine:
        answers = ask(engine)
        assert engine.snapshot().tokens_evicted > 0
    long, short = "r3", "r4"
    assert answers[long][0][:12] == native[long][0][:12]
    assert answers[long][1][0] == pytest.approx(native[long][1][0], abs=1e-3)  # from the prompt's own forward
    assert max(abs(a - b) for a, b in zip(answers[long][1][1:12], native[long][1][1:12], strict=True)) > 1e-2
    assert answers[short][1] == pytest.approx(native[short][1], abs=1e-3)  # below the budget


def test_a_preempted_request_resumes_where_it_was(tiny_gqa: Path) -> None:
    pool = {"num_gpu_blocks_override": 9, "max_model_len": 256}
    given, forced = prompts((95, 95), VOCAB), prompts((60, 60), VOCAB, seed=1)
    with running(tiny_gqa, None, **FORCING, **pool) as engine:
        for i in range(2):
            engine.add_request(f"r{i}", given[i], 60, forced_tokens=forced[i])
        outputs = {}
        while engine.has_unfinished():
            outputs |= {entry.request_id: entry.token_ids for entry in engine.step()}
            engine.snapshot()  # preemptions are counted while their request is there
        assert engine.snapshot().preemptions > 0
    assert [outputs["r0"], outputs["r1"]] == forced


class Rows:
    """The processor on a batch of rows, each labelled with the token that must win in it."""

    def __init__(self, rows: int) -> None:
        self.processor = ForcedTokens(SimpleNamespace(), torch.device("cpu"), False)
        self.builder = BatchUpdateBuilder()
        self.size = rows

    def added(self, row: int, forced: list[int], output: list[int]) -> None:
        params = SamplingParams(extra_args={FORCED_TOKENS: forced} if forced else None)
        self.builder.added.append((row, params, None, output))

    def winners(self) -> list[int]:
        """argmax of every row; 0 is the model's own choice."""
        self.processor.update_state(self.builder.get_and_reset(self.size))
        logits = torch.zeros(self.size, 8)
        logits[:, 0] = 1.0
        return self.processor.apply(logits).argmax(-1).tolist()


def test_requests_that_come_go_move_and_swap() -> None:
    rows = Rows(4)
    first, third = [], []
    rows.added(0, [1, 2], first)
    rows.added(1, [], [])
    rows.added(2, [3, 4, 5], third)
    rows.added(3, [6], [])
    assert rows.winners() == [1, 0, 3, 6]
    first.append(1)
    third.append(3)
    assert rows.winners() == [2, 0, 4, 6]
    rows.builder.moved.append((0, 2, MoveDirectionality.SWAP))
    assert rows.winners() == [4, 0, 2, 6]
    rows.builder.removed_append(1)
    rows.builder.moved.append((3, 1, MoveDirectionality.UNIDIRECTIONAL))
    rows.size = 3
    assert rows.winners() == [4, 6, 2]
    rows.builder.removed_append(2)
    rows.size = 2
    assert rows.winners() == [4, 6]
    third.extend([4, 5])
    rows.size = 3
    rows.added(2, [], [])
    assert rows.winners() == [0, 6, 0], "the row of a request that is gone must be free"


@pytest.mark.parametrize("tokens", [7, "12", [1, -1], [1.0], [True], [[1]], None])
def test_malformed_tokens_are_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"^vtoken: 'forced_tokens' = .* it must be a list of token ids\.$"):
        forced_tokens({FORCED_TOKENS: tokens})


def test_requests_are_checked_where_they_arrive(tiny_gqa: Path) -> None:
    with running(tiny_gqa, None, **FORCING) as engine:
        with pytest.raises(ValueError, match="must be a list of token ids"):
            engine.add_request("r", [5], 4, forced_tokens=[-1])
        with pytest.raises(VLLMValidationError, match="must be a list of token ids"):
            engine.add_request("r", [5], 4, extra_args={FORCED_TOKENS: [-1]})
        with pytest.raises(ValueError, match="forced token 512 is outside the vocabulary of 512 tokens"):
            engine.add_request("r", [5], 4, forced_tokens=[1, 512])
        assert not engine.has_unfinished()
    with (
        running(tiny_gqa, None, skip_tokenizer_init=True) as engine,
        pytest.raises(ValueError, match="start it with logits_processors="),
    ):
        engine.add_request("r", [5], 4, forced_tokens=[1])
