"""``prefill_evict="chunked"``: a prompt is reduced at fixed places, whatever else is in the batch."""

from collections.abc import Callable

import pytest
from stub_worker import S, StubEngine, blocks_for

from vtoken.config import VTokenConfig
from vtoken.core.budget import longest_request

MakeEngine = Callable[..., StubEngine]
C = 48


def chunked(make: MakeEngine, *args: int, **options: object) -> StubEngine:
    return make(*args, **{"prefill_evict": "chunked", "prefill_chunk": C, **options})


def lengths(engine: StubEngine, req_id: str) -> list[tuple[int, int, int]]:
    """Per forward: where it ends in the sequence, the tokens that it attends, the tokens evicted after it."""
    return [
        (f.positions.stop, f.length, f.evicted)
        for forward in engine.runner.forwards
        for f in forward
        if f.req_id == req_id
    ]


class TestOneRequest:
    def test_every_chunk_ends_in_an_eviction(self, make: MakeEngine) -> None:
        engine = chunked(make)
        engine.add("r", prompt=4 * C + 10, outputs=4, budget=20)
        engine.run()
        kept = 20 - 1
        assert lengths(engine, "r") == [
            (C, C, C - kept),
            (2 * C, kept + C, C),
            (3 * C, kept + C, C),
            (4 * C, kept + C, C),
            (4 * C + 10, kept + 10, 10),
            *[(4 * C + 10 + n, kept + 1, 1) for n in (1, 2, 3)],
        ]

    @pytest.mark.parametrize("prompt", [2 * C - 1, 2 * C, 2 * C + 1])
    def test_prompts_around_a_multiple(self, make: MakeEngine, prompt: int) -> None:
        engine = chunked(make)
        engine.add("r", prompt=prompt, outputs=3, budget=20)
        engine.run()
        ends = [end for end, _, _ in lengths(engine, "r")]
        prefill = [C, prompt] if prompt <= 2 * C else [C, 2 * C, prompt]
        assert ends == [*prefill, prompt + 1, prompt + 2]
        assert [length for _, length, _ in lengths(engine, "r")][-2:] == [20, 20]

    def test_a_prompt_within_the_budget_is_left_alone(self, make: MakeEngine) -> None:
        engine = chunked(make)
        engine.add("r", prompt=3 * C, outputs=20, budget=3 * C + 10)
        engine.run()
        seen = lengths(engine, "r")
        assert [(end, length) for end, length, _ in seen[:3]] == [(C, C), (2 * C, 2 * C), (3 * C, 3 * C)]
        assert [evicted for *_, evicted in seen] == [0] * (3 + 9) + [1] * 10

    def test_a_request_without_a_budget_is_neither_cut_nor_reduced(self, make: MakeEngine) -> None:
        engine = chunked(make)
        engine.add("r", prompt=4 * C, outputs=3, budget=4 * C + 3)
        engine.run()
        assert lengths(engine, "r") == [(4 * C, 4 * C, 0), (4 * C + 1, 4 * C + 1, 0), (4 * C + 2, 4 * C + 2, 0)]

    @pytest.mark.parametrize("interval", [1, 4])
    @pytest.mark.parametrize("budget", range(20, 20 + S))
    def test_the_peak_is_budget_and_chunk(self, make: MakeEngine, budget: int, interval: int) -> None:
        engine = chunked(make, interval=interval)
        engine.add("r", prompt=700, outputs=12, budget=budget)
        engine.run()
        seen = lengths(engine, "r")
        assert max(length for _, length, _ in seen) == budget - interval + C
        assert max(length for end, length, _ in seen if end > 700) <= budget


class TestInABatch:
    def mixed(self, make: MakeEngine, batched: int, **options: object) -> StubEngine:
        engine = chunked(make, **{"batched": batched, "seqs": 8, **options})
        for n, prompt in enumerate((500, 333, 97, 48, 640, 30)):
            engine.add(f"r{n}", prompt=prompt, outputs=10, budget=24 + n)
        return engine

    def evictions(self, engine: StubEngine) -> dict[str, list[tuple[int, int]]]:
        """Where in the sequence each request was reduced, and by how much."""
        return {f"r{n}": [(end, evicted) for end, _, evicted in lengths(engine, f"r{n}") if evicted] for n in range(6)}

    def test_the_load_does_not_change_what_is_evicted_where(self, make: MakeEngine) -> None:
        alone = self.mixed(make, 65536, seqs=1)
        alone.run()
        expected = self.evictions(alone)
        assert expected["r0"][:2] == [(C, C - 23), (2 * C, C)]
        for batched in (32, 50, 100, 1000):
            together = self.mixed(make, batched)
            together.run()
            assert self.evictions(together) == expected

    def test_a_pool_that_holds_no_whole_prompt(self, make: MakeEngine) -> None:
        """Six requests of up to 640 tokens on room for 192: admission knows what they take at their peak."""
        engine = self.mixed(make, 100, num_blocks=1 + 12)
        engine.run()
        assert engine.preemptions == 0
        assert max(length for n in range(6) for _, length, _ in lengths(engine, f"r{n}")) < 640 // 4

    def test_a_request_that_can_never_fit_ends_alone(self, make: MakeEngine) -> None:
        engine = chunked(make, 1 + 8)
        engine.add("large", prompt=700, outputs=10, budget=600)
        engine.add("small", prompt=700, outputs=10, budget=24)
        first = engine.step()
        assert first.finished == {"large": "error"}
        engine.run()
        assert lengths(engine, "small")[-1][:2] == (709, 24)

    def test_preempted_in_the_middle_of_its_prompt(self, make: MakeEngine) -> None:
        """Requests without a budget grow and take blocks; who is preempted starts again, uncompressed, in chunks."""
        engine = chunked(make, 1 + 24, batched=40, seqs=8)
        for n in range(3):
            engine.add(f"grows{n}", prompt=40, outputs=90, budget=1000)
        for n in range(3):
            engine.add(f"r{n}", prompt=300, outputs=40, budget=30)
        engine.run()
        assert engine.preemptions > 0
        for n in range(3):
            assert lengths(engine, f"r{n}")[-1][:2] == (339, 30)


def test_the_pool_that_one_request_needs() -> None:
    share = VTokenConfig(budget=0.25, prefill_evict="chunked", prefill_chunk=256)
    assert longest_request(share, 4096) == 1024 - 1 + 256
    assert longest_request(share.model_copy(update={"prefill_evict": "end"}), 4096) == 4096
    assert longest_request(VTokenConfig(budget=1.0, prefill_evict="chunked"), 4096) == 4096
    assert longest_request(VTokenConfig(budget=64, prefill_evict="chunked", prefill_chunk=8), 4096) == 64 - 1 + 8
    assert blocks_for(longest_request(share, 4096)) == 80
    for mode in ("pack", "none"):  # holes are not bounded
        assert longest_request(share.model_copy(update={"reclaim": mode}), 4096) == 4096
