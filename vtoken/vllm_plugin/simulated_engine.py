"""An engine without a model: vLLM's real scheduler and block pool, our real worker, and nothing that computes.

What it answers is what depends on counts alone: which request runs when, who holds how many blocks, what is evicted,
moved and freed, and what the bookkeeping of all that costs. Its steps take no time, so nothing of it is a speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vtoken.config import VTokenConfig
from vtoken.core.budget import longest_request
from vtoken.core.holdings import pool_use
from vtoken.policies import load_policies
from vtoken.vllm_plugin.compat import (
    EvictingModelFreeRunner,
    ModelFreeRunner,
    VTokenScheduler,
    beginning_in,
    plan_of,
)
from vtoken.vllm_plugin.counting_runner import CountingRunner, counts_suffice
from vtoken.vllm_plugin.engine import PoolSnapshot
from vtoken.vllm_plugin.kv_cache import EvictableAttentionSpec
from vtoken.vllm_plugin.plugin import AdditionalConfig, check_vllm_version, parse_config
from vtoken.vllm_plugin.request_settings import RequestSettings

VOCABULARY = 1 << 20
"""Token ids of prompts only have to differ where prompts do."""


@dataclass(frozen=True)
class SimulatedStep:
    """What happened in one step.

    Attributes:
        scheduled: tokens that each request computed.
        produced: requests that got an output token.
        finished: requests that ended, and why: "length", or "error" for one that was refused.
        preempted: requests that lost their blocks to others.
        attended: tokens whose K/V the step's attention reads, over all requests.
        pairs: of a query and a token that it attends, likewise.
        begun: requests that began with it, or began again, and how many tokens each found in the prefix cache.
        held: blocks held at its forward.
    """

    scheduled: dict[str, int]
    produced: list[str]
    finished: dict[str, str]
    preempted: list[str]
    attended: int = 0
    pairs: int = 0
    begun: dict[str, int] = field(default_factory=dict)
    held: int = 0


class SimulatedEngine:
    """vLLM's scheduler over a runner without a model, one step at a time. See ``make_simulated_engine``."""

    def __init__(self, scheduler: Any, runner: ModelFreeRunner, config: VTokenConfig | None, block_hasher: Any) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.config = config
        self.preemptions = 0
        self._settings = RequestSettings(config) if config is not None else None
        self._block_hasher = block_hasher
        self._pool = scheduler.kv_cache_manager.block_pool
        (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._blocks = manager.req_to_blocks
        self.block_size: int = scheduler.block_size
        self.max_model_len: int = scheduler.max_model_len
        self.max_num_seqs: int = scheduler.max_num_running_reqs
        self.max_num_batched_tokens: int = scheduler.max_num_scheduled_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold; vLLM keeps one more for itself."""
        return self._pool.num_gpu_blocks - 1

    @property
    def held_blocks(self) -> int:
        """Blocks that are not free; those under way from one holder to the pool count."""
        return self.num_blocks - self._pool.get_num_free_blocks()

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        return self.scheduler.get_request_counts()[1]

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        *,
        extra_args: dict[str, Any] | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among the unfinished ones.
            prompt_token_ids: the prompt; what matters of it is its length, and what it has in common with others.
            max_tokens: exactly so many are produced.
            extra_args: such as ``{"vtoken.budget": 256}``; without vtoken they do nothing.

        Raises:
            ValueError: one sentence, for a request that an engine would not take.
        """
        prompt = list(prompt_token_ids)
        if not 0 < len(prompt) < self.max_model_len:
            raise ValueError(
                f"vtoken: request {request_id} has a prompt of {len(prompt)} tokens, and max_model_len is "
                f"{self.max_model_len}; give it at least one token and leave room for one."
            )
        if self._settings is not None:
            self._settings.terms(extra_args).budget(len(prompt))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, extra_args=extra_args)
        self.scheduler.add_request(Request(request_id, prompt, params, None, block_hasher=self._block_hasher))

    def step(self) -> SimulatedStep:
        """Run one step of the scheduler and the worker."""
        output = self.scheduler.schedule()
        result = self.runner.execute_model(output)
        if result is None:
            result = self.runner.sample_tokens(None)
        _in_order_of_step(result, output)
        preempted = list(output.preempted_req_ids or ())
        self.preemptions += len(preempted)
        attended, pairs = self._attended(output)
        begun, held = beginning_in(output), self.held_blocks
        step = SimulatedStep(output.num_scheduled_tokens, [], {}, preempted, attended, pairs, begun, held)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                if one.new_token_ids:
                    step.produced.append(one.request_id)
                if one.finish_reason is not None:
                    step.finished[one.request_id] = str(one.finish_reason)
        return step

    def _attended(self, output: Any) -> tuple[int, int]:
        """(tokens attended, pairs of query and token) of a step that is scheduled and whose result is not in yet."""
        if self.config is None:
            requests = self.scheduler.requests
            tokens = [(n, requests[req_id].num_computed_tokens) for req_id, n in output.num_scheduled_tokens.items()]
            return sum(end for _, end in tokens), sum(n * end - n * (n - 1) // 2 for n, end in tokens)
        counts = plan_of(output).counts
        n, end = counts.new_tokens, counts.length + counts.new_tokens
        return int(end.sum()), int((n * end - n * (n - 1) // 2).sum())

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def num_blocks_of(self, request_id: str) -> int:
        """How many blocks a request holds."""
        return len(self._blocks.get(request_id, ()))

    def blocks_of(self, request_id: str) -> list[int]:
        """Their ids, in the order of its positions."""
        return [block.block_id for block in self._blocks.get(request_id, ())]

    def snapshot(self) -> PoolSnapshot:
        """The pool after the last step. Looks at every block that a running request holds."""
        running = [request.request_id for request in self.scheduler.running]
        if self.config is None:
            held = [block for req_id in running for block in self.blocks_of(req_id)]
            live = sum(request.num_computed_tokens for request in self.scheduler.running)
            live -= (len(held) - len(set(held))) * self.block_size  # only full blocks are shared
            evicted = moved = reclaimed = 0
        else:
            live = pool_use(self.runner.vtoken.table, running).live  # type: ignore[attr-defined]
            stats = self.scheduler.vtoken.stats
            evicted, moved, reclaimed = stats.tokens_evicted, stats.tokens_moved, stats.blocks_reclaimed
        return PoolSnapshot(
            self.held_blocks, live, self.running, self.waiting, self.preemptions, evicted, moved, reclaimed
        )

    def shutdown(self) -> None:
        """There is nothing to stop; the engine's memory is freed with it."""


def make_simulated_engine(
    vtoken: VTokenConfig | None = None,
    *,
    num_blocks: int,
    block_size: int = 16,
    max_model_len: int = 8192,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    enable_prefix_caching: bool = False,
    block_hasher: Callable[[Request], list[bytes]] | None = None,
    counting: bool = False,
) -> SimulatedEngine:
    """vLLM's scheduler as it is (None) or with vtoken's settings, over a pool of blocks that hold nothing.

    No K/V is allocated, so a pool may have any size, and relocation copies nothing. Attention is not prepared either:
    what ``none``, ``pack`` and prefix caching tell our masked kernel is left out. Every output token is token 0.

    Args:
        vtoken: settings of the plugin, with policies that look at positions alone, such as streaming_llm and random.
        num_blocks: blocks that requests can hold; with vLLM, ``num_gpu_blocks_override`` is one more.
        block_size, max_model_len, max_num_seqs, max_num_batched_tokens, enable_prefix_caching: as for vLLM.
        block_hasher: returns the hashes of those full blocks of a request that have none yet, in the place of vLLM's.
        counting: blocks are counted without a token table, which takes less time (``counting_runner.py``), where the
            settings allow it; there are no snapshots of the pool then.

    Raises:
        ValueError: one sentence, for settings that need a model, or a pool smaller than one request of full length.
    """
    check_vllm_version()
    longest = max_model_len
    if vtoken is not None:
        _require_no_model(parse_config(vtoken))
        longest = longest_request(vtoken, max_model_len)
    if num_blocks * block_size < longest:
        raise ValueError(
            f"vtoken: num_blocks = {num_blocks} of {block_size} tokens is refused, since one request of full length "
            f"takes {longest} tokens; give the pool {-(-longest // block_size)} blocks or lower max_model_len."
        )
    vllm_config = _vllm_config(
        num_blocks + 1, block_size, max_model_len, max_num_seqs, max_num_batched_tokens, enable_prefix_caching
    )
    kind, spec_kind = (Scheduler, FullAttentionSpec) if vtoken is None else (VTokenScheduler, EvictableAttentionSpec)
    if vtoken is not None:
        vllm_config.additional_config = AdditionalConfig(vtoken, {})
    spec = spec_kind(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    scheduler = kind(
        vllm_config=vllm_config,
        kv_cache_config=KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
    )
    make_runner: Any = ModelFreeRunner
    if vtoken is not None:
        make_runner = partial(
            CountingRunner if counting and counts_suffice(vtoken) else EvictingModelFreeRunner, vtoken
        )
    runner = make_runner(max_num_seqs, -(-max_model_len // block_size), max_num_batched_tokens, block_size)
    hasher: Any = block_hasher if enable_prefix_caching else None
    if enable_prefix_caching and hasher is None:
        init_none_hash(sha256)
        hasher = get_request_block_hasher(block_size, sha256)
    return SimulatedEngine(scheduler, runner, vtoken, hasher)


def _in_order_of_step(result: Any, output: Any) -> None:
    """In which order blocks of several requests become free is the worker's whim; here it is always the same one."""
    report = getattr(result, "vtoken_report", None)
    if report is not None and len(report.changes) > 1:
        place = {req_id: n for n, req_id in enumerate(output.num_scheduled_tokens)}
        report.changes = dict(sorted(report.changes.items(), key=lambda change: place.get(change[0], len(place))))


def _require_no_model(config: VTokenConfig) -> None:
    for name, policy in load_policies(config).items():
        if policy.needs.attention or policy.needs.key_norms:
            raise ValueError(
                f"vtoken: policy '{name}' looks at attention or keys, and without a model there are none; choose one "
                "that looks at positions, such as streaming_llm or random."
            )
    if config.verify:
        raise ValueError("vtoken: option 'verify' = True is refused without a model, since there is no K/V; drop it.")


def _vllm_config(
    num_blocks: int, block_size: int, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int, caching: bool
) -> VllmConfig:
    """What vLLM is told: a Llama of which there is nothing but a configuration."""
    from transformers import LlamaConfig

    with TemporaryDirectory() as directory:  # needed only while vLLM reads it
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            max_position_embeddings=max_model_len,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(directory)
        model_config = ModelConfig(
            model=directory, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len, enforce_eager=True
        )
    cache_config = CacheConfig(block_size=block_size, enable_prefix_caching=caching)
    cache_config.num_gpu_blocks = num_blocks
    return VllmConfig(
        model_config=model_config,
        cache_config=cache_config,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
    )
