"""What the policy is told: masses and key norms of the right tokens, at the right moments, and nothing else."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from vtoken.config import VTokenConfig
from vtoken.core.budget import cadence_of
from vtoken.core.ledger import LengthLedger
from vtoken.core.observed import AttendedQueries, ObservedRuns
from vtoken.core.token_table import HOLE, TokenTable
from vtoken.kernels.copy_engine import InlineCopyEngine
from vtoken.policies import ALL, Needs, Observation, Policy, PolicyBatch
from vtoken.vllm_plugin.protocol import StepPlan
from vtoken.vllm_plugin.ranks import Ranks
from vtoken.vllm_plugin.scores import ScoreKeeper, score_bytes
from vtoken.vllm_plugin.worker import EvictionWorker, Start

S = 16
HEADS = 6


def attention(tokens: Sequence[int], query: int) -> np.ndarray:
    """What the query at logical position ``query`` gives to these tokens: a function of ids alone, summing to HEADS."""
    ids = np.asarray(tokens, dtype=np.float64)
    weight = np.where((ids <= query) & (ids != HOLE), 1 + (ids * 7 + query * 3) % 11, 0)
    return HEADS * weight / weight.sum()


@dataclass
class FakeObserver:
    """Answers with ``attention`` of the tokens that the table says lie at each request's positions."""

    each_query: bool = False
    decay: float = 1.0
    heads: int = HEADS
    asked: list[AttendedQueries] = field(default_factory=list)
    spoil: float = 1.0
    worker: Any = None

    def begin(self, queries: AttendedQueries, block_table: Any) -> None:
        self.asked.append(queries)

    def take(self) -> np.ndarray:
        queries, table, lines = self.asked[-1].observed, self.worker.table, []
        for index, several, attended in zip(queries.index, queries.count, queries.attended, strict=True):
            row = int(table.rows([f"r{index}"])[0])
            tokens, last = table.logical_at[row, :attended], int(table.length[row]) - 1
            rows = np.array([attention(tokens, last - back) for back in range(several - 1, -1, -1)])
            rows[:, tokens == HOLE] = np.nan  # nobody may look there
            weights = self.decay ** np.arange(several - 1, -1, -1)
            lines += list(rows) if self.each_query else [weights @ rows]
        return (np.concatenate(lines) * self.spoil).astype(np.float32)


@dataclass(frozen=True)
class Recorder(Policy):
    """Remembers what it was shown. state = old state * 2 + mass."""

    asks: Needs
    seen: list[Observation] = field(default_factory=list)
    shown: list[PolicyBatch] = field(default_factory=list)

    @property
    def needs(self) -> Needs:
        return self.asks

    def observe(self, seen: Observation) -> Any:
        self.seen.append(seen)
        return seen.state * 2 + seen.mass

    def priority(self, batch: PolicyBatch) -> Any:
        self.shown.append(batch)
        return batch.tokens


class Driver:
    """A ledger and a worker, stepped together; requests are r0, r1, ... in batch order."""

    def __init__(self, needs: Needs, observer: FakeObserver | None = None, **settings: Any) -> None:
        self.config = VTokenConfig(**{"policy": "streaming_llm", "sinks": 2, "recent": 4, **settings})
        self.policy = Recorder(needs)
        self.observer = observer or FakeObserver(needs.each_query, needs.query_decay)
        self.moved: list[int] = []
        cadence = cadence_of(self.config, needs.prompt_queries, needs.decode_queries)
        self.ledger = LengthLedger(S, cadence, dense=self.config.reclaim == "fill")
        self.worker = EvictionWorker(
            self.config,
            S,
            InlineCopyEngine(lambda sources, destinations: self.moved.extend(destinations.tolist())),
            self.observer,
        )
        self.worker._scores = ScoreKeeper(
            self.worker.table,
            [self.policy],
            self.config.score_interval,
            self.observer,
            lambda slots: (slots % 97).astype(np.float32),
        )
        self.observer.worker = self.worker
        self.computed: dict[str, int] = {}
        self.known: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        self.fresh: dict[str, list[int]] = {}
        self.blocks: dict[str, list[int]] = {}
        self.free_blocks: dict[str, Iterator[int]] = {}
        self.grants = count(10_000)

    def add(self, prompt: int, budget: int) -> None:
        name = f"r{len(self.known)}"
        self.ledger.open(name, prompt, budget, prompt + 1000)
        self.known[name], self.computed[name] = prompt, 0
        self.fresh[name] = list(range(prompt))
        self.free_blocks[name] = count(1 + 64 * len(self.free_blocks))

    def step(self, *counts: int) -> None:
        """Each request computes so many tokens; none: the next one, or all that is left of its prompt."""
        names = list(self.known)
        new = np.array(counts or [max(self.known[n] - self.computed[n], 1) for n in names], dtype=np.int64)
        for name, tokens in zip(names, new.tolist(), strict=True):
            self.computed[name] += tokens
            self.known[name] = max(self.known[name], self.computed[name])
        logical = np.array([self.computed[n] for n in names])
        counts = self.ledger.schedule(names, new, logical, np.array([self.known[n] for n in names]))
        granted = [next(self.grants) for _ in range(2)] if self.config.reclaim == "pack" else []
        plan = StepPlan(0, names, counts, granted=granted)
        self.worker.begin_step(plan, [], {name: Start(prompt) for name, prompt in self.fresh.items()})
        self.blocks |= {name: [] for name in self.fresh}
        self.fresh = {}
        blocks = np.zeros((len(names), 64), dtype=np.int32)
        for n, name in enumerate(names):
            grown = int(plan.counts.num_blocks[n]) - len(self.blocks[name])
            self.blocks[name] += [next(self.free_blocks[name]) for _ in range(grown)]
            blocks[n, : len(self.blocks[name])] = self.blocks[name]
        starts = np.concatenate([[0], np.cumsum(new)])
        self.worker.place_tokens(np.arange(len(names)), blocks, plan.counts.num_blocks, starts)
        self.blocks |= self.worker.evict()
        report = self.worker.take_report()
        self.errors = report.errors
        self.ledger.follow(report.returned)
        for name in report.changes:
            self.ledger.hold_blocks(name, len(self.blocks[name]))

    def observes_everything(self) -> bool:
        """Whether the last forward had no other queries than the observed ones."""
        asked = self.observer.asked[-1]
        return int(asked.observed.count.sum()) == asked.total

    def queries(self) -> list[tuple[int, int, int, int]]:
        """(request, first query's place in the batch, queries, positions attended) of the last forward."""
        asked = self.observer.asked[-1].observed
        return [tuple(map(int, row)) for row in zip(asked.index, asked.first, asked.count, asked.attended, strict=True)]


ALL_QUERIES = Needs(prompt_queries=ALL, decode_queries=True)


class TestWhatIsObserved:
    def test_every_query(self) -> None:
        driver = Driver(ALL_QUERIES)
        driver.add(40, budget=20)
        driver.add(30, budget=20)
        driver.step()
        assert driver.queries() == [(0, 0, 40, 40), (1, 40, 30, 30)]
        driver.step()
        assert driver.queries() == [(0, 0, 1, 20), (1, 1, 1, 20)]
        assert driver.observes_everything()

    def test_the_last_queries_of_a_prompt_that_comes_in_parts(self) -> None:
        driver = Driver(Needs(prompt_queries=8))
        driver.add(40, budget=20)
        driver.known["r0"] = 40
        for part, expected in ((30, []), (5, [(0, 2, 3, 35)]), (5, [(0, 0, 5, 40)])):
            driver.step(part)
            assert driver.queries() == expected
        driver.step()
        assert driver.queries() == []

    def test_the_window_before_each_chunk(self) -> None:
        driver = Driver(Needs(prompt_queries=8), prefill_evict="chunked", prefill_chunk=16)
        driver.add(40, budget=20)
        asked = []
        for part in (16, 10, 6, 8):
            driver.step(part)
            asked.append(driver.queries())
        assert asked == [[], [(0, 8, 2, 26)], [(0, 0, 6, 32)], [(0, 0, 8, 27)]]  # 16 tokens are within the budget

    def test_a_window_longer_than_the_prompt(self) -> None:
        driver = Driver(Needs(prompt_queries=64))
        driver.add(40, budget=20)
        driver.step()
        assert driver.queries() == [(0, 0, 40, 40)]

    def test_requests_without_a_budget_are_not_observed(self) -> None:
        driver = Driver(ALL_QUERIES)
        driver.add(40, budget=20)
        driver.add(30, budget=2000)
        driver.step()
        assert driver.queries() == [(0, 0, 40, 40)] and not driver.observes_everything()
        driver.step()
        assert driver.queries() == [(0, 0, 1, 20)] and not driver.observes_everything()

    def test_every_third_decode_query_stands_for_three(self) -> None:
        driver = Driver(ALL_QUERIES, score_interval=3)
        driver.add(40, budget=20)
        asked = []
        for _ in range(7):
            driver.step()
            asked.append(len(driver.queries()))
        assert asked == [1, 0, 0, 1, 0, 0, 1]
        assert driver.policy.seen[0].queries.tolist() == [40]
        decode = driver.policy.seen[1]
        assert decode.queries.tolist() == [3]
        assert decode.mass.sum() == pytest.approx(3 * HEADS, rel=1e-5)

    def test_nothing_is_asked_of_the_observer_for_nothing(self) -> None:
        driver = Driver(Needs())
        driver.add(40, budget=20)
        driver.step()
        driver.step()
        assert not any(len(asked.observed.index) for asked in driver.observer.asked) and not driver.policy.seen


class TestWhatThePolicySees:
    @pytest.mark.parametrize("reclaim", ["fill", "none", "pack"])
    def test_masses_belong_to_their_tokens_after_moves(self, reclaim: str) -> None:
        """Evictions and moves in between: a token's state is the sum over the queries since, by logical id."""
        driver = Driver(ALL_QUERIES, reclaim=reclaim)
        driver.add(60, budget=24)
        driver.add(45, budget=21)
        state: dict[str, dict[int, float]] = {"r0": {}, "r1": {}}
        for step in range(12):
            driver.step()
            seen = driver.policy.seen[-1]
            bounds = np.concatenate([[0], np.cumsum(seen.counts)])
            for n, name in enumerate(state):
                part = slice(bounds[n], bounds[n + 1])
                tokens, length = seen.tokens[part].tolist(), driver.computed[name]
                queries = range(length) if step == 0 else [length - 1]
                mass = np.sum([attention(tokens, query) for query in queries], axis=0)
                np.testing.assert_allclose(seen.mass[part], mass, rtol=1e-5)
                before = [state[name].get(t, 0.0) for t in tokens]
                np.testing.assert_allclose(seen.state[part], before, rtol=1e-5)
                state[name] = dict(zip(tokens, np.array(before) * 2 + mass, strict=True))
                assert (seen.length[n], seen.position[n], seen.attended[n]) == (length, length - 1, len(tokens))
        assert reclaim == "none" or driver.moved, "no token was ever moved, so this has shown nothing"
        batch = driver.policy.shown[-1]
        expected = [state["r0"][t] for t in batch.tokens[: batch.counts[0]].tolist()]
        np.testing.assert_allclose(batch.state[: batch.counts[0]], expected, rtol=1e-5)

    def test_each_query_comes_alone_and_in_order(self) -> None:
        driver = Driver(Needs(prompt_queries=3, decode_queries=True, each_query=True))
        driver.add(40, budget=20)
        driver.add(2, budget=20)
        driver.step()
        turns = [(s.counts.tolist(), s.position.tolist(), s.attended.tolist()) for s in driver.policy.seen]
        assert turns == [([40, 2], [37, 0], [38, 1]), ([40, 2], [38, 1], [39, 2]), ([40], [39], [40])]
        for seen in driver.policy.seen:
            np.testing.assert_allclose(seen.mass[:40], attention(range(40), int(seen.position[0])), rtol=1e-5)

    @pytest.mark.parametrize("reclaim", ["fill", "none"])
    def test_each_query_of_a_chunk_sees_the_tokens_that_are_left(self, reclaim: str) -> None:
        """The second chunk's queries attend what the first eviction spared, with or without holes between."""
        needs = Needs(prompt_queries=2, decode_queries=True, each_query=True)
        driver = Driver(needs, reclaim=reclaim, prefill_evict="chunked", prefill_chunk=32)
        driver.add(40, budget=12)
        driver.step(32)
        driver.step(8)
        left = sorted(driver.policy.seen[-1].tokens.tolist())
        assert len(left) == 11 + 8 and left[-8:] == list(range(32, 40))
        for seen, position in zip(driver.policy.seen[-2:], (38, 39), strict=True):
            assert (int(seen.position[0]), int(seen.attended[0])) == (position, 11 + position - 31)
            np.testing.assert_allclose(seen.mass, attention(seen.tokens.tolist(), position), rtol=1e-5)

    def test_a_sum_is_weighted(self) -> None:
        driver = Driver(Needs(prompt_queries=ALL, query_decay=0.9))
        driver.add(40, budget=20)
        driver.step()
        expected = sum(0.9 ** (39 - q) * attention(range(40), q) for q in range(40))
        np.testing.assert_allclose(driver.policy.seen[0].mass, expected, rtol=1e-5)
        assert not driver.errors

    @pytest.mark.parametrize("decay", [1.0, 0.9])
    @pytest.mark.parametrize("queries", [ALL, 8])
    def test_how_a_prompt_was_cut_does_not_show(self, queries: int, decay: float) -> None:
        shown = []
        for parts in ((40,), (13, 20, 7), (36, 1, 1, 1, 1)):
            driver = Driver(Needs(prompt_queries=queries, decode_queries=True, query_decay=decay))
            driver.add(40, budget=20)
            driver.add(25, budget=20)  # a neighbour that is done after the first part and then decodes
            for n, part in enumerate(parts):
                driver.step(part, 25 if n == 0 else 1)
            whole = [(s, s.counts.tolist().index(40)) for s in driver.policy.seen if 40 in s.counts]
            ((seen, at),) = whole
            assert (seen.queries[at], seen.position[at], seen.attended[at]) == (min(queries, 40), 39, 40)
            assert seen.of_prompt[at] and (seen.of_prompt.sum() == 1 or len(parts) == 1)
            assert not driver.errors
            shown.append(seen.mass[:40] if at == 0 else seen.mass[-40:])
        np.testing.assert_allclose(shown[1], shown[0], rtol=1e-5)
        np.testing.assert_allclose(shown[2], shown[0], rtol=1e-5)

    def test_nor_with_one_query_at_a_time(self) -> None:
        """A token of the same forward that comes after the query has seen nothing of it."""
        states = []
        for parts in ((40,), (13, 20, 7), (36, 1, 1, 1, 1)):
            driver = Driver(Needs(prompt_queries=8, each_query=True))
            object.__setattr__(driver.policy, "observe", lambda seen: seen.state + 1 + (seen.mass < 0.1))
            driver.add(40, budget=20)
            for part in parts:
                driver.step(part)
            states.append(driver.policy.shown[0].state.tolist())
        assert states[0] == states[1] == states[2]
        assert states[0][-1] in (1, 2) and min(states[0][:32]) >= 8

    def test_each_part_of_a_prompt_that_is_reduced_in_chunks_is_shown_alone(self) -> None:
        driver = Driver(ALL_QUERIES, prefill_evict="chunked", prefill_chunk=16)
        driver.add(40, budget=20)
        for part in (16, 10, 6, 8):
            driver.step(part)
        seen = [(int(s.queries[0]), int(s.position[0]), int(s.counts[0])) for s in driver.policy.seen]
        assert seen == [(32, 31, 32), (8, 39, 27)]  # the first chunk is within the budget, so nothing is reduced there

    def test_key_norms_are_those_of_the_tokens_slots(self) -> None:
        driver = Driver(Needs(key_norms=True))
        driver.add(40, budget=20)
        driver.step()
        slots = np.arange(40) + S  # the request's blocks are 1, 2, 3
        np.testing.assert_array_equal(driver.policy.shown[0].key_norm, (slots % 97).astype(np.float32))
        norm_of = dict(zip(range(40), driver.policy.shown[0].key_norm.tolist(), strict=True))
        for token in range(40, 46):
            driver.step()
            batch = driver.policy.shown[-1]
            norms = dict(zip(batch.tokens.tolist(), batch.key_norm.tolist(), strict=True))
            norm_of[token] = float(driver.worker._new_tokens[2][0] % 97)
            assert norms == {t: norm_of[t] for t in norms}

    def test_a_row_that_is_used_again_starts_with_nothing(self) -> None:
        driver = Driver(ALL_QUERIES)
        driver.add(40, budget=20)
        driver.step()
        assert (driver.policy.shown[-1].state > 0).all()
        driver.ledger.reset("r0")
        driver.computed["r0"] = 0
        driver.fresh = {"r0": list(range(40))}
        driver.step(40)
        assert (driver.policy.seen[-1].state == 0).all()

    def test_the_prompt_hash_is_the_prompts(self) -> None:
        hashes = []
        for prompt in ([1, 2, 3] * 20, [1, 2, 4] * 20, [1, 2, 3] * 20):
            driver = Driver(Needs())
            driver.add(60, budget=20)
            driver.fresh["r0"] = prompt
            driver.step()
            hashes.append(int(driver.policy.shown[0].prompt_hash[0]))
        assert hashes[0] == hashes[2] != hashes[1] and all(0 <= h < 2**31 for h in hashes)


class Given:
    """An observer whose masses are given, line after line."""

    heads = 1

    def __init__(self) -> None:
        self.lines: list[list[float]] = []

    def begin(self, queries: AttendedQueries, block_table: Any) -> None:
        raise NotImplementedError

    def take(self) -> np.ndarray:
        return np.concatenate(self.lines).astype(np.float32)


NAN = float("nan")


class Kept:
    """A keeper over a table that recycles; request after request, each with the next blocks of four slots."""

    def __init__(self, needs: Needs) -> None:
        self.table, self.policy, self.given = TokenTable(4, requests=2, tokens=16), Recorder(needs), Given()
        self.keeper = ScoreKeeper(self.table, [self.policy], 1, self.given, lambda slots: slots.astype(np.float32))
        self.first_block = count(1, 8)
        self.blocks: dict[str, np.ndarray] = {}

    def add(self, name: str, tokens: int, hit: int = 0) -> int:
        """A request and its first forward; so many of its tokens come from the prefix cache."""
        row = self.table.add_request(name, prefix=hit)
        self.keeper.start(row, [1, 2, 3], hit)
        self.blocks[name] = np.arange(next(self.first_block), 1000, dtype=np.int32)[None, :8]
        self.compute(name, tokens - hit, told=hit)
        return row

    def compute(self, name: str, tokens: int, told: int = 0) -> None:
        """So many new tokens have a slot; the keeper also learns of the ``told`` ones before them."""
        row = self.table.rows([name])
        held = -(-(self.table.end[row] + tokens) // 4)
        self.table.sync_new_tokens(row, self.blocks[name], held, np.array([tokens]))
        length = int(self.table.length[row[0]])
        new = np.arange(length - tokens - told, length)
        owner = np.repeat(row, len(new))
        self.keeper.follow(owner, new)
        self.keeper.absorb_keys(
            owner, new, self.table.slots(owner, self.table.physical_of[owner, new].astype(np.int64))
        )

    def share_first_block(self, row: int, *dead: int) -> None:
        """These tokens die in a block that must stay as it is."""
        self.table.evict_tokens(np.full(len(dead), row), np.array(dead))
        self.table.keep_read_only(row, 1)

    def look(self, rows: list[int], lines: list[list[float]], counts: list[int], ends_part: bool = True) -> list[int]:
        """A forward with these observed queries, which are a prompt's where there is more than one."""
        several = np.array(counts)
        self.given.lines = lines
        attended = self.table.end[rows]
        manner = self.keeper.manner(np.array(rows))
        queries = ObservedRuns(np.arange(len(rows)), np.zeros_like(several), several, attended, *manner)
        self.keeper.watch(np.array(rows), several == 1, np.full(len(rows), ends_part), queries)
        return self.keeper.absorb_attention().tolist()

    def shown(self, rows: list[int]) -> PolicyBatch:
        self.keeper.priorities(np.array(rows))
        return self.policy.shown[-1]


HOLED = [0.25, NAN, NAN, 0.125, 0.5, 0.125]  # by position; tokens 1 and 2 are dead
DENSE = [0.5, 0.25, 0.25]


class TestSharedBlocksWithHoles:
    """Of a request that recycles, the read-only blocks may have holes: their masses are nobody's."""

    def holed(self, needs: Needs = ALL_QUERIES) -> tuple[Kept, int, int]:
        kept = Kept(needs)
        holed, dense = kept.add("holed", 6), kept.add("dense", 3)
        kept.share_first_block(holed, 1, 2)
        return kept, holed, dense

    @pytest.mark.parametrize("holed_first", [True, False])
    def test_beside_a_dense_request(self, holed_first: bool) -> None:
        kept, *rows = self.holed(replace(ALL_QUERIES, key_norms=True))
        lines, tokens = [HOLED, DENSE], [[0, 3, 4, 5], [0, 1, 2]]
        masses = [[0.25, 0.125, 0.5, 0.125], DENSE]
        norms = [[4.0, 7.0, 8.0, 9.0], [36.0, 37.0, 38.0]]
        if not holed_first:
            for pair in (rows, lines, tokens, masses, norms):
                pair.reverse()
        assert kept.look(rows, lines, [1, 1]) == []
        (seen,) = kept.policy.seen
        assert seen.counts.tolist() == [len(part) for part in tokens]
        assert seen.tokens.tolist() == [*tokens[0], *tokens[1]]
        assert seen.mass.tolist() == [*masses[0], *masses[1]]
        assert seen.attended.tolist() == seen.counts.tolist()
        batch = kept.shown(rows)
        assert batch.tokens.tolist() == [*tokens[0], *tokens[1]] and batch.state.tolist() == [*masses[0], *masses[1]]
        assert batch.key_norm.tolist() == [*norms[0], *norms[1]]

    def test_alone(self) -> None:
        kept, row, _ = self.holed()
        kept.look([row], [HOLED], [1])
        batch = kept.shown([row])
        assert (batch.counts.tolist(), batch.length.tolist()) == ([4], [6])
        assert dict(zip(batch.tokens.tolist(), batch.state.tolist(), strict=True)) == {
            0: 0.25,
            3: 0.125,
            4: 0.5,
            5: 0.125,
        }

    def test_a_token_that_recycles_a_hole_behind_them(self) -> None:
        """Positions 0 to 5 then hold 0, -, -, 3, 6, 5."""
        kept, row, _ = self.holed()
        kept.table.evict_tokens(np.array([row]), np.array([4]))
        kept.compute("holed", 1)
        kept.look([row], [HOLED], [1])
        assert kept.policy.seen[0].tokens.tolist() == [0, 3, 6, 5]
        assert kept.policy.seen[0].mass.tolist() == [0.25, 0.125, 0.5, 0.125]

    def test_each_query_of_a_chunk(self) -> None:
        kept, row, dense = self.holed(Needs(prompt_queries=2, decode_queries=True, each_query=True))
        kept.compute("holed", 2)
        first = [0.25, NAN, NAN, 0.25, 0.25, 0.125, 0.125, 0.0]
        second = [0.125, NAN, NAN, 0.125, 0.25, 0.125, 0.125, 0.25]
        assert kept.look([dense, row], [DENSE, first, second], [1, 2]) == []
        turns = [(seen.tokens.tolist(), seen.mass.tolist()) for seen in kept.policy.seen]
        assert turns == [
            ([0, 1, 2, 0, 3, 4, 5, 6, 7], [*DENSE, 0.25, 0.25, 0.25, 0.125, 0.125, 0.0]),
            ([0, 3, 4, 5, 6, 7], [0.125, 0.125, 0.25, 0.125, 0.125, 0.25]),
        ]

    def test_a_dense_request_is_left_as_it_is(self) -> None:
        kept, _, dense = self.holed()
        kept.look([dense], [DENSE], [1])
        assert kept.policy.seen[0].mass.tolist() == DENSE

    def test_a_mass_in_a_hole_is_found_out(self) -> None:
        """The negative control: were the holes' masses not dropped, or were there any, the sum would tell."""
        kept, row, dense = self.holed()
        wrong = [0.125, 0.25, 0.0, 0.125, 0.375, 0.125]
        assert kept.look([row, dense], [wrong, DENSE], [1, 1]) == [row]
        assert kept.policy.seen[0].mass.tolist() == [0.0] * 4 + DENSE


class TestAfterAPrefixHit:
    def test_who_computed_which_queries(self) -> None:
        kept = Kept(ALL_QUERIES)
        hit, miss = kept.add("hit", 6, hit=4), kept.add("miss", 3)
        kept.look([hit, miss], [[0.5, 0.5, 0.25, 0.25, 0.25, 0.25], [1.5, 1.0, 0.5]], [2, 3])
        (seen,) = kept.policy.seen
        assert seen.first_query.tolist() == [4, 0]
        assert seen.tokens.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
        assert seen.state.tolist() == [0.0] * 9
        assert (seen.queries.tolist(), seen.position.tolist()) == ([2, 3], [5, 2])
        assert kept.shown([miss, hit]).first_query.tolist() == [0, 4]
        assert kept.shown([hit]).state.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25]

    def test_norms_of_keys_that_were_there_already(self) -> None:
        kept = Kept(Needs(key_norms=True))
        kept.add("another", 3)
        row = kept.add("hit", 6, hit=4)
        assert kept.shown([row]).key_norm.tolist() == [36.0, 37.0, 38.0, 39.0, 40.0, 41.0]

    def test_parts_of_the_prompt_are_summed_up_over_the_prefix_too(self) -> None:
        kept = Kept(Needs(prompt_queries=ALL, query_decay=0.5))
        row = kept.add("hit", 6, hit=4)
        kept.look([row], [[0.5, 0.25, 0.25, 0.0, 0.25, 0.25]], [2], ends_part=False)
        assert not kept.policy.seen
        kept.compute("hit", 2)
        kept.look([row], [[0.5, 0.25, 0.0, 0.25, 0.125, 0.125, 0.125, 0.125]], [2])
        (seen,) = kept.policy.seen
        assert seen.queries.tolist() == [4]
        assert seen.mass.tolist() == [0.625, 0.3125, 0.0625, 0.25, 0.1875, 0.1875, 0.125, 0.125]

    def test_a_row_that_is_used_again(self) -> None:
        kept = Kept(ALL_QUERIES)
        row = kept.add("before", 6)
        kept.look([row], [[2.0, 1.0, 1.0, 1.0, 0.5, 0.5]], [6], ends_part=False)
        kept.look([row], [[0.5, 0.25, 0.125, 0.125, 0.0, 0.0]], [1])
        kept.table.drop_request("before")
        assert kept.add("after", 7, hit=4) == row
        batch = kept.shown([row])
        assert batch.state.tolist() == [0.0] * 7 and batch.first_query.tolist() == [4]
        kept.look([row], [[0.5, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]], [3])
        assert kept.policy.seen[-1].mass.tolist() == [0.5, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25]
        kept.table.drop_request("after")
        assert kept.add("last", 3) == row
        assert kept.shown([row]).first_query.tolist() == [0]

    def test_rows_beyond_the_first_ones(self) -> None:
        kept = Kept(Needs())
        rows = [kept.add(f"r{n}", hit + 1, hit) for n, hit in enumerate((4, 0, 8, 12, 0))]
        assert kept.shown(rows).first_query.tolist() == [4, 0, 8, 12, 0]


class TestRefusals:
    @pytest.mark.parametrize("spoil", [1.01, 0.9, np.nan, np.inf])
    def test_attention_that_is_no_probability_ends_the_request(self, spoil: float) -> None:
        driver = Driver(ALL_QUERIES, FakeObserver(spoil=spoil))
        driver.add(40, budget=20)
        driver.step()
        assert list(driver.errors) == ["r0"] and "does not sum to one" in driver.errors["r0"]
        assert np.isfinite(driver.policy.seen[0].mass).all()

    def test_only_that_request(self) -> None:
        driver = Driver(ALL_QUERIES)
        driver.add(40, budget=20)
        driver.add(50, budget=20)
        take = driver.observer.take
        driver.observer.take = lambda: np.concatenate([take()[:40], np.full(50, np.nan, dtype=np.float32)])  # type: ignore[method-assign]
        driver.step()
        assert list(driver.errors) == ["r1"]


class TestWhatAPolicyReturns:
    @pytest.mark.parametrize(
        "returned, sentence",
        [
            (
                lambda batch: batch.state[:-1],
                r"returned float32 of shape \[39\]; return one real number per token, shape \[40\]",
            ),
            (lambda batch: batch.state[:, None], r"of shape \[40, 1\]"),
            (lambda batch: 1.0, r"of shape \[\]"),
            (lambda batch: None, r"returned object of shape \[\]"),
            (lambda batch: batch.state + 1j, "returned complex64"),
            (lambda batch: batch.state * np.nan, "returned NaN or infinity"),
        ],
        ids=["short", "column", "scalar", "none", "complex", "nan"],
    )
    @pytest.mark.parametrize("method", ["observe", "priority"])
    def test_is_refused_before_it_reaches_the_table(self, method: str, returned: Any, sentence: str) -> None:
        driver = Driver(ALL_QUERIES)
        object.__setattr__(driver.policy, method, returned)
        driver.add(40, budget=20)
        with pytest.raises(ValueError, match=rf"^vtoken: Recorder\.{method} .*{sentence}"):
            driver.step()
        assert driver.worker.table.num_live[0] == 40

    def test_what_it_is_shown_cannot_be_written_to(self) -> None:
        driver = Driver(ALL_QUERIES)

        def sorts(batch: PolicyBatch) -> Any:
            batch.tokens.sort()
            return batch.tokens

        object.__setattr__(driver.policy, "priority", sorts)
        driver.add(40, budget=20)
        with pytest.raises(ValueError, match="read-only"):
            driver.step()


class TestRanks:
    """Two ranks with half of the heads each; this one sees less of the attention than the other."""

    class Two(Ranks):
        size = 2

        def __init__(self) -> None:
            self.asked: list[int] = []

        def sum(self, values: np.ndarray) -> np.ndarray:
            return values * 2

        def agree(self, victims: np.ndarray) -> np.ndarray:
            self.asked.append(len(victims))
            return victims - 1  # rank 0 chose others

    def test_scores_are_summed_and_the_first_rank_chooses(self) -> None:
        driver, alone = Driver(ALL_QUERIES, record_trace=True), Driver(ALL_QUERIES, record_trace=True)
        driver.worker._ranks = driver.worker._scores._ranks = self.Two()
        for each in (driver, alone):
            each.add(40, budget=20)
            each.step()
        assert not driver.errors
        np.testing.assert_array_equal(driver.policy.seen[0].mass, 2 * alone.policy.seen[0].mass)
        assert driver.worker._ranks.asked == [21]
        (mine,), (chosen,) = (each.worker.take_traces()["r0"].incarnations[0].victims for each in (alone, driver))
        assert chosen == [victim - 1 for victim in mine]


class TestGrace:
    def test_generated_tokens_are_spared_for_so_many_forwards(self) -> None:
        """With the newest evicted first, a generated token dies exactly when its grace is over."""
        driver = Driver(Needs(), sinks=2, recent=4, grace=10, record_trace=True)
        driver.policy = driver.worker._scores._policies[0] = type(
            "Newest", (), {"priority": lambda self, batch: -batch.tokens}
        )()
        driver.add(60, budget=20)
        for _ in range(25):
            driver.step()
        victims = driver.worker.take_traces()["r0"].incarnations[0].victims
        assert victims[0] == list(range(60 - 4 - 41, 60 - 4))  # the prompt's newest are protected by `recent` alone
        for step, (victim,) in enumerate(victims[1:], start=1):
            length, generated = 60 + step, step
            assert victim <= length - 1 - max(4, min(10, generated))
        # from then on each step takes the token whose grace has just ended
        assert [victim for (victim,) in victims[-8:]] == [60 + step - 11 for step in range(17, 25)]


class TestMemory:
    def test_bytes_that_scores_take_per_slot(self) -> None:
        assert score_bytes(Needs(), lanes=2) == 0
        assert score_bytes(Needs(key_norms=True), lanes=2) == 4
        assert score_bytes(ALL_QUERIES, lanes=2) == 4 * 3 + 2 * 12
        assert score_bytes(Needs(prompt_queries=32, each_query=True), lanes=3) == 4 * 3 + 3 * 12 * 32
