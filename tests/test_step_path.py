"""No hook of ours runs Python per request: a decode step takes as many instructions with many requests as with few.

What vLLM itself asks for each request, in its own loop, is answered per request, in a few instructions.
"""

from collections.abc import Callable
from typing import Any

import pytest
from bytecode_counter import BytecodeCounter
from stub_worker import StubEngine

from vtoken.core.ledger import LengthLedger

MakeEngine = Callable[..., StubEngine]
FEW, MANY = 8, 24
STEPS = 2
ASKED_PER_REQUEST = {
    "EvictableAttentionManager.allocate_new_blocks",
    "EvictableAttentionManager.cache_blocks",
    "EvictableAttentionManager.get_num_blocks_to_allocate",
    "EvictingScheduler._reserve_prefill_lookahead",
}
HOOKS = ("EvictingScheduler.", "EvictingRunner.", "EvictableAttentionManager.")


def decode(make: MakeEngine, requests: int, shared: int, **options: object) -> BytecodeCounter:
    """Some steps in which all requests decode, after all of them have been reduced."""
    engine = make(requests * 10 + 1, seqs=requests, batched=100 * requests, caching=shared > 0, budget=48, **options)
    for n in range(requests):
        own = [(n // 61**place) % 61 for place in range(3)] * 40
        engine.add(f"r{n:03}", outputs=60, tokens=([7] * shared + own)[:100])
        if n == 0:
            engine.step()  # what it has computed is there for the others to find
    for _ in range(20):
        engine.step()
    counter = BytecodeCounter()
    for _ in range(STEPS):
        with counter:
            step = engine.step()
        assert len(step.output.num_scheduled_tokens) == step.output.total_num_scheduled_tokens == requests
    return counter


def hooks(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name.startswith(HOOKS)}


def grown(make: MakeEngine, shared: int, **options: object) -> set[str]:
    """The hooks that take more instructions with more requests, beside those that are asked for each of them."""
    few, many = decode(make, FEW, shared, **options), decode(make, MANY, shared, **options)
    asked = {name for name, calls in hooks(many.calls).items() if calls == STEPS * MANY}
    assert asked <= ASKED_PER_REQUEST
    assert all(calls == STEPS for name, calls in hooks(many.calls).items() if name not in asked)
    for name in asked:
        assert few.instructions[name] * MANY == many.instructions[name] * FEW, f"{name} costs more among many"
        assert many.instructions[name] < 100 * STEPS * MANY, f"{name} does much for each request"
    few_hooks, many_hooks = hooks(few.instructions), hooks(many.instructions)
    assert few_hooks.keys() == many_hooks.keys() > asked
    return {name for name in many_hooks.keys() - asked if many_hooks[name] != few_hooks[name]}


@pytest.mark.parametrize("mode", ["fill", "none", "pack"])
@pytest.mark.parametrize("shared", [0, 48], ids=["nothing shared", "shared blocks"])
def test_a_decode_step_has_no_loop_over_requests(make: MakeEngine, mode: str, shared: int) -> None:
    assert not grown(make, shared, reclaim=mode)


def test_a_loop_over_requests_is_seen(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stock: Any = LengthLedger.schedule
    code = "def schedule(self, req_ids, *args):\n    [0 for _ in req_ids]\n    return stock(self, req_ids, *args)"
    names = {"stock": stock}
    exec(compile(code, LengthLedger.schedule.__code__.co_filename, "exec"), names)
    monkeypatch.setattr(LengthLedger, "schedule", names["schedule"])
    assert grown(make, 0) == {"EvictingScheduler.schedule"}
