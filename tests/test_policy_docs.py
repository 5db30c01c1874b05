"""docs/policies.md as a reader takes it: its own policy works as written, and its tables name what there is."""

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from engines import Job, generate, prompts, running
from policy_driver import NAMESPACES, Request, observation, priorities, random_model, request_of
from victim_oracle import Measured, Settings, check_victims

from vtoken.config import VTokenConfig
from vtoken.policies import POLICIES, Policy, load_policy

PAGE = (Path(__file__).parent.parent / "docs" / "policies.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)

both_namespaces = pytest.mark.parametrize("xp", NAMESPACES.values(), ids=NAMESPACES)


@pytest.fixture
def my_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's module, written to a directory on sys.path."""
    (source,) = [block for block in BLOCKS if block.startswith("# my_policies.py\n")]
    (tmp_path / "my_policies.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("my_policies", None)


def max_mass(**options: Any) -> Policy:
    return load_policy(VTokenConfig(policy="my_policies:MaxMass", policy_options=options))


@pytest.mark.usefixtures("my_policies")
class TestTheExample:
    def test_it_is_found_and_its_options_are_checked(self) -> None:
        policy: Any = max_mass(fading=0.5, prompt_queries=3)
        assert policy.needs.each_query and policy.needs.prompt_queries == 3 and policy.fading == 0.5
        with pytest.raises(ValueError, match=r"^vtoken: policy_options = .*: fading must lie in \(0, 1\]\.$"):
            max_mass(fading=1.5)
        with pytest.raises(ValueError, match=r"^vtoken: unknown option 'fadign' .*; did you mean 'fading'\?$"):
            max_mass(fadign=0.5)

    def test_it_runs_in_the_engine(self, tiny: Callable[[str], Path]) -> None:
        """The victims are those of its formula, over attention that a dense pass of the model measures."""
        config = VTokenConfig(
            policy="my_policies:MaxMass", policy_options={"fading": 0.99}, budget=64, record_trace=True
        )
        (prompt,) = prompts((200,), 512)
        with running(tiny("llama-gqa"), config, skip_tokenizer_init=True) as engine:
            answers = generate(engine, [Job("r", prompt, 20)], logprobs=-1)
            traces = engine.take_traces()
        reference = oracle.load_reference(tiny("llama-gqa"))
        oracle.check(reference, prompt, answers["r"].token_ids, traces["r"], answers["r"].logits)

        def largest(measured: Measured, settings: Settings, n: int) -> tuple[np.ndarray, np.ndarray]:
            state = np.zeros(n)
            for q in range(len(prompt) - 16, n):
                state = np.maximum(0.99 * state, measured.a[q, :n])
            return state * (1 - 1e-4), state * (1 + 1e-4)

        settings = Settings(prompt, [200], config.sinks, config.recent)
        (life,) = traces["r"].incarnations
        tokens = [*prompt, *answers["r"].token_ids]
        assert check_victims(reference, tokens, life, largest, settings) == 200 - 63 + 19

    @both_namespaces
    def test_it_keeps_the_largest_mass_that_one_query_gave(self, xp: Any) -> None:
        attend, prompt, window, length = random_model(2), 20, 5, 26
        expected = np.zeros(length)
        for q in range(prompt - window, length):
            mass = attend(q, np.arange(q + 1)).sum(axis=0)
            expected[: q + 1] = np.maximum(0.9 * expected[: q + 1], mass)
        request = Request(max_mass(prompt_queries=window, fading=0.9), attend, xp)
        request.prefill([12, 5, 3])
        for _ in range(prompt, length):
            request.decode(0)
        np.testing.assert_allclose(priorities(request.policy, request._batch()), expected, rtol=1e-5)

    @both_namespaces
    def test_it_decodes_within_a_budget(self, xp: Any) -> None:
        heavy = {9, 40, 70}
        model = random_model(1, importance=dict.fromkeys(heavy, 4.0))
        request = Request(max_mass(), model, xp, recent=4)
        request.prefill([60])
        request.evict(60 - 20)
        for _ in range(100):
            request.decode(1)
            live = [token for token in request.live if token >= 0]
            assert len(live) == 20 and set(live) >= {0, 1, 2, 3, *range(request.length - 4, request.length)}
        assert set(request.live) >= heavy

    @both_namespaces
    def test_a_request_gets_the_same_alone(self, xp: Any) -> None:
        policy = max_mass(fading=0.7)
        batch = observation(
            xp,
            tokens=[0, 2, 1, 0, 4, 1],
            counts=[3, 1, 2],
            length=[3, 1, 5],
            state=[1, 0, 0, 2, 0, 1],
            mass=[0.2, 0.3, 0.5, 1, 8, 2],
            queries=[1, 1, 4],
        )
        together = np.asarray(policy.observe(batch))
        alone = [np.asarray(policy.observe(request_of(batch, i))) for i in range(3)]
        np.testing.assert_array_equal(together, np.concatenate(alone))
        np.testing.assert_allclose(together, [0.7, 0.3, 0.5, 1.4, 2.0, 0.5], rtol=1e-6)

    def test_the_page_s_own_trial_runs_as_written(self) -> None:
        (trial,) = [block for block in BLOCKS if "assert" in block]
        exec(compile(trial, "docs/policies.md", "exec"), {})
        with pytest.raises(AssertionError):
            exec(trial.replace("[0.5, 0.5, 0.25]", "[0.5, 0.5, 0.5]"), {})


class TestTheTables:
    def rows(self, heading: str) -> list[list[str]]:
        section = PAGE.split(f"\n## {heading}\n")[1].split("\n#")[0]
        rows = [line for line in section.splitlines() if line.startswith("| ")]
        return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows[1:]]

    def test_every_policy_has_its_row(self) -> None:
        assert sorted(row[0] for row in self.rows("Which there are")) == sorted(POLICIES)

    def test_every_option_with_its_default(self) -> None:
        written, policy = set(), ""
        for name, option, default, _ in self.rows("Options"):
            policy = name or policy
            written.add((policy, option, default.strip('"').lower()))
        actual = {
            (name, field.name, str(field.default).lower())
            for name, policy_class in POLICIES.items()
            for field in dataclasses.fields(policy_class)  # type: ignore[arg-type]
            if field.name != "observation_window"
        }
        assert written == actual
