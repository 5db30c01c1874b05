"""How figures look, and writing them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "native": "#4d4d4d",
    "none": "#d55e00",
    "pack": "#0072b2",
    "fill": "#009e73",
}
"""Of the four ways to run, in every figure; told apart without colour vision (Okabe and Ito's palette)."""
MARKERS = {"native": "s", "none": "v", "pack": "^", "fill": "o"}
FURTHER = ("#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#000000")
LABELS = {
    "native": "native vLLM",
    "none": "naive eviction (none)",
    "pack": "vtoken, pack",
    "fill": "vtoken, fill",
}
KINDS = ("svg", "png")
STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.hashsalt": "vtoken",  # the same figure, the same file
    "svg.fonttype": "none",
}


def new_figure(rows: int = 1, columns: int = 1, width: float = 4.6, height: float = 3.2, **options: Any) -> Any:
    """A figure and its axes (an array unless there is one), in the style of all figures, without a display."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(STYLE)  # for good: titles and legends come later, and look for their size then
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def save(figure: "Figure", directory: Path, name: str) -> list[Path]:
    """Write ``name.svg`` and ``name.png``."""
    from matplotlib import rc_context

    paths = [directory / f"{name}.{kind}" for kind in KINDS]
    with rc_context(STYLE):
        for path, metadata in zip(paths, ({"Date": None}, {"Software": None}), strict=True):
            figure.savefig(path, metadata=metadata)
    return paths
