"""Recordings of a pool without a model: vLLM's scheduler and our worker, on made-up prompts.

    python tests/pool_recordings.py FILE.html docs/figures/pool.png

writes the report of two of them, and the picture of it that the documents show.
"""

import sys
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Literal

from vtoken.config import VTokenConfig
from vtoken.core.history import Frame, Recording

SECONDS_PER_STEP = 0.1


@cache
def simulated_recording(
    reclaim: Literal["none", "fill"],
    policy: str = "random",
    num_blocks: int = 240,
    requests: int = 24,
    longest: int = 600,
    every: int = 4,
) -> Recording:
    """Requests that all come at once, on a pool that holds some of them; a frame in every so many steps."""
    from vtoken.vllm_plugin import make_simulated_engine

    config = VTokenConfig(policy=policy, budget=0.4, reclaim=reclaim, recent=16)
    engine = make_simulated_engine(config, num_blocks=num_blocks, block_size=16, max_model_len=2 * longest)
    random = Random(7)
    for n in range(requests):
        engine.add_request(
            f"request-{n}", [n] * random.randint(longest // 3, longest), random.randint(longest // 10, longest // 3)
        )
    frames: list[Frame] = []
    step = 0
    while engine.has_unfinished():
        engine.step()
        if step % every == 0 or not engine.has_unfinished():
            frames.append(frame_of(engine, len(frames) + 1, 1000 + step * SECONDS_PER_STEP))
        step += 1
    settings = f"{policy}, budget {config.budget:g} of the prompt, reclaim {reclaim}; simulated without a model"
    return Recording(reclaim, settings, engine.block_size, engine.num_blocks, frames)


def frame_of(engine: Any, number: int, time: float) -> Frame:
    """What a simulated engine's pool looks like now."""
    from vtoken.core.holdings import holdings, pool_use

    table, stats = engine.runner.vtoken.table, engine.scheduler.vtoken.stats
    running = [request.request_id for request in engine.scheduler.running]
    use = pool_use(table, running)
    return Frame(
        number,
        time,
        engine.running,
        engine.waiting,
        engine.held_blocks,
        use.live,
        use.dead,
        stats.tokens_evicted,
        stats.tokens_moved,
        stats.blocks_reclaimed,
        [one for one in holdings(table).listed() if one.request in running],
    )


def draw(page: Path, picture: Path) -> None:
    """Take the picture: what a window shows that reaches from the title to the figures."""
    from browser import start_browser

    with TemporaryDirectory() as profile:
        browser = start_browser(Path(profile))
        try:
            browser.open(page.resolve().as_uri(), width=1120, height=920)
            seen = browser.command("Page.captureScreenshot", format="png")["data"]
        finally:
            browser.driver.quit()
    Image.fromarray(pixels(seen)).quantize(128).save(picture, optimize=True)


if __name__ == "__main__":
    from browser import pixels
    from PIL import Image

    from vtoken.view import report_page

    both = [simulated_recording("none"), simulated_recording("fill")]
    title = "The same evictions on the same pool: naive eviction, and vtoken"
    Path(sys.argv[1]).write_text(report_page(title, both), encoding="utf-8")
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
