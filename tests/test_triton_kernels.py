"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for an H100 as they would be launched."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from vtoken.kernels.attention_mass import QuerySegments  # noqa: E402
from vtoken.kernels.gpu import attention_mass, decode_attention, key_norms, relocation  # noqa: E402
from vtoken.kernels.layout import BlockLayout  # noqa: E402

H100 = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def test_kernels_equal_their_references_in_tritons_interpreter() -> None:
    """In a process of its own, since the interpreter must be switched on before the kernels are imported."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "triton_interpreter.py"],
        check=False,
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.fullmatch(r"\d+ passed in .*", ran.stdout.splitlines()[-1])


class Launch:
    """Stands in for a kernel, and keeps what it would be launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert max(grid[1:]) <= 65535  # the limit of all axes but the first

        def record(*arguments: Any, **options: Any) -> None:
            self.arguments, self.options = arguments, options

        return record

    def compile(self, **more_options: Any) -> Any:
        """For an H100, with an argument's type, divisibility and equality to 1 known as at a launch."""
        names = self.kernel.arg_names
        constants = {name: value for name, value in self.options.items() if name in names}
        options = {name: value for name, value in self.options.items() if name not in names}
        signature, attributes = {}, {}
        for place, (name, argument) in enumerate(zip(names, self.arguments, strict=False)):
            if isinstance(argument, float):
                signature[name] = "fp32"
                continue
            if argument is None or (isinstance(argument, int) and argument == 1):
                constants[name] = argument
                continue
            if isinstance(argument, int):
                signature[name] = "i32" if argument < 2**31 else "i64"
            else:
                signature[name] = POINTERS[argument.dtype]  # allocations begin at multiples of 16
            if not isinstance(argument, int) or argument % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(
            self.kernel, {name: signature.get(name, "constexpr") for name in names}, constants, attributes
        )
        return triton.compile(source, target=H100, options={"enable_fp_fusion": True, **options, **more_options})


def memory_of_threads(compiled: Any, folder: Path) -> list[int]:
    """Bytes of a thread's stack and local memory, for each function of a compiled kernel: where spills go."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    report = subprocess.run([CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    found = re.findall(r"REG:\d+ STACK:(\d+) .*?LOCAL:(\d+)", report.stdout)
    assert found
    return [int(stack) + int(local) for stack, local in found]


def check(launch: Launch, folder: Path) -> None:
    compiled = launch.compile()
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    assert memory_of_threads(compiled, folder) == [0]
    # An order that sums do not depend on: nobody adds to another's numbers.
    assert not re.search(r"\b(atom|red)\.", compiled.asm["ptx"])
    assert compiled.metadata.shared <= 99 * 1024  # what the smallest of today's GPUs gives one program


class Case:
    """A layer as large as those of a 7B model, 8 KV heads of a group of 4, without memory behind it."""

    def __init__(self, dtype: torch.dtype, head_size: int) -> None:
        with torch.device("meta"):
            self.key_cache, self.value_cache = torch.empty(2, 30000, 16, 8, head_size, dtype=dtype).unbind()
            self.query = torch.empty(64, 32, head_size, dtype=dtype)
            self.block_table = torch.empty(64, 512, dtype=torch.int32)
            self.lengths = torch.empty(64, dtype=torch.int32)
            self.offsets = torch.empty(64, dtype=torch.int64)
            self.mass = torch.empty(8, 64 * 4096)
            self.live = torch.empty(64, 512 * 16, dtype=torch.bool)
            self.all_layers = torch.empty(32, 30000, 16 * 8 * head_size * 2, dtype=dtype)
            self.layout = BlockLayout(torch.empty(16, 8 * head_size * 2, dtype=torch.int64))
            self.slots = torch.empty(48, dtype=torch.int64)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[64, 128])
def case(request: pytest.FixtureRequest, dtype: torch.dtype) -> Case:
    return Case(dtype, request.param)


EVERYTHING = bool(os.environ.get("VTOKEN_TEST_EVERYTHING"))
COMPILED = {  # seconds each: the widest heads, in which something would spill first, and one of the others
    (torch.float32, 128, False),
    (torch.float32, 128, True),
    (torch.bfloat16, 128, False),
    (torch.bfloat16, 128, True),
    (torch.float16, 128, True),
    (torch.bfloat16, 64, True),
}


def skip_most(case: Case, masked: bool) -> None:
    if not EVERYTHING and (case.query.dtype, case.query.shape[2], masked) not in COMPILED:
        pytest.skip("runs with VTOKEN_TEST_EVERYTHING=1")


def recorded(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> list[Launch]:
    launches = [Launch(getattr(module, name)) for name in names]
    for name, launch in zip(names, launches, strict=True):
        monkeypatch.setattr(module, name, launch)
    return launches


def decode_launches(monkeypatch: pytest.MonkeyPatch, c: Case, masked: bool = False) -> list[Launch]:
    launches = recorded(monkeypatch, decode_attention, "attend_part", "join_parts")
    live = c.live if masked else None
    decode_attention.decode_attention(
        c.query, c.key_cache, c.value_cache, c.block_table, c.lengths, 0.1, c.query, c.mass, c.offsets, live
    )
    return launches


class TestCompiledForH100:
    @pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
    def test_decode_attention(self, monkeypatch: pytest.MonkeyPatch, case: Case, masked: bool, tmp_path: Path) -> None:
        skip_most(case, masked)
        for launch in decode_launches(monkeypatch, case, masked):
            check(launch, tmp_path)

    @pytest.mark.parametrize("masked", [False, True], ids=["dense", "masked"])
    def test_attention_mass(self, monkeypatch: pytest.MonkeyPatch, case: Case, masked: bool, tmp_path: Path) -> None:
        skip_most(case, masked)
        launches = recorded(monkeypatch, attention_mass, "sum_queries", "add_mass")
        segments = QuerySegments(*np.full((6, 2), 32, dtype=np.int64), decay=np.full(2, 0.9))
        live = case.live if masked else None
        attention_mass.attention_mass(case.query, case.key_cache, case.block_table, segments, 0.1, case.mass, live)
        for launch in launches:
            check(launch, tmp_path)

    def test_key_norms(self, monkeypatch: pytest.MonkeyPatch, case: Case, tmp_path: Path) -> None:
        (launch,) = recorded(monkeypatch, key_norms, "norms_per_layer")
        key_norms.key_norms(case.all_layers, case.layout, 8, case.key_cache.shape[3], case.slots)
        check(launch, tmp_path)

    @pytest.mark.parametrize("number", [torch.uint8, torch.int16, torch.int32])
    def test_relocation(self, monkeypatch: pytest.MonkeyPatch, number: torch.dtype, tmp_path: Path) -> None:
        (launch,) = recorded(monkeypatch, relocation, "copy_tokens")
        case = Case(torch.float32, 128)
        relocation.relocate(case.all_layers.to(number), case.layout, case.slots, case.slots)
        check(launch, tmp_path)

    def test_spills_would_be_seen(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        launch, _ = decode_launches(monkeypatch, Case(torch.float32, 128))
        assert memory_of_threads(launch.compile(maxnreg=32), tmp_path) > [0]
