"""OpenVINO GenAI as a peer: its interpreter, the model in its format, and a pipeline in a process of its own."""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from vtoken.evaluation.child import end, tail
from vtoken.evaluation.model import cache_directory
from vtoken.evaluation.workloads import Workload

PEER = Path(__file__).with_name("openvino_peer.py")
INSTALL = (
    "python3 -m venv openvino-env && "
    "openvino-env/bin/pip install -r requirements/torch.txt -r requirements/peers.txt && "
    "openvino-env/bin/pip install --no-deps 'optimum-intel>=2.2,<2.3'"
)
MODEL_FILE = "openvino_model.xml"


@dataclass(frozen=True)
class Eviction:
    """OpenVINO's ``CacheEvictionConfig``, in tokens: multiples of its blocks of 32."""

    start_size: int
    recent_size: int
    max_cache_size: int
    aggregation_mode: str = "NORM_SUM"
    apply_rotation: bool = False
    snapkv_window_size: int = 8


@dataclass(frozen=True)
class PipelineSpec:
    """Which pipeline; ``eviction`` is None where it keeps all."""

    model: str
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    threads: int
    kv_cache_precision: str
    eviction: Eviction | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class OpenVINOEngine:
    """One pipeline's process.

    Attributes:
        about: num_blocks, bytes_per_block, openvino_genai (the version).

    Raises:
        RuntimeError: it broke off; what it said, else the end of its stderr.
    """

    def __init__(self, python: Path, spec: PipelineSpec, script: Path = PEER) -> None:
        self._stderr: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command(python, str(script)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            encoding="utf-8",
        )
        try:
            self.about: dict[str, Any] = self._exchange(spec.to_json())
        except BaseException:
            self.close()
            raise
        del self.about["event"]

    def run(self, workloads: Sequence[Workload]) -> dict[str, Any]:
        """Run requests that all come at once; the result is that of ``openvino_peer.Pipeline.run``."""
        result: dict[str, Any] = self._exchange({"requests": [asdict(work) for work in workloads]})["result"]
        return result

    def close(self) -> None:
        """End the process, and wait for that."""
        end(self._process)
        self._stderr.close()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            line = ""
        else:
            line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"OpenVINO GenAI ended with exit code {code}\n{tail(self._stderr)}".strip())
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "failed":
            raise RuntimeError(event["message"])
        return event


def command(python: Path, *arguments: str) -> list[str]:
    """Isolated, so that this process's own packages and variables do not leak into that environment."""
    return [str(python), "-I", *arguments]


def check_interpreter(python: Path | None) -> Path:
    """Raises ValueError, in one sentence with the commands that make one, unless it has what a peer needs."""
    if python is None:
        raise ValueError(f"peers needs a Python that has OpenVINO GenAI; make one and name it: {_advice()}")
    if not os.access(python, os.X_OK) or python.is_dir():
        raise ValueError(f"--openvino-python {python} is no interpreter; make one: {_advice()}")
    probe = "from importlib.metadata import version as v; v('openvino-genai'); v('optimum-intel')"
    if subprocess.run(command(python, "-c", probe), capture_output=True, check=False).returncode:
        raise ValueError(f"--openvino-python {python} lacks openvino-genai or optimum-intel; make one: {_advice()}")
    return python


def export(python: Path, model: Path, folder: Path | None = None) -> Path:
    """The model in OpenVINO's format in float32, made once per state of its files.

    Args:
        folder: where such models lie; by default below ``cache_directory()``.

    Raises:
        RuntimeError: the export failed; the end of what it said.
    """
    folder = folder or cache_directory() / "openvino"
    target = folder / f"{model.name}-f32-{_digest(model)}"
    if (target / MODEL_FILE).is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=folder))
    try:
        options = ["--model", str(model.resolve()), "--task", "text-generation-with-past", "--weight-format", "fp32"]
        done = subprocess.run(
            command(python, "-m", "optimum.commands.optimum_cli", "export", "openvino", *options, str(partial)),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode or not (partial / MODEL_FILE).is_file():
            last = "\n".join(done.stderr.splitlines()[-3:])
            raise RuntimeError(f"optimum-intel did not export {model}: {last}")
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _digest(model: Path) -> str:
    files = sorted(path for path in model.resolve().iterdir() if path.is_file())
    state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(state).encode()).hexdigest()[:12]


def _advice() -> str:
    return f"{INSTALL}, then --openvino-python openvino-env/bin/python (or VTOKEN_OPENVINO_PYTHON)."
