"""``vtoken serve``."""

from typing import Annotated, Any

import typer

from vtoken.cli_options import read_settings, settings_options

ANY_OF_VLLM = {"allow_extra_args": True, "ignore_unknown_options": True}


@settings_options(without=())
def serve(
    settings: dict[str, Any],
    ctx: typer.Context,
    vllm_help: Annotated[bool, typer.Option("--vllm-help", help="List the options of vllm serve, and exit.")] = False,
) -> None:
    """Run vLLM's OpenAI server with vtoken configured: vtoken serve MODEL, and any option of vllm serve.

    The server also has a page that shows its block pool, at /vtoken, and vtoken's metrics among those at /metrics.
    """
    from vtoken.cli import failures, parse_settings

    with failures():
        parse_settings(settings)
        from vtoken.vllm_plugin.server import serve as run

        run(read_settings(settings), ["--help=all"] if vllm_help else ctx.args)
