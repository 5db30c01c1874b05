"""What looking at attention costs end to end: the same requests under each policy and under streaming_llm, in turn.

Both engines live in one process and take turns, round by round, so that drift of the machine hits both; a ratio is one
of two neighbouring rounds. The profile charges every moment to the innermost of: attention in vLLM's kernel, attention
observed by vtoken, vtoken's other hooks, and the rest of vLLM; prompt steps and decode steps are listed apart.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vtoken.config import VTokenConfig
from vtoken.evaluation.model import ensure_model, model_dtype
from vtoken.vllm_plugin import make_engine
from vtoken.vllm_plugin.hook_timer import ExclusiveTimer, instrument

BASELINE = "streaming_llm"
PHASES = ("prompt", "decode")
CHARGED = ("attention", "observed attention", "hooks", "relocation", "vllm")


@dataclass
class Round:
    """One run of all requests: seconds in all, and per phase and payer."""

    seconds: float
    spent: dict[str, dict[str, float]] = field(default_factory=lambda: {p: dict.fromkeys(CHARGED, 0.0) for p in PHASES})


@dataclass
class Load:
    requests: int
    prompt: int
    outputs: int
    budget: float
    eager: bool


def watch(timer: ExclusiveTimer) -> None:
    """Wrap vtoken's hooks, and both ways to attend."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from vtoken.kernels.cpu.observer import AttentionObserver

    instrument(timer)
    timer.wrap(CPUAttentionBackendImpl, "forward", "attention")
    for name in ("begin", "attend", "take"):
        timer.wrap(AttentionObserver, name, "observed attention")


def run(engine: Any, timer: ExclusiveTimer, load: Load, seed: int) -> Round:
    """Add all requests at once, and step to their end."""
    rng = np.random.default_rng(seed)
    for n in range(load.requests):
        engine.add_request(f"r{n}", rng.integers(100, 40000, load.prompt).tolist(), load.outputs)
    done, result = 0, Round(0.0)
    timer.take()
    while engine.has_unfinished():
        began = perf_counter()
        progress = engine.step()
        result.seconds += perf_counter() - began
        # The first output of a request comes with the end of its prompt; later steps only decode.
        phase = "prompt" if not progress or any(len(p.token_ids) == 1 for p in progress) else "decode"
        for payer, seconds in timer.take().items():
            result.spent[phase][{"vtoken": "hooks", "outside": "vllm"}.get(payer, payer)] += seconds
        done += sum(p.finished for p in progress)
    assert done == load.requests
    return result


def compare(timer: ExclusiveTimer, model: Path, policy: str, load: Load, rounds: int, tick: Any) -> dict[str, Any]:
    """Rounds of both policies in turn. The timer must watch already: layers hold on to the methods they start with."""
    engines = {}
    for name in (BASELINE, policy):
        engines[name] = make_engine(
            str(model),
            VTokenConfig(policy=name, budget=load.budget, copies="inline"),
            dtype=model_dtype(),
            enforce_eager=load.eager,
            enable_prefix_caching=False,
            block_size=32,
            max_model_len=4096,
            max_num_seqs=max(64, load.requests),
            kv_cache_memory_bytes=2 << 30,
        )
    for engine in engines.values():
        run(engine, timer, load, seed=999)
        tick()
    taken: dict[str, list[Round]] = {name: [] for name in engines}
    for n in range(rounds):
        for name in list(engines)[:: 1 if n % 2 else -1]:
            taken[name].append(run(engines[name], timer, load, seed=n))
            tick()
    evicted = {name: engine.snapshot().tokens_evicted for name, engine in engines.items()}
    assert evicted[policy] == evicted[BASELINE] > 0
    for engine in engines.values():
        engine.shutdown()
    ratios = [a.seconds / b.seconds for a, b in zip(taken[BASELINE], taken[policy], strict=True)]
    return {
        "policy": policy,
        "throughput_ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "ratios": ratios,
        "rounds": {name: [asdict(r) for r in rs] for name, rs in taken.items()},
    }


def table(results: list[dict[str, Any]], load: Load) -> Table:
    shown = Table(title=f"{load.requests} requests of {load.prompt} + {load.outputs} tokens, budget {load.budget}")
    shown.add_column("policy")
    shown.add_column("throughput\nagainst it")
    for phase in PHASES:
        for payer in CHARGED:
            shown.add_column(f"{phase}\n{payer}\nms", justify="right")

    def row(name: str, ratio: str, rounds: list[dict[str, Any]]) -> None:
        cells = [
            f"{1e3 * statistics.median(r['spent'][phase].get(payer, 0.0) for r in rounds):,.0f}"
            for phase in PHASES
            for payer in CHARGED
        ]
        shown.add_row(name, ratio, *cells)

    for result in results:
        row(BASELINE, "1", result["rounds"][BASELINE])
        low, high = result["spread"]
        ratio = f"{result['throughput_ratio']:.3f} ({low:.3f}-{high:.3f})"
        row(result["policy"], ratio, result["rounds"][result["policy"]])
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", default="h2o", help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--outputs", type=int, default=128)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--eager", action="store_true", help="leave out vLLM's compilation")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = Load(args.requests, args.prompt, args.outputs, args.budget, args.eager)
    model, policies, console = args.model or ensure_model(), args.policies.split(","), Console(width=200)
    timer, results = ExclusiveTimer(), []
    watch(timer)
    with Progress(console=console) as progress:
        bar = progress.add_task("rounds", total=len(policies) * 2 * (args.rounds + 1))
        for policy in policies:
            results.append(compare(timer, model, policy, load, args.rounds, lambda: progress.advance(bar)))
    console.print(table(results, load))
    if args.json:
        args.json.write_text(json.dumps({"load": asdict(load), "results": results}, indent=2))


if __name__ == "__main__":
    main()
