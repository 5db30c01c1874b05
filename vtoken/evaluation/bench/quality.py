"""What eviction costs, per policy and budget, and whether the way of reclaiming blocks adds anything to it."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.base import Check, Experiment, Run
from vtoken.evaluation.bench.bench import POLICIES, Bench
from vtoken.evaluation.bench.engines import RunningEngine
from vtoken.evaluation.bench.load import as_arguments
from vtoken.evaluation.bench.memory import distinct
from vtoken.evaluation.bench.quality_of import ENGINE_ARGS, offering
from vtoken.evaluation.bench.quality_shown import all_checks, draw, pairs_table, settings_table
from vtoken.evaluation.bench.quality_task import ANSWER_AND_WRITE
from vtoken.evaluation.bench.requests import BenchRequests
from vtoken.evaluation.bench.tables import Table
from vtoken.evaluation.questions import Question, Wishes, data_directory, library_questions, load_questions
from vtoken.evaluation.workloads import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Sizes:
    """What is asked.

    Attributes:
        budgets: shares of the prompt.
        policies: all that are asked.
        paired: those that also write under ``none``.
        prompts: texts to write at most, of at most ``outputs`` tokens each, with different prompts of ``shortest`` to
            ``longest`` tokens.
        needles, passages: of ``length`` tokens each; after a passage ``outputs`` tokens are scored.
        documents: with references, of at most ``longest_document`` tokens.
    """

    budgets: tuple[float, ...] = (0.25, 0.5)
    policies: tuple[str, ...] = POLICIES
    paired: tuple[str, ...] = ("h2o", "scissorhands", "random")
    prompts: int = 24
    shortest: int = 100
    longest: int = 400
    outputs: int = 64
    needles: int = 6
    passages: int = 4
    length: int = 512
    documents: int = 3
    longest_document: int = 1400


QUICK = Sizes(
    budgets=(0.5,),
    policies=("h2o", "random"),
    prompts=2,
    longest=150,
    outputs=16,
    needles=1,
    passages=1,
    length=384,
    documents=0,
)


@dataclass(frozen=True)
class Asked:
    """Everything that each setting is asked; documents and passages are scored, prompts are to be written on."""

    needles: list[Question]
    documents: list[Question]
    passages: list[Question]
    prompts: list[Workload]


class Quality(Experiment):
    name = "quality"
    question = "What does eviction cost in quality, per policy and budget, and does reclaiming blocks add to it?"

    def measure(self, bench: Bench) -> list[Run]:
        sizes = QUICK if bench.quick else Sizes()
        asked = questions_of(bench.requests, sizes)
        settings = [(policy, budget) for policy in sizes.policies for budget in sizes.budgets]
        paired = [(policy, budget) for policy, budget in settings if policy in sizes.paired]
        variants = [("native", None, None), *(("fill", *setting) for setting in settings)]
        variants += [("none", *setting) for setting in paired]
        arguments = dict(ENGINE_ARGS)
        if not bench.quick:  # prompts are computed once for all settings: h2o alone needs every query again
            arguments |= {"num_blocks": 768, "max_model_len": 2048, "max_num_seqs": 96, "enable_prefix_caching": True}
        kinds = dict.fromkeys(variant for variant, _, _ in variants)
        engines = {kind: bench.engine(engine_settings(kind, bench.quick), **arguments) for kind in kinds}
        runs: list[Run] = []
        with bench.progress("quality", len(variants)) as tick:
            for variant, policy, budget in variants:
                wanted = replace(asked, needles=[], documents=[], passages=[]) if variant == "none" else asked
                found = ask_all(engines[variant], wanted, policy, budget, bench.requests.tokenizer.decode)
                agreement = rouge_l((runs[0] if runs else found)["texts"], found["texts"])
                runs.append({"variant": variant, "policy": policy, "budget": budget, **found, "rouge_l": agreement})
                tick()
        return runs

    def tables(self, runs: Sequence[Run]) -> list[Table]:
        return [settings_table(runs), pairs_table(runs)]

    def figure(self, runs: Sequence[Run]) -> "Figure":
        return draw(runs)

    def checks(self, runs: Sequence[Run]) -> list[Check]:
        return all_checks(runs)


def questions_of(requests: BenchRequests, sizes: Sizes) -> Asked:
    """Needles from Python's library; documents and passages from the data directory, else passages from there, too."""
    wishes = Wishes(0, 0, 0, sizes.length, requests.data)
    needles = library_questions(requests.tokenizer, replace(wishes, needles=sizes.needles))
    documents: list[Question] = []
    if data_directory(requests.data) is not None:
        passages, _ = load_questions(requests.tokenizer, replace(wishes, passages=sizes.passages))
        if sizes.documents:
            longer = replace(wishes, documents=sizes.documents, max_prompt=sizes.longest_document)
            documents, _ = load_questions(requests.tokenizer, longer)
    else:
        passages = library_questions(requests.tokenizer, replace(wishes, documents=sizes.passages))
    passages = [replace(passage, forced=passage.forced[: 1 + sizes.outputs]) for passage in passages]
    # Where there are fewer, they come again, and the same text twice is no second observation.
    prompts = distinct(requests.chat(sizes.prompts, sizes.longest, sizes.shortest, sizes.outputs))
    return Asked(needles, documents, passages, prompts)


def engine_settings(variant: str, quick: bool) -> VTokenConfig | None:
    """The quick form has the settings that all experiments have their quality from."""
    if variant == "native":
        return None
    return offering(
        POLICIES, {} if quick else {"h2o": {"whole_prompt": True}}, **({"reclaim": "none"} if variant == "none" else {})
    )


def ask_all(engine: RunningEngine, asked: Asked, policy: str | None, budget: float | None, decode: Any) -> Run:
    """Everything, under one setting; scores are mean nats per token, by question."""
    start = time.monotonic()
    questions = [*asked.needles, *asked.documents, *asked.passages]
    told = engine.do(
        ANSWER_AND_WRITE,
        questions=[asdict(question) for question in questions],
        workloads=as_arguments(asked.prompts),
        extra_args={} if policy is None else {"vtoken.policy": policy, "vtoken.budget": budget},
    )
    needles, documents = len(asked.needles), len(asked.needles) + len(asked.documents)
    found: dict[str, bool] = {}
    for question, (tokens, _) in zip(asked.needles, told["answers"][:needles], strict=True):
        text = decode(tokens[len(question.forced) :])
        found[question.question_id] = any(answer in text for answer in question.answers or ())
    return {
        "needles": found,
        "documents": _log_likelihoods(asked.documents, told["answers"][needles:documents]),
        "passages": _log_likelihoods(asked.passages, told["answers"][documents:]),
        "texts": {w.request_id: decode(tokens) for w, tokens in zip(asked.prompts, told["texts"], strict=True)},
        "lengths": {w.request_id: len(tokens) for w, tokens in zip(asked.prompts, told["texts"], strict=True)},
        "tokens_evicted": told["tokens_evicted"],
        "seconds": time.monotonic() - start,
    }


def rouge_l(theirs: dict[str, str], ours: dict[str, str]) -> dict[str, float]:
    """ROUGE-L F1 of each text against the one of the same name; equal ones agree even where they have no words."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    return {
        name: 1.0 if text == theirs[name] else float(scorer.score(theirs[name], text)["rougeL"].fmeasure)
        for name, text in ours.items()
    }


def _log_likelihoods(questions: Sequence[Question], answers: Sequence[Any]) -> dict[str, float]:
    """Of what follows each prompt; its own last token, which comes first, is not scored."""
    return {q.question_id: statistics.fmean(scores[1:]) for q, (_, scores) in zip(questions, answers, strict=True)}
