"""What was found out, as tables and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from vtoken.planning.gpu import Gpu
from vtoken.planning.model_size import GIB, ModelSize
from vtoken.planning.pool import Pool
from vtoken.planning.trace import Workload
from vtoken.planning.variants import VARIANTS, Setting

HEADINGS = {"native": "native vLLM", "none": "naive eviction", "fill": "vtoken"}
BY_BLOCKS_ALONE = "Exact: blocks alone are the limit here, not max_num_seqs, nor a step's tokens, nor time."
ESTIMATE = (
    "Times are an estimate: {efficiency:.0%} of the data sheet's bandwidth and operations, and {overhead:g} ms per "
    "step. Counts are exact, given these times."
)
# Label, key, unit, decimals, factor from the JSON's unit to the one shown.
AT_ONCE = (
    ("requests at once, mean while others wait", "mean_running", "", 1, 1.0),
    ("requests at once, peak", "peak_running", "", 0, 1.0),
    ("preemptions", "preemptions", "", 0, 1.0),
)
QUEUE = (
    ("requests finished", "finished", "", 0, 1.0),
    ("time until the last one has ended", "seconds", "s", 1, 1.0),
    ("output tokens/s", "output_tokens_per_s", "", 0, 1.0),
    ("waiting, mean", "mean_waiting", "", 1, 1.0),
    ("waiting, peak", "peak_waiting", "", 0, 1.0),
    ("somebody waits for blocks", "waits_for_blocks", "s", 1, 1.0),
    ("somebody waits for max_num_seqs", "waits_for_sequences", "s", 1, 1.0),
    ("somebody waits for a step's tokens", "waits_for_tokens", "s", 1, 1.0),
    ("running, mean", "mean_running", "", 1, 1.0),
    ("running, peak", "peak_running", "", 0, 1.0),
    ("blocks held, mean", "mean_held", "", 0, 1.0),
    ("blocks held, peak", "peak_held", "", 0, 1.0),
    ("time to first token, p50", "ttft_p50", "s", 2, 1.0),
    ("time to first token, p95", "ttft_p95", "s", 2, 1.0),
    ("time to first token, p99", "ttft_p99", "s", 2, 1.0),
    ("time in the queue, p50", "queued_p50", "s", 2, 1.0),
    ("time in the queue, p95", "queued_p95", "s", 2, 1.0),
    ("time in the queue, p99", "queued_p99", "s", 2, 1.0),
    ("time per output token, p50", "tpot_p50", "ms", 1, 1e3),
    ("time per output token, p95", "tpot_p95", "ms", 1, 1e3),
    ("preemptions", "preemptions", "", 0, 1.0),
)
HIT_RATE = ("prompt tokens from the prefix cache", "hit_rate", "%", 1, 100.0)
FAILED = ("requests ended with an error", "failed", "", 0, 1.0)
Row = tuple[str, str, str, int, float]


@dataclass(frozen=True)
class PlanReport:
    """The question and the answer.

    Attributes:
        model, gpu, pool, setting: what was asked about.
        workload: the requests, and ``source``, the file that they are from.
        sample: how many of them were there from the beginning, to see how many fit.
        found: by variant, what ``run_all`` returns.
        wall_seconds: that it took.
    """

    model: ModelSize
    gpu: Gpu
    pool: Pool
    setting: Setting
    workload: Workload
    source: str
    sample: int
    found: dict[str, dict[str, Any]]
    wall_seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model.to_json(),
            "gpu": self.gpu.to_json(),
            "pool": self.pool.to_json(),
            "setting": self.setting.to_json(),
            "workload": {
                "source": self.source,
                "requests": len(self.workload.arrivals),
                "left_out": self.workload.left_out,
                "prompt_tokens": self.workload.prompt_tokens,
                "output_tokens": self.workload.output_tokens,
                "seconds": self.workload.seconds,
                "at_once": self.sample,
            },
            "variants": self.found,
            "wall_seconds": self.wall_seconds,
        }


def heading(model: ModelSize, gpu: Gpu, pool: Pool, workload: Workload, source: str) -> list[str]:
    """What is going to be planned, in lines."""
    requests = len(workload.arrivals)
    lines = [
        f"{model.name}: {model.parameters / 1e9:.2f} billion parameters, {model.weight_bytes / GIB:.1f} GiB of "
        f"weights, {model.kv_bytes_per_token / 1024:g} KiB of K/V per token in {model.dtype}",
        f"{gpu.name}: {gpu.memory:g} GiB, {gpu.bandwidth:g} GB/s, {gpu.flops:g} TFLOP/s (data sheet, or as given)",
        f"{pool.num_blocks:,} blocks of {pool.block_size} tokens ({pool.tokens:,} tokens): {pool.source}",
        f"{source}: {requests:,} requests in {workload.seconds:,.0f} s, prompts of "
        f"{workload.prompt_tokens / requests:,.0f} tokens and outputs of {workload.output_tokens / requests:,.0f} "
        "on average",
    ]
    if workload.left_out:
        lines.append(f"{workload.left_out:,} requests are left out: they are longer than --max-model-len.")
    return lines


def tables(report: PlanReport) -> list[Table]:
    """How many fit, and what the queue is like: native vLLM | naive eviction | vtoken | vtoken / native."""
    setting, time = report.setting, report.setting.step_time
    fits = _table(
        f"How many requests fit: {report.sample:,} of them there from the beginning",
        [*AT_ONCE, *_if_any(report, "at_once")],
        {name: found["at_once"] for name, found in report.found.items()},
    )
    fits.caption = BY_BLOCKS_ALONE
    rows: list[Row] = [*QUEUE, *([HIT_RATE] if setting.enable_prefix_caching else []), *_if_any(report, "queue")]
    queue = _table(
        f"The queue of {len(report.workload.arrivals):,} requests",
        rows,
        {name: found["queue"] for name, found in report.found.items()},
    )
    queue.caption = ESTIMATE.format(efficiency=time.efficiency, overhead=time.overhead * 1e3)
    return [fits, queue]


def _if_any(report: PlanReport, part: str) -> list[Row]:
    return [FAILED] if any(found[part]["failed"] for found in report.found.values()) else []


def _table(title: str, rows: Sequence[Row], found: dict[str, dict[str, Any]]) -> Table:
    grid = Table(title=title)
    grid.add_column("")
    for name in VARIANTS:
        grid.add_column(HEADINGS[name], justify="right")
    grid.add_column("vtoken / native", justify="right")
    for label, key, unit, decimals, factor in rows:
        values = [found[name][key] for name in VARIANTS]
        before, after = values[0], values[-1]
        ratio = f"{after / before:.2f}x" if before and after is not None else "-"
        grid.add_row(label, *(_show(value, unit, decimals, factor) for value in values), ratio)
    return grid


def _show(value: float | None, unit: str, decimals: int, factor: float) -> str:
    return "-" if value is None else f"{value * factor:,.{decimals}f} {unit}".rstrip()
