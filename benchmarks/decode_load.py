"""Requests that all decode, on a stub engine."""

from typing import Any


def start_decoding(engine: Any, running: int, prompt: int, outputs: int, sharing: bool) -> None:
    """Add so many requests, and step until all of them decode.

    Args:
        engine: a ``StubEngine`` with room for them.
        prompt, outputs: tokens of each request.
        sharing: prompts share their first half.
    """
    shared = prompt // 2 if sharing else 0
    for n in range(running):
        own = [(n // 61**place) % 61 for place in range(3)] * prompt
        engine.add(f"r{n}", outputs=outputs, tokens=([7] * shared + own)[:prompt])
        if n == 0:
            engine.step()  # what it has computed is there for the others to find
    for _ in range(4):
        engine.step()
