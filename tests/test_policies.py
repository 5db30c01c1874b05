"""Each policy against its paper's formula, written out over explicit attention matrices."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from policy_driver import NAMESPACES, Request, observation, priorities, random_model, request_of, to

from vtoken.policies import ALL, POLICIES, Needs, Observation, Policy
from vtoken.policies.h2o import H2O
from vtoken.policies.key_norm import KeyNorm
from vtoken.policies.random import Random
from vtoken.policies.scissorhands import Scissorhands
from vtoken.policies.snapkv import SnapKV
from vtoken.policies.streaming_llm import StreamingLLM
from vtoken.policies.tova import TOVA

PROMPT, LENGTH = 40, 47
EVERY_POLICY = [
    StreamingLLM(),
    H2O(),
    H2O(decay=0.9),
    H2O(decay=0.9, average=False),
    H2O(whole_prompt=True),
    Scissorhands(history=5, observation_window=8),
    SnapKV(observation_window=8),
    SnapKV(observation_window=8, pooling="max", kernel_size=7),
    TOVA(),
    KeyNorm(),
    Random(seed=3),
]

both_namespaces = pytest.mark.parametrize("xp", NAMESPACES.values(), ids=NAMESPACES)


def masses() -> np.ndarray:
    """a[q, t]: what query q gives token t, summed over heads and layers; no token is ever evicted."""
    attend, a = random_model(7), np.zeros((LENGTH, LENGTH))
    for q in range(LENGTH):
        a[q, : q + 1] = attend(q, np.arange(q + 1)).sum(axis=0)
    return a


def run(policy: Policy, xp: Any, decode: int = LENGTH - PROMPT, hit: int = 0) -> np.ndarray:
    """The priorities of all tokens after a prompt and a few decode steps on the same model, in logical order.

    ``hit``: so many of the prompt's tokens come from a prefix cache.
    """
    request = Request(policy, random_model(7), xp, prefix_hit=hit)
    request.prefill([PROMPT - hit])
    for _ in range(decode):
        request.decode(0)
    assert request.live == list(range(PROMPT + decode))
    return priorities(policy, request._batch())


class TestFormulas:
    @both_namespaces
    @pytest.mark.parametrize("decay", [1.0, 0.999999, 0.9, 0.01])
    def test_h2o(self, xp: Any, decay: float) -> None:
        a, total, mean = masses(), np.zeros(LENGTH), np.zeros(LENGTH)
        for t in range(LENGTH):
            weights = [decay ** (LENGTH - 1 - q) for q in range(t, LENGTH)]
            total[t] = sum(w * a[q, t] for w, q in zip(weights, range(t, LENGTH), strict=True))
            mean[t] = total[t] / sum(weights)
        np.testing.assert_allclose(run(H2O(decay, average=False), xp), total, rtol=3e-6)
        np.testing.assert_allclose(run(H2O(decay), xp), mean, rtol=3e-6)

    @both_namespaces
    @pytest.mark.parametrize("history", [1, 4, 400])
    def test_scissorhands(self, xp: Any, history: int) -> None:
        a, window = masses(), 8
        count = np.zeros(LENGTH)
        for q in range(PROMPT - window, LENGTH):
            for t in range(q + 1):
                mean = sum(a[q, : q + 1]) / (q + 1)
                count[t] = (1 - 1 / history) * count[t] + (1 if a[q, t] < mean else 0)
        assert len(set(np.round(count, 4))) > (1 if history == 1 else 5)
        np.testing.assert_allclose(run(Scissorhands(history, window), xp), -count, rtol=1e-5)

    @both_namespaces
    @pytest.mark.parametrize(("pooling", "kernel_size"), [("avg", 5), ("max", 5), ("avg", 1), ("max", 9)])
    def test_snapkv(self, xp: Any, pooling: Any, kernel_size: int) -> None:
        a, window, half = masses(), 8, kernel_size // 2
        attended = [sum(a[q, t] for q in range(PROMPT - window, PROMPT)) for t in range(PROMPT)]
        state = np.zeros(LENGTH)
        state[:PROMPT] = attended
        for t in range(PROMPT - window):
            around = [attended[s] if 0 <= s < PROMPT - window else 0.0 for s in range(t - half, t + half + 1)]
            state[t] = max(around) if pooling == "max" else sum(around) / kernel_size
        np.testing.assert_allclose(run(SnapKV(kernel_size, pooling, window), xp, decode=0), state[:PROMPT], rtol=2e-6)
        for q in range(PROMPT, LENGTH):
            state = (1 - 1 / window) * state + a[q]
        np.testing.assert_allclose(run(SnapKV(kernel_size, pooling, window), xp), state, rtol=2e-6)

    @both_namespaces
    def test_tova(self, xp: Any) -> None:
        a = masses()
        np.testing.assert_allclose(run(TOVA(), xp, decode=0), a[PROMPT - 1, :PROMPT], rtol=1e-6)
        np.testing.assert_allclose(run(TOVA(), xp), a[LENGTH - 1], rtol=1e-6)

    @both_namespaces
    def test_key_norm_and_streaming_llm(self, xp: Any) -> None:
        batch = observation(xp, tokens=[4, 0, 2], key_norm=[3.5, 0.25, 9.0])
        assert priorities(KeyNorm(), batch).tolist() == [-3.5, -0.25, -9.0]
        assert priorities(StreamingLLM(), batch).tolist() == [4, 0, 2]

    def test_what_each_asks_the_runtime_to_measure(self) -> None:
        needs = {type(policy).__name__: policy.needs for policy in EVERY_POLICY}
        assert {name for name, need in needs.items() if need.attention} == {"H2O", "Scissorhands", "SnapKV", "TOVA"}
        assert {name for name, need in needs.items() if need.key_norms} == {"KeyNorm"}
        assert {name for name, need in needs.items() if need.each_query} == {"Scissorhands"}
        assert H2O(decay=0.5).needs.query_decay == 0.5
        assert [policy.needs.computed_queries for policy in EVERY_POLICY] == [0, 32, 32, 32, ALL, 8, 8, 8, 1, 0, 0]
        assert H2O(observation_window=64).needs == replace(H2O().needs, own_queries=64)
        assert {type(policy) for policy in EVERY_POLICY} == set(POLICIES.values())


class TestNeeds:
    def test_queries_that_are_looked_at_are_computed(self) -> None:
        assert Needs().computed_queries == 0
        assert Needs(prompt_queries=8).computed_queries == 8
        assert Needs(prompt_queries=ALL).computed_queries == ALL
        assert Needs(prompt_queries=ALL, own_queries=0).computed_queries == 0
        assert Needs(prompt_queries=ALL, own_queries=ALL).computed_queries == ALL
        assert Needs(prompt_queries=8, own_queries=8).computed_queries == 8
        assert Needs(own_queries=9).computed_queries == 9

    @pytest.mark.parametrize("own", [-1, 1.0, True, "32"])
    def test_a_count_is_a_count(self, own: Any) -> None:
        with pytest.raises(ValueError, match=r"^own_queries must be a count of queries, ALL, or None$"):
            Needs(prompt_queries=ALL, own_queries=own)

    def test_fewer_than_the_observed_ones_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"^own_queries = 7 must not be below prompt_queries = 8, which are all "):
            Needs(prompt_queries=8, own_queries=7)


class TestAfterAHit:
    """The prompt's first tokens come from a prefix cache, and nobody has seen what their queries attended."""

    TOKENS = to(np, [3, 0, 2, 1])
    SUM = (0.5, 0.625, 0.375, 0.5)  # of the queries 2: 1/2, 1/4, 1/4 and 3: 1/8, 1/4, 1/8, 1/2 to tokens 0, 1, ...
    FADED = (0.5, 0.375, 0.25, 0.375)  # with the former halved

    @both_namespaces
    def test_h2o_averages_over_the_queries_that_were_seen(self, xp: Any) -> None:
        batch = observation(xp, tokens=self.TOKENS, state=self.SUM, first_query=[2])
        assert priorities(H2O(), batch).tolist() == [0.5, 0.3125, 0.1875, 0.25]
        assert priorities(H2O(average=False), batch).tolist() == list(self.SUM)
        faded = observation(xp, tokens=self.TOKENS, state=self.FADED, first_query=[2])
        np.testing.assert_allclose(priorities(H2O(decay=0.5), faded), [0.5, 0.25, 0.25 / 1.5, 0.25], rtol=1e-6)

    @both_namespaces
    def test_requests_with_and_without_a_hit_in_one_batch(self, xp: Any) -> None:
        batch = observation(
            xp, tokens=[*self.TOKENS, *self.TOKENS], state=[*self.SUM] * 2, counts=[4, 4], length=[4, 4],
            first_query=[2, 0],
        )  # fmt: skip
        hit, miss = [0.5, 0.3125, 0.1875, 0.25], [0.5, 0.15625, 0.1875, 0.5 / 3]
        np.testing.assert_allclose(priorities(H2O(), batch), [*hit, *miss], rtol=1e-6)

    @both_namespaces
    @pytest.mark.parametrize("decay", [1.0, 1 - 1e-7, 0.999999, 0.9])
    def test_h2o_s_formula(self, xp: Any, decay: float) -> None:
        a, hit, n = masses(), 24, LENGTH
        total, mean = np.zeros(n), np.zeros(n)
        for t in range(n):
            weight = {q: decay ** (n - 1 - q) for q in range(max(t, hit), n)}
            total[t] = sum(w * a[q, t] for q, w in weight.items())
            mean[t] = total[t] / sum(weight.values())
        np.testing.assert_allclose(run(H2O(decay, average=False), xp, hit=hit), total, rtol=3e-6)
        np.testing.assert_allclose(run(H2O(decay), xp, hit=hit), mean, rtol=3e-6)

    @both_namespaces
    @pytest.mark.parametrize("policy", [p for p in EVERY_POLICY if not isinstance(p, H2O)], ids=str)
    def test_for_the_others_a_hit_changes_nothing(self, policy: Policy, xp: Any) -> None:
        longest = PROMPT - max(policy.needs.computed_queries, 1)
        np.testing.assert_array_equal(run(policy, xp, hit=longest), run(policy, xp))
        assert not np.allclose(run(H2O(), xp, hit=longest), run(H2O(), xp))  # what a difference would look like


class TestObserving:
    @both_namespaces
    @pytest.mark.parametrize("cuts", [(20,), (39,), (1, 3), range(1, PROMPT)], ids=str)
    @pytest.mark.parametrize("policy", [H2O(), H2O(0.8)], ids=str)
    def test_h2o_in_parts_is_h2o_at_once(self, policy: Policy, cuts: tuple[int, ...], xp: Any) -> None:
        request = Request(policy, random_model(7), xp)
        for start, end in pairwise([0, *cuts, PROMPT]):
            request.prefill([end - start])
        for _ in range(PROMPT, LENGTH):
            request.decode(0)
        np.testing.assert_allclose(priorities(policy, request._batch()), run(policy, xp), rtol=1e-5)

    @both_namespaces
    def test_snapkv_s_older_windows_fade(self, xp: Any) -> None:
        request = Request(SnapKV(kernel_size=1, observation_window=4), random_model(7), xp)
        request.prefill([20])
        before = np.array([request.state[t] for t in range(20)])
        request.prefill([20])
        expected = masses()[PROMPT - 4 : PROMPT, :20].sum(axis=0) + (1 - 1 / 4) ** 4 * before
        np.testing.assert_allclose([request.state[t] for t in range(20)], expected, rtol=1e-5)

    @both_namespaces
    def test_scissorhands_counts_queries_and_not_their_sum(self, xp: Any) -> None:
        """Negative control of ``each_query``: token 1 is below the mean of two queries, not of their sum."""
        policy = Scissorhands(history=1000)
        first, second = [0.7, 0.05, 0.25], [0.2, 0.2, 0.6]
        state: Any = [0.0, 0.0, 0.0]
        for mass in (first, second):
            state = policy.observe(observation(xp, tokens=[0, 1, 2], state=state, mass=mass))
        np.testing.assert_allclose(state, [1.0, 0.999 + 1, 0.999], rtol=1e-6)
        summed = policy.observe(observation(xp, tokens=[0, 1, 2], mass=np.add(first, second), queries=[2], length=[3]))
        assert np.asarray(summed).tolist() == [0.0, 2.0, 0.0]

    @both_namespaces
    def test_scissorhands_does_not_count_tokens_after_the_query(self, xp: Any) -> None:
        seen = observation(
            xp, tokens=[3, 0, 2, 1], mass=[0, 0.5, 0.3, 1.2], position=[2], attended=[3], state=[0, 2, 2, 2]
        )
        assert np.asarray(Scissorhands(history=2).observe(seen)).tolist() == [0.0, 2.0, 2.0, 1.0]

    @both_namespaces
    def test_a_decode_query_that_stands_for_several_counts_as_often(self, xp: Any) -> None:
        seen = observation(xp, tokens=[0, 1], mass=[3.0, 1.0], queries=[4], state=[8.0, 8.0])
        assert np.asarray(Scissorhands(history=2).observe(seen)).tolist() == [0.5, 4.5]
        assert np.asarray(H2O(decay=0.5).observe(seen)).tolist() == [3.5, 1.5]
        assert np.asarray(SnapKV(observation_window=2).observe(seen)).tolist() == [3.5, 1.5]


class TestPooling:
    WINDOW = 2

    def pooled(self, xp: Any, tokens: list[int], mass: list[float], pooling: Any = "avg", **more: Any) -> list[float]:
        policy = SnapKV(kernel_size=3, pooling=pooling, observation_window=self.WINDOW)
        more.setdefault("of_prompt", [True] * len(more.get("counts", [0])))
        more.setdefault("queries", [2] * len(more["of_prompt"]))
        return np.asarray(policy.observe(observation(xp, tokens=tokens, mass=mass, **more))).tolist()

    @both_namespaces
    def test_the_ends_and_the_window(self, xp: Any) -> None:
        tokens, mass = [0, 1, 2, 3, 4, 5], [3.0, 6.0, 0.0, 9.0, 99.0, 50.0]
        assert self.pooled(xp, tokens, mass) == [3.0, 3.0, 5.0, 3.0, 99.0, 50.0]
        assert self.pooled(xp, tokens, mass, "max") == [6.0, 6.0, 9.0, 9.0, 99.0, 50.0]

    @both_namespaces
    def test_in_any_order(self, xp: Any) -> None:
        tokens, mass = [3, 0, 5, 2, 1, 4], [9.0, 3.0, 50.0, 0.0, 6.0, 99.0]
        assert self.pooled(xp, tokens, mass) == [3.0, 3.0, 50.0, 5.0, 3.0, 99.0]

    @both_namespaces
    def test_neighbours_are_the_nearest_that_are_left(self, xp: Any) -> None:
        assert self.pooled(xp, [0, 7, 30, 98, 99], [3.0, 6.0, 9.0, 1.0, 1.0]) == [3.0, 6.0, 5.0, 1.0, 1.0]

    @both_namespaces
    @pytest.mark.parametrize("pooling", ["avg", "max"])
    def test_nothing_leaks_into_the_next_request(self, xp: Any, pooling: str) -> None:
        tokens, mass = [1, 0, 2, 3, 0, 1, 2, 3], [3.0, 3.0, 7.0, 7.0, 60.0, 60.0, 0.0, 0.0]
        requests = {"counts": [4, 4], "length": [4, 4]}
        scale = 3 if pooling == "avg" else 2
        expected = [6.0 / scale, 6.0 / scale, 7.0, 7.0, 120.0 / scale, 120.0 / scale, 0.0, 0.0]
        assert self.pooled(xp, tokens, mass, pooling, **requests) == expected

    @both_namespaces
    @pytest.mark.parametrize("pooling", ["avg", "max"])
    def test_nor_where_the_pooling_reaches_across_the_whole_window(self, xp: Any, pooling: Any) -> None:
        policy = SnapKV(kernel_size=5, pooling=pooling, observation_window=1)
        requests = {"counts": [3, 3], "length": [3, 3], "queries": [1, 1], "of_prompt": [True, True]}
        got = policy.observe(observation(xp, tokens=[0, 1, 2] * 2, mass=[0, 50, 9, 5, 5, 9], **requests))
        expected = [10, 10, 9, 2, 2, 9] if pooling == "avg" else [50, 50, 9, 5, 5, 9]
        assert np.asarray(got).tolist() == expected

    @both_namespaces
    def test_a_prompt_within_the_window_is_left_as_it_is(self, xp: Any) -> None:
        assert self.pooled(xp, [0, 1], [1.5, 0.5]) == [1.5, 0.5]
        assert self.pooled(xp, [0], [1.0], queries=[1]) == [1.0]

    @both_namespaces
    def test_decoding_beside_a_prompt_is_not_pooled(self, xp: Any) -> None:
        got = self.pooled(
            xp, [0, 1, 2, 3] * 2, [3.0, 9.0, 1.0, 1.0] * 2, counts=[4, 4], length=[4, 4], state=[8] * 8, queries=[2, 2],
            of_prompt=[False, True],
        )  # fmt: skip
        assert got == [3.0 + 2, 9.0 + 2, 1.0 + 2, 1.0 + 2, 4.0 + 2, 4.0 + 2, 1.0 + 2, 1.0 + 2]


class TestBatches:
    COUNTS = (9, 1, 30, 2, 17)

    def batch(self, xp: Any, policy: Policy) -> Observation:
        rng = np.random.default_rng(5)
        tokens = [rng.permutation(3 * n + 5)[:n] for n in self.COUNTS]
        length = np.array([3 * n + 5 for n in self.COUNTS])
        flat, total = np.concatenate(tokens), sum(self.COUNTS)
        queries = [1, 1, 1, 1, 1] if policy.needs.each_query else [1, 3, 4, 2, 9]
        return observation(
            xp,
            tokens=flat,
            counts=self.COUNTS,
            length=length,
            prompt_hash=rng.integers(2**31, size=5),
            first_query=[0, 3, 40, 10, 2],
            state=rng.random(total),
            key_norm=rng.random(total),
            mass=rng.random(total) * rng.choice([1.0, 1000.0], size=total),
            queries=queries,
            of_prompt=[False, True, True, False, True],
        )

    @both_namespaces
    @pytest.mark.parametrize("policy", EVERY_POLICY, ids=str)
    def test_a_request_gets_the_same_alone(self, policy: Policy, xp: Any) -> None:
        batch = self.batch(xp, policy)
        alone = [request_of(batch, i) for i in range(len(self.COUNTS))]
        together = priorities(policy, batch)
        assert together.shape == (sum(self.COUNTS),)
        np.testing.assert_array_equal(together, np.concatenate([priorities(policy, one) for one in alone]))
        if policy.needs.attention:
            separate = np.concatenate([np.asarray(policy.observe(one)) for one in alone])
            np.testing.assert_array_equal(np.asarray(policy.observe(batch)), separate)

    @pytest.mark.parametrize("policy", EVERY_POLICY, ids=str)
    def test_numpy_and_torch_agree(self, policy: Policy) -> None:
        results = []
        for xp in NAMESPACES.values():
            batch = self.batch(xp, policy)
            if policy.needs.attention:
                batch = replace(batch, state=to(xp, policy.observe(batch), "float32"))
                assert isinstance(policy.observe(batch), type(batch.tokens))
            assert isinstance(policy.priority(batch), type(batch.tokens))
            results.append(priorities(policy, batch))
        np.testing.assert_allclose(results[0], results[1], rtol=2e-6)

    @both_namespaces
    @pytest.mark.parametrize("policy", EVERY_POLICY, ids=str)
    def test_the_runtime_s_arrays_are_left_alone(self, policy: Policy, xp: Any) -> None:
        batch, pristine = self.batch(xp, policy), self.batch(xp, policy)
        policy.priority(batch)
        if policy.needs.attention:
            policy.observe(batch)
        for name in (
            "tokens",
            "counts",
            "length",
            "first_query",
            "state",
            "mass",
            "key_norm",
            "queries",
            "position",
            "attended",
        ):
            np.testing.assert_array_equal(np.asarray(getattr(batch, name)), np.asarray(getattr(pristine, name)))


class TestRandom:
    def hashes(self, count: int = 20000, prompt_hash: int = 77, seed: int = 0, xp: Any = np) -> np.ndarray:
        batch = observation(xp, tokens=np.arange(count), prompt_hash=[prompt_hash])
        return priorities(Random(seed), batch)

    def test_numpy_and_torch_hash_alike_at_the_edges_of_the_range(self) -> None:
        for prompt_hash in (0, 1, 2**31 - 1):
            for seed in (0, 2**31 - 1):
                ours, torchs = (self.hashes(500, prompt_hash, seed, xp) for xp in NAMESPACES.values())
                assert ours.dtype == np.int64 and (ours == torchs).all()
                assert ours.min() >= 0 and ours.max() < 2**31
        far = [observation(xp, tokens=[2**31 - 2, 0]) for xp in NAMESPACES.values()]
        assert priorities(Random(), far[0]).tolist() == priorities(Random(), far[1]).tolist()

    def test_uniform(self) -> None:
        counts = np.bincount(self.hashes(64000) >> 25, minlength=64)
        chi_squared = ((counts - 1000) ** 2 / 1000).sum()
        assert 30 < chi_squared < 110  # 63 degrees of freedom: 1 in 1000 beyond each

    def test_no_tokens_tie(self) -> None:
        assert len(set(self.hashes().tolist())) == 20000

    @pytest.mark.parametrize("other", [{"prompt_hash": 78}, {"prompt_hash": 76}, {"seed": 1}, {"seed": 2**30}])
    def test_requests_and_seeds_are_unrelated(self, other: dict[str, int]) -> None:
        correlation = np.corrcoef(self.hashes(), self.hashes(**other))[0, 1]
        assert abs(correlation) < 0.03  # four standard deviations

    def test_positions_are_unrelated(self) -> None:
        hashes = self.hashes()
        assert abs(np.corrcoef(hashes, np.arange(len(hashes)))[0, 1]) < 0.03
        for distance in (1, 2, 16, 128):
            assert abs(np.corrcoef(hashes[distance:], hashes[:-distance])[0, 1]) < 0.03

    def test_each_bit_of_a_position_flips_each_bit_of_the_hash_half_of_the_time(self) -> None:
        batch = observation(tokens=np.arange(4096))
        for bit in range(12):
            flipped = priorities(Random(), replace(batch, tokens=batch.tokens ^ (1 << bit)))
            difference = flipped ^ priorities(Random(), batch)
            shares = [((difference >> i) & 1).mean() for i in range(31)]
            assert min(shares) > 0.4 and max(shares) < 0.6

    def test_a_token_keeps_its_number(self) -> None:
        some = observation(tokens=[9, 3], prompt_hash=[77], length=[5000])
        assert priorities(Random(), some).tolist() == self.hashes()[[9, 3]].tolist()
