"""Everything at once, from a seed: settings, arrivals that share beginnings, aborts at every point, missed steps."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from stub_copies import LazyCopyEngine
from stub_worker import StubEngine

NAMES = [f"r{n}" for n in range(16)]
POLICIES = ["streaming_llm", "random", "key_norm", "tova", "h2o", "snapkv", "scissorhands"]


def settings(rng: np.random.Generator) -> dict[str, Any]:
    """Of the engine."""
    window = int(rng.choice([1, 4, 20]))
    recent = int(rng.choice([window, window + 5]))
    mode = str(rng.choice(["fill", "fill", "fill", "pack", "none"]))
    packing = {"theta_f": 0.1, "check_interval": int(rng.choice([1, 3])), "headroom": 0.05, "low_watermark": 0.6}
    policy, others = str(rng.choice(["streaming_llm", *POLICIES])), rng.permutation(POLICIES)[:3].tolist()
    return {
        "policy": policy,
        "request_policies": [name for name in others if name != policy],
        "reclaim": mode,
        "shared_blocks": str(rng.choice(["smaller", "smaller", "keep"])),
        "sinks": int(rng.choice([0, 2, 4])),
        "protect_prefix": int(rng.choice([0, 0, 0, 20])),
        "recent": recent,
        "grace": int(rng.choice([0, 0, 9])),
        "observation_window": window,
        "interval": int(rng.choice([1, 1, 2, 3, 7])),
        "prefill_evict": str(rng.choice(["end", "chunked"])),
        "prefill_chunk": int(rng.integers(10, 70)),
        "verify": bool(rng.random() < 0.2),
        "record_trace": True,
        **(packing if mode == "pack" else {}),
    }


class Soak:
    """One engine and its load.

    Args:
        make: makes stub engines.
        seed: says everything else.
        lag: how late results come: "sync", or a step, and executed "early" or "late".
        scheduling: vLLM's own options.

    Attributes:
        options: of the engine.
        crowded: the pool is so small that requests are preempted all the time.
        seen: how often what is to be tested has happened.
    """

    def __init__(self, make: Callable[..., StubEngine], seed: int, lag: str = "sync", **scheduling: Any) -> None:
        self.rng, self._stops = np.random.default_rng(seed), np.random.default_rng(seed + 10**6)
        self.options = settings(self.rng)
        self.seen: Counter[str] = Counter()
        self.crowded = bool(self.rng.random() < 0.7)
        num_blocks = int(self.rng.integers(17, 26)) if self.crowded else int(self.rng.integers(30, 70))
        batched = int(self.rng.choice([48, 100, 300]))
        self.engine = make(
            num_blocks, seqs=10, batched=batched, caching=True, lag=lag, scheduling=scheduling, **self.options
        )
        self.priorities = 3 if scheduling.get("policy") == "priority" else 0
        self.lazy = bool(self.rng.random() < 0.5)
        if self.lazy:
            self.engine.runner.use_copies(LazyCopyEngine)
        self._trunks = [self.rng.integers(0, 61, 110).tolist() for _ in range(self.rng.integers(1, 4))]

    def run(self, steps: int) -> Counter[str]:
        """So many steps of arrivals, and as many as it takes until nothing is left."""
        rng, engine = self.rng, self.engine
        for _ in range(steps):
            for req_id in NAMES:
                few_wait = len(engine.scheduler.waiting) < 4
                gone = req_id not in engine.scheduler.requests and not engine.in_flight(req_id)
                if few_wait and gone and rng.random() < 0.15:
                    self._arrive(req_id)
            few = rng.random() < 0.15
            engine.scheduler.max_num_scheduled_tokens = int(rng.choice([1, 3, 40])) if few else 10**5
            reset = rng.random() < 0.01
            if reset:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
                self.seen["resets"] += 1
            preemptions = engine.preemptions
            engine.step(before_update=self._abort_some)
            self.seen["preemptions"] += 0 if reset else engine.preemptions - preemptions
            self._abort_some()
        engine.scheduler.max_num_scheduled_tokens = 10**5
        engine.run(limit=4000)
        stats = engine.scheduler.vtoken.stats
        self.seen["hits"] = sum(hit > 0 for _, hit in engine.runner.hits)
        self.seen["evicted"], self.seen["moved"] = stats.tokens_evicted, stats.tokens_moved
        self.seen["reclaimed"] = stats.blocks_reclaimed
        return self.seen

    def _arrive(self, req_id: str) -> None:
        rng, config = self.rng, self.engine.config
        trunk, branch = self._trunks[rng.integers(len(self._trunks))], int(rng.integers(0, 110))
        tokens = trunk[:branch] + rng.integers(0, 61, int(rng.integers(1, 40))).tolist()
        floor = config.protected_with(len(tokens))
        budgets = [floor, int(rng.integers(floor, floor + 90)), float(rng.integers(1, 101)) / 100, None, 10**6]
        budget = budgets[rng.choice(5, p=[0.15, 0.2, 0.1, 0.1, 0.45])]
        outputs = int(rng.integers(1, 40)) if budget != 10**6 else int(rng.integers(40, 90))
        own: dict[str, Any] = {"budget": budget} | self._own_settings(len(tokens))
        own["stop_after"] = int(self._stops.integers(1, outputs + 1)) if self._stops.random() < 0.3 else None
        own["priority"] = int(rng.integers(self.priorities)) if self.priorities else 0
        self.engine.add(req_id, tokens=tokens, outputs=outputs, **own)
        self.seen["requests"] += 1

    def _own_settings(self, prompt: int) -> dict[str, Any]:
        """Of a third of the requests: another policy, other protection, or none of it all."""
        rng, config, own = self.rng, self.engine.config, dict[str, Any]()
        if rng.random() < 0.7:
            return own
        if rng.random() < 0.2:
            return {"off": 1, "budget": None}
        if config.request_policies and rng.random() < 0.7:
            own["policy"] = str(rng.choice(list(config.request_policies)))
        for name, values in (
            ("sinks", [0, 7]),
            ("recent", [config.observation_window, config.observation_window + 11]),
            ("protect_prefix", [0, 25]),
            ("protect_prompt", [False, True]),
        ):
            if rng.random() < 0.4:
                own[name] = values[int(rng.integers(2))]
        floor = config.model_copy(update=own).protected_with(prompt)
        return own | {"budget": int(rng.choice([floor, floor + int(rng.integers(1, 60))]))}

    def _abort_some(self) -> None:
        living = sorted(self.engine.scheduler.requests)
        if living and self.rng.random() < 0.03:
            self.engine.abort(str(self.rng.choice(living)))
            self.seen["aborts"] += 1
