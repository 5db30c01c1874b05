"""What every engine's process has imported before it is told which engine it is: see ``evaluation.bench.engines``.

vLLM without any of our hooks: plugins are loaded when an engine starts, and only where its environment says so.
"""

import contextlib
import os

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # read once, when vLLM is imported
os.environ["VLLM_PLUGINS"] = ""

with contextlib.suppress(ImportError):  # without vLLM the engine itself says so
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
