"""The page of results in the documentation: what stands between its marks is written from result files, never by hand.

    python -m vtoken.evaluation.bench.page RESULTS docs/evaluation.md

takes NAME.json of every experiment that lies in RESULTS, keeps it beside the page in results/, draws figures/NAME.svg,
and rewrites the page between

    <!-- bench NAME -->
    <!-- /bench NAME -->
"""

import re
import shutil
import sys
from pathlib import Path

from vtoken.evaluation.bench.catalogue import MODULES, load_experiment
from vtoken.evaluation.bench.figures import save
from vtoken.evaluation.bench.report import markdown, read_report

RESULTS, FIGURES = "results", "figures"


def section(path: Path) -> str:
    """What stands between the marks for one result: the figure, question, tables and checks."""
    report = read_report(path)
    experiment = load_experiment(report.name)
    return f"![{experiment.question}]({FIGURES}/{report.name}.svg)\n\n{markdown(report, experiment)}"


def fill(page: str, sections: dict[str, str]) -> str:
    """The page with these sections, by name of the experiment, between their marks.

    Raises:
        ValueError: the page has no marks for one of them.
    """
    for name, text in sections.items():
        first, last = f"<!-- bench {name} -->\n", f"<!-- /bench {name} -->"
        places = re.findall(f"{first}.*?{last}", page, re.DOTALL)
        if len(places) != 1:
            raise ValueError(f"the page has {len(places)} places for '{name}', where it needs one")
        page = page.replace(places[0], f"{first}\n{text}\n{last}")
    return page


def write(results: Path, page: Path) -> list[str]:
    """Take over all results of a directory; returns their names."""
    names = [name for name in MODULES if (results / f"{name}.json").is_file()]
    for folder in (RESULTS, FIGURES):
        (page.parent / folder).mkdir(exist_ok=True)
    for name in names:
        kept = page.parent / RESULTS / f"{name}.json"
        if kept.resolve() != (results / f"{name}.json").resolve():
            shutil.copy(results / f"{name}.json", kept)
        report = read_report(kept)
        (drawn, _) = save(load_experiment(name).figure(report.runs), page.parent / FIGURES, name)
        drawn.with_suffix(".png").unlink()
    kept_sections = {name: section(page.parent / RESULTS / f"{name}.json") for name in names}
    page.write_text(fill(page.read_text(encoding="utf-8"), kept_sections), encoding="utf-8")
    return names


if __name__ == "__main__":
    print("written:", *write(Path(sys.argv[1]), Path(sys.argv[2])))
