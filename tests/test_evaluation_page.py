"""The page of results says what its result files say."""

import re
from pathlib import Path

import pytest

from vtoken.evaluation.bench.catalogue import ALL, MODULES, load_experiment, load_experiments
from vtoken.evaluation.bench.page import fill, section

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "evaluation.md"


def between_marks(name: str) -> str:
    (text,) = re.findall(rf"<!-- bench {name} -->\n(.*)<!-- /bench {name} -->", PAGE.read_text("utf-8"), re.DOTALL)
    return str(text)


@pytest.mark.parametrize("name", MODULES)
def test_every_number_comes_from_a_result_file(name: str) -> None:
    result = DOCS / "results" / f"{name}.json"
    if not result.is_file():
        assert between_marks(name) == "", "what was not measured has no numbers"
        return
    assert between_marks(name) == f"\n{section(result)}\n"
    assert (DOCS / "figures" / f"{name}.svg").stat().st_size > 1000


@pytest.mark.parametrize("name", MODULES)
def test_an_experiment_is_complete(name: str) -> None:
    experiment = load_experiment(name)
    assert experiment.name == name
    assert experiment.question.endswith(("?", "."))


def test_all_is_all_but_the_peers() -> None:
    assert [experiment.name for experiment in load_experiments(ALL)] == [name for name in MODULES if name != "peers"]


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="there is no experiment 'memry'; did you mean 'memory'"):
        load_experiments("memry")


def test_fill_replaces_what_stands_between_the_marks_alone() -> None:
    page = "a\n<!-- bench memory -->\nold\n<!-- /bench memory -->\nb\n<!-- bench sla -->\n<!-- /bench sla -->\n"
    filled = "a\n<!-- bench memory -->\n\nnew\n<!-- /bench memory -->\nb\n<!-- bench sla -->\n<!-- /bench sla -->\n"
    assert fill(page, {"memory": "new"}) == filled
    assert fill(filled, {"memory": "new"}) == filled
    with pytest.raises(ValueError, match="0 places for 'prefix'"):
        fill(page, {"prefix": "new"})
