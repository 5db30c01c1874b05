"""How much of a decode step is spent in vtoken's hooks: outermost vtoken frames minus the vLLM calls inside them.

Stock and own methods are wrapped in a timer that charges every moment to whoever is innermost, so that a vLLM call
inside a hook counts as vLLM's. Relocation is listed apart. Shares are of the same steps, so they compare across
machines; times do not.
"""

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter

import numpy as np

from vtoken.config import VTokenConfig
from vtoken.evaluation.model import ensure_model, model_dtype
from vtoken.vllm_plugin import make_engine
from vtoken.vllm_plugin.hook_timer import ExclusiveTimer, instrument


def measure(
    model: Path, running: int, steps: int, prompt: int, config: VTokenConfig, caching: bool, sharing: bool
) -> dict[str, float]:
    """Decode steps at a fixed number of running requests; medians and shares over them.

    With ``sharing``, the prompts begin with the same tokens, half of them all, which the first request has computed.
    """
    timer = ExclusiveTimer()
    instrument(timer)
    engine = make_engine(
        str(model),
        config,
        dtype=model_dtype(),
        enforce_eager=True,
        enable_prefix_caching=caching,
        block_size=32,
        max_model_len=4096,
        max_num_seqs=max(64, running),
        kv_cache_memory_bytes=4 << 30,
    )
    rng = np.random.default_rng(0)
    shared = rng.integers(100, 40000, prompt // 2 if sharing else 0)
    for n in range(running):
        own = rng.integers(100, 40000, prompt - len(shared))
        engine.add_request(f"r{n}", np.concatenate([shared, own]).tolist(), steps + 40)
        if n == 0:
            engine.step()
    while not (engine.snapshot().running == running and engine.snapshot().waiting == 0):
        engine.step()
    for _ in range(4):  # the last prefill chunks, and a warm cache
        engine.step()
    shares, rows = [], []
    for _ in range(steps):
        timer.take()
        began = perf_counter()
        engine.step()
        total = perf_counter() - began
        spent = timer.take()
        rows.append((total, spent.get("vtoken", 0.0), spent.get("relocation", 0.0)))
        shares.append(spent.get("vtoken", 0.0) / total)
    snapshot = engine.snapshot()
    assert (snapshot.running, snapshot.preemptions) == (running, 0)
    engine.shutdown()
    total, own, moved = (sum(column) for column in zip(*rows, strict=True))
    return {
        "running": running,
        "steps": steps,
        "step_ms_median": 1e3 * statistics.median(row[0] for row in rows),
        "hooks_ms_median": 1e3 * statistics.median(row[1] for row in rows),
        "relocation_ms_median": 1e3 * statistics.median(row[2] for row in rows),
        "hooks_share": own / total,
        "hooks_share_p95": float(np.percentile(shares, 95)),
        "relocation_share": moved / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--budget", type=int, default=400)
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--caching", action=argparse.BooleanOptionalAction, default=True, help="prefix caching")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--sharing", action="store_true", help="prompts that share their first half")
    args = parser.parse_args()
    config = VTokenConfig(policy="streaming_llm", budget=args.budget, interval=args.interval, copies="inline")
    model = args.model or ensure_model()
    print(
        json.dumps(measure(model, args.running, args.steps, args.prompt, config, args.caching, args.sharing), indent=2)
    )


if __name__ == "__main__":
    main()
