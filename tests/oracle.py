"""The exactness oracle: a dense Hugging Face pass that attends to exactly what a traced request attended to.

The K/V of a token are a function of its own row of the attention mask, so one pass per incarnation, in which
each token is hidden from the forwards after its eviction, reproduces every forward of it. The engine's own
tokens are fed in and logits are compared: equal text proves little, and rounding may flip a near tie.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vtoken.core.trace import Incarnation, Trace

NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class OracleReport:
    max_abs_diff: float  # largest |engine - oracle| over all compared logits
    tokens: int  # output tokens compared
    entries: int  # logits compared, over all of them
    evictions: int  # victims in all incarnations
    logit_spread: float  # standard deviation over the vocabulary, smallest over the output tokens
    near_ties: int  # outputs that differ from the oracle's argmax within the tolerance


@dataclass(frozen=True, order=True)
class Victim:
    """Where a trace evicts a token: right after ``forward`` of ``incarnation``."""

    incarnation: int
    forward: int
    token: int


def load_reference(path: str | Path) -> Any:
    """The Hugging Face model in float32 with an attention that honours an explicit mask."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()


def length(life: Incarnation) -> int:
    """Tokens in the sequence when this incarnation ended, evicted ones included."""
    return life.prefix_hit + sum(life.new_tokens)


def victims_of(trace: Trace) -> Iterator[Victim]:
    for i, life in enumerate(trace.incarnations):
        for forward, tokens in enumerate(life.victims):
            yield from (Victim(i, forward, token) for token in tokens)


def felt_victims(trace: Trace) -> list[Victim]:
    """Victims that a later forward did without; an eviction after the last forward changes nothing."""
    return [v for v in victims_of(trace) if v.forward < len(trace.incarnations[v.incarnation].new_tokens) - 1]


# ---- Consistency -------------------------------------------------------------------------------------------


def check_trace(trace: Trace, prompt_length: int, num_outputs: int) -> None:
    """Raise AssertionError unless such a trace produces ``num_outputs`` tokens after such a prompt."""
    assert trace.incarnations, "the trace has no incarnation"
    total = prompt_length + num_outputs - 1  # the last output is never fed back
    known = prompt_length  # what the prefill of the next incarnation has to compute
    for i, life in enumerate(trace.incarnations):
        assert len(life.victims) == len(life.new_tokens), (
            f"incarnation {i}: {len(life.new_tokens)} forwards but {len(life.victims)} lists of victims"
        )
        assert 0 <= life.prefix_hit < known, f"incarnation {i}: prefix hit {life.prefix_hit} of {known} known tokens"
        assert length(life) <= total, f"incarnation {i}: {length(life)} tokens computed, at most {total} exist"
        _check_life(life, i, known)
        known = max(known, length(life) + 1)
    computed = length(trace.incarnations[-1])
    assert computed == total, (
        f"last incarnation: {computed} tokens computed, expected prompt {prompt_length} + outputs {num_outputs} - 1"
    )


def _check_life(life: Incarnation, index: int, known: int) -> None:
    end, evicted = life.prefix_hit, set[int]()
    for forward, (new, victims) in enumerate(zip(life.new_tokens, life.victims, strict=True)):
        where = f"incarnation {index}, forward {forward}"
        assert new >= 1, f"{where}: computes {new} tokens"
        assert end + new <= known or (end >= known and new == 1), (
            f"{where}: computes tokens {end} to {end + new - 1}, but only {max(known, end + 1)} are known"
        )
        end += new
        for token in victims:
            assert 0 <= token < end, f"{where}: victim {token} is not below the current length {end}"
            assert token not in evicted, f"{where}: victim {token} was already evicted"
            evicted.add(token)


# ---- Replay ------------------------------------------------------------------------------------------------


def visibility(life: Incarnation) -> torch.Tensor:
    """bool [tokens, tokens]: whether the query in row q attended key t when it was computed."""
    prefix = torch.full((life.prefix_hit,), -1)  # computed before forward 0, with nothing evicted
    forwards = torch.arange(len(life.new_tokens))
    steps = forwards.repeat_interleave(torch.tensor(life.new_tokens, dtype=torch.int64))
    forward_of = torch.cat([prefix, steps])
    evicted_after = torch.full_like(forward_of, NEVER)
    for forward, tokens in enumerate(life.victims):
        evicted_after[tokens] = forward
    position = torch.arange(len(forward_of))
    return (position[None, :] <= position[:, None]) & (forward_of[:, None] <= evicted_after[None, :])


@torch.inference_mode()
def masked_logits(model: Any, token_ids: Sequence[int], visible: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocab] of one dense pass; ``visible``: bool [tokens, tokens]; ``rows``: positions."""
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    hidden = model.model(
        input_ids=torch.tensor([token_ids]),
        position_ids=torch.arange(len(token_ids))[None],
        attention_mask=mask[None, None],
        use_cache=False,
    ).last_hidden_state
    return model.lm_head(hidden[0, rows])


def replay(model: Any, prompt_ids: Sequence[int], output_ids: Sequence[int], trace: Trace) -> torch.Tensor:
    """The logits [outputs, vocab] from which each output token was chosen, according to the trace.

    An output belongs to the first incarnation that computed the token before it; later ones prefill it again.
    """
    check_trace(trace, len(prompt_ids), len(output_ids))
    token_ids = [*prompt_ids, *output_ids]
    first, parts = len(prompt_ids) - 1, []  # the query whose logits give the next output
    for life in trace.incarnations:
        end = length(life)
        if end > first:
            parts.append(masked_logits(model, token_ids[:end], visibility(life), torch.arange(first, end)))
            first = end
    return torch.cat(parts)


# ---- The check ---------------------------------------------------------------------------------------------


def check(
    model: Any,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    trace: Trace,
    vllm_logits: Sequence[Mapping[int, float]],
    *,
    atol: float = 1e-3,
    allow_none: bool = False,
    greedy: bool = True,
) -> OracleReport:
    """Raise AssertionError unless the engine's raw logits are those of the replayed trace.

    ``vllm_logits`` holds per output token {token id: raw logit}, the top few or the whole vocabulary. The
    trace must be consistent and evict something that a later forward misses (unless ``allow_none``), and the
    logits must be spread widely enough for a tolerance to mean something. Where tokens were sampled otherwise
    (``greedy=False``), that each is the likeliest is not asked for.
    """
    check_trace(trace, len(prompt_ids), len(output_ids))
    assert allow_none or felt_victims(trace), "nothing was evicted that a later forward could miss"
    logits = replay(model, prompt_ids, output_ids, trace)
    spread = logits.std(dim=-1).min().item()
    assert spread >= 1, f"logit spread {spread:.3g} is below 1: a tolerance would prove nothing"
    largest, entries, near_ties = _compare(logits, output_ids, vllm_logits, atol, greedy)
    evictions = sum(1 for _ in victims_of(trace))
    return OracleReport(largest, len(output_ids), entries, evictions, spread, near_ties)


def _compare(
    logits: torch.Tensor,
    output_ids: Sequence[int],
    vllm_logits: Sequence[Mapping[int, float]],
    atol: float,
    greedy: bool = True,
) -> tuple[float, int, int]:
    """Largest difference, number of logits compared, number of near ties; AssertionError beyond ``atol``."""
    assert len(vllm_logits) == len(output_ids), f"{len(output_ids)} outputs but logits for {len(vllm_logits)}"
    largest, entries, near_ties = 0.0, 0, 0
    for i, (row, token, engine) in enumerate(zip(logits, output_ids, vllm_logits, strict=True)):
        assert token in engine, f"output {i}: the engine gave no logit for token {token}, which it chose"
        top = row.topk(2)
        best, gap = int(top.indices[0]), (top.values[0] - top.values[1]).item()
        ids = torch.tensor(list(engine.keys()), dtype=torch.int64)
        worst = (row[ids] - torch.tensor(list(engine.values()))).abs().max().item()
        # Written so that a NaN fails.
        assert worst <= atol, (
            f"output {i} (token {token}): logits differ by {worst:.3g}, allowed {atol:g}; top-2 gap {gap:.3g}"
        )
        if greedy and token != best:
            behind = (top.values[0] - row[token]).item()
            assert behind < atol, (
                f"output {i}: token {token} lies {behind:.3g} behind the oracle's {best}, allowed {atol:g};"
                f" top-2 gap {gap:.3g}"
            )
            near_ties += 1
        largest, entries = max(largest, worst), entries + len(ids)
    return largest, entries, near_ties


# ---- Sensitivity: traces that are wrong in one place -------------------------------------------------------


def drop_victim(trace: Trace, victim: Victim) -> Trace:
    """The trace without that eviction."""
    return _edited(trace, victim, None)


def shift_victim(trace: Trace, victim: Victim, by: int = 1) -> Trace:
    """The trace with that eviction ``by`` forwards later (earlier if negative)."""
    target = victim.forward + by
    if not 0 <= target < len(trace.incarnations[victim.incarnation].new_tokens):
        raise ValueError(f"{victim} cannot move by {by}: there is no forward {target}")
    return _edited(trace, victim, target)


def _edited(trace: Trace, victim: Victim, target: int | None) -> Trace:
    life = trace.incarnations[victim.incarnation]
    victims = [list(tokens) for tokens in life.victims]
    victims[victim.forward].remove(victim.token)
    if target is not None:
        victims[target].append(victim.token)
    incarnations = list(trace.incarnations)
    incarnations[victim.incarnation] = replace(life, victims=victims)
    return Trace(incarnations)


def worst_control(
    model: Any,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    trace: Trace,
    edit: Callable[[Trace, Victim], Trace],
    candidates: int = 4,
) -> Trace:
    """The edited trace that changes the replayed logits most.

    A single victim may have carried hardly any attention, so ``edit`` is tried on ``candidates`` victims,
    spread evenly over the trace with its first and last, and the largest change of any logit wins: a dense
    pass each.
    """
    felt = felt_victims(trace)
    assert felt, "nothing was evicted that a later forward could miss"
    chosen = {felt[int(i)] for i in torch.linspace(0, len(felt) - 1, min(candidates, len(felt)))}
    truth = replay(model, prompt_ids, output_ids, trace)

    def effect(edited: Trace) -> float:
        return (replay(model, prompt_ids, output_ids, edited) - truth).abs().max().item()

    return max((edit(trace, victim) for victim in sorted(chosen)), key=effect)


def check_sensitivity(
    model: Any,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    trace: Trace,
    vllm_logits: Sequence[Mapping[int, float]],
    *,
    atol: float = 1e-3,
    candidates: int = 4,
) -> dict[str, str]:
    """Raise AssertionError unless ``check`` refuses the trace with one victim dropped, and with one shifted.

    Returns the message with which each control was refused.
    """
    refusals = {}
    edits = {"one victim dropped": drop_victim, "one victim evicted a forward late": shift_victim}
    for name, edit in edits.items():
        control = worst_control(model, prompt_ids, output_ids, trace, edit, candidates)
        try:
            _compare(replay(model, prompt_ids, output_ids, control), output_ids, vllm_logits, atol)
        except AssertionError as refusal:
            refusals[name] = str(refusal)
        else:
            raise AssertionError(f"the oracle accepted a trace with {name}: it could not have failed")
    return refusals
