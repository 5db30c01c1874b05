"""What an experiment is given: the model, the workloads, engines, repeats in turn, and a progress bar."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from vtoken.config import VTokenConfig
from vtoken.evaluation.bench.engines import EnginePool, EngineSpec, RunningEngine
from vtoken.evaluation.bench.quality_of import QualityOf
from vtoken.evaluation.bench.requests import BenchRequests
from vtoken.evaluation.model import model_dtype
from vtoken.evaluation.plan import BLOCK_SIZE, engine_arguments

REPEATS = 5
QUICK_REPEATS = 2
BLOCKS = 512
MAX_MODEL_LEN = 4096
POLICIES = ("h2o", "scissorhands", "random", "streaming_llm", "snapkv", "tova", "key_norm")

Variant = TypeVar("Variant")


@dataclass
class Bench:
    """One invocation of ``vtoken bench``.

    Attributes:
        model: directory.
        text_config: the model's, as transformers has it.
        requests: prompts from the user's file, the data directory, or Python's library.
        engines: alive from experiment to experiment.
        quick: small sizes; shows that everything works, not what it is worth.
        wanted_repeats: as asked for on the command line, else None.
        openvino: interpreter of an environment with OpenVINO GenAI.
    """

    model: Path
    text_config: Any
    requests: BenchRequests
    engines: EnginePool
    console: Console
    quick: bool = False
    wanted_repeats: int | None = None
    openvino: Path | None = None
    _quality: QualityOf | None = field(default=None, repr=False)

    @property
    def repeats(self) -> int:
        """Of each variant of a timed comparison."""
        return self.wanted_repeats or (QUICK_REPEATS if self.quick else REPEATS)

    def engine(
        self,
        vtoken: VTokenConfig | None,
        *,
        num_blocks: int = BLOCKS,
        max_model_len: int = MAX_MODEL_LEN,
        block_size: int = BLOCK_SIZE,
        copy: int = 0,
        **engine_args: Any,
    ) -> RunningEngine:
        """An engine with these settings, started or taken from those that are there.

        Args:
            vtoken: settings, or None for native vLLM.
            num_blocks: blocks that requests can hold.
            max_model_len: at most the model's context is taken.
            block_size: slots per block.
            copy: another number, another engine of the same kind.
            engine_args: more of vLLM's ``EngineArgs``; prefix caching is off and vLLM's compilation left out unless
                they say otherwise.

        Raises:
            ValueError: the configuration is refused; one sentence.
            RuntimeError: the engine did not start.
        """
        length = min(max_model_len, num_blocks * block_size, int(self.text_config.max_position_embeddings))
        arguments = engine_arguments(
            self.text_config, num_blocks, length, eager=True, block_size=block_size, dtype=bench_dtype()
        )
        arguments |= {"enable_prefix_caching": False, **engine_args}
        return self.engines.get(EngineSpec(str(self.model), vtoken, arguments, copy))

    def interleaved(
        self, variants: Sequence[Variant], what: str, repeats: int | None = None
    ) -> Iterator[tuple[int, Variant]]:
        """(repeat, variant), each variant once per repeat, in an order drawn for it, so that drift hits all alike."""
        repeats = repeats or self.repeats
        with self.progress(what, repeats * len(variants)) as tick:
            for repeat in range(repeats):
                for variant in in_any_order(variants, repeat):
                    yield repeat, variant
                    tick()

    def progress(self, what: str, total: int) -> "_Bar":
        """A context whose value is to be called once for each of ``total`` parts that is done."""
        return _Bar(self.console, what, total)

    def quality_of(self, policy: str, budget: int | float, **settings: Any) -> dict[str, Any]:
        """What a policy and a budget cost in quality, whatever the way of reclaiming: see ``QualityOf``."""
        if self._quality is None:
            questions = self.requests.quality_questions(self.quick)
            self._quality = QualityOf(self.engine, questions, self.requests.tokenizer.decode, POLICIES)
        with self.console.status(f"quality of {policy} at {budget}"):
            return self._quality(policy, budget, **settings)


def bench_dtype() -> str:
    """float32 on any CPU, also where bfloat16 would be faster.

    In bfloat16 the order of a sum decides near ties, so that ways of reclaiming that keep the same tokens produce other
    texts, and a difference between two likelihoods is rounding as much as eviction.
    """
    import torch

    return model_dtype() if torch.cuda.is_available() else "float32"


def in_any_order(variants: Sequence[Variant], repeat: int) -> list[Variant]:
    """The order of a repeat: drawn, since in a rotation everybody always follows the same one."""
    return random.Random(repeat).sample(variants, len(variants))


class _Bar:
    """A moving bar on a terminal, a line at each tenth in a log file."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
        )
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._what, self._total, self._done = what, total, 0
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Callable[[], None]:
        self._bar.start()
        return self._tick

    def __exit__(self, *failure: object) -> None:
        self._bar.stop()

    def _tick(self) -> None:
        self._done += 1
        self._bar.advance(self._task)
        if not self._bar.console.is_terminal and self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            self._bar.console.print(f"{self._what}: {self._done} of {self._total}")
