"""OpenVINO GenAI, run by an interpreter of its own that has it; imports nothing of vtoken or vLLM.

A JSON line on stdin says which pipeline, each further one is a load; one JSON line on stdout answers each. See
``openvino_engine.OpenVINOEngine`` for the other side.
"""

import json
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

FINISHED = "FINISHED"


def main() -> int:
    # The library prints, too: stdout is for our lines alone.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines = _lines()

    def emit(**event: Any) -> None:
        channel.write(json.dumps(event) + "\n")
        channel.flush()

    try:
        pipeline = Pipeline(json.loads(next(lines)))
        emit(event="started", **pipeline.about)
        for line in lines:
            emit(event="result", result=pipeline.run(json.loads(line)["requests"]))
    except Exception as error:  # whatever the library raises, the other side shall read it
        emit(event="failed", message=f"OpenVINO GenAI broke off: {error}")
        return 1
    return 0


class Pipeline:
    """One continuous-batching pipeline.

    Args:
        spec: model (directory with the IR), num_blocks, max_num_seqs, max_num_batched_tokens, threads,
            kv_cache_precision ("f32", "u8"), and eviction: None, or start_size, recent_size and max_cache_size in
            tokens, aggregation_mode, apply_rotation and snapkv_window_size.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        import openvino
        import openvino_genai as genai

        self._openvino, self._genai = openvino, genai
        scheduler = genai.SchedulerConfig()
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            setattr(scheduler, name, spec[name])
        self._blocks = scheduler.num_kv_blocks = spec["num_blocks"]
        scheduler.enable_prefix_caching = False
        if spec["eviction"]:
            eviction = dict(spec["eviction"])
            eviction["aggregation_mode"] = getattr(genai.AggregationMode, eviction["aggregation_mode"])
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = genai.CacheEvictionConfig(**eviction)
        properties = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": spec["kv_cache_precision"],
            "INFERENCE_NUM_THREADS": spec["threads"],
        }
        self._pipeline = genai.ContinuousBatchingPipeline(spec["model"], scheduler, "CPU", properties)
        self._started = 0
        self.run([{"request_id": "warm-up", "prompt_token_ids": [1] * 256, "max_tokens": 2}])
        self.about = {
            "num_blocks": self._blocks,
            "bytes_per_block": self._pipeline.get_metrics().kv_cache_size_in_bytes // self._blocks,
            "openvino_genai": genai.__version__,
        }

    def run(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Run requests that all come at once to their ends.

        Returns:
            seconds, output_tokens, output_tokens_per_s, steps, step_ms (the median), peak_blocks, mean_running and
            peak_running; decode_blocks_per_request, the median over the steps in which all that runs has its first
            token and no request is to come (None if there are none); outputs, the tokens of each request by id.

        Raises:
            RuntimeError: a request did not produce what it was to.
        """
        handles = {}
        begun = time.perf_counter()
        for request in requests:
            self._started += 1
            prompt = self._tensor(request["prompt_token_ids"])
            handles[request["request_id"]] = self._pipeline.add_request(
                self._started, prompt, self._greedy(request["max_tokens"])
            )
        outputs: dict[str, list[int]] = {request["request_id"]: [] for request in requests}
        ended, blocks, running, settled = [], [], [], []
        while self._pipeline.has_non_finished_requests():
            settled.append(all(outputs.values()))
            self._pipeline.step()
            ended.append(time.perf_counter())
            metrics = self._pipeline.get_metrics()
            blocks.append(metrics.cache_usage * self._blocks / 100)
            running.append(metrics.scheduled_requests)
            for name, handle in handles.items():
                if handle.can_read():
                    for output in handle.read().values():
                        outputs[name].extend(output.generated_ids)
        self._check(requests, handles, outputs)
        seconds, tokens = ended[-1] - begun, sum(map(len, outputs.values()))
        held = [b / r for b, r, alone in zip(blocks, running, settled, strict=True) if alone and r]
        return {
            "requests": len(requests),
            "seconds": seconds,
            "output_tokens": tokens,
            "output_tokens_per_s": tokens / seconds,
            "steps": len(ended),
            "step_ms": 1e3 * statistics.median(b - a for a, b in zip([begun, *ended], ended, strict=False)),
            "peak_blocks": round(max(blocks)),
            "mean_running": statistics.fmean(running),
            "peak_running": max(running),
            "decode_blocks_per_request": statistics.median(held) if held else None,
            "outputs": outputs,
        }

    def _tensor(self, tokens: list[int]) -> Any:
        import numpy as np

        return self._openvino.Tensor(np.array([tokens], dtype=np.int64))

    def _greedy(self, max_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        return config

    def _check(self, requests: list[dict[str, Any]], handles: dict[str, Any], outputs: dict[str, list[int]]) -> None:
        for request in requests:
            name, wanted = request["request_id"], request["max_tokens"]
            status, found = handles[name].get_status().name, len(outputs[name])
            if status != FINISHED or found != wanted:
                raise RuntimeError(f"request {name} ended as {status} with {found} of {wanted} tokens")


def _lines() -> Iterator[str]:
    """What the parent writes; when it closes the pipe, however it ends, this process ends at once."""
    arrived: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            arrived.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield arrived.get()


if __name__ == "__main__":
    sys.exit(main())
