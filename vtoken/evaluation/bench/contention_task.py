"""The engine's side of ``contention``: a load, with the time that its host waits for copies."""

from typing import Any

from vtoken.evaluation.bench.load import run_load

RUN_TIMED = "vtoken.evaluation.bench.contention_task:run_timed"


def run_timed(engine: Any, workloads: list[dict[str, Any]]) -> dict[str, Any]:
    """All at once, as ``run_load`` with ``series``, and ``copy_wait_ms``: in launching copies and in waiting for them.

    On a GPU, whose host never waits, that is 0.
    """
    from vtoken.kernels.cpu.copy_engine import ThreadCopyEngine
    from vtoken.vllm_plugin.hook_timer import ExclusiveTimer

    timer = ExclusiveTimer()
    try:
        for name in ("launch", "finish"):  # waiting is finishing, there
            timer.wrap(ThreadCopyEngine, name, "copies")
        told = run_load(engine, workloads, series=True)
        told["copy_wait_ms"] = timer.take().get("copies", 0.0) * 1e3
    finally:
        timer.unwrap()
    return told
