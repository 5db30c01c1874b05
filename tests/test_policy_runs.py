"""Policies over a prompt of 400 tokens and 400 decode steps: what stays, what goes, and what must never happen."""

from typing import Any

import pytest
from policy_driver import NAMESPACES, Request, random_model

from vtoken.policies import Policy
from vtoken.policies.h2o import H2O
from vtoken.policies.random import Random
from vtoken.policies.scissorhands import Scissorhands
from vtoken.policies.snapkv import SnapKV
from vtoken.policies.streaming_llm import StreamingLLM
from vtoken.policies.tova import TOVA

PROMPT, STEPS, BUDGET, SINKS, RECENT = 400, 400, 64, 4, 16
HEAVY_IN_PROMPT = {50, 150, 250, 350}
HEAVY_GENERATED = {430, 480, 530, 580, 630, 680, 730}
MODEL = random_model(0, importance={0: 3.0} | dict.fromkeys(HEAVY_IN_PROMPT | HEAVY_GENERATED, 2.5))

NOT_FROZEN = [H2O(), H2O(decay=0.99), H2O(decay=0.9), H2O(decay=0.97, average=False), Scissorhands(), TOVA()]
FROZEN = H2O(decay=1.0, average=False)


def long_run(policy: Policy, xp: Any) -> tuple[Request, int]:
    """A request at its end, and how many generated tokens stayed at least one step beyond ``recent``."""
    request = Request(policy, MODEL, xp, SINKS, RECENT)
    request.prefill([256, PROMPT - 256])
    request.evict(PROMPT - BUDGET)
    stayed: set[int] = set()
    for _ in range(STEPS):
        request.decode(1)
        live = {token for token in request.live if token >= 0}
        newest = set(range(request.length - RECENT, request.length))
        assert len(live) == BUDGET and live >= set(range(SINKS)) | newest
        stayed |= {token for token in live - newest if token >= PROMPT}
    return request, len(stayed)


@pytest.mark.parametrize("xp", NAMESPACES.values(), ids=NAMESPACES)
class TestLongRuns:
    @pytest.mark.parametrize("policy", NOT_FROZEN, ids=str)
    def test_heavy_hitters_stay_and_new_ones_get_in(self, policy: Policy, xp: Any) -> None:
        request, stayed = long_run(policy, xp)
        assert set(request.live) >= HEAVY_IN_PROMPT | HEAVY_GENERATED
        assert stayed >= 7

    def test_snapkv_too_with_its_window(self, xp: Any) -> None:
        request, stayed = long_run(SnapKV(observation_window=RECENT), xp)
        assert set(request.live) >= HEAVY_IN_PROMPT | HEAVY_GENERATED
        assert stayed >= 7

    def test_the_plain_sum_of_the_paper_freezes_the_cache(self, xp: Any) -> None:
        """The negative control: not one generated token outlives ``recent``, however much it is attended."""
        request, stayed = long_run(FROZEN, xp)
        assert stayed == 0
        assert not set(request.live) & HEAVY_GENERATED - set(range(request.length - RECENT, request.length))

    def test_streaming_llm_is_the_sinks_and_a_window(self, xp: Any) -> None:
        request, _ = long_run(StreamingLLM(), xp)
        assert sorted(set(request.live) - {-1}) == [0, 1, 2, 3, *range(PROMPT + STEPS - 60, PROMPT + STEPS)]

    def test_random_is_one_sample_of_all_that_was_unprotected(self, xp: Any) -> None:
        request, _ = long_run(Random(), xp)
        middle = sorted(set(request.live) - {-1})[SINKS:-RECENT]
        by_hash = Request(Random(), MODEL, xp, live=list(range(PROMPT + STEPS)), length=PROMPT + STEPS)
        gone = by_hash.evict(PROMPT + STEPS - BUDGET)
        # The last token to leave `recent` came when one place was left for it and the worst of the rest.
        assert sorted(set(range(SINKS, PROMPT + STEPS - RECENT)) - set(gone)) == middle


class TestShortContexts:
    @pytest.mark.parametrize("length", [1, 2, 3, 20])
    @pytest.mark.parametrize("policy", [*NOT_FROZEN, FROZEN, SnapKV(), Random(), StreamingLLM()], ids=str)
    def test_shorter_than_any_window(self, policy: Policy, length: int) -> None:
        request = Request(policy, MODEL, sinks=1, recent=2)
        request.prefill([length])
        gone: list[int] = []
        for step in range(12):
            gone += request.decode(1 if length + step > 6 else 0)
        assert len(set(gone)) == len(gone) == sum(length + step > 6 for step in range(12))
        assert 0 in request.live and {request.length - 1, request.length - 2} <= set(request.live)
