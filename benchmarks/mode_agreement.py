"""Do `fill`, `pack` and `none` compute the same? Chat prompts, recorded victims, every logit compared.

`fill` runs first and records victims and outputs. The others take the same victims; in float32 they are also given the
outputs, so that each logit can be compared, in other dtypes they go on by themselves, and the texts are compared.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vtoken.config import VTokenConfig
from vtoken.evaluation.agreement import Agreement, ModeRun, TextSimilarity, compare, compare_texts, replaying, run_mode
from vtoken.evaluation.prompt_file import read_prompt_file
from vtoken.evaluation.questions import data_directory
from vtoken.evaluation.workloads import Workload, load_tokenizer

TOLERANCE = 1e-3
# Packing as often as there is anything to pack: what is compared is the result, not the trigger.
MODES: dict[str, dict[str, Any]] = {"none": {}, "pack": {"low_watermark": 1.0, "check_interval": 4, "headroom": 0.1}}


def chat_prompts(tokenizer: Any, count: int, outputs: int, longest: int) -> list[Workload]:
    """The first prompts of chat.jsonl that are long enough to evict something and no longer than ``longest``."""
    directory = data_directory()
    if directory is None:
        raise SystemExit("there are no workloads: set VTOKEN_DATA to a directory that holds chat.jsonl.")
    works = read_prompt_file(directory / "chat.jsonl", tokenizer, 10**9, outputs)
    fit = [work for work in works if 64 <= len(work.prompt_token_ids) <= longest]
    return [Workload(work.request_id, work.prompt_token_ids, outputs) for work in fit[:count]]


def texts(tokenizer: Any, run: ModeRun) -> list[list[int]]:
    """What each request produced, up to the token that ends a reply."""
    end = tokenizer.eos_token_id
    return [ids[: ids.index(end)] if end in ids else ids for ids in (r.token_ids for r in run.runs.values())]


def similarity(tokenizer: Any, one: ModeRun, two: ModeRun) -> TextSimilarity:
    a, b = texts(tokenizer, one), texts(tokenizer, two)
    decoded = ([tokenizer.decode(ids) for ids in each] for each in (a, b))
    return compare_texts(*decoded, [(max(len(x), 1), len(y)) for x, y in zip(a, b, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="else SmolLM2-135M, fetched once")
    parser.add_argument("--policies", default="h2o,random,streaming_llm")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--longest", type=int, default=768, help="tokens of a prompt, at most")
    parser.add_argument("--outputs", type=int, default=256, help="tokens per request")
    parser.add_argument("--budget", type=float, default=0.5, help="share of the prompt")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()

    if args.model is None:
        from vtoken.evaluation.model import ensure_model

        args.model = ensure_model()
    tokenizer = load_tokenizer(args.model)
    works = chat_prompts(tokenizer, args.prompts, args.outputs, args.longest)
    context = -(-max(work.total_tokens for work in works) // 32) * 32
    engine_args = {
        "dtype": args.dtype,
        "block_size": 32,
        "max_model_len": context,
        "max_num_seqs": 16,
        "num_gpu_blocks_override": 16 * context // 32 + 64,
        "kv_cache_memory_bytes": 2 << 30,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    }
    forced = args.dtype == "float32"
    rows: list[dict[str, Any]] = []
    console = Console()
    policies = args.policies.split(",")
    with Progress(console=console, transient=True) as progress, tempfile.TemporaryDirectory() as directory:
        bar = progress.add_task("requests", total=len(policies) * (1 + len(MODES)) * len(works))

        def tick() -> None:
            progress.advance(bar)

        for policy in policies:
            config = VTokenConfig(policy=policy, budget=args.budget)
            recorded = run_mode(args.model, config, works, engine_args, tick=tick)
            given = {req_id: run.token_ids for req_id, run in recorded.runs.items()} if forced else None
            rows.append({"policy": policy, "mode": "fill", **totals(recorded)})
            for mode, options in MODES.items():
                again = replaying(config, recorded, works, Path(directory) / f"{policy}.json")
                again = VTokenConfig(**{**again.model_dump(), "reclaim": mode, **options})
                other = run_mode(args.model, again, works, engine_args, given, tick)
                result = compare(recorded, other) if forced else similarity(tokenizer, recorded, other)
                rows.append({"policy": policy, "mode": mode, **totals(other), **asdict(result)})
    show(console, rows, forced)
    if args.json:
        args.json.write_text(json.dumps({"settings": vars(args), "rows": rows}, default=str, indent=1), "utf-8")
    agreed = [Agreement(**{k: row[k] for k in Agreement.__dataclass_fields__}) for row in rows if "outputs" in row]
    if any(not agreement.holds(TOLERANCE) for agreement in agreed):
        raise SystemExit(f"the modes differ by more than {TOLERANCE}")


def totals(run: ModeRun) -> dict[str, int]:
    return {name: getattr(run, name) for name in ("tokens_evicted", "tokens_moved", "blocks_reclaimed")}


def show(console: Console, rows: list[dict[str, Any]], forced: bool) -> None:
    table = Table(title="against fill, the same victims" + (" and outputs" if forced else ""))
    figures = (
        ["requests", "identical_requests", "outputs", "largest_difference", "other_choices", "widest_tie"]
        if forced
        else ["requests", "identical", "rouge_l", "median_length_ratio"]
    )
    for name in ("policy", "mode", "tokens_evicted", "tokens_moved", "blocks_reclaimed", *figures):
        table.add_column(name.replace("_", " "), justify="left" if name in ("policy", "mode") else "right")
    for row in rows:
        numbers = [row.get(name, "") for name in ("tokens_evicted", "tokens_moved", "blocks_reclaimed", *figures)]
        table.add_row(
            row["policy"],
            row["mode"],
            *(f"{n:.3g}" if isinstance(n, float) else f"{n:,}" if n != "" else "" for n in numbers),
        )
    console.print(table)


if __name__ == "__main__":
    main()
