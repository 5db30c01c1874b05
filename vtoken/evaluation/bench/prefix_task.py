"""The task of ``prefix``: requests that share beginnings, the blocks they hold, and who hits the cache afterwards."""

import statistics
from typing import Any

RUN_GROUPS = "vtoken.evaluation.bench.prefix_task:run_groups"
STEPS_FOR_PROBES = 3
"""Before the requests end; the blocks held are counted up to there."""


def run_groups(
    engine: Any, prompts: list[list[int]], outputs: int, probes: list[list[int]], off: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run all prompts at once, and, while they still run, a further request for each of ``probes``.

    Args:
        engine: with prefix caching, room for all, and so many tokens to a step that every prompt fits the first one.
        prompts: token ids.
        outputs: tokens that each request produces.
        probes: prompts that begin as some of ``prompts`` do; each produces one token.
        off: what a probe sets so that nothing of it is evicted.

    Returns:
        blocks_per_request: distinct blocks held over requests, mean over the steps in which all decode; ``held``: the
            blocks themselves, of all these steps.
        hits: tokens of each prompt that came from the cache; ``probe_hits`` those of each probe.
        probe_outputs: each probe's token, and its log-probability.
        tokens_evicted, tokens_moved, preemptions: of everything.
    """
    before = engine.snapshot()
    names = [f"request-{n}" for n in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, outputs)
    last: dict[str, Any] = {}
    held: list[int] = []
    probing = False
    while engine.has_unfinished():
        last |= {entry.request_id: entry for entry in engine.step()}
        produced = min(len(last[name].token_ids) if name in last else 0 for name in names)
        pool = engine.snapshot()
        if not probing and produced > 1 and pool.running == len(prompts):
            held.append(pool.held_blocks)
        if not probing and produced >= outputs - STEPS_FOR_PROBES:
            probing = True
            for n, probe in enumerate(probes):
                engine.add_request(f"probe-{n}", probe, 1, logprobs=0, extra_args=off)
    after = engine.snapshot()
    asked = [last[f"probe-{n}"] for n in range(len(probes))]
    return {
        "requests": len(prompts),
        "block_size": engine.block_size,
        "blocks_per_request": statistics.fmean(held) / len(prompts),
        "held": held,
        "hits": [last[name].cached_tokens for name in names],
        "probe_hits": [entry.cached_tokens for entry in asked],
        "probe_outputs": [(entry.token_ids[0], entry.logprobs[0][entry.token_ids[0]]) for entry in asked],
        **{
            name: getattr(after, name) - getattr(before, name)
            for name in ("tokens_evicted", "tokens_moved", "preemptions")
        },
    }
