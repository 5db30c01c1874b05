"""The queries of a Grafana dashboard, and the metrics and labels that they name."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana-dashboard.json"
WORDS = {"sum", "max", "rate", "increase", "by", "label_values"}
"""Of PromQL and of Grafana's variables, as far as the dashboard uses them."""


@dataclass(frozen=True)
class Query:
    """One query: the metrics that it names, and the labels that it selects or groups by."""

    text: str
    metrics: frozenset[str]
    labels: frozenset[str]


def read_dashboard(path: Path = DASHBOARD) -> list[Query]:
    """All queries of panels and variables."""
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    return [understand(text) for text in _texts(dashboard)]


def understand(text: str) -> Query:
    """What a query names. Raises ValueError for brackets that do not match."""
    for opening, closing in ("()", "{}", "[]"):
        if text.count(opening) != text.count(closing):
            raise ValueError(f"{opening} and {closing} do not match in {text}")
    selected = set(re.findall(r"(\w+)=~", text))
    grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", text) for label in group.split(",")}
    asked = set(re.findall(r"label_values\(.*, (\w+)\)", text))
    bare = re.sub(r'\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)|"[^"]*"', " ", text)
    names = set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS - asked
    return Query(text, frozenset(names), frozenset(selected | grouped | asked))


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("expr"), str):
            yield node["expr"]
        if isinstance(node.get("query"), dict):
            yield node["query"]["query"]
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _texts(child)
