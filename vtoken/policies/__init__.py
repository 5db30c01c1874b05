"""Eviction policies: one small file each, and a way to look them up by name."""

import difflib

from vtoken.policies.base import Policy, PolicyBatch
from vtoken.policies.streaming_llm import StreamingLLM

POLICIES: dict[str, type[Policy]] = {"streaming_llm": StreamingLLM}

__all__ = ["POLICIES", "Policy", "PolicyBatch", "load_policy"]


def load_policy(name: str) -> Policy:
    """The policy of that name. Raises ValueError, with a sentence for the user, if there is none."""
    if name in POLICIES:
        return POLICIES[name]()
    close = difflib.get_close_matches(name, POLICIES, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"the policies are {', '.join(sorted(POLICIES))}."
    raise ValueError(f"vtoken: unknown policy '{name}'; {hint}")
