"""How many bytecode instructions vtoken executes, by the hook through which vLLM entered it.

Unlike time that is exact: a loop over requests in Python shows as a count that grows with their number.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import vtoken

HOME = str(Path(vtoken.__file__).parent)


class BytecodeCounter:
    """Counts while it is entered, in this thread.

    Attributes:
        calls: how often each function of vtoken was called from elsewhere, by qualified name.
        instructions: what was executed in it, and in vtoken's own functions that it called; what vLLM calls from there
            counts for itself, and comprehensions count per turn.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.instructions: Counter[str] = Counter()
        self._entry_of: dict[FrameType | None, str] = {}

    def __enter__(self) -> "BytecodeCounter":
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        self._entry_of.clear()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        if event == "call" and frame not in self._entry_of:
            entry = self._entry_of.get(frame.f_back)
            if entry is None:
                entry = frame.f_code.co_qualname
                self.calls[entry] += 1
            self._entry_of[frame] = entry
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.instructions[self._entry_of[frame]] += 1
        elif event == "return":
            del self._entry_of[frame]  # a generator that goes on is called anew
        return self._trace
