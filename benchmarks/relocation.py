"""Speed of vtoken's relocation on the CPU against a plain copy of as many bytes.

Ratios are the plain copy's time over relocation's: 1 is as fast as copying one array to another. "pack" moves the live
half of some blocks to consecutive slots of fresh ones; "fill" moves the live half of some blocks to the holes of others
that are half empty too. Caches lie as in vLLM's CPU backend. Where its blocks hold keys transposed, tokens share cache
lines, so half of the tokens lie in all lines of the keys, and relocation has to read twice as much of them, and to fill
twice as much, as the plain copy does. All copy in turns within each round, on one thread.
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, thread_time

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vtoken.core.ragged import Ints
from vtoken.kernels.layout import BlockLayout, vec_views
from vtoken.kernels.relocation import Relocator

MIB = 2**20


@dataclass(frozen=True)
class Result:
    """One comparison; times are medians in milliseconds."""

    what: str
    block_size: int
    tokens: int
    mib: float
    copy_ms: float
    relocation_ms: float
    ratio: float
    ratio_min: float
    ratio_max: float


def vec_layout(size: int, heads: int, head_size: int) -> BlockLayout:
    block = torch.arange(size * 2 * heads * head_size)
    keys, values = vec_views(block.view(1, heads, size, 2 * head_size))
    return BlockLayout(torch.stack([keys[0], values[0]], dim=1).flatten(1).contiguous())


def half_of(blocks: Ints, size: int, random: np.random.Generator) -> Ints:
    slots = blocks[:, None] * size + np.arange(size)
    return slots[random.random(slots.shape).argsort(axis=1) < size // 2]


def moves(what: str, blocks: int, size: int) -> tuple[Ints, Ints]:
    """Sources in the first of the blocks, destinations in the others, each in an order of their own."""
    random = np.random.default_rng(0)
    order = random.permutation(blocks)
    if what == "pack":
        full, fresh = order[: 2 * (blocks // 3)], order[2 * (blocks // 3) :][: blocks // 3]
        return half_of(full, size, random), (fresh[:, None] * size + np.arange(size)).ravel()
    tail, front = order[: blocks // 2], order[blocks // 2 :][: blocks // 2]
    return half_of(tail, size, random), half_of(front, size, random)


def measure(what: str, size: int, arguments: argparse.Namespace, clock: Callable[[], float]) -> Result:
    dtype = getattr(torch, arguments.dtype)
    numbers = 2 * arguments.kv_heads * arguments.head_size
    per_block = arguments.layers * size * numbers * dtype.itemsize
    blocks = max(6, arguments.cache_mib * MIB // per_block // 6 * 6)
    cache = torch.ones(arguments.layers, blocks, size * numbers, dtype=dtype)
    sources, destinations = moves(what, blocks, size)
    relocate = Relocator(cache, vec_layout(size, arguments.kv_heads, arguments.head_size))
    plain_source, plain_target = torch.ones(2, len(sources) * arguments.layers * numbers, dtype=dtype).unbind()

    def timed(copy: Callable[[], object]) -> float:
        before = clock()
        copy()
        return clock() - before

    def round_of() -> tuple[float, float]:
        return timed(lambda: plain_target.copy_(plain_source)), timed(lambda: relocate(sources, destinations))

    round_of()
    times = [round_of() for _ in range(arguments.rounds)]
    ratios = [plain / relocation for plain, relocation in times]
    return Result(
        what,
        size,
        len(sources),
        plain_source.nbytes / MIB,
        1e3 * statistics.median(plain for plain, _ in times),
        1e3 * statistics.median(relocation for _, relocation in times),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


def show(console: Console, results: list[Result]) -> None:
    table = Table("what", "block size", "tokens", "MiB", "plain copy, ms", "relocation, ms", "ratio")
    for r in results:
        ratio = f"{r.ratio:.2f} ({r.ratio_min:.2f}..{r.ratio_max:.2f})"
        times = f"{r.copy_ms:.1f}", f"{r.relocation_ms:.1f}"
        table.add_row(r.what, str(r.block_size), str(r.tokens), f"{r.mib:.0f}", *times, ratio)
    console.print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[32, 16])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--cache-mib", type=int, default=256, help="size of the whole cache, beyond the processor's")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true", help="processor time, for machines that are busy otherwise")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    console = Console()
    if not console.is_terminal:
        console.width = 120
    torch.set_num_threads(1)
    setting = {
        "machine": platform.processor() or platform.machine(),
        "threads": 1,
        "load": os.getloadavg()[0],
        "clock": "CPU time" if arguments.cpu_time else "wall time",
        "torch": torch.__version__,
        "layers": arguments.layers,
        "kv_heads": arguments.kv_heads,
        "head_size": arguments.head_size,
        "dtype": arguments.dtype,
        "rounds": arguments.rounds,
    }
    console.print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items()))
    cases = [(what, size) for size in arguments.block_sizes for what in ("pack", "fill")]
    results = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for what, size in cases:
            progress.update(task, description=f"{what}, blocks of {size}")
            clock = thread_time if arguments.cpu_time else perf_counter
            results.append(measure(what, size, arguments, clock))
            progress.advance(task)
    show(console, results)
    if arguments.json:
        arguments.json.write_text(json.dumps({**setting, "results": [asdict(r) for r in results]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
