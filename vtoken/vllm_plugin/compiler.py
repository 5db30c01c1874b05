"""The C++ compiler that vLLM's compilation on a CPU calls, and which nobody looks for before the model is loaded.

Without one, vLLM ends with torch's traceback out of the worker process once the weights are there, even where it has
compiled the same model before.
"""

import os
import shutil
from typing import Any


def missing_compiler() -> str | None:
    """The name of the compiler that torch is going to call and will not find; None if it finds one.

    That is ``CXX``, or g++. With ``TORCH_INDUCTOR_INSTALL_GXX`` torch may fetch one by itself, so none is missed.
    """
    name = os.environ.get("CXX", "g++")
    return None if shutil.which(name) or os.environ.get("TORCH_INDUCTOR_INSTALL_GXX") else name


def check_compiler(vllm_config: Any) -> None:
    """Raises ValueError, in one sentence, if the model is going to be compiled for a CPU and cannot be."""
    compilation = vllm_config.compilation_config
    if vllm_config.device_config.device_type != "cpu" or not compilation.mode or compilation.backend != "inductor":
        return
    name = missing_compiler()
    if name is not None:
        raise ValueError(
            f"vtoken: vLLM's compilation calls the C++ compiler '{name}', which is not to be found; install g++, name "
            "another compiler by the environment variable CXX, or set enforce_eager=True."
        )
