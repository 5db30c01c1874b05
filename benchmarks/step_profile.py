"""Where the time of vtoken's hooks goes in a decode step of many requests: vLLM's scheduler, and no model.

Time spent in C (numpy) counts for the function that called it. A profile makes Python calls dearer than they are, so
what counts is how often something runs per step: what runs once per request is asked by vLLM's own loop. ``vtoken bench
hostscale`` has the times without a profile.
"""

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decode_load import start_decoding

import vtoken
from vtoken.config import VTokenConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
HOME = Path(vtoken.__file__).parent
SHOWN = 25


def make_engine(model: Any, args: argparse.Namespace) -> Any:
    """The tests' stub engine, without its checks, and all requests decoding."""
    from stub_worker import S, StubEngine

    class Unchecked(StubEngine):
        def check(self) -> None: ...
        def check_pool(self) -> None: ...
        def _check_steady_growth(self, output: Any) -> None: ...
        def _check_nobody_lingers(self, output: Any) -> None: ...

    config = VTokenConfig(policy="streaming_llm", budget=args.budget, reclaim=args.reclaim)
    running, outputs = args.running, args.steps + 20
    blocks = running * -(-(args.prompt + outputs) // S) + 1
    engine = Unchecked(model, config, blocks, running, running * args.prompt, args.caching)
    start_decoding(engine, running, args.prompt, outputs, args.caching)
    return engine


def watch(profiler: cProfile.Profile, engine: Any) -> None:
    """Profile vLLM's scheduler with our hooks, and the worker's part, but nothing of the stub that lies between."""

    def watched(stock: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            profiler.enable()
            try:
                return stock(*args, **kwargs)
            finally:
                profiler.disable()

        return run

    for name in ("schedule", "update_from_output"):
        setattr(engine.scheduler, name, watched(getattr(engine.scheduler, name)))
    for name in ("wait_for_copies", "begin_step", "place_tokens", "evict", "take_report"):
        setattr(engine.runner.vtoken, name, watched(getattr(engine.runner.vtoken, name)))


def profile(engine: Any, steps: int) -> dict[str, Any]:
    """Functions of vtoken, with calls and own milliseconds per step, and what everything took."""
    profiler = cProfile.Profile(builtins=False)
    watch(profiler, engine)
    for _ in range(steps):
        step = engine.step()
        assert step.output.total_num_scheduled_tokens == len(step.output.num_scheduled_tokens)
    rows, vllm = [], 0.0
    for (file, line, name), (_, calls, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if Path(file).is_relative_to(HOME):
            where = f"{Path(file).relative_to(HOME)}:{line}"
            rows.append({"function": name, "where": where, "calls": calls / steps, "ms": 1e3 * own / steps})
        elif "/vllm/" in file:
            vllm += 1e3 * own / steps
    rows.sort(key=lambda row: -row["ms"])
    return {"vtoken_ms": sum(row["ms"] for row in rows), "vllm_ms": vllm, "functions": rows}


def table(found: dict[str, Any]) -> str:
    lines = ["| function | where | calls per step | own ms per step |", "|:--|:--|--:|--:|"]
    for row in found["functions"][:SHOWN]:
        lines.append(f"| `{row['function']}` | {row['where']} | {row['calls']:.0f} | {row['ms']:.3f} |")
    lines.append(f"| all of vtoken | | | {found['vtoken_ms']:.2f} |")
    lines.append(f"| vLLM's scheduler | | | {found['vllm_ms']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--budget", type=int, default=200)
    parser.add_argument("--reclaim", choices=["fill", "pack", "none"], default="fill")
    parser.add_argument("--caching", action="store_true", help="prefix caching, prompts that share their first half")
    args = parser.parse_args()
    from stub_model import stub_model

    with tempfile.TemporaryDirectory() as directory:
        model = stub_model(Path(directory))
    found = profile(make_engine(model, args), args.steps)
    print(json.dumps({"settings": vars(args), **found}, indent=2))
    print(table(found))


if __name__ == "__main__":
    main()
