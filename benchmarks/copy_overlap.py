"""How long the host stands still for relocations: copies beside sampling and scheduling, in order, and forced to wait.

One engine, the same requests again and again; between runs only the way of copying is exchanged. "Stall" is the time
that the host spends in launching copies and in waiting for them; "copy" is how long the copies themselves take.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vtoken.config import VTokenConfig
from vtoken.kernels.copy_engine import CopyMode
from vtoken.vllm_plugin import make_engine
from vtoken.vllm_plugin.copy_timer import timed_copies

MODES: tuple[CopyMode, ...] = ("async", "inline", "force_sync")
FIRST_TOKEN = 100


@dataclass
class Round:
    """One run of all requests, in one mode; milliseconds per relocation except for the last two."""

    mode: CopyMode
    relocations: int
    tokens_moved: int
    stall_ms: float
    copy_ms: float
    run_s: float


def run(engine: Any, mode: CopyMode, prompts: list[list[int]], outputs: int) -> Round:
    with timed_copies(engine.evicting_worker, mode) as (copies, relocation):
        start = time.perf_counter()
        for n, prompt in enumerate(prompts):
            engine.add_request(str(n), prompt, outputs)
        while engine.has_unfinished():
            engine.step()
        seconds = time.perf_counter() - start
    each = 1e3 / max(copies.launches, 1)
    return Round(mode, copies.launches, relocation.tokens, copies.seconds * each, relocation.seconds * each, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="else SmolLM2-135M, fetched once")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=384, help="tokens of each prompt")
    parser.add_argument("--outputs", type=int, default=97, help="tokens per request")
    parser.add_argument("--interval", type=int, default=32, help="tokens between evictions: larger, larger bursts")
    parser.add_argument("--reclaim", choices=("fill", "pack"), default="pack")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    if args.model is None:
        from vtoken.evaluation.model import ensure_model

        args.model = ensure_model()
    longest = args.prompt + args.outputs
    config = VTokenConfig(
        policy="random",
        budget=0.5,
        interval=args.interval,
        reclaim=args.reclaim,
        copies="inline",
        check_interval=1,
        theta_f=0.1,
        low_watermark=1.0,
        headroom=0.1,
    )
    engine = make_engine(
        str(args.model),
        config,
        dtype="float32",
        block_size=32,
        max_model_len=-(-longest // 32) * 32,
        max_num_seqs=args.requests,
        num_gpu_blocks_override=args.requests * (-(-longest // 32) + 4),
        kv_cache_memory_bytes=2 << 30,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(FIRST_TOKEN, 40000, args.prompt).tolist() for _ in range(args.requests)]
    rounds: list[Round] = []
    console = Console()
    try:
        run(engine, "inline", prompts, args.outputs)  # warm-up
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("runs", total=args.rounds * len(MODES))
            for n in range(args.rounds):
                for mode in MODES[n % 3 :] + MODES[: n % 3]:
                    rounds.append(run(engine, mode, prompts, args.outputs))
                    progress.advance(bar)
    finally:
        engine.shutdown()
    show(console, rounds, args)
    if args.json:
        settings = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(
            json.dumps({"settings": settings, "rounds": [asdict(r) for r in rounds]}, indent=1), "utf-8"
        )


def show(console: Console, rounds: list[Round], args: argparse.Namespace) -> None:
    table = Table(title=f"{args.reclaim}: per relocation, median of {args.rounds} runs (least … most)")
    for name in ("copies", "relocations", "tokens moved", "copy ms", "host stall ms", "run s"):
        table.add_column(name, justify="left" if name == "copies" else "right")

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ({min(values):.2f} … {max(values):.2f})"

    for mode in MODES:
        mine = [r for r in rounds if r.mode == mode]
        table.add_row(
            mode,
            str(mine[0].relocations),
            f"{mine[0].tokens_moved:,}",
            *(spread([getattr(r, name) for r in mine]) for name in ("copy_ms", "stall_ms", "run_s")),
        )
    console.print(table)


if __name__ == "__main__":
    main()
