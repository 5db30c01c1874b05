"""The script that checks GPU code, as far as it runs without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent
BENCHMARKS = FOLDER.parent / "benchmarks"

COMPARISONS = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import torch
import gpu_check
from vtoken.kernels.gpu.attention_mass import attention_mass
from vtoken.kernels.gpu.decode_attention import decode_attention
from vtoken.kernels.gpu.key_norms import key_norms
from vtoken.kernels.gpu.relocation import relocate

shape = gpu_check.Shape(4, 2, 32, 8, (1, 40, 21), torch.float32)

def wrong_scale(*arguments, **named):
    decode_attention(*arguments[:5], 1.1 * arguments[5], *arguments[6:], **named)

def wrong_decay(*arguments, **named):
    attention_mass(*arguments[:5], 0.8 * arguments[5], *arguments[6:], **named)

def unmasked(kernel):
    return lambda *arguments, live=None: kernel(*arguments, live=None)

def one_move_missing(cache, layout, sources, destinations):
    relocate(cache, layout, sources[1:], destinations[1:])

def no_move(cache, layout, sources, destinations):
    pass

def next_slots(cache, layout, heads, head_size, slots):
    return key_norms(cache, layout, heads, head_size, slots - slots.gt(0).long())

right = list(gpu_check.check_kernels("cpu", [shape]))
wrong = [
    *(gpu_check.check_decode(shape, "cpu", wrong_scale, masked) for masked in (False, True)),
    *(gpu_check.check_mass(shape, "cpu", wrong_decay, masked) for masked in (False, True)),
    gpu_check.check_decode(shape, "cpu", unmasked(decode_attention), True),
    gpu_check.check_mass(shape, "cpu", unmasked(attention_mass), True),
    *gpu_check.check_relocation(shape, "cpu", one_move_missing),
    *gpu_check.check_relocation(shape, "cpu", no_move),
    *gpu_check.check_key_norms(shape, "cpu", next_slots),
]
print(json.dumps([[[each.check, each.passed] for each in outcomes] for outcomes in (right, wrong)]))
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_without_cuda_it_says_so_in_a_sentence() -> None:
    ran = run(str(BENCHMARKS / "gpu_check.py"), CUDA_VISIBLE_DEVICES="")
    assert ran.returncode == 2, ran.stderr
    assert ran.stdout == "There is no CUDA device here, so nothing could be checked.\n"


def test_it_needs_neither_vllm_nor_numba() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu_check\n"
        "import vtoken.kernels.gpu.attention_mass, vtoken.kernels.gpu.decode_attention\n"
        "import vtoken.kernels.gpu.key_norms, vtoken.kernels.gpu.relocation\n"
        "print([name for name in ('vllm', 'numba', 'llvmlite') if name in sys.modules])"
    )
    ran = run("-c", program)
    assert ran.returncode == 0 and ran.stdout == "[]\n", ran.stdout + ran.stderr


def test_comparisons_pass_right_kernels_and_fail_wrong_ones() -> None:
    """In Triton's interpreter, which has to be switched on before the kernels are imported."""
    ran = run("-c", COMPARISONS, str(BENCHMARKS), str(FOLDER.parent), TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.stderr
    right, wrong = json.loads(ran.stdout.splitlines()[-1])
    assert right and all(passed for _, passed in right), right
    assert len(wrong) == 12 and not any(passed for _, passed in wrong), wrong
    names = {"decode attention", "attention mass"}
    masked = {f"{name}, masked" for name in names}
    assert {name for name, _ in right} == names | masked | {"relocation", "key norms"}


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_check

    yield gpu_check
    sys.modules.pop("gpu_check", None)


@pytest.mark.parametrize("failing", [False, True])
def test_status_and_json(gpu_check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: bool) -> None:  # type: ignore[no-untyped-def]
    """With a pretended device and pretended checks: one fails, or one breaks off, and the others are still made."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "pretended")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    outcome = gpu_check.Outcome("some", "case", True, "nothing")
    monkeypatch.setattr(gpu_check, "check_kernels", lambda *_: iter([outcome]))
    monkeypatch.setattr(gpu_check, "check_graph", lambda _: outcome)
    monkeypatch.setattr(gpu_check, "measure_speed", lambda: iter([gpu_check.Outcome("speed", "", None, "1 ms")]))

    def breaks_off():  # type: ignore[no-untyped-def]
        yield outcome
        if failing:
            raise RuntimeError("an illegal memory access\nand more")

    monkeypatch.setattr(gpu_check, "check_order", breaks_off)
    report = tmp_path / "report.json"
    assert gpu_check.main(["--json", str(report)]) == int(failing)
    outcomes = json.loads(report.read_text())["outcomes"]
    assert [each for each in outcomes if each["passed"] is False] == [
        {
            "check": "order of copies",
            "case": "stopped",
            "passed": False,
            "found": "RuntimeError: an illegal memory access",
        }
    ][: int(failing)]
    assert outcomes[-1]["check"] == "speed"
