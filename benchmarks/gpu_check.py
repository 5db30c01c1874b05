"""Check vtoken's GPU code on a GPU, in a few minutes: kernels, order of copies, CUDA graphs, and the speed of copies.

It needs torch, triton, numpy, rich and vtoken, and neither vLLM nor numba. It has never run on hardware: what can be
run without it (the comparisons, in Triton's interpreter) is tested, the rest has only been read. Exit status: 0 if all
checks pass, 1 if one fails, 2 if there is no CUDA here.

What a control takes away has to be missed for a check to mean anything, but on hardware nothing forces a race to be
lost. So controls say whether a violation was observed, and do not decide the exit status.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vtoken.core.ragged import Ints
from vtoken.kernels.attention_mass import QuerySegments, attention_mass_reference
from vtoken.kernels.decode_attention import decode_attention_reference
from vtoken.kernels.gpu.copy_engine import CudaCopyEngine
from vtoken.kernels.key_norms import key_norms_reference
from vtoken.kernels.layout import BlockLayout, vec_views
from vtoken.kernels.relocation import Relocator, bits_of, relocate_reference

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of an output, in which probabilities are rounded to this dtype."""
MASS_TOLERANCE = 1e-4
"""Of a mass, which is float32 in all cases."""


@dataclass(frozen=True)
class Outcome:
    """What one check found. ``passed`` is None for what is reported and not judged."""

    check: str
    case: str
    passed: bool | None
    found: str


@dataclass(frozen=True)
class Shape:
    query_heads: int
    kv_heads: int
    head_size: int
    block_size: int
    lengths: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{dtype}, {self.query_heads}/{self.kv_heads} heads of {self.head_size}, blocks of {self.block_size}, "
            f"{len(self.lengths)} requests up to {max(self.lengths)}"
        )


SHAPES = [
    Shape(query_heads, kv_heads, head_size, block_size, lengths, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for query_heads, kv_heads, head_size, block_size, lengths in (
        (9, 3, 64, 16, (1, 17, 700)),
        (32, 8, 128, 16, (64, 4001, 5, 1023)),
        (8, 1, 80, 32, (300,)),
    )
]


class Problem:
    """Requests over one layer's cache, [blocks, S, H, D] twice, in which all that must not be read is NaN."""

    def __init__(self, shape: Shape, device: str, masked: bool, queries: int | None = None) -> None:
        self.shape, self.device = shape, device
        random = torch.Generator().manual_seed(sum(shape.lengths))

        def numbers(*size: int) -> Tensor:
            return torch.randn(*size, generator=random).to(device, shape.dtype)

        size, lengths = shape.block_size, torch.tensor(shape.lengths)
        held = [-(-length // size) for length in shape.lengths]
        blocks = sum(held) + 2
        self.query = numbers(queries or len(lengths), shape.query_heads, shape.head_size)
        self.caches = torch.full(
            (2, blocks, size, shape.kv_heads, shape.head_size), torch.nan, dtype=shape.dtype, device=device
        )
        # Beyond a request's blocks the table names one that does not exist.
        table = torch.full((len(lengths), max(held) + 1), 2**30, dtype=torch.int32)
        order = torch.randperm(blocks, generator=random).to(torch.int32)
        live = torch.rand(len(lengths), max(shape.lengths), generator=random) < 0.5
        live[:, 0] = True
        self.live = live.to(device) if masked else None
        for row, (length, count) in enumerate(zip(shape.lengths, held, strict=True)):
            table[row, :count], order = order[:count], order[count:]
            position = torch.arange(length)
            position = position[live[row, :length]] if masked else position
            at = (table[row, position // size].long().to(device), (position % size).to(device))
            for cache in self.caches:
                cache[at] = numbers(len(position), shape.kv_heads, shape.head_size)
        self.table, self.lengths = table.to(device), lengths.to(device, torch.int32)
        self.offsets = (lengths.cumsum(0) - lengths).to(device)
        self.scale = float(shape.head_size) ** -0.5

    def decode(self, kernel: Callable[..., None]) -> tuple[Tensor, Tensor]:
        """The output, and the mass summed over its lanes."""
        output = torch.full_like(self.query, torch.nan)
        mass = torch.zeros(self.shape.kv_heads, sum(self.shape.lengths), device=self.device)
        keys, values = self.caches
        kernel(
            self.query,
            keys,
            values,
            self.table,
            self.lengths,
            self.scale,
            output,
            mass,
            self.offsets,
            live=self.live,
        )
        return output.float(), mass.sum(dim=0)

    def observe(self, kernel: Callable[..., None], decay: float) -> Tensor:
        """The last queries of each request, summed up for every other one, and one by one for the others."""
        each = self.query.shape[0] // len(self.shape.lengths)
        count = np.minimum(each, np.array(self.shape.lengths, dtype=np.int64))
        rows = np.arange(len(count), dtype=np.int64)
        lengths = np.array(self.shape.lengths, dtype=np.int64)
        stride = np.where(rows % 2, lengths, 0)
        width = np.where(stride == 0, lengths, lengths * count)
        offset, decays = width.cumsum() - width, np.full(len(rows), decay)
        segments = QuerySegments(rows * each, count, lengths - count + 1, rows, offset, stride, decays)
        mass = torch.zeros(self.shape.kv_heads, int(width.sum()), device=self.device)
        kernel(self.query, self.caches[0], self.table, segments, self.scale, mass, live=self.live)
        return mass.sum(dim=0)


def compared(check: str, case: str, pairs: list[tuple[Tensor, Tensor, float]]) -> Outcome:
    """Pairs of what was found and expected, and the tolerance, relative and absolute, of each."""
    errors, passed = [], True
    for found, expected, tolerance in pairs:
        passed = passed and bool(torch.allclose(found, expected, rtol=tolerance, atol=tolerance))
        passed = passed and expected.numel() > 0 and not bool(expected.isnan().any())
        errors.append(f"{float((found - expected).abs().max()):.1e}" if found.numel() else "nothing")
    return Outcome(check, case, passed, "largest error " + ", ".join(errors))


def check_decode(shape: Shape, device: str, kernel: Callable[..., None], masked: bool) -> Outcome:
    problem = Problem(shape, device, masked)
    (output, mass), (expected, expected_mass) = problem.decode(kernel), problem.decode(decode_attention_reference)
    pairs = [(output, expected, TOLERANCE[shape.dtype]), (mass, expected_mass, MASS_TOLERANCE)]
    return compared("decode attention" + ", masked" * masked, str(shape), pairs)


def check_mass(shape: Shape, device: str, kernel: Callable[..., None], masked: bool) -> Outcome:
    problem = Problem(shape, device, masked, queries=17 * len(shape.lengths))
    if problem.live is not None:
        # A query attends at least one position: the first one is live for all.
        assert bool(problem.live[:, 0].all())
    found, expected = problem.observe(kernel, 0.9), problem.observe(attention_mass_reference, 0.9)
    return compared("attention mass" + ", masked" * masked, str(shape), [(found, expected, MASS_TOLERANCE)])


def layouts(size: int, heads: int, head_size: int, device: str) -> dict[str, BlockLayout]:
    """One token after the other, as GPUs have it, and keys transposed, as vLLM's CPU backend does."""
    numbers = torch.arange(size * 2 * heads * head_size, device=device)
    keys, values = vec_views(numbers.view(1, heads, size, 2 * head_size))
    vec = torch.stack([keys[0], values[0]], dim=1).flatten(1)
    return {"rows": BlockLayout(numbers.view(size, -1)), "vec": BlockLayout(vec.contiguous())}


def all_layers(shape: Shape, device: str, layers: int = 3, blocks: int = 13) -> Tensor:
    random = torch.Generator().manual_seed(1)
    numbers = shape.block_size * 2 * shape.kv_heads * shape.head_size
    return torch.randn(layers, blocks, numbers, generator=random).to(device, shape.dtype)


def some_moves(slots: int, device: str) -> tuple[Tensor, Tensor]:
    """A third of the slots to another third, and one token to two places."""
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(2))
    sources, destinations = order[: slots // 3], order[slots // 3 : 2 * (slots // 3)]
    sources = torch.cat([sources[:-1], sources[:1]])
    return sources.to(device), destinations.to(device)


def check_relocation(shape: Shape, device: str, kernel: Callable[..., None]) -> Iterator[Outcome]:
    for name, layout in layouts(shape.block_size, shape.kv_heads, shape.head_size, device).items():
        found = all_layers(shape, device)
        expected, before = found.clone(), found.clone()
        moves = some_moves(found.shape[1] * shape.block_size, device)
        kernel(bits_of(found), layout, *moves)
        relocate_reference(bits_of(expected), layout, *moves)
        wrong = int((bits_of(found) != bits_of(expected)).sum())
        passed = wrong == 0 and not torch.equal(found, before)
        yield Outcome("relocation", f"{name}, {shape}", passed, f"{wrong} numbers differ")


def check_key_norms(shape: Shape, device: str, kernel: Callable[..., Tensor]) -> Iterator[Outcome]:
    for name, layout in layouts(shape.block_size, shape.kv_heads, shape.head_size, device).items():
        cache = all_layers(shape, device)
        slots, _ = some_moves(cache.shape[1] * shape.block_size, device)
        arguments = cache, layout, shape.kv_heads, shape.head_size, slots
        pairs = [(kernel(*arguments), key_norms_reference(*arguments), 1e-5)]
        yield compared("key norms", f"{name}, {shape}", pairs)


def check_kernels(device: str, shapes: list[Shape]) -> Iterator[Outcome]:
    from vtoken.kernels.gpu.attention_mass import attention_mass
    from vtoken.kernels.gpu.decode_attention import decode_attention
    from vtoken.kernels.gpu.key_norms import key_norms
    from vtoken.kernels.gpu.relocation import relocate

    for shape in shapes:
        for masked in (False, True):
            yield check_decode(shape, device, decode_attention, masked)
            yield check_mass(shape, device, attention_mass, masked)
        yield from check_relocation(shape, device, relocate)
        yield from check_key_norms(shape, device, key_norms)


# -- the order of copies ----------------------------------------------------------------------------------------------


class NotBehindTheForward(CudaCopyEngine):
    """The control whose copies do not wait for what was ordered before."""

    def launch(self, sources: Ints, destinations: Ints) -> None:
        with self._cuda.stream(self._stream):
            self._relocate(sources, destinations)
        self._copied.record(self._stream)


class NotBeforeTheNextForward(CudaCopyEngine):
    """The control whose copies nobody waits for."""

    def wait(self) -> None:
        pass


def violations(engine_class: type[CudaCopyEngine], repeats: int = 20, cycles: int = 20_000_000) -> int:
    """How often a token is not, after the next forward has overwritten its old slot, what the last forward wrote.

    Every forward is a long one, and so is every copy: each would be overtaken if nothing held back what follows.
    """
    size, numbers = 16, 256
    layout = BlockLayout(torch.arange(size * numbers, device="cuda").view(size, numbers))
    cache = torch.zeros(4, 64, size * numbers, device="cuda")
    relocator = Relocator(cache, layout)

    def relocate(sources: Ints, destinations: Ints) -> None:
        torch.cuda._sleep(cycles)
        relocator(sources, destinations)

    engine = engine_class(relocate)
    sources = np.arange(32 * size, dtype=np.int64)
    destinations = sources + 32 * size
    relocator(sources, destinations)  # compiled before anything is timed
    torch.cuda.synchronize()
    wrong = 0
    for number in range(1, repeats + 1):
        cache.fill_(-1)
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        cache[:, :32] = number
        engine.launch(sources, destinations)
        engine.wait()
        cache[:, :32] = -2  # the freed blocks' next owner
        found = cache[:, 32:].clone()
        engine.finish()
        torch.cuda.synchronize()
        wrong += not (bool((found == number).all()) and bool((cache[:, 32:] == number).all()))
    return wrong


def check_order() -> Iterator[Outcome]:
    wrong = violations(CudaCopyEngine)
    yield Outcome("order of copies", "both waits", wrong == 0, f"{wrong} of 20 wrong")
    for control in (NotBehindTheForward, NotBeforeTheNextForward):
        wrong = violations(control)
        found = "observed" if wrong else "not observed"
        yield Outcome("order of copies", f"control: {control.__name__}", None, f"{found}, {wrong} of 20 wrong")


# -- CUDA graphs ------------------------------------------------------------------------------------------------------


def check_graph(shape: Shape) -> Outcome:
    """A captured launch of decode attention, replayed after blocks, lengths, mask and K/V have changed in place."""
    from vtoken.kernels.gpu.decode_attention import decode_attention

    problem = Problem(shape, "cuda", masked=True)
    keys, values = problem.caches
    output = torch.zeros_like(problem.query)
    mass = torch.zeros(shape.kv_heads, sum(shape.lengths), device="cuda")

    def launch() -> None:
        mass.zero_()
        decode_attention(
            problem.query,
            keys,
            values,
            problem.table,
            problem.lengths,
            problem.scale,
            output,
            mass,
            problem.offsets,
            live=problem.live,
        )

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # as torch asks for: what a first launch sets up must not be captured
        for _ in range(3):
            launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    before = output.clone()

    assert problem.live is not None
    problem.live.fill_(True)
    problem.caches.copy_(torch.randn_like(problem.caches))
    problem.lengths.copy_((problem.lengths + 1) // 2)
    problem.query.copy_(torch.randn_like(problem.query))
    used = -(-problem.lengths // shape.block_size)
    for row, count in enumerate(used.tolist()):
        problem.table[row, :count] = problem.table[row, :count].flip(0)
    graph.replay()
    torch.cuda.synchronize()
    expected, expected_mass = problem.decode(decode_attention_reference)
    pairs = [
        (output.float(), expected, TOLERANCE[shape.dtype]),
        (mass.sum(dim=0), expected_mass, MASS_TOLERANCE),
    ]
    outcome = compared("CUDA graph", str(shape), pairs)
    changed = not torch.equal(before, output)
    return Outcome(outcome.check, outcome.case, bool(outcome.passed) and changed, outcome.found)


# -- speed ------------------------------------------------------------------------------------------------------------


def milliseconds(work: Callable[[], object], rounds: int = 9) -> float:
    """Median of a few rounds after one more, on the current stream."""
    times = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(np.median(times[1:]))


def measure_speed() -> Iterator[Outcome]:
    """Packing half of 256 blocks of a model like Llama-3.1-8B, alone and beside attention over another cache."""
    from vtoken.kernels.gpu.decode_attention import decode_attention

    layers, blocks, size, numbers = 32, 400, 16, 2 * 8 * 128
    cache = torch.zeros(layers, blocks, size * numbers, dtype=torch.bfloat16, device="cuda")
    random = np.random.default_rng(0)
    sources = np.flatnonzero(random.random(256 * size) < 0.5)
    destinations = np.arange(len(sources), dtype=np.int64) + 256 * size
    layout = BlockLayout(torch.arange(size * numbers, device="cuda").view(size, numbers))
    relocate = Relocator(cache, layout)
    plain = torch.zeros(2, len(sources) * layers * numbers, dtype=torch.bfloat16, device="cuda")
    gib = plain[0].nbytes / 2**30
    copy_ms = milliseconds(lambda: plain[1].copy_(plain[0]))
    moved_ms = milliseconds(lambda: relocate(sources, destinations))
    case = f"{len(sources)} tokens, {gib:.2f} GiB"
    yield Outcome("speed", f"plain copy of {case}", None, f"{copy_ms:.2f} ms, {1000 * gib / copy_ms:.0f} GiB/s")
    yield Outcome("speed", f"relocation of {case}", None, f"{moved_ms:.2f} ms, ratio {copy_ms / moved_ms:.2f}")

    problem = Problem(Shape(32, 8, 128, 16, (4000,) * 32, torch.bfloat16), "cuda", masked=False)
    engine = CudaCopyEngine(relocate)
    launches = max(1, round(4 * moved_ms / milliseconds(lambda: problem.decode(decode_attention))))

    def decoding() -> None:
        for _ in range(launches):
            problem.decode(decode_attention)

    def both() -> None:
        engine.launch(sources, destinations)
        decoding()
        engine.wait()

    def one_after_the_other() -> None:
        engine.launch(sources, destinations)
        engine.wait()
        decoding()

    for name, work in (("decoding", decoding), ("beside", both), ("one after the other", one_after_the_other)):
        yield Outcome("speed", f"{launches} decode launches, {name}", None, f"{milliseconds(work):.2f} ms")


# -- all of it --------------------------------------------------------------------------------------------------------


def guarded(check: str, outcomes: Callable[[], Iterator[Outcome]]) -> Iterator[Outcome]:
    """An exception is a failure of this check, and the next ones are still made."""
    try:
        yield from outcomes()
    except Exception as failure:
        yield Outcome(check, "stopped", False, f"{type(failure).__name__}: {str(failure).splitlines()[0][:200]}")


def show(console: Console, outcomes: list[Outcome]) -> None:
    words = {True: "[green]ok[/]", False: "[red]FAILED[/]", None: "-"}
    table = Table("check", "case", "", "found")
    for outcome in outcomes:
        table.add_row(outcome.check, outcome.case, words[outcome.passed], outcome.found)
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there as well")
    options = parser.parse_args(arguments)
    console = Console()
    if not torch.cuda.is_available():
        console.print("There is no CUDA device here, so nothing could be checked.")
        return 2
    if not console.is_terminal:
        console.width = 160
    setting: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    console.print(", ".join(f"{name} {value}" for name, value in setting.items()))
    graphs = [shape for shape in SHAPES if shape.head_size == 128]
    parts: list[tuple[str, Callable[[], Iterator[Outcome]]]] = [
        *((f"kernels, {shape.dtype}", lambda shape=shape: check_kernels("cuda", [shape])) for shape in SHAPES),
        ("order of copies", check_order),
        ("CUDA graph", lambda: (check_graph(shape) for shape in graphs)),
        ("speed", measure_speed),
    ]
    outcomes = []
    for name, part in parts:
        with console.status(name):
            outcomes += guarded(name, part)
    show(console, outcomes)
    failed = sum(outcome.passed is False for outcome in outcomes)
    console.print(f"{failed} of {sum(outcome.passed is not None for outcome in outcomes)} checks failed")
    if options.json:
        options.json.write_text(
            json.dumps({**setting, "outcomes": [asdict(outcome) for outcome in outcomes]}, indent=2) + "\n"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
