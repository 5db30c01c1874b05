"""Speed of vtoken's CPU attention, scores included, against vLLM's own kernel on the same cache.

Ratios are vLLM's time over vtoken's, so that more than 1 is faster than vLLM. Both run in turns within each round, and
a round's time is the median over its calls: on a machine with other work, ratios mean more than times. Decoding goes
through as many layers' caches as it takes to be well beyond the last-level cache, up to a limit on memory.

"Half live" is decoding over the same slots of which every other one on average is a hole. vLLM's kernel knows no holes
and attends all of them. So does vtoken's own kernel without a mask; its time over the masked one's is the last column.
"""

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, thread_time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
import vllm
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from vtoken.kernels.attention_mass import QuerySegments
from vtoken.kernels.cpu.attention_mass import AttentionMass
from vtoken.kernels.cpu.decode_attention import DecodeAttention
from vtoken.kernels.layout import vec_views

MIB = 2**20
LAST = 32
"""Queries that SnapKV and its like look at: the last of a prompt."""


@dataclass(frozen=True)
class Geometry:
    query_heads: int
    kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype

    @property
    def scale(self) -> float:
        return float(self.head_size) ** -0.5

    def cache(self, blocks: int) -> Tensor:
        """One layer's cache, in the layout of vLLM's CPU backend."""
        return torch.randn(blocks, self.kv_heads, self.block_size, 2 * self.head_size).to(self.dtype)

    def queries(self, count: int) -> Tensor:
        return torch.randn(count, self.query_heads, self.head_size).to(self.dtype)


@dataclass(frozen=True)
class Result:
    """One comparison; times are medians in microseconds, of one layer."""

    what: str
    requests: int
    tokens: int
    caches: int
    cache_mib: float
    vllm_us: float
    vtoken_us: float
    ratio: float
    ratio_min: float
    ratio_max: float
    ratio_to_unmasked: float | None


class StockAttention:
    """vLLM's kernel over requests of which each has the same number of tokens and of queries."""

    def __init__(self, geometry: Geometry, requests: int, tokens: int, queries: int, table: Tensor) -> None:
        g = self._geometry = geometry
        self._lengths = torch.full((requests,), tokens, dtype=torch.int32)
        self._starts = torch.arange(requests + 1, dtype=torch.int32) * queries
        self._table = table
        self._schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=requests,
            num_heads=g.query_heads,
            num_kv_heads=g.kv_heads,
            head_dim=g.head_size,
            seq_lens=self._lengths,
            dtype=g.dtype,
            query_start_loc=self._starts,
            causal=True,
            sliding_window_size=-1,
            isa="vec" if g.block_size % 32 == 0 else "vec16",
            enable_kv_split=True,
        )

    def __call__(self, query: Tensor, cache: Tensor, output: Tensor) -> None:
        blocks, heads, size, _ = cache.shape
        keys, values = cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=output,
            query_start_loc=self._starts,
            seq_lens=self._lengths,
            scale=self._geometry.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self._table,
            softcap=0,
            scheduler_metadata=self._schedule,
            s_aux=None,
        )


def in_turns(calls: list[list[Callable[[], None]]], rounds: int, clock: Callable[[], float]) -> list[list[float]]:
    """Per contender, the seconds of each round: the median over its calls. A round that warms up is left out."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for contender, own in enumerate(calls):
            times = []
            for call in own:
                began = clock()
                call()
                times.append(clock() - began)
            seconds[contender].append(statistics.median(times))
    return [own[1:] for own in seconds]


def result(
    what: str,
    requests: int,
    tokens: int,
    caches: int,
    cache_bytes: int,
    stock: list[float],
    own: list[float],
    unmasked: list[float] | None = None,
) -> Result:
    ratios = [a / b for a, b in zip(stock, own, strict=True)]
    return Result(
        what=what,
        requests=requests,
        tokens=tokens,
        caches=caches,
        cache_mib=caches * cache_bytes / MIB,
        vllm_us=1e6 * statistics.median(stock),
        vtoken_us=1e6 * statistics.median(own),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        ratio_to_unmasked=statistics.median(a / b for a, b in zip(unmasked, own, strict=True)) if unmasked else None,
    )


def check(what: str, stock: Tensor, own: Tensor) -> None:
    """A comparison of different results would be none."""
    error = (stock.float() - own.float()).abs().max().item()
    if not error < (1e-4 if stock.dtype == torch.float32 else 2e-2):
        raise SystemExit(f"{what}: vtoken's output differs from vLLM's by {error:.1e}")


def measure_decode(
    geometry: Geometry, requests: int, tokens: int, arguments: argparse.Namespace, clock: Callable[[], float]
) -> list[Result]:
    per_request = -(-tokens // geometry.block_size)
    first = geometry.cache(requests * per_request)
    size = first.numel() * first.element_size()
    wanted = max(arguments.layers, math.ceil(arguments.beyond_mib * MIB / size))
    count = max(1, min(wanted, arguments.memory_mib * MIB // size))
    caches = [first, *(first.clone() for _ in range(count - 1))]
    table = torch.randperm(requests * per_request).to(torch.int32).view(requests, -1)
    query = geometry.queries(requests)
    outputs = [torch.empty_like(query) for _ in range(2)]

    stock = StockAttention(geometry, requests, tokens, 1, table)
    dense, masked = (DecodeAttention(*vec_views(first), geometry.query_heads, masked=each) for each in (False, True))
    mass = torch.zeros(dense.lanes, requests * tokens)
    views = [vec_views(cache) for cache in caches]

    def attend(own: DecodeAttention, keys: Tensor, values: Tensor, mass: Tensor | None) -> None:
        own(query, keys, values, geometry.scale, outputs[1], mass)

    def over_all(own: DecodeAttention, mass: Tensor | None) -> list[Callable[[], None]]:
        return [lambda pair=pair: attend(own, *pair, mass) for pair in views]

    planned = (np.full(requests, tokens), table, np.arange(requests) * tokens)
    stock(query, first, outputs[0])
    for own in (dense, masked):
        own.plan(*planned)
        attend(own, *views[0], None)
        check(f"decode of {requests} x {tokens}", *outputs)
    live = np.random.default_rng(0).random((requests, tokens)) < 0.5
    live[:, -1] = True
    masked.plan(*planned, live)
    times = in_turns(
        [
            [lambda cache=cache: stock(query, cache, outputs[0]) for cache in caches],
            *(over_all(own, wanted) for own in (dense, masked) for wanted in (mass, None)),
        ],
        arguments.rounds,
        clock,
    )
    of = (requests, tokens, count, size, times[0])
    return [
        result("decode and scores", *of, times[1]),
        result("decode", *of, times[2]),
        result("decode and scores, half live", *of, times[3], times[1]),
        result("decode, half live", *of, times[4], times[2]),
    ]


def measure_prefill(
    geometry: Geometry, tokens: int, arguments: argparse.Namespace, clock: Callable[[], float]
) -> list[Result]:
    blocks = -(-tokens // geometry.block_size)
    cache = geometry.cache(blocks)
    table = torch.randperm(blocks).to(torch.int32).view(1, -1)
    query = geometry.queries(tokens)
    output = torch.empty_like(query)
    keys, _ = vec_views(cache)
    stock = StockAttention(geometry, 1, tokens, tokens, table)

    def observing(count: int) -> Callable[[], None]:
        first, context = tokens - count, tokens - count + 1
        fields = {"first": first, "count": count, "context": context, "row": 0, "offset": 0, "stride": 0, "decay": 1.0}
        observer = AttentionMass(keys, geometry.query_heads)
        observer.plan(table, QuerySegments(**{name: np.array([value]) for name, value in fields.items()}))
        mass = torch.zeros(observer.lanes, tokens)
        return lambda: observer(query, keys, geometry.scale, mass)

    last = min(LAST, tokens)
    times = in_turns(
        [[lambda: stock(query, cache, output)], [observing(tokens)], [observing(last)]], arguments.rounds, clock
    )
    size = cache.numel() * cache.element_size()
    return [
        result("scores of all queries", 1, tokens, 1, size, times[0], times[1]),
        result(f"scores of the last {last}", 1, tokens, 1, size, times[0], times[2]),
    ]


def show(console: Console, results: list[Result]) -> None:
    table = Table("", "tokens", "caches", "MiB", "vLLM µs", "vtoken µs", "ratio", "min … max", "unmasked")
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for r in results:
        table.add_row(
            *(r.what, f"{r.requests} x {r.tokens}", str(r.caches), f"{r.cache_mib:.0f}"),
            *(f"{r.vllm_us:.0f}", f"{r.vtoken_us:.0f}", f"{r.ratio:.2f}", f"{r.ratio_min:.2f} … {r.ratio_max:.2f}"),
            "" if r.ratio_to_unmasked is None else f"{r.ratio_to_unmasked:.2f}",
        )
    console.print(table)
    console.print("Ratio: vLLM's attention / vtoken's, median over rounds; more than 1 is faster than vLLM.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 32], help="batch sizes of decoding")
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 2048, 8192], help="tokens of each request")
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2048, 8192], help="tokens of a prompt")
    parser.add_argument("--query-heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--layers", type=int, default=30, help="layers' caches to go through")
    parser.add_argument("--beyond-mib", type=int, default=256, help="more of them, until they have this size")
    parser.add_argument("--memory-mib", type=int, default=2048, help="fewer of them, so that they fit in this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="threads of both, by default torch's")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's processor time, for machines that are busy otherwise"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    console = Console()
    if not console.is_terminal:
        console.width = 120
    current_platform.import_kernels()
    torch.manual_seed(0)
    threads = 1 if arguments.cpu_time else arguments.threads
    if threads:
        torch.set_num_threads(threads)
    clock = thread_time if arguments.cpu_time else perf_counter
    geometry = Geometry(
        arguments.query_heads,
        arguments.kv_heads,
        arguments.head_size,
        arguments.block_size,
        getattr(torch, arguments.dtype),
    )
    setting = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "clock": "CPU time" if arguments.cpu_time else "wall time",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "query_heads": geometry.query_heads,
        "kv_heads": geometry.kv_heads,
        "head_size": geometry.head_size,
        "block_size": geometry.block_size,
        "dtype": arguments.dtype,
        "rounds": arguments.rounds,
    }
    console.print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items()))
    decodes = [(requests, tokens) for requests in arguments.requests for tokens in arguments.tokens]
    results = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(decodes) + len(arguments.prompts))
        for requests, tokens in decodes:
            progress.update(task, description=f"decode {requests} x {tokens}")
            results += measure_decode(geometry, requests, tokens, arguments, clock)
            progress.advance(task)
        for tokens in arguments.prompts:
            progress.update(task, description=f"prefill {tokens}")
            results += measure_prefill(geometry, tokens, arguments, clock)
            progress.advance(task)
    show(console, results)
    if arguments.json:
        arguments.json.write_text(json.dumps({**setting, "results": [asdict(r) for r in results]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
