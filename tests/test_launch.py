"""One flat list of options -> vLLM's arguments, and the line of the log that says what they come to."""

from typing import Any

import pytest

import vtoken
from vtoken.config import VTokenConfig
from vtoken.launch import with_settings
from vtoken.vllm_plugin.startup import startup_line


class TestEngineArgs:
    def test_our_options_and_vllms_side_by_side(self) -> None:
        given = vtoken.engine_args("MODEL", policy="h2o", policy_options={"decay": 0.9}, budget=256, max_model_len=2048)
        assert given == {
            "model": "MODEL",
            "max_model_len": 2048,
            "additional_config": {"vtoken": {"policy": "h2o", "policy_options": {"decay": 0.9}, "budget": 256}},
        }

    def test_without_any_vtoken_is_on(self) -> None:
        assert vtoken.engine_args("MODEL") == {"model": "MODEL", "additional_config": {"vtoken": {}}}

    def test_what_else_is_configured_stays(self) -> None:
        mine = {"other": 1}
        assert vtoken.engine_args("MODEL", budget=64, additional_config=mine)["additional_config"] == {
            "other": 1,
            "vtoken": {"budget": 64},
        }
        assert mine == {"other": 1}

    def test_settings_that_are_there_already(self) -> None:
        there = {"vtoken": {"budget": 64}}
        assert with_settings(there, {}) == there
        assert with_settings({"vtoken": VTokenConfig(budget=64)}, {}) == {"vtoken": VTokenConfig(budget=64)}
        with pytest.raises(ValueError, match=r"^vtoken: option 'recent' and additional_config\['vtoken'\] = .* both"):
            with_settings(there, {"recent": 3})

    @pytest.mark.parametrize(
        "options, sentence",
        [
            ({"budget": 3}, "vtoken: option 'budget' = 3 is below sinks"),
            ({"policy": "h3o"}, "vtoken: unknown policy 'h3o'"),
            ({"request_policies": ["h3o"]}, "vtoken: unknown policy 'h3o'"),
            (
                {"additional_config": {"vtoken": {"bugdet": 3}}},
                "vtoken: unknown option 'bugdet'; did you mean 'budget'?",
            ),
        ],
    )
    def test_bad_ones_are_refused_at_once(self, options: dict[str, Any], sentence: str) -> None:
        with pytest.raises(ValueError) as refused:
            vtoken.engine_args("MODEL", **options)
        assert str(refused.value).startswith(sentence)

    def test_no_option_of_ours_is_one_of_vllms(self) -> None:
        from dataclasses import fields

        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = make_arg_parser(FlexibleArgumentParser())
        vllms = {option.lstrip("-").replace("-", "_") for action in parser._actions for option in action.option_strings}
        assert "max_model_len" in vllms
        assert not (vllms | {field.name for field in fields(AsyncEngineArgs)}) & VTokenConfig.model_fields.keys()


KEPT = "requests are kept to 0.25 of their prompt by policy snapkv, and blocks freed by"


class TestTheLine:
    """For prompts of 4096 tokens in a pool of 400 blocks of 32: 128 blocks each, three at once."""

    @pytest.mark.parametrize(
        "options, kept, at_once",
        [
            ({}, "32", "12"),
            ({"budget": 129}, "5", "80"),
            ({"budget": 10**6}, "128", "3"),
            ({"budget": 1000, "reclaim": "pack", "theta_f": 0.5}, "about 63", "about 6"),
        ],
    )
    def test_what_it_saves(self, options: dict[str, Any], kept: str, at_once: str) -> None:
        assert line(**options) == (
            f"{VTokenConfig(**options).summary()}: a prompt of 4096 tokens goes from 128 to {kept} blocks of 32, and "
            f"the pool of 400 holds {at_once} of them at once instead of 3."
        )

    @pytest.mark.parametrize(
        "options, said",
        [
            ({}, f"{KEPT} 'fill'"),
            ({"reclaim": "none"}, f"{KEPT} 'none', which promises nothing, since a block is freed only when all its"),
            (
                {"protect_prompt": True},
                f"{KEPT} 'fill', and prompts stay whole, so what is saved depends on the length",
            ),
            (
                {"budget": 512, "compress": "asked", "request_policies": ["h2o", "tova"], "reclaim": "pack"},
                "requests that ask for it are kept to 512 tokens by policy snapkv, and blocks freed by 'pack'; "
                "requests may ask for h2o, tova: a prompt",
            ),
        ],
    )
    def test_what_is_on(self, options: dict[str, Any], said: str) -> None:
        assert line(**options).startswith(said)


def line(**options: Any) -> str:
    """Without the version that it begins with."""
    written = startup_line(VTokenConfig(**options), block_size=32, num_blocks=400, max_model_len=4096)
    return written.removeprefix(f"vtoken {vtoken.__version__}: ")
