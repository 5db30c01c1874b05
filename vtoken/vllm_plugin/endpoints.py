"""vtoken's part of vLLM's HTTP server: the live page, what it draws, and the metrics.

vLLM's endpoint-plugin group (``vllm.plugins.endpoint_plugins.interface``): loaded in front-end processes, if
VLLM_PLUGINS names vtoken. What shows anything of requests lies under /v1, which vLLM guards with the server's API key;
the page without data is as open as vLLM's /docs, and /metrics as open as it is without us.
"""

from argparse import Namespace
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import make_asgi_app
from prometheus_client.registry import Collector
from pydantic import Field
from starlette.types import Receive, Scope, Send
from vllm.v1.metrics.prometheus import get_prometheus_registry

from vtoken.launch import NAME
from vtoken.view.page import live_page
from vtoken.vllm_plugin.metrics import registry_with
from vtoken.vllm_plugin.plugin import is_configured
from vtoken.vllm_plugin.watch import Watch

NOT_CONFIGURED = (
    "vtoken is installed here and not configured; start the server with vtoken serve, or --additional-config."
)

Number = Annotated[int, Field(ge=0)]
router = APIRouter()


class Endpoints:
    """vLLM's ``EndpointPlugin``."""

    name = NAME
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        configured = engine_client is not None and is_configured(engine_client.vllm_config)
        state.vtoken = Watch(engine_client) if configured else None


def watch_of(request: Request) -> Watch:
    """Raises HTTPException 404 where the engine runs without vtoken."""
    watch: Watch | None = request.app.state.vtoken
    if watch is None:
        raise HTTPException(404, NOT_CONFIGURED)
    return watch


@router.get("/vtoken", include_in_schema=False)
async def page(request: Request) -> HTMLResponse:
    """The live page, without any data."""
    watch_of(request)
    return HTMLResponse(live_page())


@router.get("/v1/vtoken/pool")
async def pool(request: Request, since: Annotated[list[Number], Query()] = []) -> dict[str, Any]:  # noqa: B006
    """What the block pool of each engine has looked like since its frame of this number, one for each engine."""
    recordings = await watch_of(request).recordings(since)
    return {"engines": [recording.to_json() for recording in recordings]}


class MetricsPage(Response):
    """A registry, written the way that whoever asks can read it."""

    def __init__(self, registry: Collector) -> None:
        super().__init__()
        self._write = make_asgi_app(registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._write(scope, receive, send)


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """vLLM's metrics and, where it is configured, vtoken's."""
    registry = get_prometheus_registry()
    watch: Watch | None = request.app.state.vtoken
    if watch is None:
        return MetricsPage(registry)
    counts = await watch.counts()
    return MetricsPage(registry_with(registry, watch.model_name, counts, watch.age))
