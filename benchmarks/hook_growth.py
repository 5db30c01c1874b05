"""How the time in vtoken's hooks grows with the number of decoding requests: vLLM's scheduler, and no model.

The worker is the tests' stub, whose forward only looks at what attention would read; that is not counted, nor are the
checks of the stub. What is counted is as in hook_cost: outermost vtoken frames minus the vLLM, or stub, calls inside
them. It is the processor time of the one thread that does it all, so other work on the machine hardly shows. What
compares across machines is the growth: at most 1 means that a request costs no more among many.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from time import thread_time
from typing import Any

from decode_load import start_decoding

from vtoken.config import VTokenConfig
from vtoken.vllm_plugin.hook_timer import ExclusiveTimer, instrument

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def instrument_stub(timer: ExclusiveTimer) -> None:
    """``instrument``, and what stands below our runner and behind the scheduler in the stub."""
    import stub_runner
    from stub_worker import StubEngine

    from vtoken.vllm_plugin.compat import EvictingRunner

    instrument(timer)
    for name, value in vars(EvictingRunner).items():
        if callable(value) and name != "__init__":
            timer.wrap(stub_runner.BareRunner, name, "stub")
    timer.wrap(StubEngine, "_free_once", "stub")


def measure(timer: ExclusiveTimer, model: Any, running: int, args: argparse.Namespace) -> dict[str, float]:
    """Decode steps at a fixed number of running requests; medians over them."""
    from stub_worker import S, StubEngine

    config = VTokenConfig(policy="streaming_llm", budget=args.budget, interval=args.interval)
    outputs, blocks = args.steps + 20, -(-(args.prompt + args.steps + 20) // S)
    engine = StubEngine(model, config, running * blocks + 1, running, running * args.prompt, args.caching)
    start_decoding(engine, running, args.prompt, outputs, args.caching)
    rows = []
    for _ in range(args.steps):
        timer.take()
        step = engine.step()
        spent = timer.take()
        assert len(step.output.num_scheduled_tokens) == running == step.output.total_num_scheduled_tokens
        rows.append((spent["vtoken"], spent.get("relocation", 0.0)))
    assert engine.preemptions == 0
    hooks, moved = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
    return {
        "running": running,
        "hooks_ms_median": hooks,
        "hooks_ms_p95": 1e3 * statistics.quantiles((row[0] for row in rows), n=20)[-1],
        "relocation_ms_median": moved,
        "hooks_us_per_request": 1e3 * hooks / running,
    }


def with_growth(results: list[dict[str, float]]) -> list[dict[str, float]]:
    """The time per request, relative to that among the fewest requests."""
    base = results[0]["hooks_us_per_request"]
    return [result | {"growth": result["hooks_us_per_request"] / base} for result in results]


def table(results: list[dict[str, float]]) -> str:
    lines = [
        "| requests | hooks, ms per step | p95 | relocation, ms | us per request | growth |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        lines.append(
            f"| {r['running']} | {r['hooks_ms_median']:.2f} | {r['hooks_ms_p95']:.2f} | "
            f"{r['relocation_ms_median']:.2f} | {r['hooks_us_per_request']:.1f} | {r['growth']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--budget", type=int, default=400)
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument(
        "--caching", action="store_true", help="prefix caching, and prompts that share their first half"
    )
    args = parser.parse_args()
    from stub_model import stub_model

    timer = ExclusiveTimer(thread_time)
    with tempfile.TemporaryDirectory() as directory:
        model = stub_model(Path(directory))
    instrument_stub(timer)
    results = with_growth([measure(timer, model, running, args) for running in sorted(args.running)])
    print(json.dumps({"settings": vars(args), "results": results}, indent=2))
    print(table(results))


if __name__ == "__main__":
    main()
