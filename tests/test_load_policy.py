"""Finding a policy: by name or as a user's own class, with its options; every refusal is one sentence."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from vtoken.config import VTokenConfig
from vtoken.policies import POLICIES, load_policy
from vtoken.policies.h2o import H2O
from vtoken.policies.random import Random
from vtoken.policies.scissorhands import Scissorhands
from vtoken.policies.snapkv import SnapKV

HEADER = """
from dataclasses import dataclass
from vtoken.policies import Needs, Policy
"""
OWN = (
    HEADER
    + """
@dataclass(frozen=True)
class Own(Policy):
    share: float
    names: list[str] | None = None
    def __post_init__(self):
        if self.share < 0: raise ValueError("share must not be negative")
    def priority(self, batch): return batch.tokens

@dataclass(frozen=True)
class Unfinished(Policy):
    pass

class Bare(Policy):
    def priority(self, batch): return batch.tokens

@dataclass(frozen=True)
class Deaf(Policy):
    @property
    def needs(self): return Needs(decode_queries=True)
    def priority(self, batch): return batch.state

@dataclass(frozen=True)
class Choosy(Policy):
    observation_window: int
    def check(self, config):
        if config.sinks: raise ValueError(f"option 'sinks' = {config.sinks} is refused by choosy: set it to 0")
    def priority(self, batch): return batch.tokens

A_NUMBER = 3
"""
)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on sys.path with modules of a user."""
    (tmp_path / "vtoken_test_own.py").write_text(OWN)
    (tmp_path / "vtoken_test_broken.py").write_text("raise RuntimeError('out of\\nluck')\n")
    (tmp_path / "vtoken_test_needs.py").write_text("import vtoken_test_absent\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def load(policy: str, window: int = 32, **options: Any) -> Any:
    return load_policy(VTokenConfig(policy=policy, policy_options=options, observation_window=window))


def refusal(policy: str, **options: Any) -> str:
    with pytest.raises(ValueError) as info:
        load(policy, **options)
    return str(info.value)


class TestAccepted:
    @pytest.mark.parametrize("name", sorted(POLICIES))
    def test_every_name_with_its_defaults(self, name: str) -> None:
        assert type(load(name)) is POLICIES[name]

    def test_options(self) -> None:
        assert load("h2o", decay=0.5, average=False) == H2O(0.5, False)
        assert load("h2o", decay=1) == H2O(1.0)
        assert load("random", seed=2**31 - 1) == Random(2**31 - 1)
        assert load("snapkv", pooling="max", kernel_size=7) == SnapKV(7, "max", 32)

    def test_the_observation_window_is_the_engine_s(self) -> None:
        assert load("snapkv", window=20) == SnapKV(observation_window=20)
        assert load("scissorhands", window=64, history=100) == Scissorhands(100, 64)
        assert load("h2o", window=64, whole_prompt=True) == H2O(whole_prompt=True, observation_window=64)

    def test_the_options_given_are_not_changed(self) -> None:
        config = VTokenConfig(policy="scissorhands", policy_options={"history": 9})
        load_policy(config)
        assert config.policy_options == {"history": 9}

    def test_a_class_of_one_s_own(self, own: Path) -> None:
        policy = load("vtoken_test_own:Own", share=1, names=["a"])
        assert type(policy).__name__ == "Own" and (policy.share, policy.names) == (1.0, ["a"])


ALL_NAMES = "h2o, key_norm, random, scissorhands, snapkv, streaming_llm, tova"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("h20", {}, "unknown policy 'h20'; did you mean 'h2o'?"),
    ("lru", {}, f"unknown policy 'lru'; the policies are {ALL_NAMES}, and 'module:Class' is one of your own."),
    ("h2o", {"decai": 0.9}, "unknown option 'decai' of policy 'h2o'; did you mean 'decay'?"),
    ("h2o", {"seed": 1}, "unknown option 'seed' of policy 'h2o'; its options are decay, average, whole_prompt."),
    ("tova", {"seed": 1}, "unknown option 'seed' of policy 'tova'; it has no options."),
    ("snapkv", {"observation_window": 8}, "option 'observation_window' is the engine's; set it beside policy_options, "
     "not in it."),
    ("h2o", {"decay": "0.9"}, "option 'decay' = '0.9' of policy 'h2o' is refused: it should be a valid number; "
     "its options are decay, average, whole_prompt."),
    ("h2o", {"average": 1}, "option 'average' = 1 of policy 'h2o' is refused: it should be a valid boolean; "
     "its options are decay, average, whole_prompt."),
    ("snapkv", {"pooling": "sum"}, "option 'pooling' = 'sum' of policy 'snapkv' is refused: it should be 'avg' or "
     "'max'; its options are kernel_size, pooling."),
    ("h2o", {"decay": 0.0}, "policy_options = {'decay': 0.0} are refused by policy 'h2o': decay must lie in (0, 1]."),
    ("h2o", {"decay": float("nan")}, "policy_options = {'decay': nan} are refused by policy 'h2o': decay must lie in "
     "(0, 1]."),
    ("scissorhands", {"history": 0}, "policy_options = {'history': 0} are refused by policy 'scissorhands': history "
     "must be at least 1."),
    ("snapkv", {"kernel_size": 4}, "policy_options = {'kernel_size': 4} are refused by policy 'snapkv': kernel_size "
     "must be odd and at least 1."),
    ("random", {"seed": 2**31}, "policy_options = {'seed': 2147483648} are refused by policy 'random': seed must lie "
     "in [0, 2**31)."),
    (":Own", {}, "policy ':Own' is not of the form 'module:Class', such as 'my_policies:MaxMass'."),
    ("own:", {}, "policy 'own:' is not of the form 'module:Class', such as 'my_policies:MaxMass'."),
    ("a/b.py:Own", {}, "policy 'a/b.py:Own' is not of the form 'module:Class', such as 'my_policies:MaxMass'."),
    ("vtoken_test_absent:Own", {}, "policy 'vtoken_test_absent:Own' was not found: there is no module "
     "'vtoken_test_absent'; put its directory on PYTHONPATH."),
    ("vtoken_test_absent.sub:Own", {}, "policy 'vtoken_test_absent.sub:Own' was not found: there is no module "
     "'vtoken_test_absent'; put its directory on PYTHONPATH."),
    ("vtoken_test_needs:Own", {}, "policy 'vtoken_test_needs:Own' was not found: importing 'vtoken_test_needs' raised "
     "ModuleNotFoundError (No module named 'vtoken_test_absent'); correct that module."),
    ("vtoken_test_broken:Own", {}, "policy 'vtoken_test_broken:Own' was not found: importing 'vtoken_test_broken' "
     "raised RuntimeError (out of luck); correct that module."),
    ("vtoken_test_own:Onw", {}, "policy 'vtoken_test_own:Onw' was not found: 'vtoken_test_own' has no 'Onw'; did you "
     "mean 'Own'?"),
    ("vtoken_test_own:A_NUMBER", {}, "policy 'vtoken_test_own:A_NUMBER' is no policy; derive it from "
     "vtoken.policies.Policy."),
    ("vtoken_test_own:Unfinished", {}, "policy 'vtoken_test_own:Unfinished' says nothing about priorities; give its "
     "class a method 'priority'."),
    ("vtoken_test_own:Bare", {}, "policy 'vtoken_test_own:Bare' is no dataclass; put @dataclass(frozen=True) above its "
     "class."),
    ("vtoken_test_own:Deaf", {}, "policy 'vtoken_test_own:Deaf' asks for attention; give its class a method "
     "'observe'."),
    ("vtoken_test_own:Own", {}, "policy 'vtoken_test_own:Own' needs the option 'share'; set it in policy_options."),
    ("vtoken_test_own:Own", {"share": -1}, "policy_options = {'share': -1} are refused by policy "
     "'vtoken_test_own:Own': share must not be negative."),
    ("vtoken_test_own:Own", {"share": 1, "names": "a"}, "option 'names' = 'a' of policy 'vtoken_test_own:Own' is "
     "refused: it should be a valid list; its options are share, names."),
    ("vtoken_test_own:Choosy", {}, "option 'sinks' = 4 is refused by choosy: set it to 0."),
]  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize(("policy", "options", "sentence"), REFUSED)
    def test_one_sentence(self, own: Path, policy: str, options: dict[str, Any], sentence: str) -> None:
        assert refusal(policy, **options) == f"vtoken: {sentence}"
        assert ". " not in sentence and "\n" not in sentence

    def test_snapkv_s_window_must_be_protected(self) -> None:
        sentence = (
            r"^vtoken: option 'recent' = 31 is refused by snapkv: raise it to observation_window = 32 or lower that, "
            r"since the window's own tokens must stay\.$"
        )
        with pytest.raises(ValueError, match=sentence):
            load_policy(VTokenConfig(policy="snapkv", recent=31))
        load_policy(VTokenConfig(policy="snapkv", recent=31, observation_window=31))
        load_policy(VTokenConfig(policy="scissorhands", recent=31))
