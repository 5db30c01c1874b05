"""vLLM's own OpenAI server, with vtoken configured: what ``vtoken serve`` runs."""

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from vtoken.launch import NAME, with_settings
from vtoken.vllm_plugin.engine import first_sentence
from vtoken.vllm_plugin.plugin import check_vllm_version, register

PLUGIN_GROUPS = ("general", "platform", "io_processor", "stat_logger")
"""Of which vLLM loads all plugins if VLLM_PLUGINS is not set, beside that of endpoints, of which it loads none."""


def serve(settings: dict[str, Any], arguments: Sequence[str]) -> None:
    """Run the server until it is told to end.

    Args:
        settings: vtoken's, by name.
        arguments: of ``vllm serve``.

    Raises:
        ValueError: one sentence, for settings or a configuration that vtoken refuses.
        SystemExit: vLLM's parser refused its arguments, and has said so.
    """
    check_vllm_version()
    prepare_environment()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    cli_env_setup()
    args = parse(arguments)
    args.additional_config = with_settings(args.additional_config, settings or {})
    configure_logging_from_args(args)
    register()
    try:
        ServeSubcommand().validate(args)
        ServeSubcommand.cmd(args)
    except ValueError as error:
        raise ValueError(first_sentence(error)) from error


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """vLLM's own reading of the arguments of its ``serve`` command."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vtoken")
    ServeSubcommand().subparser_init(parser.add_subparsers())
    return parser.parse_args(["serve", *arguments])


def prepare_environment() -> None:
    """Let vLLM load the plugin with its routes, beside what it would load anyway.

    Raises:
        ValueError: one sentence, if VLLM_PLUGINS leaves vtoken out.
    """
    named = os.environ.get("VLLM_PLUGINS")
    if named is None:
        found = {point.name for group in PLUGIN_GROUPS for point in entry_points(group=f"vllm.{group}_plugins")}
        os.environ["VLLM_PLUGINS"] = ",".join(sorted(found | {NAME}))
    elif NAME not in named.split(","):
        raise ValueError(f"vtoken: VLLM_PLUGINS = '{named}' leaves vtoken out; add it, or unset the variable.")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # for a GPU: what vtoken extends is the V1 runner
