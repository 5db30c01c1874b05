"""Recordings made by hand, in which every number and every pixel can be told in advance."""

import re
from importlib.resources import files
from typing import Any

from vtoken.core.history import Frame, Holding, Recording

SIZE = 16
NASTY = "</script><img src=x onerror=alert(1)>"


def frame(number: int, time: float, *holdings: Holding, **figures: Any) -> Frame:
    """Of blocks of 16; what is not given follows from the holdings, of which none may share blocks then."""
    blocks = {block for one in holdings for block in one.blocks}
    told = {
        "running": len(holdings),
        "waiting": 0,
        "held_blocks": len(blocks),
        "live_tokens": sum(sum(one.live) for one in holdings),
        "dead_tokens": 0,
        "tokens_evicted": 10 * number,
        "tokens_moved": 2 * number,
        "blocks_reclaimed": number,
    }
    return Frame(number, time, **{**told, **figures}, holdings=list(holdings))


def recording(*frames: Frame, name: str = "one", num_blocks: int = 40, settings: str = "what is evicted") -> Recording:
    return Recording(name, settings, SIZE, num_blocks, list(frames))


FULL, HALF, SHARED, FREE = 1, 2, 3, 5
"""Blocks of the scene below."""


def scene(number: int = 1, time: float = 1000.0) -> Frame:
    """Block 1 is full, 2 half live, 3 shared, 4 has 5 tokens; two requests, of which the second waits for nobody."""
    a = Holding("a", [FULL, HALF, SHARED], [16, 8, 16])
    b = Holding("b", [SHARED, 4], [16, 5])
    return frame(number, time, a, b, waiting=7, live_tokens=45, tokens_evicted=12345, blocks_reclaimed=6)


def shown(one: Frame, num_blocks: int = 40) -> dict[str, str]:
    """The figures that the page has to show for a frame."""
    waste = f"{100 * (1 - one.live_tokens / (one.held_blocks * SIZE)):.1f} %" if one.held_blocks else "–"
    return {
        "waste": waste,
        "held": f"{one.held_blocks:,}",
        "free": f"{num_blocks - one.held_blocks:,}",
        "running": f"{one.running:,}",
        "waiting": f"{one.waiting:,}",
        "evicted": f"{one.tokens_evicted:,}",
        "moved": f"{one.tokens_moved:,}",
        "reclaimed": f"{one.blocks_reclaimed:,}",
    }


def colours(*, dark: bool = False) -> dict[str, tuple[int, ...]]:
    """The named colours of the style sheet."""
    css = files("vtoken.view").joinpath("page.css").read_text(encoding="utf-8")
    light, darker, *_ = re.findall(r":root \{(.*?)\n *\}", css, re.DOTALL)
    named: dict[str, tuple[int, ...]] = {}
    for part in (light, darker) if dark else (light,):
        for name, value in re.findall(r"--([\w-]+): #([0-9a-f]{6});", part):
            named[name] = tuple(int(value[at : at + 2], 16) for at in (0, 2, 4))
    return named


def mixed(one: tuple[int, ...], other: tuple[int, ...], share: float) -> tuple[int, ...]:
    return tuple(int(a * share + b * (1 - share) + 0.5) for a, b in zip(one, other, strict=True))


def luminance(colour: tuple[int, ...]) -> float:
    """Relative, as WCAG defines it."""
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
