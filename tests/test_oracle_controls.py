"""The oracle agrees with an independent step-by-step run, and it refuses what is wrong."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from oracle import Victim, check, check_sensitivity, drop_victim, load_reference, replay, shift_victim
from transformers import DynamicCache

from vtoken.core.trace import Incarnation, Trace

SINKS, BUDGET, PROMPT, OUTPUTS = 4, 24, 48, 20


@dataclass
class Run:
    """What an engine would report about one request."""

    model: Any
    prompt_ids: list[int]
    output_ids: list[int]
    trace: Trace
    logits: list[dict[int, float]]

    def check(self, trace: Trace | None = None, **options: Any) -> oracle.OracleReport:
        return check(self.model, self.prompt_ids, self.output_ids, trace or self.trace, self.logits, **options)


@torch.inference_mode()
def simulate_life(
    model: Any, prompt_ids: list[int], output_ids: list[int], chunks: list[int], outputs: int, evict_from: int
) -> tuple[Incarnation, list[torch.Tensor]]:
    """Decode greedily until ``outputs`` tokens exist, cutting StreamingLLM victims out of the cache.

    ``chunks`` divide the prefill; eviction down to the budget follows every forward from ``evict_from`` on.
    ``output_ids`` is extended; the logits behind each new output are returned.
    """
    cache, kept, life, logits = DynamicCache(config=model.config), list[int](), Incarnation(), []
    done = 0
    while len(output_ids) < outputs:
        token_ids = prompt_ids + output_ids
        new = chunks[len(life.new_tokens)] if len(life.new_tokens) < len(chunks) else 1
        positions = torch.arange(done, done + new)
        step = model(
            input_ids=torch.tensor([token_ids[done : done + new]]),
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
        )
        kept, done = kept + positions.tolist(), done + new
        if done == len(token_ids):
            logits.append(step.logits[0, -1])
            output_ids.append(int(logits[-1].argmax()))
        evict = len(life.new_tokens) >= evict_from and len(kept) > BUDGET
        victims = kept[SINKS : SINKS + len(kept) - BUDGET] if evict else []
        slots = torch.tensor([slot for slot, token in enumerate(kept) if token not in victims])
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, slots], layer.values[:, :, slots]
        kept = [token for token in kept if token not in victims]
        life.new_tokens.append(new)
        life.victims.append(victims)
    return life, logits


def simulate(model: Any, chunks: list[int], evict_from: int, preempt_at: int | None = None) -> Run:
    generator = torch.Generator().manual_seed(7)
    prompt_ids = torch.randint(model.config.vocab_size, (PROMPT,), generator=generator).tolist()
    output_ids, lives, logits = list[int](), [], []
    if preempt_at:
        life, rows = simulate_life(model, prompt_ids, output_ids, chunks, preempt_at, evict_from)
        lives, logits, chunks, evict_from = [life], rows, [PROMPT, preempt_at], 1
    life, rows = simulate_life(model, prompt_ids, output_ids, chunks, OUTPUTS, evict_from)
    as_reported = [dict(enumerate(row.tolist())) for row in [*logits, *rows]]
    return Run(model, prompt_ids, output_ids, Trace([*lives, life]), as_reported)


@pytest.fixture(scope="module")
def model(tiny_gqa: Path) -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the operations are too small to share, above all on a busy machine
    yield load_reference(tiny_gqa)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def streaming(model: Any) -> Run:
    return simulate(model, [PROMPT], evict_from=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"chunks": [PROMPT], "evict_from": 0},
        {"chunks": [20, 20, 8], "evict_from": 2},
        {"chunks": [20, 20, 8], "evict_from": 0},
        {"chunks": [20, 20, 8], "evict_from": 2, "preempt_at": 9},
    ],
    ids=["whole prompt", "chunks, evict at end", "chunks, evict in each", "preempted"],
)
def test_replay_equals_deleting_from_the_cache(model: Any, settings: dict[str, Any]) -> None:
    run = simulate(model, **settings)
    truth = torch.tensor([list(row.values()) for row in run.logits])
    difference = (replay(model, run.prompt_ids, run.output_ids, run.trace) - truth).abs().max().item()
    assert difference < 1e-4
    report = run.check(atol=1e-4)
    assert (report.tokens, report.near_ties) == (OUTPUTS, 0)
    assert report.entries == OUTPUTS * model.config.vocab_size
    last = run.trace.incarnations[-1]
    assert sum(map(len, last.victims)) == PROMPT + OUTPUTS - 1 - BUDGET
    assert report.max_abs_diff == pytest.approx(difference) and report.logit_spread >= 1


def test_prefix_hit_is_an_uncompressed_prefix(streaming: Run) -> None:
    """Leaving the first tokens to a cache changes nothing: nothing is evicted before the prompt's end."""
    life = streaming.trace.incarnations[0]
    hit = Incarnation(32, [PROMPT - 32, *life.new_tokens[1:]], life.victims)
    assert streaming.check(Trace([hit])) == streaming.check()


def test_controls_fail_the_check(streaming: Run) -> None:
    refusals = check_sensitivity(
        streaming.model, streaming.prompt_ids, streaming.output_ids, streaming.trace, streaming.logits
    )
    assert len(refusals) == 2 and all("logits differ by" in message for message in refusals.values())


@pytest.mark.parametrize("edit", [drop_victim, shift_victim, lambda trace, v: shift_victim(trace, v, by=-1)])
def test_one_wrong_victim_in_steady_state_fails_the_check(
    streaming: Run, edit: Callable[[Trace, Victim], Trace]
) -> None:
    """Each single decode-time victim of this run is enough, not only the one that matters most."""
    for victim in [v for v in oracle.felt_victims(streaming.trace) if v.forward > 0]:
        with pytest.raises(AssertionError, match=r"^output \d+ \(token \d+\): logits differ by .*; top-2 gap"):
            streaming.check(edit(streaming.trace, victim))


def test_wrong_reports_are_refused(streaming: Run) -> None:
    best = streaming.output_ids[5]
    logits = [dict(row) for row in streaming.logits]
    logits[5][best] += 0.01
    run = replace(streaming, logits=logits)
    with pytest.raises(AssertionError, match=r"^output 5 .*: logits differ by 0\.01, allowed 0\.001; top-2 gap"):
        run.check()
    logits[5][best] = float("nan")
    with pytest.raises(AssertionError, match=r"^output 5 .* differ by nan"):
        run.check()
    del logits[5][best]
    with pytest.raises(AssertionError, match=rf"^output 5: the engine gave no logit for token {best}, which"):
        run.check()
    run.logits = streaming.logits[:-1]
    with pytest.raises(AssertionError, match=r"^20 outputs but logits for 19$"):
        run.check()


def test_another_argmax_is_refused_unless_it_is_a_near_tie(streaming: Run) -> None:
    """The last output is fed to no forward, so it can be replaced without touching any logits."""
    top = sorted(streaming.logits[-1].items(), key=lambda item: -item[1])
    (best, high), (second, low) = top[:2]
    run = replace(streaming, output_ids=[*streaming.output_ids[:-1], second])
    with pytest.raises(AssertionError, match=rf"^output 19: token {second} lies .* behind the oracle's {best},"):
        run.check()
    assert run.check(atol=1.01 * (high - low)).near_ties == 1


def test_a_check_that_could_not_fail_is_refused(model: Any, streaming: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    life = streaming.trace.incarnations[0]
    none = Trace([Incarnation(0, life.new_tokens, [[]] * OUTPUTS)])
    with pytest.raises(AssertionError, match=r"^nothing was evicted that a later forward"):
        streaming.check(none)
    late = Trace([Incarnation(0, life.new_tokens, [[]] * (OUTPUTS - 1) + [[5]])])
    with pytest.raises(AssertionError, match=r"^nothing was evicted that a later forward"):
        streaming.check(late)
    with pytest.raises(AssertionError, match=r"^output 1 .* logits differ"):  # output 0 saw the whole prompt
        streaming.check(none, allow_none=True)
    monkeypatch.setattr(oracle, "replay", lambda *_: 0.1 * replay(*_))
    with pytest.raises(AssertionError, match=r"^logit spread 0\.\d+ is below 1"):
        streaming.check()


def test_a_control_needs_somewhere_to_go(streaming: Run) -> None:
    with pytest.raises(ValueError, match=r"cannot move by -1: there is no forward -1$"):
        shift_victim(streaming.trace, Victim(0, 0, SINKS), by=-1)


@pytest.mark.parametrize(
    ("incarnations", "message"),
    [
        ([], "the trace has no incarnation"),
        ([Incarnation(0, [6, 1, 1], [[], []])], "incarnation 0: 3 forwards but 2 lists of victims"),
        ([Incarnation(6, [1, 1], [[], []])], "incarnation 0: prefix hit 6 of 6 known tokens"),
        (
            [Incarnation(0, [6, 1], [[], []])],
            "last incarnation: 7 tokens computed, expected prompt 6 + outputs 3 - 1",
        ),
        ([Incarnation(0, [6, 1, 1, 1], [[]] * 4)], "incarnation 0: 9 tokens computed, at most 8 exist"),
        (
            [Incarnation(0, [4, 3, 1], [[]] * 3)],
            "incarnation 0, forward 1: computes tokens 4 to 6, but only 6 are known",
        ),
        (
            [Incarnation(0, [6, 2], [[]] * 2)],
            "incarnation 0, forward 1: computes tokens 6 to 7, but only 7 are known",
        ),
        ([Incarnation(0, [6, 0, 1, 1], [[]] * 4)], "incarnation 0, forward 1: computes 0 tokens"),
        (
            [Incarnation(0, [6, 1, 1], [[6], [], []])],
            "incarnation 0, forward 0: victim 6 is not below the current length 6",
        ),
        (
            [Incarnation(0, [6, 1, 1], [[-1], [], []])],
            "incarnation 0, forward 0: victim -1 is not below the current length 6",
        ),
        (
            [Incarnation(0, [6, 1, 1], [[2], [2], []])],
            "incarnation 0, forward 1: victim 2 was already evicted",
        ),
        (
            [Incarnation(0, [6, 1, 1], [[2, 2], [], []])],
            "incarnation 0, forward 0: victim 2 was already evicted",
        ),
        (
            [Incarnation(0, [6], [[]]), Incarnation(0, [6, 2], [[]] * 2)],
            "incarnation 1, forward 1: computes tokens 6 to 7, but only 7 are known",
        ),
    ],
)
def test_inconsistent_traces_are_refused(incarnations: list[Incarnation], message: str) -> None:
    with pytest.raises(AssertionError) as refusal:
        oracle.check_trace(Trace(incarnations), prompt_length=6, num_outputs=3)
    assert str(refusal.value) == message
