"""What the raw runs of ``peers`` say: tables, figure and checks."""

from collections.abc import Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from vtoken.evaluation.agreement import compare_texts
from vtoken.evaluation.bench.base import Check, Run
from vtoken.evaluation.bench.figures import COLOURS, FURTHER, new_figure
from vtoken.evaluation.bench.intervals import Interval, interval, ratio
from vtoken.evaluation.bench.tables import Cell, Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NATIVE, AGAIN = "native", "native again"
OURS = ("streaming_llm", "snapkv")
OPENVINO, OPENVINO_EVICTING, OPENVINO_U8 = "openvino", "openvino evicting", "openvino evicting u8"
VARIANTS = (NATIVE, *OURS, OPENVINO, OPENVINO_EVICTING, OPENVINO_U8, AGAIN)
LABELS = {
    NATIVE: "native vLLM",
    "streaming_llm": "vtoken, streaming_llm",
    "snapkv": "vtoken, snapkv",
    OPENVINO: "OpenVINO GenAI",
    OPENVINO_EVICTING: "OpenVINO GenAI, evicting",
    OPENVINO_U8: "OpenVINO GenAI, evicting, 8-bit cache",
    AGAIN: "native vLLM, a second engine",
}
SHADES = {
    NATIVE: COLOURS["native"],
    "streaming_llm": COLOURS["fill"],
    "snapkv": FURTHER[2],
    OPENVINO: FURTHER[1],
    OPENVINO_EVICTING: FURTHER[0],
}
AIM = 1.7
BLOCK_SIZE = 32


def measured_at(batch: int, batches: Sequence[int]) -> list[str]:
    """The variants of a batch: what is there for reference is run in one of them alone."""
    middle = batches[len(batches) // 2]
    once = {OPENVINO: middle, OPENVINO_U8: middle, AGAIN: min(batches)}
    return [variant for variant in VARIANTS if once.get(variant, batch) == batch]


def tables(runs: Sequence[Run]) -> list[Table]:
    return [_speed(runs), _where_time_goes(runs), _price(runs)]


def checks(runs: Sequence[Run]) -> list[Check]:
    return [*_musts(runs), *_aims(runs)]


def figure(runs: Sequence[Run]) -> "Figure":
    """Output tokens/s by batch, and the middle batch's seconds: prompts, and all else."""
    shown, (left, right) = new_figure(1, 2, width=5.2, height=3.6)
    batches, middle = _batches(runs), _middle(runs)
    width = 0.8 / len(SHADES)
    for place, (variant, shade) in enumerate(SHADES.items()):
        found = {n: _values(runs, variant, batch) for n, batch in enumerate(batches)}
        bars = {n: interval(values) for n, values in found.items() if values}
        at = [n + (place - (len(SHADES) - 1) / 2) * width for n in bars]
        spread = [
            [max(bar.median - bar.low, 0.0) for bar in bars.values()],
            [max(bar.high - bar.median, 0.0) for bar in bars.values()],
        ]
        heights = [bar.median for bar in bars.values()]
        left.bar(at, heights, width, yerr=spread, color=shade, label=LABELS[variant], capsize=2)
    left.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    left.set_ylim(0, 1.45 * left.dataLim.ymax)  # room for the legend
    left.set_xlabel("requests that come at once")
    left.set_ylabel("output tokens/s")
    left.set_title(f"Who produces most on {_blocks(runs)} blocks of KV cache?")
    left.legend(fontsize=7)
    for place, (variant, shade) in enumerate(SHADES.items()):
        prompts = _prompt_seconds(runs, variant, middle)
        rest = max(median(_values(runs, variant, middle, "seconds")) - prompts, 0.0)
        right.barh(place, prompts, color=shade, alpha=0.45)
        right.barh(place, rest, left=prompts, color=shade)
    right.set_yticks(range(len(SHADES)), [LABELS[variant] for variant in SHADES])
    right.invert_yaxis()
    right.set_xlabel("seconds: prompts (pale), all else (full)")
    right.set_title(f"Where the time goes, {middle} requests")
    return shown


def _speed(runs: Sequence[Run]) -> Table:
    columns = [
        Column("requests"),
        Column("engine"),
        Column("output tokens/s", 1),
        Column("against native", 2),
        Column("against OpenVINO, evicting", 2),
        Column("running at once, mean", 1),
        Column("most blocks held"),
    ]
    rows: list[list[Cell]] = []
    for batch in _batches(runs):
        for variant in VARIANTS:
            mine = _timed(runs, variant, batch)
            if not mine:
                continue
            rows.append(
                [
                    batch,
                    LABELS[variant],
                    interval(_values(runs, variant, batch)),
                    None if variant == NATIVE else _ratio(runs, variant, NATIVE, batch),
                    None if variant == OPENVINO_EVICTING else _ratio(runs, variant, OPENVINO_EVICTING, batch),
                    fmean(run["mean_running"] for run in mine),
                    max(run["peak_blocks"] for run in mine),
                ]
            )
    about = _engine(runs, NATIVE)
    openvino = _engine(runs, OPENVINO)["openvino_genai"]
    again = _ratio(runs, AGAIN, NATIVE, min(_batches(runs)))
    repeats = {batch: len(_timed(runs, NATIVE, batch)) for batch in _batches(runs)}
    least, most = min(repeats.values()), max(repeats.values())
    fewer = f" ({least} with {max(repeats)} requests)" if least < most else ""
    note = (
        f"Median and 95 % interval of {most} interleaved repeats{fewer}, ratios paired by repeat. Prompts of "
        f"{about['prompt']:,} tokens, {about['outputs']} output tokens each, all at once; {about['num_blocks']} blocks "
        f"of {BLOCK_SIZE} tokens for all, which is five full requests; budget {about['budget']} tokens; float32 "
        f"throughout but for the line that says 8-bit. OpenVINO GenAI {openvino}: {_settings(runs)}. Two engines of "
        f"the same kind (native vLLM) differ by {again.median:.3f} ({again.low:.3f} to {again.high:.3f})."
    )
    title = f"Output tokens/s on the KV cache of five full requests, budget {about['budget']}"
    return Table(title, columns, rows, note)


def _where_time_goes(runs: Sequence[Run]) -> Table:
    batch = _middle(runs)
    native = median(_values(runs, NATIVE, batch, "seconds"))
    columns = [
        Column("engine"),
        Column("prompts, tokens/s"),
        Column("prompts alone, s", 1),
        Column("whole run, s", 1),
        Column("prompts' share", percent=True),
        Column("step, median, ms", 1),
        Column("native / this", 2),
        Column("were decoding free", 2),
    ]
    rows: list[list[Cell]] = []
    for variant in VARIANTS:
        if variant == AGAIN or not _timed(runs, variant, batch):
            continue
        prompts, whole = _prompt_seconds(runs, variant, batch), median(_values(runs, variant, batch, "seconds"))
        (alone,) = [run for run in runs if run["kind"] == "prompts" and run["variant"] == variant]
        step = median(_values(runs, variant, batch, "step_ms"))
        rate = alone["tokens"] / alone["seconds"]
        rows.append([LABELS[variant], rate, prompts, whole, prompts / whole, step, native / whole, native / prompts])
    note = (
        "Prompts alone: the same prompts with one output token each, once. The last column is what this engine would "
        "gain over native vLLM if everything but prompts took no time: no eviction can gain more."
    )
    return Table(f"Where the time goes, {batch} requests", columns, rows, note)


def _price(runs: Sequence[Run]) -> Table:
    columns = [
        Column("engine"),
        Column("compared with"),
        Column("ROUGE-L F1", 3),
        Column("identical outputs"),
        Column("first difference after, median, tokens"),
        Column("needles found"),
    ]
    pairs = [(variant, NATIVE) for variant in OURS]
    pairs += [(OPENVINO_EVICTING, OPENVINO), (OPENVINO, NATIVE)]
    rows: list[list[Cell]] = [[LABELS[NATIVE], None, None, None, None, _needles(runs, NATIVE)]]
    for variant, other in pairs:
        one, two = _outputs(runs, variant), _outputs(runs, other)
        lengths = [(len(a), len(b)) for a, b in zip(one, two, strict=True)]
        found = compare_texts(_as_texts(one), _as_texts(two), lengths)
        first = float(median(_common(a, b) for a, b in zip(one, two, strict=True)))
        same = f"{found.identical} of {found.requests}"
        rows.append([LABELS[variant], LABELS[other], found.rouge_l, same, first, _needles(runs, variant)])
    about = _engine(runs, NATIVE)
    note = (
        f"Greedy outputs of {about['outputs']} tokens against the same engine's own with the whole cache, over tokens; "
        "the last line is what two engines differ by with no eviction at all. Needles: a number hidden in prompts of "
        f"{about['prompt']:,} and {about['prompt'] * 3 // 4:,} tokens."
    )
    return Table("What eviction costs", columns, rows, note)


def _musts(runs: Sequence[Run]) -> list[Check]:
    found = []
    for variant in OURS:
        least = min(run["tokens_evicted"] for run in _all_timed(runs, variant))
        found.append(Check(f"{LABELS[variant]}: evictions fired", "> 0 tokens in each run", f"{least:,}", least > 0))
    most = max(run["tokens_evicted"] for variant in (NATIVE, AGAIN) for run in _all_timed(runs, variant))
    found.append(Check(f"{LABELS[NATIVE]}: nothing is evicted", "0 tokens", f"{most:,}", most == 0))
    about = _engine(runs, NATIVE)
    kept, whole = about["budget"] // BLOCK_SIZE + 1, -(-about["prompt"] // BLOCK_SIZE)
    for variant in (OPENVINO_EVICTING, OPENVINO_U8):
        held = max(run["decode_blocks_per_request"] for run in _all_timed(runs, variant))
        what = f"{LABELS[variant]}: evictions fired"
        found.append(Check(what, f"at most {kept} blocks per decoding request", f"{held:.1f}", held <= kept))
    held = min(run["decode_blocks_per_request"] for run in _all_timed(runs, OPENVINO))
    what = f"{LABELS[OPENVINO]}: nothing is evicted"
    found.append(Check(what, f"at least {whole} blocks per decoding request", f"{held:.1f}", held >= whole))
    pools = {(e["num_blocks"], e["bytes_per_block"]) for e in _engines(runs) if e["variant"] != OPENVINO_U8}
    shown = ", ".join(f"{blocks} x {size:,} bytes" for blocks, size in sorted(pools))
    found.append(Check("the same KV cache for all (8-bit apart)", "one size", shown, len(pools) == 1))
    timed = [run for run in runs if run["kind"] == "timed"]
    wrong = sum(run["output_tokens"] != run["batch"] * about["outputs"] for run in timed)
    found.append(Check("each request has all of its output tokens", "0 runs differ", f"{wrong}", wrong == 0))
    return found


def _aims(runs: Sequence[Run]) -> list[Check]:
    found = []
    for variant in OURS:
        ratios = {batch: _ratio(runs, variant, OPENVINO_EVICTING, batch) for batch in _batches(runs)}
        what = f"{LABELS[variant]}: ahead of {LABELS[OPENVINO_EVICTING]}"
        held = all(one.low > 1 for one in ratios.values())
        found.append(Check(what, "> 1 beyond the interval", _shown(ratios), held, "aim", _why_openvino(runs, variant)))
    for variant in OURS:
        ratios = {batch: _ratio(runs, variant, NATIVE, batch) for batch in _batches(runs)}
        held = all(one.median >= AIM for one in ratios.values())
        what = f"{LABELS[variant]}: against {LABELS[NATIVE]}"
        found.append(Check(what, f">= {AIM}", _shown(ratios), held, "aim", _why_native(runs, variant)))
    return found


def _why_openvino(runs: Sequence[Run], variant: str) -> str:
    theirs, ours = (_spent(runs, one) for one in (OPENVINO_EVICTING, variant))
    return f"with {_middle(runs)} requests OpenVINO takes {theirs}, vLLM with vtoken {ours}"


def _why_native(runs: Sequence[Run], variant: str) -> str:
    theirs, ours = (_spent(runs, one) for one in (NATIVE, variant))
    return (
        f"with {_middle(runs)} requests native vLLM takes {theirs}, with vtoken {ours}: prompts cost both the same, "
        "and in a step more requests share the cores"
    )


def _spent(runs: Sequence[Run], variant: str) -> str:
    """Where an engine's time goes in the middle batch."""
    batch = _middle(runs)
    prompts, whole = _prompt_seconds(runs, variant, batch), median(_values(runs, variant, batch, "seconds"))
    return f"{prompts:.1f} s for prompts and {whole - prompts:.1f} s for all else"


def _shown(ratios: dict[int, Interval]) -> str:
    return "; ".join(f"{batch}: {r.median:.2f} ({r.low:.2f} to {r.high:.2f})" for batch, r in ratios.items())


def _settings(runs: Sequence[Run]) -> str:
    spec = _engine(runs, OPENVINO_EVICTING)["settings"]
    eviction = spec["eviction"]
    return (
        f"{spec['max_num_batched_tokens']} tokens per step (its default), {spec['threads']} threads, start_size "
        f"{eviction['start_size']}, recent_size {eviction['recent_size']}, max_cache_size {eviction['max_cache_size']}"
        f", {eviction['aggregation_mode']}, snapkv_window_size {eviction['snapkv_window_size']}"
    )


def _engines(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run["kind"] == "engine"]


def _engine(runs: Sequence[Run], variant: str) -> Run:
    (found,) = [run for run in _engines(runs) if run["variant"] == variant]
    return found


def _batches(runs: Sequence[Run]) -> list[int]:
    return sorted({run["batch"] for run in runs if run["kind"] == "timed"})


def _middle(runs: Sequence[Run]) -> int:
    batches = _batches(runs)
    return batches[len(batches) // 2]


def _blocks(runs: Sequence[Run]) -> int:
    return int(_engine(runs, NATIVE)["num_blocks"])


def _all_timed(runs: Sequence[Run], variant: str) -> list[Run]:
    return [run for run in runs if run["kind"] == "timed" and run["variant"] == variant]


def _timed(runs: Sequence[Run], variant: str, batch: int) -> list[Run]:
    found = [run for run in _all_timed(runs, variant) if run["batch"] == batch]
    return sorted(found, key=lambda run: int(run["repeat"]))


def _values(runs: Sequence[Run], variant: str, batch: int, name: str = "output_tokens_per_s") -> list[float]:
    return [run[name] for run in _timed(runs, variant, batch)]


def _ratio(runs: Sequence[Run], ours: str, theirs: str, batch: int) -> Interval:
    return ratio(_values(runs, ours, batch), _values(runs, theirs, batch))


def _prompt_seconds(runs: Sequence[Run], variant: str, batch: int) -> float:
    """What the prompts of a batch take alone."""
    (alone,) = [run for run in runs if run["kind"] == "prompts" and run["variant"] == variant]
    return float(alone["seconds"] / alone["requests"] * batch)


def _outputs(runs: Sequence[Run], variant: str) -> list[list[int]]:
    (run,) = [run for run in _all_timed(runs, variant) if "outputs" in run]
    outputs: dict[str, list[int]] = run["outputs"]
    return [outputs[name] for name in sorted(outputs)]


def _as_texts(outputs: Sequence[Sequence[int]]) -> list[str]:
    """Each token a word."""
    return [" ".join(map(str, tokens)) for tokens in outputs]


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((n for n, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), len(one))


def _needles(runs: Sequence[Run], variant: str) -> str:
    (run,) = [run for run in runs if run["kind"] == "needles" and run["variant"] == variant]
    return f"{run['found']} of {run['needles']}"
