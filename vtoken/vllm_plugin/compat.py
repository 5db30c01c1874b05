"""The only file that touches vLLM's private names: subclasses that map its hooks to the methods of our classes.

Written against vLLM 0.32. A new vLLM version is a change of this file.
"""

from collections import ChainMap
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu_worker import Worker

from vtoken.config import VTokenConfig
from vtoken.core.budget import cadence_of
from vtoken.core.holdings import pool_use
from vtoken.core.ledger import LengthLedger
from vtoken.core.trace import Trace
from vtoken.launch import NAME
from vtoken.policies import load_policies, load_policy
from vtoken.vllm_plugin.kv_cache import EvictableAttentionManager, EvictableAttentionSpec
from vtoken.vllm_plugin.layers import make_worker
from vtoken.vllm_plugin.protocol import EngineCounts, StepPlan, StepReport
from vtoken.vllm_plugin.refused import SESSIONS
from vtoken.vllm_plugin.scheduler import EvictionScheduler, ScheduledStep
from vtoken.vllm_plugin.scores import score_bytes
from vtoken.vllm_plugin.simulated_runner import NoCopies, SimulatedRunner
from vtoken.vllm_plugin.startup import startup_line
from vtoken.vllm_plugin.worker import EvictionWorker, Start

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Runner
else:  # mixins: which scheduler and which runner they extend is for the configuration to say
    _Runner = _Scheduler = object

logger = init_logger(f"vllm.{__name__}")

PREPARE_INPUTS, RUN_MODEL = "_prepare_inputs", "_model_forward"
"""Names of the parts of the runner's ``execute_model`` that ``phase_timer`` times."""


def settings_of(vllm_config: Any) -> VTokenConfig:
    return vllm_config.additional_config.vtoken


def plan_of(output: SchedulerOutput) -> StepPlan:
    """The plan that rides on a scheduler's output; both are pickled together where processes differ."""
    return output.vtoken_plan


def beginning_in(output: SchedulerOutput) -> dict[str, int]:
    """The requests that begin with this step, or begin again, and how many tokens each found in the prefix cache."""
    cached = output.scheduled_cached_reqs
    found = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    if cached.resumed_req_ids:
        computed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        found |= {req_id: hit for req_id, hit in computed if req_id in cached.resumed_req_ids}
    return found


def register_spec() -> None:
    """Make our spec known to this process. vLLM's own must be first: it registers them only into an empty list."""
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(
        EvictableAttentionSpec, EvictableAttentionManager, uniform_type_base_spec=FullAttentionSpec
    )


class EvictingScheduler(_Scheduler):
    """Mixin over vLLM's schedulers: a plan attached to each step, and the emptied blocks returned with its result."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register_spec()
        super().__init__(*args, **kwargs)
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        assert isinstance(manager, EvictableAttentionManager)
        config = settings_of(self.vllm_config)
        needs = load_policy(config).needs
        manager.ledger = LengthLedger(
            manager.block_size,
            cadence_of(config, needs.prompt_queries, needs.decode_queries, needs.computed_queries),
            dense=config.reclaim == "fill",
        )
        pool = self.kv_cache_manager.block_pool
        # vLLM keeps one block for itself.
        self.vtoken = EvictionScheduler(config, manager.ledger, pool.num_gpu_blocks - 1, pool, manager)
        logger.info(
            "%s",
            startup_line(
                config, manager.block_size, pool.num_gpu_blocks - 1, self.vllm_config.model_config.max_model_len
            ),
        )
        manager.reserve, manager.lose = self.vtoken.reserve, self.vtoken.lose
        self._scheduling = False
        self._ending: set[str] = set()

    def add_request(self, request: Request) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if known:
            return
        params = request.sampling_params
        try:
            if request.resumable:
                raise ValueError(SESSIONS)
            self.vtoken.admit(
                request.request_id,
                request.num_prompt_tokens,
                min(request.max_tokens, self.max_model_len - request.num_prompt_tokens),
                params.extra_args if params is not None else None,
            )
        except ValueError as error:
            # The front end has checked the settings; whoever got past it must not take the engine down.
            self.vtoken.admit_unreduced(request.request_id, request.num_prompt_tokens)
            self._end_with_error({request.request_id: str(error)})

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        # Where vLLM itself shortens chunks, just before their blocks are allocated.
        clamped = self.vtoken.clamp(request.request_id, num_computed_tokens, num_new_tokens)
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, clamped)

    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        blocks, hit, *rest = super()._get_local_prefix_cache_hit(request)
        longest = self.vtoken.longest_hit(request.request_id, request.num_tokens)
        if hit > longest:
            blocks, hit = self.kv_cache_manager.truncate_computed_blocks(blocks, longest), longest
        return blocks, hit, *rest

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        manager.forget_uncomputed(request.request_id, request.num_computed_tokens)
        super()._preempt_request(request, *args, **kwargs)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._scheduling = True
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self._scheduling = False
        with self.vtoken.planning:
            req_ids = list(output.num_scheduled_tokens)
            requests = list(map(self.requests.__getitem__, req_ids))
            output.vtoken_plan = self.vtoken.plan(
                ScheduledStep(
                    req_ids,
                    output.num_scheduled_tokens.values(),
                    map(attrgetter("num_computed_tokens"), requests),
                    map(attrgetter("num_tokens"), requests),
                    beginning_in(output),
                    *self.get_request_counts(),
                )
            )
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        report: StepReport | None = getattr(model_runner_output, "vtoken_report", None)
        with self.vtoken.settling:
            errors = self.vtoken.settle(plan_of(scheduler_output), report)
        self._end_with_error(errors)
        unseen = self._ending | self.vtoken.spoilt
        for req_id in unseen & model_runner_output.req_id_to_index.keys() if unseen else ():
            # What a request computed from a cache that is not its own must not be seen. vLLM also insists that
            # a request without a token brings no prompt logprobs.
            model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[req_id]] = []
            model_runner_output.prompt_logprobs_dict.pop(req_id, None)
            model_runner_output.prompt_token_id_logprobs_dict.pop(req_id, None)
        self._ending.clear()
        return super().update_from_output(scheduler_output, model_runner_output)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if reset_running_requests or not self.running:
            self.vtoken.let_go()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def _end_with_error(self, errors: Mapping[str, str]) -> None:
        for req_id, sentence in errors.items():
            if req_id in self.requests:
                logger.error("%s", sentence)
                self.grammar_compile_error_reqs.add(req_id)
                self._ending.add(req_id)
                self.vtoken.stats.requests_failed += 1

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        outcome = self.vtoken.outcome(request.request_id)
        transfer, *others = super()._free_request(request, delay_free_blocks)
        self.vtoken.forget(request.request_id)
        # What vLLM's front end passes on with a finished request, whoever it comes from.
        told = {"tokens_evicted": outcome.evicted, "peak_blocks": outcome.most_held}
        return {**(transfer or {}), NAME: told}, *others

    def _request_blocks_can_be_freed(self, request: Request) -> bool:
        # Asked before a preemption: while blocks are on their way back, waiting one step is enough. Never so while
        # each step's result is taken before the next one is scheduled.
        if self._scheduling and self.vtoken.waits_for_frees():
            return False
        return super()._request_blocks_can_be_freed(request)


class VTokenScheduler(EvictingScheduler, Scheduler):
    """vLLM's scheduler, evicting."""


class VTokenAsyncScheduler(EvictingScheduler, AsyncScheduler):
    """vLLM's scheduler for steps whose results arrive after the next one has been scheduled, evicting."""


class ReportedOutput(AsyncModelRunnerOutput):
    """A runner's output that is still on its way from the device, and the report that belongs to it."""

    def __init__(self, output: AsyncModelRunnerOutput, report: StepReport) -> None:
        self._output, self._report = output, report

    def get_output(self) -> ModelRunnerOutput:
        return _with_report(self._output.get_output(), self._report)


class EvictingRunner(_Runner):
    """Mixin over vLLM's V1 model runner, the same for CPU and GPU."""

    vtoken: EvictionWorker

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        register_spec()
        specs = super().get_kv_cache_spec()
        if len(set(specs.values())) > 1:
            raise ValueError(
                "vtoken: layers with different KV caches are not supported yet; "
                "serve a model whose layers have the same KV heads."
            )
        return {name: _evictable(name, spec) for name, spec in specs.items()}

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        (group,) = self.kv_cache_config.kv_cache_groups
        layers = self.compilation_config.static_forward_context
        block_size = group.kv_cache_spec.block_size
        if self.input_batch.block_table[0].block_size != block_size:
            raise ValueError(
                f"vtoken: the attention kernel splits blocks of {block_size} tokens, which is not supported yet; "
                f"set block_size={self.input_batch.block_table[0].block_size}."
            )
        self.vtoken = make_worker(
            settings_of(self.vllm_config),
            self.vllm_config,
            [layers[name] for name in group.layer_names],
            group.kv_cache_spec,
        )
        blocks = self.kv_cache_config.num_blocks - 1
        self.vtoken.monitor.engine = EngineCounts(num_blocks=blocks, free_blocks=blocks)
        self._vtoken_blocks: dict[str, list[int]] = {}

    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> Any:
        # Before anything else touches the cache, or a block list: clearing blocks and preparing inputs happen inside.
        monitor = self.vtoken.monitor
        with monitor.waiting_for_copies:
            self.vtoken.wait_for_copies()
        with monitor.beginning:
            self._vtoken_follow_blocks()
            plan = plan_of(scheduler_output)
            known = ChainMap({new.req_id: new for new in scheduler_output.scheduled_new_reqs}, self.requests)
            self.vtoken.begin_step(
                plan,
                ended=[*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())],
                started={
                    req_id: Start(known[req_id].prompt_token_ids, hit, plan.policies.get(req_id, 0))
                    for req_id, hit in beginning_in(scheduler_output).items()
                },
            )
        output = super().execute_model(scheduler_output, intermediate_tensors)
        if output is None:
            with monitor.evicting:
                self._vtoken_blocks = self.vtoken.evict()
            return None
        return self._vtoken_with_report(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self._vtoken_with_report(super().sample_tokens(grammar_output))

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        with self.vtoken.monitor.placing:
            self._vtoken_place(plan_of(scheduler_output))
        return prepared

    def _vtoken_place(self, plan: StepPlan) -> None:
        index_of, table = self.input_batch.req_id_to_index, self.input_batch.block_table[0]
        place = self.vtoken.place_tokens(
            np.fromiter(map(index_of.__getitem__, plan.req_ids), dtype=np.int64),
            table.block_table.np,
            table.num_blocks_per_row,
            self.query_start_loc.np,
        )
        if place is None:
            return
        # vLLM has filled these in from logical lengths. Positions, sampling and progress keep those.
        index, length = torch.from_numpy(place.index), torch.from_numpy(place.length).to(torch.int32)
        self.optimistic_seq_lens_cpu[index] = length
        self.seq_lens[index.to(self.device)] = length.to(self.device)
        tokens, slots = torch.from_numpy(place.tokens), torch.from_numpy(place.slots)
        table.slot_mapping.gpu[tokens.to(self.device)] = slots.to(self.device)

    def _vtoken_follow_blocks(self) -> None:
        table = self.input_batch.block_table[0]
        for req_id, blocks in self._vtoken_blocks.items():
            request = self.requests.get(req_id)
            if request is not None:
                request.block_ids[0][:] = blocks
            row = self.input_batch.req_id_to_index.get(req_id)
            if row is not None:
                table.block_table.np[row, len(blocks) : table.num_blocks_per_row[row]] = 0
                table.block_table.np[row, : len(blocks)] = blocks
                table.num_blocks_per_row[row] = len(blocks)
        self._vtoken_blocks = {}

    def _vtoken_with_report(self, output: Any) -> Any:
        report = self.vtoken.take_report()
        if isinstance(output, AsyncModelRunnerOutput):
            return ReportedOutput(output, report)
        return _with_report(output, report)


class ModelFreeRunner(SimulatedRunner):
    """A runner without a model, under the names that vLLM's runner has for its parts."""

    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> Any:
        new_tokens = self.follow(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._prepare_inputs(scheduler_output, new_tokens)
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.answer()

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: Any) -> Any:
        self.lay_out(num_scheduled_tokens)


class EvictingModelFreeRunner(EvictingRunner, ModelFreeRunner):
    """The same, evicting: our worker over a cache that nobody has allocated."""

    def __init__(self, config: VTokenConfig, requests: int, blocks: int, tokens: int, block_size: int) -> None:
        super().__init__(requests, blocks, tokens, block_size)
        self.vtoken = EvictionWorker(config, block_size, NoCopies())
        self._vtoken_blocks = {}


def _with_report(output: ModelRunnerOutput, report: StepReport) -> ModelRunnerOutput:
    output = copy(output)  # an empty output is a singleton that all steps share
    output.vtoken_report = report
    return output


def _evictable(name: str, spec: KVCacheSpec) -> KVCacheSpec:
    if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
        raise ValueError(
            f"vtoken: layer {name} uses {type(spec).__name__}, which is not supported yet; "
            "serve a model with full attention."
        )
    return EvictableAttentionSpec(**{name: getattr(spec, name) for name in spec.__dataclass_fields__})


def _beside_scores(available: int, runner: Any) -> int:
    """The bytes for the KV cache out of all available ones: each of its slots needs room for its scores, too."""
    layers = list(runner.get_kv_cache_spec().values())
    cached = sum(layer.page_size_bytes for layer in layers) / layers[0].block_size
    lanes = torch.get_num_threads() if runner.device.type == "cpu" else layers[0].num_kv_heads
    policies = load_policies(settings_of(runner.vllm_config)).values()
    scored = max(score_bytes(policy.needs, lanes) for policy in policies)  # whatever requests will ask for
    return int(available * cached / (cached + scored))


class EvictingWorker:
    """What engines ask of a worker by name, mixed into vLLM's."""

    model_runner: Any

    def determine_available_memory(self) -> int:
        return _beside_scores(super().determine_available_memory(), self.model_runner)  # type: ignore[misc]

    def take_vtoken_traces(self) -> dict[str, dict[str, Any]]:
        traces: dict[str, Trace] = self.model_runner.vtoken.take_traces()
        return {req_id: asdict(trace) for req_id, trace in traces.items()}

    def count_vtoken(self) -> dict[str, Any]:
        return self.model_runner.vtoken.monitor.counts().to_json()

    def recall_vtoken(self, since: list[int]) -> dict[str, Any]:
        engine = self.model_runner.vllm_config.parallel_config.data_parallel_index
        known = since[engine] if engine < len(since) else 0
        return self.model_runner.vtoken.monitor.recording(known).to_json()

    def take_vtoken_frame(self, number: int, time: float) -> dict[str, Any]:
        return self.model_runner.vtoken.monitor.frame(number, time).to_json()

    def count_vtoken_live_slots(self, req_ids: list[str]) -> int:
        table = self.model_runner.vtoken.table
        return pool_use(table, [req_id for req_id in req_ids if req_id in table]).live

    def count_vtoken_live_per_block(self, req_ids: list[str]) -> dict[str, list[int]]:
        table = self.model_runner.vtoken.table
        return {req_id: table.live_per_block(req_id) for req_id in req_ids if req_id in table}


if current_platform.is_cpu():
    from vllm.v1.worker import cpu_worker
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    class VTokenCPUModelRunner(EvictingRunner, CPUModelRunner):
        """vLLM's CPU runner, evicting."""

    class VTokenCPUWorker(EvictingWorker, cpu_worker.CPUWorker):
        """vLLM's CPU worker with our runner."""

        def init_device(self) -> None:
            # The stock worker names its runner class in a module global and nowhere else.
            stock = cpu_worker.CPUModelRunner
            cpu_worker.CPUModelRunner = VTokenCPUModelRunner
            try:
                super().init_device()
            finally:
                cpu_worker.CPUModelRunner = stock


else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    class VTokenGPUModelRunner(EvictingRunner, GPUModelRunner):
        """vLLM's V1 GPU runner, evicting. Not yet run on hardware."""

    class VTokenGPUWorker(EvictingWorker, Worker):
        """vLLM's GPU worker with our runner. Not yet run on hardware."""

        def _make_model_runner(self) -> Any:
            return VTokenGPUModelRunner(self.vllm_config, self.device)
