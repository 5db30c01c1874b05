"""The demo as a page: the pool under naive eviction and under vtoken, side by side, and the figures of all runs."""

import json

from vtoken.evaluation.report import DemoReport, comparison, every_run, table_title
from vtoken.view import Grid, Section, report_page

TITLE = "vtoken demo: the same requests on the same block pool"


def demo_page(report: DemoReport) -> str:
    """Everything that the demo found out, in one HTML file."""
    tables = [_grid(table_title(report), *comparison(report), "The ratio is vtoken's figure by native vLLM's.")]
    if len(report.repeats) > 1:
        tables.append(_grid("Every run", *every_run(report)))
    text = (
        f"{report.model}: the same requests under native vLLM, under naive eviction, which forgets the same tokens and "
        "gives a block back once all of them are dead, and under vtoken. Above is the pool of the first run of the two "
        "that evict, from the first step to the last."
    )
    settings = [
        ("engine arguments of all runs", json.dumps(report.engine_args, indent=2)),
        ("vtoken's settings; naive eviction differs in reclaim = none", json.dumps(report.vtoken_config, indent=2)),
    ]
    return report_page(
        TITLE, report.recordings, [Section("Figures", [text], tables), Section("Settings", code=settings)]
    )


def _grid(title: str, headings: list[str], rows: list[list[str]], note: str = "") -> Grid:
    return Grid(title, headings, rows, frozenset(range(1, len(headings))), note)
