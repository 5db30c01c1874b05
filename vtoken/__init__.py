"""Token-level KV-cache eviction for stock vLLM that hands emptied blocks back to vLLM's own block pool.

A policy names the tokens to forget; vtoken keeps the map from logical token to physical slot, keeps every
request dense, and returns whole blocks while decoding goes on. vLLM loads it as a plugin and runs unmodified.
"""

from vtoken.launch import engine_args

__all__ = ["engine_args"]
__version__ = "0.1.0"
