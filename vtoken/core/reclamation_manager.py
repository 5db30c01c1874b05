"""When blocks are packed, and into how many: the scheduler's part of ``reclaim="pack"``."""

import math

from vtoken.config import VTokenConfig


class ReclamationManager:
    """The paper's trigger (arXiv 2608.13263): waste above theta_F and few free blocks, looked at now and then.

    Admission leaves the headroom alone: who would need it waits, and makes blocks count as few, so that what is trapped
    comes before who is next. An attempt that frees something is followed by another one at once. Running requests may
    use the headroom; as soon as they do, it is looked at in every step. Beside that, ``sudden_rise`` (the paper has
    nothing of the kind) answers a burst of evictions at once.

    Args:
        config: the engine's settings.
        pool_blocks: blocks that requests can hold.
        block_size: slots per block.

    Attributes:
        headroom: blocks that admission leaves free, as destinations.
        looks, grants, deferrals: how often it was looked, blocks were granted, and could not be since none was free.
    """

    def __init__(self, config: VTokenConfig, pool_blocks: int, block_size: int) -> None:
        self.headroom = math.ceil(_exact(config.headroom * pool_blocks))
        self.looks = self.grants = self.deferrals = 0
        self._config = config
        self._low_watermark = _exact(config.low_watermark * pool_blocks)
        self._block_size = block_size
        self._steps = 0
        self._last_waste = 0.0
        self._pending = False  # blocks are granted, and it is not known yet what came of it
        self._gaining = False  # the last attempt freed something
        self._barren = False  # it did not, and no regular look has come since
        self._refused = False  # somebody was not admitted since the last look

    def grant(self, live_tokens: int, held_blocks: int, free_blocks: int) -> int:
        """How many blocks to grant in this step; call once per step.

        Args:
            live_tokens, held_blocks: over all requests.
            free_blocks: in the pool.
        """
        self._steps += 1
        waste = _exact(1 - live_tokens / (held_blocks * self._block_size)) if held_blocks else 0.0
        rise, regular = self._config.sudden_rise, self._steps % self._config.check_interval == 0
        self._barren = self._barren and not regular
        self._last_waste = min(self._last_waste, waste)
        sudden = rise is not None and _exact(waste - self._last_waste) >= rise
        urgent = free_blocks <= self.headroom and not self._barren
        if self._pending or not (sudden or urgent or self._gaining or regular):
            return 0
        self.looks += 1
        self._last_waste = waste
        few = free_blocks <= self._low_watermark or self._refused or sudden or urgent
        self._refused = self._gaining = False
        if waste <= self._config.theta_f or not few:
            return 0
        granted = min(self.headroom, free_blocks)
        if not granted:
            self.deferrals += 1
            return 0
        self.grants += 1
        self._pending = True
        return granted

    def settle(self, net_blocks: int) -> None:
        """The attempt that blocks were granted for emptied so many more than it took."""
        self._pending, self._gaining, self._barren = False, net_blocks > 0, net_blocks <= 0

    def reserve(self, wanted: int, held_blocks: int, free_blocks: int) -> int:
        """Blocks that an admission which wants ``wanted`` must leave free; without running requests none."""
        if not held_blocks:
            return 0
        if wanted + self.headroom > free_blocks:
            self._refused = True
        return self.headroom


def _exact(value: float) -> float:
    """A product such as 0.29 * 100 ends up a rounding error beside the number that was meant."""
    return round(value, 9)
