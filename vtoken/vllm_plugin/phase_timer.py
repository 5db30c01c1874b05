"""Where a step goes, phase by phase: the same phases for stock vLLM and for vLLM with vtoken."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vtoken.vllm_plugin import compat
from vtoken.vllm_plugin.hook_timer import ExclusiveTimer, instrument

PHASES = ("schedule", "prepare inputs", "forward", "sample", "hooks", "relocation", "update", "front end")
_METHODS = (
    (Scheduler, "schedule", "schedule"),
    (GPUModelRunner, "execute_model", "prepare inputs"),  # what is left of it: batch, attention metadata
    (GPUModelRunner, compat.RUN_MODEL, "forward"),
    (LogitsProcessor, "forward", "sample"),
    (GPUModelRunner, "sample_tokens", "sample"),
    (Scheduler, "update_from_output", "update"),
)
# What a decode step calls of vLLM inside our hooks and not within one of the methods above is the block manager's part
# of scheduling, and preparing inputs.
_OTHERWISE = {"vtoken": "hooks", "vllm": "schedule", "outside": "front end"}


@contextmanager
def timed_phases() -> Iterator[ExclusiveTimer]:
    """A timer over all phases, for as long as the context lasts; ``phases_of`` names what it takes."""
    timer = ExclusiveTimer()
    for owner, name, phase in _METHODS:
        timer.wrap(owner, name, phase)
    timer.wrap(GPUModelRunner, compat.PREPARE_INPUTS, "prepare inputs")
    instrument(timer)
    try:
        yield timer
    finally:
        timer.unwrap()


def phases_of(spent: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, each of ``PHASES``."""
    phases = dict.fromkeys(PHASES, 0.0)
    for category, seconds in spent.items():
        phases[_OTHERWISE.get(category, category)] += seconds
    return phases
