"""When packing is due, how many blocks it is granted, and what admission has to leave free meanwhile."""

import pytest

from vtoken.config import VTokenConfig
from vtoken.core.reclamation_manager import ReclamationManager

S = 16
POOL = 100


def manager(pool_blocks: int = POOL, **options: object) -> ReclamationManager:
    settings = {"reclaim": "pack", "check_interval": 1, "theta_f": 0.25, "low_watermark": 0.25, "headroom": 0.05}
    return ReclamationManager(VTokenConfig(**{**settings, **options}), pool_blocks, S)


def due(one: ReclamationManager, live: int = 10, held: int = 10, free: int = 8) -> int:
    return one.grant(live, held, free)


class TestTheTrigger:
    @pytest.mark.parametrize("theta_f", [0.0, 0.1, 0.25, 0.3, 0.35, 0.6, 0.7, 0.9])
    def test_waste_must_exceed_theta(self, theta_f: float) -> None:
        """Exactly theta is not enough; one token less is. 1 - 0.7 is not 0.3 in binary."""
        at_theta = round((1 - theta_f) * 10 * S)
        assert due(manager(theta_f=theta_f), live=at_theta) == 0
        assert due(manager(theta_f=theta_f), live=at_theta - 1) == 5

    @pytest.mark.parametrize("share", [0.07, 0.25, 0.29, 0.57, 1.0])
    def test_free_blocks_up_to_the_watermark(self, share: float) -> None:
        """Exactly the watermark is few; one block more is not. 0.29 * 100 is not 29 in binary."""
        mark = round(share * POOL)
        one = manager(low_watermark=share)
        assert due(one, free=mark) == min(5, mark)
        assert due(manager(low_watermark=share), free=mark + 1) == 0

    def test_nothing_held_is_no_waste(self) -> None:
        assert due(manager(theta_f=0.0), live=0, held=0) == 0

    @pytest.mark.parametrize(
        ("headroom", "pool_blocks", "blocks"),
        [(0.02, 100, 2), (0.02, 101, 3), (0.07, 100, 7), (0.01, 1, 1)],
    )
    def test_the_headroom_is_rounded_up(self, headroom: float, pool_blocks: int, blocks: int) -> None:
        assert manager(pool_blocks, headroom=headroom).headroom == blocks

    @pytest.mark.parametrize(("free", "granted"), [(20, 5), (5, 5), (4, 4), (1, 1)])
    def test_as_many_blocks_as_the_headroom_and_never_more_than_are_free(self, free: int, granted: int) -> None:
        one = manager()
        assert due(one, free=free) == granted
        assert (one.looks, one.grants, one.deferrals) == (1, 1, 0)

    def test_whenever_the_headroom_is_touched(self) -> None:
        """Between regular looks too, and whatever the watermark; not again and again for nothing."""
        one = manager(check_interval=10, low_watermark=0.0)
        assert due(one, free=6) == 0 and one.looks == 0
        assert due(one, free=5) == 5
        one.settle(1)
        assert due(one, free=4) == 4
        one.settle(0)
        assert [due(one, free=4) for _ in range(7)] == [0] * 6 + [4]  # the tenth step is a regular one
        one.settle(0)
        assert [due(one, free=4) for _ in range(10)] == [0] * 9 + [4]

    def test_deferred_while_none_is_free(self) -> None:
        one = manager()
        assert [due(one, free=0), due(one, free=0), due(one, free=1)] == [0, 0, 1]
        assert (one.looks, one.grants, one.deferrals) == (3, 1, 2)


class TestLooks:
    @pytest.mark.parametrize("interval", [1, 4, 7])
    def test_every_so_many_steps(self, interval: int) -> None:
        one = manager(check_interval=interval)
        looked = []
        for step in range(1, 30):
            before = one.looks
            due(one, live=160)
            if one.looks > before:
                looked.append(step)
        assert looked == list(range(interval, 30, interval))

    def test_not_while_blocks_are_granted(self) -> None:
        one = manager()
        assert [due(one), due(one), due(one)] == [5, 0, 0]
        one.settle(0)
        assert due(one) == 5 and one.looks == 2

    def test_again_at_once_after_a_gain_and_only_then(self) -> None:
        one = manager(check_interval=4)
        assert [due(one) for _ in range(4)] == [0, 0, 0, 5]
        one.settle(1)
        assert due(one) == 5  # the fifth step
        one.settle(0)
        assert [due(one) for _ in range(3)] == [0, 0, 5]  # the eighth

    def test_a_gain_does_not_outlive_the_waste(self) -> None:
        one = manager(check_interval=4)
        for _ in range(4):
            due(one)
        one.settle(1)
        assert due(one, live=160) == 0
        assert due(one) == 0 and one.looks == 2


class TestASuddenRise:
    def test_is_answered_at_once_whatever_is_free(self) -> None:
        one = manager(check_interval=1000, sudden_rise=0.5, low_watermark=0.0)
        assert due(one, live=81, free=90) == 0 and one.looks == 0
        assert due(one, live=80, free=90) == 5 and one.looks == 1

    def test_is_counted_from_the_last_look(self) -> None:
        one = manager(check_interval=1000, sudden_rise=0.25, theta_f=0.9)
        looked = []
        for live in (120, 100, 80, 60, 41, 40):  # waste 1/4, 3/8, 1/2, 5/8, then just below 3/4 and 3/4
            before = one.looks
            due(one, live=live)
            looked.append(one.looks - before)
        assert looked == [1, 0, 1, 0, 0, 1]

    def test_is_counted_from_the_least_since_the_last_look(self) -> None:
        one = manager(check_interval=1000, sudden_rise=0.25, theta_f=0.1)
        assert due(one, live=80, free=90) == 5  # waste 1/2
        one.settle(0)
        assert [due(one, live=live, free=90) for live in (160, 121, 120)] == [0, 0, 5]

    def test_does_not_lift_theta(self) -> None:
        one = manager(check_interval=1000, sudden_rise=0.1, theta_f=0.5)
        assert due(one, live=100) == 0 and one.looks == 1


class TestAdmission:
    def test_leaves_the_headroom_free(self) -> None:
        assert manager().reserve(wanted=10, held_blocks=1, free_blocks=50) == 5

    def test_leaves_nothing_where_nothing_runs(self) -> None:
        one = manager()
        due(one)
        assert one.reserve(wanted=10, held_blocks=0, free_blocks=10) == 0

    def test_goes_on_beside_reclaiming(self) -> None:
        """However long packing gains something: who fits beside the headroom must not starve."""
        one = manager()
        for _ in range(3):
            assert due(one) == 5
            assert one.reserve(wanted=1, held_blocks=1, free_blocks=50) == 5
            one.settle(2)
            assert one.reserve(wanted=1, held_blocks=1, free_blocks=50) == 5

    @pytest.mark.parametrize(("wanted", "granted"), [(45, 0), (46, 5)])
    def test_whoever_is_refused_makes_blocks_few(self, wanted: int, granted: int) -> None:
        """50 are free, far above the watermark; the headroom of 5 does not leave room for 46."""
        one = manager()
        one.reserve(wanted, held_blocks=10, free_blocks=50)
        assert due(one, free=50) == granted
        if granted:
            one.settle(0)
        assert due(one, free=50) == 0, "a refusal counts until the next look"
