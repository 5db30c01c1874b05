"""Work that has nothing to do with us, on cores that we use; run as a module with a core and the most seconds."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from vtoken.evaluation.child import end

BURN = (sys.executable, "-m", "vtoken.evaluation.bench.burner")
LOOP = 100_000


def usable_cores() -> list[int]:
    """Cores that this process, and so its children, may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


@contextmanager
def burning(cores: Sequence[int], seconds: float) -> Iterator[list["subprocess.Popen[str]"]]:
    """A busy process on each of these cores for as long as the context lasts, ``seconds`` at most.

    Raises:
        RuntimeError: one of them did not start, or had ended before the context did.
    """
    burners: list[subprocess.Popen[str]] = []
    try:
        for core in cores:
            command = [*BURN, str(core), str(seconds)]
            burners.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8")
            )
        for burner in burners:
            assert burner.stdout is not None
            if not burner.stdout.readline():
                raise RuntimeError("a process that was to keep a core busy did not start")
        yield burners
        if any(burner.poll() is not None for burner in burners):
            raise RuntimeError(
                f"the processes that keep cores busy ended after {seconds:g} seconds, before the run did"
            )
    finally:
        for burner in burners:
            end(burner)


def burn(core: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Count on this core until the time is up or whoever started us is gone."""
    os.sched_setaffinity(0, {core})
    parent, deadline = os.getppid(), clock() + seconds
    print("burning", flush=True)
    while clock() < deadline and os.getppid() == parent:
        for _ in range(LOOP):
            pass


if __name__ == "__main__":
    burn(int(sys.argv[1]), float(sys.argv[2]))
