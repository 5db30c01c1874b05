"""An engine for the rooms above: stock vLLM or vLLM with vtoken, stepped by hand, with its block pool in view."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vtoken.config import VTokenConfig
from vtoken.core.history import Frame, Holding
from vtoken.core.trace import Trace
from vtoken.launch import NAME
from vtoken.vllm_plugin.plugin import check_vllm_version, parse_config, register

FORCED_TOKENS = "forced_tokens"
"""Key in a request's ``extra_args``; outside ``vtoken.``, since native vLLM takes it as well."""
FORCED_TOKENS_PROCESSOR = "vtoken.vllm_plugin.forced_tokens:ForcedTokens"
"""For the engine argument ``logits_processors``, without which no token is forced."""


@dataclass(frozen=True)
class Progress:
    """A request after a step in which it produced a token.

    ``logprobs`` holds one table per output token; ``cached_tokens`` of the prompt came from the prefix cache.
    """

    request_id: str
    token_ids: list[int]
    finished: bool
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class PoolSnapshot:
    """vLLM's block pool and queues after a step. The last four are totals since start-up.

    ``live_tokens`` are slots whose token somebody attends, so that a token that several requests share counts once, as
    its block does in ``held_blocks``.
    """

    held_blocks: int
    live_tokens: int
    running: int
    waiting: int
    preemptions: int
    tokens_evicted: int
    tokens_moved: int
    blocks_reclaimed: int


class Engine:
    """Greedy generation on one vLLM engine, one step at a time."""

    def __init__(self, llm_engine: Any, engine_args: dict[str, Any]) -> None:
        self.engine_args = engine_args
        self._engine = llm_engine
        self._external_id: dict[str, str] = {}
        self._preemptions: dict[str, int] = {}
        cache = llm_engine.vllm_config.cache_config
        self.block_size: int = cache.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold; vLLM keeps one for itself."""
        return self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        max_tokens: int,
        *,
        extra_args: dict[str, Any] | None = None,
        logprobs: int | None = None,
        forced_tokens: list[int] | None = None,
        stop_at_end: bool = False,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among the unfinished ones.
            prompt_token_ids: the prompt.
            max_tokens: exactly so many are produced, or fewer with ``stop_at_end``.
            extra_args: such as ``{"vtoken.budget": 256}``.
            logprobs: for each output token, also report so many of the likeliest; 0 reports the output token alone.
            forced_tokens: output tokens that are given, from the first one on.
            stop_at_end: the model may end its text.

        Raises:
            ValueError: one sentence, for settings that vtoken refuses or tokens that cannot be forced.
        """
        from vllm import SamplingParams

        if forced_tokens:
            extra_args = {**(extra_args or {}), FORCED_TOKENS: forced_tokens}
            self._check_forced(extra_args)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=not stop_at_end,
            extra_args=extra_args,
            logprobs=logprobs,
        )
        internal = self._engine.add_request(request_id, {"prompt_token_ids": prompt_token_ids}, params)
        self._external_id[internal or request_id] = request_id

    def _check_forced(self, extra_args: dict[str, Any]) -> None:
        from vtoken.vllm_plugin.forced_tokens import forced_tokens

        tokens, model = forced_tokens(extra_args), self._engine.vllm_config.model_config
        if FORCED_TOKENS_PROCESSOR not in (model.logits_processors or []):
            raise ValueError(
                f"vtoken: tokens cannot be forced on this engine; start it with logits_processors="
                f"['{FORCED_TOKENS_PROCESSOR}']."
            )
        if max(tokens) >= model.get_vocab_size():
            raise ValueError(
                f"vtoken: forced token {max(tokens)} is outside the vocabulary of {model.get_vocab_size()} tokens; "
                "force tokens of this model's tokenizer."
            )

    def step(self) -> list[Progress]:
        """Run one step of the scheduler and the model."""
        progress = []
        for output in self._engine.step():
            completion = output.outputs[0]
            tables = completion.logprobs
            progress.append(
                Progress(
                    output.request_id,
                    list(completion.token_ids),
                    output.finished,
                    completion.finish_reason,
                    None if tables is None else [{t: entry.logprob for t, entry in row.items()} for row in tables],
                    output.num_cached_tokens,
                )
            )
        return progress

    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished_requests()

    def abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])

    def snapshot(self) -> PoolSnapshot:
        """The pool after the last step. Only where engine and scheduler share this process."""
        scheduler = self._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        for req_id, request in scheduler.requests.items():
            self._preemptions[req_id] = request.num_preemptions
        evicting = getattr(scheduler, "vtoken", None)
        running = [request.request_id for request in scheduler.running]
        if evicting is None:
            manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
            held = [block.block_id for req_id in running for block in manager.req_to_blocks[req_id]]
            live = sum(request.num_computed_tokens for request in scheduler.running)
            live -= (len(held) - len(set(held))) * self.block_size  # only full blocks are shared
        else:
            live = self._engine.collective_rpc("count_vtoken_live_slots", args=(running,))[0]
        stats = evicting.stats if evicting is not None else None
        return PoolSnapshot(
            held_blocks=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            live_tokens=live,
            running=len(scheduler.running),
            waiting=scheduler.get_request_counts()[1],
            preemptions=sum(self._preemptions.values()),
            tokens_evicted=stats.tokens_evicted if stats else 0,
            tokens_moved=stats.tokens_moved if stats else 0,
            blocks_reclaimed=stats.blocks_reclaimed if stats else 0,
        )

    def live_per_block(self) -> dict[str, list[int]]:
        """For each running request, how many live tokens every block that it holds has, in order."""
        scheduler = self._scheduler
        running = {request.request_id: request for request in scheduler.running}
        if getattr(scheduler, "vtoken", None) is not None:
            counts = self._engine.collective_rpc("count_vtoken_live_per_block", args=(list(running),))[0]
        else:
            manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
            counts, size = {}, self.block_size
            for req_id, request in running.items():
                starts = range(0, len(manager.req_to_blocks[req_id]) * size, size)
                counts[req_id] = [min(max(request.num_computed_tokens - start, 0), size) for start in starts]
        return {self._external_id.get(req_id, req_id): counts[req_id] for req_id in running if req_id in counts}

    def frame(self, number: int, time: float) -> Frame:
        """The pool after the last step, with this number and time; not of stock vLLM."""
        told = self._engine.collective_rpc("take_vtoken_frame", args=(number, time))[0]
        held = [
            Holding(self._external_id.get(one["request"], one["request"]), one["blocks"], one["live"])
            for one in told["holdings"]
        ]
        return Frame(**{**told, "holdings": held})

    def take_traces(self) -> dict[str, Trace]:
        """Traces by request id, and forget them. Needs ``VTokenConfig(record_trace=True)``.

        Raises:
            RuntimeError: the ranks of a tensor-parallel model have recorded different ones.
        """
        traces, *others = self._engine.collective_rpc("take_vtoken_traces")
        if any(other != traces for other in others):
            raise RuntimeError("vtoken: the ranks of the model have evicted different tokens; set verify=True.")
        return {self._external_id.get(r, r): Trace.from_dict(trace) for r, trace in traces.items()}

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()

    @property
    def llm_engine(self) -> Any:
        """vLLM's own engine."""
        return self._engine

    @property
    def evicting_worker(self) -> Any:
        """vtoken's part of the worker. Only where engine and worker share this process, and not in stock vLLM."""
        return self._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.vtoken

    @property
    def _scheduler(self) -> Any:
        return self._engine.engine_core.engine_core.scheduler


def make_engine(
    model: str, vtoken: VTokenConfig | None = None, *, multiprocess: bool = False, **engine_args: Any
) -> Engine:
    """Start vLLM, with vtoken's settings or (None) as it is.

    Args:
        model: directory or name, as vLLM takes it.
        vtoken: settings of the plugin.
        multiprocess: engine core and worker in processes of their own, as ``vllm serve`` has it.
        engine_args: passed on to vLLM's ``EngineArgs``.

    Raises:
        ValueError: one sentence, for a vLLM, an option or a configuration that vtoken does not support.
    """
    check_vllm_version()
    if model.startswith(("/", ".", "~")) and not os.path.isfile(os.path.join(model, "config.json")):
        raise ValueError(f"vtoken: there is no model in '{model}'; give a directory that holds a config.json.")
    if vtoken is not None:
        parse_config(vtoken)
        register()  # VLLM_PLUGINS may leave us out, and vLLM would then run as if nothing had been asked for
        engine_args = {**engine_args, "additional_config": {NAME: vtoken.model_dump()}}
    if not multiprocess and engine_args.get("tensor_parallel_size", 1) == 1:
        engine_args.setdefault("distributed_executor_backend", "uni")
    shown = {key: value for key, value in engine_args.items() if key != "additional_config"}
    with _layout(multiprocess):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            llm_engine = LLMEngine.from_engine_args(EngineArgs(model=model, **engine_args))
        except ValueError as error:
            raise ValueError(first_sentence(error)) from error
    if multiprocess:
        _tell_when_core_ends(llm_engine.engine_core)
    return Engine(llm_engine, shown)


def _tell_when_core_ends(client: Any) -> None:
    """Whoever waits for a core that was killed would wait for ever: vLLM's synchronous client does not tell him.

    It notices, and ends the thread that takes in what the core puts out; nothing says so to who waits for that.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    outputs, intake = client.outputs_queue, client.output_queue_thread

    def tell() -> None:
        intake.join()
        outputs.put(EngineDeadError())

    threading.Thread(target=tell, name="vtoken-core-watch", daemon=True).start()


@contextmanager
def _layout(multiprocess: bool) -> Iterator[None]:
    """vLLM reads the process layout from the environment while it starts."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(name)
    os.environ[name] = "1" if multiprocess else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def first_sentence(error: ValueError) -> str:
    """What to tell a user whose configuration is refused.

    Our own refusals come wrapped into pydantic's report; vLLM's are passed on as they are.
    """
    for line in str(error).splitlines():
        found = line.find("vtoken: ")
        if found >= 0:
            return line[found:].split(" [type=")[0]
    return str(error)
