"""Our runner mixin over a runner without a model."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from bare_runner import BareRunner
from query_recorder import QueryRecorder
from reference_cache import AppendingReference, S
from stub_batch import Forward
from stub_copies import EagerCopyEngine
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

from vtoken.core.ragged import Ints
from vtoken.kernels.copy_engine import CopyEngine
from vtoken.kernels.relocation import Relocate
from vtoken.vllm_plugin import layers
from vtoken.vllm_plugin.compat import EvictingRunner, plan_of
from vtoken.vllm_plugin.protocol import StepReport

FORESEEN = "streaming_llm"
"""The policy whose victims the references name for themselves."""


class StubRunner(EvictingRunner, BareRunner):  # type: ignore[misc]
    """Our mixin where it belongs."""

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        config = self.vllm_config.additional_config.vtoken
        foreseen = {config.policy, *config.request_policies} == {FORESEEN}
        assert foreseen or config.record_trace, "what is not foreseen is looked up in the trace"

        def engine_for(device_type: str, relocate: Relocate, mode: str) -> CopyEngine:
            self.relocate = relocate
            return self._guarded(EagerCopyEngine(relocate))

        def observe(*args: Any) -> QueryRecorder | None:
            *_, needs, holes = args
            if not holes and not any(one.attention for one in needs.values()):
                return None  # as with a backend that ours cannot stand in for
            self.recorder = QueryRecorder(lambda slots: self.marks[0, slots, 1])
            return self.recorder

        # There is no attention backend here to lay an observer over.
        with patch.object(layers, "_observe", observe), patch.object(layers, "copy_engine_for", engine_for):
            super().initialize_kv_cache(kv_cache_config, *args, **kwargs)

    def use_copies(self, kind: Callable[[Relocate], CopyEngine]) -> CopyEngine:
        """Copy tokens in another way from now on."""
        self.vtoken._copies = engine = self._guarded(kind(self.relocate))
        return engine

    def _guarded(self, engine: CopyEngine) -> CopyEngine:
        """An engine that must not be told to write into a block that is shared or cached at that moment."""
        launch = engine.launch

        def guarded(sources: Ints, destinations: Ints) -> None:
            if self.content is not None:
                for block in {int(slot) // S for slot in destinations}:
                    assert self.is_writable(block), f"tokens move into block {block}, which is cached or shared"
            launch(sources, destinations)

        engine.launch = guarded  # type: ignore[method-assign]
        return engine

    @property
    def copies_are_made(self) -> bool:
        """Between two steps, too."""
        return isinstance(self.vtoken._copies, EagerCopyEngine)

    def run(self, output: Any) -> ModelRunnerOutput:
        """A step of the worker, as vLLM's engine core has it."""
        self.expected = (0, 0)
        result = self.execute_model(output)
        if result is None:
            result = self.sample_tokens(None)
        report = result.vtoken_report
        self._follow(plan_of(output).granted, report)
        if not self.broken:
            moved = self.expected[1] if self.content is None else report.moved
            assert (report.evicted, report.moved) == (self.expected[0], moved)
        result.vtoken_report = self.sabotage_report(report)
        return result

    def execute_model(self, output: Any, intermediate_tensors: Any = None) -> Any:
        result = super().execute_model(output, intermediate_tensors)
        if result is None:
            for forward in self.forwards[-1]:
                self._forget(forward)
                if forward.evicted or forward.req_id in plan_of(output).read_only:
                    self._note_change(forward)
        return result

    def _note_change(self, forward: Forward) -> None:
        """What the scheduler will be told of this forward only when it has scheduled the next one."""
        reference, table = self.references[forward.req_id], self.vtoken.table
        held = int(table.num_blocks[table.rows([forward.req_id])[0]])
        reference.reduced_from, reference.grown_by = forward.length, max(held - len(forward.blocks), 0)

    def _update_states(self, output: Any) -> None:
        plan = plan_of(output)
        self.clear_new_blocks([*plan.granted, *(block for copy in plan.copy_out.values() for block in copy.blocks)])
        super()._update_states(output)

    def _forget(self, forward: Forward) -> None:
        """What the policy forgets after a forward; one that is not foreseen is asked."""
        state, taken = self.requests[forward.req_id], None
        if self.references[forward.req_id].config.policy != FORESEEN:
            taken = self.vtoken._traces.traces[forward.req_id].incarnations[-1].victims[-1]
        complete = state.num_computed_tokens == len(state.tokens)
        forward.victims, moved = self.references[forward.req_id].forget(complete, taken)
        self.expected = (self.expected[0] + forward.evicted, self.expected[1] + moved)

    def _follow(self, granted: list[int], report: StepReport) -> None:
        """Do to the references' blocks what the worker says that it has done, as far as that was allowed."""
        if self.content is not None:
            return
        adopted = [block for change in report.changes.values() for block in change.adopted]
        assert sorted(adopted) == sorted(granted[: len(adopted)]), "a block was adopted that was not granted, or twice"
        for req_id, reference in self.references.items():
            if isinstance(reference, AppendingReference) and req_id not in self.broken:
                moved = reference.follow(report.changes.get(req_id))
                self.expected = (self.expected[0], self.expected[1] + moved)
        assert report.changes.keys() <= self.references.keys() | self.broken
        assert self.vtoken.table.recycling is False or not report.changes
