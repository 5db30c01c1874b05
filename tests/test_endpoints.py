"""The routes without a server: what they answer when engines answer late, not at all, or run without vtoken."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from vtoken.config import VTokenConfig
from vtoken.core.history import Frame, Holding, Recording
from vtoken.core.token_table import TokenTable
from vtoken.vllm_plugin.endpoints import NOT_CONFIGURED, Endpoints
from vtoken.vllm_plugin.metrics import registry_with
from vtoken.vllm_plugin.monitor import Counts, Monitor
from vtoken.vllm_plugin.plugin import AdditionalConfig
from vtoken.vllm_plugin.watch import Watch

COUNTS = Counts(
    block_size=16,
    num_blocks=100,
    free_blocks=90,
    held_blocks=10,
    held_tokens=160,
    live_tokens=120,
    dead_tokens=30,
    running=3,
    waiting=2,
    tokens_evicted=1000,
    tokens_moved=50,
    blocks_reclaimed=60,
    relocations=4,
    copied_bytes=5000,
    requests_failed=1,
    phase_seconds={"plan": 0.5, "settle": 0.25, "wait": 0.0, "begin": 1.0, "place": 2.0, "evict": 4.0},
)
FRAME = Frame(7, 1000.0, 1, 0, 2, 20, 4, 100, 5, 6, [Holding("a", [3, 9], [16, 4])])


class Client:
    """Stands for vLLM's EngineClient: ``answers`` are those of each engine's workers, by method."""

    def __init__(self, answers: dict[str, list[list[Any]]], *, configured: bool = True) -> None:
        self.answers = answers
        additional = AdditionalConfig(VTokenConfig(), {}) if configured else {}
        engines = max(map(len, answers.values()), default=1)
        self.vllm_config = SimpleNamespace(
            additional_config=additional,
            parallel_config=SimpleNamespace(data_parallel_size=engines),
            model_config=SimpleNamespace(served_model_name="tiny"),
        )
        self.engine_core = self
        self.held_up = asyncio.Event()
        self.held_up.set()
        self.dead = False

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        await self.held_up.wait()
        if self.dead:
            raise RuntimeError("the engine is dead")
        return self.answers[method][0]

    async def call_utility_all_async(self, rpc: str, method: str, *_: Any) -> list[list[Any]]:
        assert rpc == "collective_rpc"
        return self.answers[method]


def told(**changed: Any) -> dict[str, Any]:
    return {**COUNTS.to_json(), **changed}


def visit(client: Any, look: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        app, plugin = FastAPI(), Endpoints()
        plugin.attach_router(app)
        await plugin.init_state(client() if client is not None else None, app.state, SimpleNamespace())  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as browser:
            await look(browser)

    asyncio.run(run())


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vtoken_")
    }


class TestMetrics:
    def test_every_count_under_its_name(self) -> None:
        async def look(browser: httpx.AsyncClient) -> None:
            page = await browser.get("/metrics")
            assert page.status_code == 200 and page.headers["content-type"].startswith("text/plain; version=0.0.4")
            of = ("engine=0", "model_name=tiny")
            seen = {name: value for name, value in samples(page.text).items() if "refused" not in name[0]}
            assert seen == {
                ("vtoken_live_tokens", *of): 120,
                ("vtoken_dead_tokens", *of): 30,
                ("vtoken_held_tokens", *of): 160,
                ("vtoken_held_blocks", *of): 10,
                ("vtoken_free_blocks", *of): 90,
                ("vtoken_pool_blocks", *of): 100,
                ("vtoken_waste_ratio", *of): 0.25,
                ("vtoken_tokens_evicted_total", *of): 1000,
                ("vtoken_tokens_moved_total", *of): 50,
                ("vtoken_blocks_reclaimed_total", *of): 60,
                ("vtoken_relocations_total", *of): 4,
                ("vtoken_copied_bytes_total", *of): 5000,
                ("vtoken_requests_failed_total", *of): 1,
                **{
                    ("vtoken_phase_seconds_total", *of, f"phase={phase}"): seconds
                    for phase, seconds in COUNTS.phase_seconds.items()
                },
                ("vtoken_counts_age_seconds",): pytest.approx(0.0, abs=60.0),
            }

        visit(lambda: Client({"count_vtoken": [[COUNTS.to_json()]]}), look)

    def test_types_and_help(self) -> None:
        registry = registry_with(CollectorRegistry(), "tiny", [COUNTS], 0.0)
        families = {family.name: family for family in registry.collect()}
        assert {name: family.type for name, family in families.items() if family.type != "gauge"} == dict.fromkeys(
            (
                "vtoken_tokens_evicted",
                "vtoken_tokens_moved",
                "vtoken_blocks_reclaimed",
                "vtoken_relocations",
                "vtoken_copied_bytes",
                "vtoken_requests_failed",
                "vtoken_phase_seconds",
            ),
            "counter",
        )
        assert all(family.documentation.endswith(".") for family in families.values())

    def test_vllms_own_are_still_there(self) -> None:
        own = CollectorRegistry()
        Gauge("vllm:something", "of vLLM", registry=own).set(3)
        names = [family.name for family in registry_with(own, "tiny", [COUNTS], 0.0).collect()]
        assert names[0] == "vllm:something" and len(names) == 1 + 7 + 6 + 2

    def test_one_of_them_can_be_asked_for(self) -> None:
        async def look(browser: httpx.AsyncClient) -> None:
            page = await browser.get("/metrics", params={"name[]": "vtoken_pool_blocks"})
            assert list(samples(page.text)) == [("vtoken_pool_blocks", "engine=0", "model_name=tiny")]

        visit(lambda: Client({"count_vtoken": [[COUNTS.to_json()]]}), look)

    def test_several_engines_and_workers(self) -> None:
        """Engines stand side by side; of an engine's workers only the bytes add up."""
        workers = [told(copied_bytes=30), told(copied_bytes=12)]

        async def look(browser: httpx.AsyncClient) -> None:
            seen = samples((await browser.get("/metrics")).text)
            assert seen["vtoken_copied_bytes_total", "engine=0", "model_name=tiny"] == 42
            assert seen["vtoken_copied_bytes_total", "engine=1", "model_name=tiny"] == 5000
            assert seen["vtoken_tokens_evicted_total", "engine=0", "model_name=tiny"] == 1000
            assert seen["vtoken_tokens_evicted_total", "engine=1", "model_name=tiny"] == 7

        visit(lambda: Client({"count_vtoken": [workers, [told(tokens_evicted=7)]]}), look)


class TestEnginesThatDoNotAnswer:
    def test_in_a_long_step_the_last_counts_are_told_again(self) -> None:
        async def run() -> None:
            client = Client({"count_vtoken": [[COUNTS.to_json()]]})
            watch = Watch(client)
            assert await watch.counts() == [COUNTS]
            client.held_up.clear()
            client.answers = {"count_vtoken": [[told(running=9)]]}
            assert await watch.counts(patience=0.0) == [COUNTS] and await watch.counts(patience=0.0) == [COUNTS]
            assert watch.age > 0
            client.held_up.set()
            assert [counts.running for counts in await watch.counts()] == [9]

        asyncio.run(run())

    def test_nothing_is_told_of_an_engine_that_is_dead(self) -> None:
        async def run() -> None:
            client = Client({"count_vtoken": [[COUNTS.to_json()]]})
            watch = Watch(client)
            assert await watch.counts() == [COUNTS]
            client.dead = True
            assert await watch.counts() == [] and watch.age == 0.0

        asyncio.run(run())


class TestThePage:
    def test_what_it_draws(self) -> None:
        recording = Recording("", "settings", 16, 100, [FRAME])

        async def look(browser: httpx.AsyncClient) -> None:
            answer = (await browser.get("/v1/vtoken/pool")).json()
            assert answer == {"engines": [{**recording.to_json(), "name": "engine"}]}
            for bad in ("-1", "x"):
                assert (await browser.get("/v1/vtoken/pool", params={"since": bad})).status_code == 422
            assert "<html" in (await browser.get("/vtoken")).text

        visit(lambda: Client({"recall_vtoken": [[recording.to_json()]]}), look)

    @pytest.mark.parametrize(
        "client", [None, lambda: Client({}, configured=False)], ids=["no engine", "without vtoken"]
    )
    def test_an_engine_without_vtoken_has_none(self, client: Any) -> None:
        async def look(browser: httpx.AsyncClient) -> None:
            for path in ("/vtoken", "/v1/vtoken/pool"):
                answer = await browser.get(path)
                assert answer.status_code == 404
                assert answer.json() == {"detail": NOT_CONFIGURED}
            page = await browser.get("/metrics")
            assert page.status_code == 200 and not [name for name in samples(page.text) if "refused" not in name[0]]

        visit(client, look)


def test_before_the_first_step_an_engine_tells_what_it_has() -> None:
    monitor = Monitor(TokenTable(16), bytes_per_token=8, history=10, settings="these")
    assert monitor.counts().held_blocks == 0 and monitor.recording(0) == Recording("", "these", 16, 0, [])
