"""Prefix caching on the real engine: whatever a request took from the cache, both oracles hold it to its own trace."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import oracle
import pytest
from engines import Answer, ForwardWatch, Job, generate, prompts, running
from oracle_runs import BUDGET, OUTPUTS, RECENT, SINKS, TINY, Tiny, check, settings
from victim_oracle import SCORES, Settings, check_victims, h2o_fading

from vtoken.core.trace import Trace
from vtoken.policies import load_policy

S = 32
MASKED = {"shared_blocks": "keep"}
A, OTHER, MORE, FRESH = prompts((300, 300, 40, 330), 512, seed=3)
HALF = 160  # tokens that B shares with A, and E with D
B = A[:HALF] + OTHER[HALF:]
D, E = FRESH, FRESH[:HALF] + OTHER[: 300 - HALF]


@dataclass
class Runs:
    """Requests on one engine, round after round, and what its forwards were given."""

    engine: Any
    logprobs: int = -1
    jobs: list[Job] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    traces: dict[str, Trace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watch = ForwardWatch(self.engine)

    def together(self, *jobs: Job) -> None:
        """These requests at the same time, to their end."""
        self.jobs += jobs
        self.answers |= generate(self.engine, jobs, self.logprobs)
        self.traces |= self.engine.take_traces()

    def hit(self, name: str) -> int:
        """Tokens that the request took from the cache when it was first admitted."""
        return self.traces[name].incarnations[0].prefix_hit

    def masked(self) -> set[str]:
        """Requests that decoded over more positions than their budget lets them have tokens: some were dead."""
        decoded = (entry for forward in self.watch.forwards for entry in forward if len(entry.positions) == 1)
        return {entry.request_id for entry in decoded if entry.seq_len > BUDGET}


def turns(runs: Runs) -> None:
    """A; A again beside B, which begins like it; D and E, which arrive together; B again; A's next turn."""
    runs.together(Job("A", A, OUTPUTS))
    runs.together(Job("A again", A, OUTPUTS), Job("B", B, OUTPUTS))
    runs.together(Job("D", D, OUTPUTS), Job("E", E, OUTPUTS))
    runs.together(Job("B again", B, OUTPUTS))
    runs.together(Job("A goes on", [*A, *runs.answers["A"].token_ids, *MORE], OUTPUTS))


def run(
    model: Path, scenario: Callable[[Runs], None], logprobs: int = -1, engine_args: dict | None = None, **options: Any
) -> Runs:
    args = {**TINY, "enable_prefix_caching": True, **(engine_args or {})}
    with running(model, settings(**options), **args) as engine:
        runs = Runs(engine, logprobs)
        scenario(runs)
        snapshot = engine.snapshot()
        assert (snapshot.held_blocks, snapshot.live_tokens) == (0, 0)
    return runs


def own_queries(**options: Any) -> int:
    """How many of a prompt's last queries such a policy's request has to compute."""
    return max(load_policy(settings(**options)).needs.computed_queries, 1)


@pytest.mark.parametrize("policy", SCORES)
def test_every_policy(tiny: Tiny, policy: str) -> None:
    runs = run(tiny("llama-gqa"), turns, policy=policy, **MASKED)
    reference = oracle.load_reference(tiny("llama-gqa"))
    compared = check(reference, runs.jobs, runs.answers, runs.traces, SCORES[policy])
    assert compared == sum(len(job.prompt) - (BUDGET - 1) + OUTPUTS - 1 for job in runs.jobs)

    repeated = (300 - own_queries(policy=policy)) // S * S
    hits = {job.name: runs.hit(job.name) for job in runs.jobs}
    assert hits == {
        "A": 0, "A again": repeated, "B": HALF, "D": 0, "E": HALF, "B again": repeated, "A goes on": 300 // S * S,
    }  # fmt: skip
    assert runs.masked() >= {"A again", "B"}
    for name in ("A", "B"):
        assert (runs.answers[name].token_ids == runs.answers[f"{name} again"].token_ids) or policy == "h2o"


class TestWhatAHitChanges:
    def test_h2o_keeps_other_tokens_unless_it_looks_at_the_whole_prompt(self, tiny: Tiny) -> None:
        def twice(runs: Runs) -> None:
            runs.together(Job("first", A, OUTPUTS))
            runs.together(Job("second", A, OUTPUTS))

        victims = {}
        for whole in (False, True):
            runs = run(tiny("llama-gqa"), twice, policy="h2o", policy_options={"whole_prompt": whole})
            assert runs.hit("second") == (0 if whole else 256)
            victims[whole] = [runs.traces[name].incarnations[0].victims for name in ("first", "second")]
            check(oracle.load_reference(tiny("llama-gqa")), runs.jobs, runs.answers, runs.traces, SCORES["h2o"])
        assert victims[True][0] == victims[True][1] == victims[False][0]
        assert next(v for v in victims[False][1] if v) != victims[False][0][3]

    @pytest.mark.parametrize("policy", ["random", "key_norm"])
    def test_where_no_attention_is_looked_at_the_victims_are_the_same(self, tiny: Tiny, policy: str) -> None:
        runs = run(tiny("llama-gqa"), turns, policy=policy)
        for name in ("A", "B"):
            first, again = (runs.traces[n].incarnations[0] for n in (name, f"{name} again"))
            assert again.prefix_hit > first.prefix_hit
            assert [v for v in first.victims if v] == [v for v in again.victims if v]


@pytest.mark.parametrize(
    "options, score",
    [
        ({"policy": "h2o", "verify": True}, SCORES["h2o"]),
        ({"policy": "h2o", "policy_options": {"decay": 0.9}, **MASKED}, h2o_fading),
        ({"policy": "scissorhands", "interval": 5, "budget": 70}, SCORES["scissorhands"]),
        ({"policy": "h2o", "reclaim": "none"}, SCORES["h2o"]),
        (
            {"policy": "h2o", "reclaim": "pack", "check_interval": 1, "theta_f": 0.0, "low_watermark": 1.0}
            | {"headroom": 0.1},
            SCORES["h2o"],
        ),
    ],
    ids=["shared blocks are copied", "fading", "interval", "none", "pack"],
)
def test_options(tiny: Tiny, options: dict, score: Any) -> None:
    runs = run(tiny("llama-gqa"), turns, **options)
    assert check(oracle.load_reference(tiny("llama-gqa")), runs.jobs, runs.answers, runs.traces, score) > 0
    assert [runs.hit(name) for name in ("A", "A again", "B", "E", "B again", "A goes on")] == [
        0,
        256,
        160,
        160,
        256,
        288,
    ]


@pytest.mark.parametrize(
    "policy, chunk, longest",
    [
        ("h2o", 104, 64),
        ("snapkv", 40, 32),
        ("key_norm", 40, 64),
    ],
)
def test_prompts_reduced_in_chunks(tiny: Tiny, policy: str, chunk: int, longest: int) -> None:
    """A hit ends before the first reduction, at 80 or 104 tokens, so what is cached decides nothing."""
    chunks = {"prefill_evict": "chunked", "prefill_chunk": chunk, "policy": policy, **MASKED}
    runs = run(tiny("llama-gqa"), turns, **chunks)
    hits = {job.name: runs.hit(job.name) for job in runs.jobs}
    together = hits.pop("E")  # admitted as soon as D has computed its first chunk
    assert hits == {"A": 0, "A again": longest, "B": longest, "D": 0, "B again": longest, "A goes on": longest}
    assert together == min(longest, chunk // S * S)
    reference = oracle.load_reference(tiny("llama-gqa"))
    assert check(reference, runs.jobs, runs.answers, runs.traces, SCORES[policy], chunk) > 0


def test_preempted_and_resumed(tiny: Tiny) -> None:
    """Requests without a budget grow until there is no room left; of those preempted, B finds A's prefix once more."""
    growing = [Job(f"grows {n}", prompt, 160, budget=1000) for n, prompt in enumerate(prompts((64,) * 4, 512))]
    both = [Job("A", A, 200), Job("B", B, 150)]
    pool = {"num_gpu_blocks_override": 28, "max_model_len": 512}
    runs = run(tiny("llama-gqa"), lambda runs: runs.together(*growing, *both), policy="h2o", engine_args=pool, **MASKED)
    reference = oracle.load_reference(tiny("llama-gqa"))
    assert check(reference, both, runs.answers, runs.traces, SCORES["h2o"]) > 0
    for job in growing:
        answer = runs.answers[job.name]
        oracle.check(reference, job.prompt, answer.token_ids, runs.traces[job.name], answer.logits, allow_none=True)
    hits = {name: [life.prefix_hit for life in runs.traces[name].incarnations] for name in ("A", "B")}
    assert hits == {"A": [0, 0], "B": [HALF, HALF]}


class TestControls:
    """What the oracles refuse in the trace of a request with a hit."""

    @pytest.fixture(scope="class")
    def runs(self, tiny: Tiny) -> Runs:
        return run(tiny("llama-gqa"), turns, policy="h2o", **MASKED)

    @pytest.fixture(scope="class")
    def reference(self, tiny: Tiny) -> Any:
        return oracle.load_reference(tiny("llama-gqa"))

    def test_a_victim_left_out_or_late(self, runs: Runs, reference: Any) -> None:
        for name in ("A again", "B"):
            answer = runs.answers[name]
            prompt = A if name == "A again" else B
            oracle.check_sensitivity(reference, prompt, answer.token_ids, runs.traces[name], answer.logits)

    def test_a_prefix_hit_that_was_another(self, runs: Runs, reference: Any) -> None:
        """The logits do not tell who computed the prefix; the victims do."""
        (life,) = runs.traces["A again"].incarnations
        tokens = [*A, *runs.answers["A again"].token_ids]
        parts = Settings(A, [len(A)], SINKS, RECENT)
        assert check_victims(reference, tokens, life, SCORES["h2o"], parts) > 0
        longer = replace(life, prefix_hit=256 + 16, new_tokens=[44 - 16, *life.new_tokens[1:]])
        none = replace(life, prefix_hit=0, new_tokens=[300, *life.new_tokens[1:]])
        assert life.prefix_hit + life.new_tokens[0] == 300
        for wrong in (longer, none):
            with pytest.raises(AssertionError, match="was taken, and"):
                check_victims(reference, tokens, wrong, SCORES["h2o"], parts)

    def test_a_prefix_hit_that_leaves_tokens_out(self, runs: Runs, reference: Any) -> None:
        (life,) = runs.traces["A again"].incarnations
        trace = Trace([replace(life, prefix_hit=life.prefix_hit - S)])
        answer = runs.answers["A again"]
        with pytest.raises(AssertionError, match="tokens computed"):
            oracle.check(reference, A, answer.token_ids, trace, answer.logits)

    def test_another_s_trace(self, runs: Runs, reference: Any) -> None:
        """A request with a hit evicts by other scores than one without, and its logits show it."""
        answer = runs.answers["A again"]
        with pytest.raises(AssertionError):
            oracle.check(reference, A, answer.token_ids, runs.traces["A"], answer.logits)


@pytest.mark.slow
def test_the_real_model(smollm2: Path) -> None:
    first, other = prompts((240, 240), 40000, seed=5)
    second = first[:160] + other[160:]

    def scenario(runs: Runs) -> None:
        runs.together(Job("first", first, OUTPUTS), Job("second", second, OUTPUTS))
        runs.together(Job("first again", first, OUTPUTS), Job("second again", second, OUTPUTS))

    runs = run(smollm2, scenario, 20, policy="h2o", budget=96, engine_args={"max_num_batched_tokens": 320}, **MASKED)
    reference = oracle.load_reference(smollm2)
    assert check(reference, runs.jobs, runs.answers, runs.traces, SCORES["h2o"]) == 4 * (240 - 95 + OUTPUTS - 1)
    assert [runs.hit(job.name) for job in runs.jobs] == [0, 160, 192, 192]
