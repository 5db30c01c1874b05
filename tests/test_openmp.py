"""Compiled functions run as a team in torch's OpenMP runtime, and as a team of one without it."""

import ctypes
import importlib.util
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from vtoken.kernels import openmp
from vtoken.kernels.cpu.vectors import array_at
from vtoken.kernels.jit import cfunc, intrinsic, types


@intrinsic
def _as_number(typing, pointer):  # type: ignore[no-untyped-def]
    def emit(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ptrtoint(arguments[0], context.get_value_type(types.int64))

    return types.int64(types.voidptr), emit


@lru_cache
def compile_relay(module: ModuleType) -> Any:
    """A body over data [lanes, then per lane: visits, thread, all lanes' visits as seen after the barrier]."""
    thread_number, team_size, barrier = module.thread_number, module.team_size, module.barrier

    @cfunc("void(voidptr)")
    def relay(data):  # type: ignore[no-untyped-def]
        numbers = array_at(_as_number(data), np.int64)
        lanes = numbers[0]
        for lane in range(thread_number(), lanes, team_size()):
            numbers[1 + 3 * lane] += 1
            numbers[2 + 3 * lane] = thread_number()
        barrier()
        for lane in range(thread_number(), lanes, team_size()):
            for other in range(lanes):
                numbers[3 + 3 * lane] += numbers[1 + 3 * other]

    return relay


def run(module: ModuleType, lanes: int, threads: int) -> np.ndarray:
    data = np.zeros(1 + 3 * lanes, dtype=np.int64)
    data[0] = lanes
    module.run_team(compile_relay(module), data.ctypes.data, threads)
    return data[1:].reshape(lanes, 3)


@pytest.mark.skipif(not openmp.has_runtime, reason="torch has brought no OpenMP runtime")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("lanes", [1, 3, 7])
def test_each_lane_is_done_once_and_before_the_barrier(lanes: int, threads: int) -> None:
    found = run(openmp, lanes, threads)
    assert (found[:, 0] == 1).all()
    assert (found[:, 2] == lanes).all()
    assert found[:, 1].max() < threads


@pytest.mark.skipif(not openmp.has_runtime, reason="torch has brought no OpenMP runtime")
def test_a_team_has_the_size_asked_for() -> None:
    assert run(openmp, 3, 3)[:, 1].tolist() == [0, 1, 2]


def test_as_many_threads_as_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert openmp.num_threads() == (5 if openmp.has_runtime else 1)


class NoRuntime:
    """A process in which one of the entry points is missing."""

    omp_get_thread_num = omp_get_num_threads = GOMP_parallel = ctypes.CFUNCTYPE(None)(lambda: None)


def test_an_incomplete_runtime_is_none() -> None:
    assert openmp.find_runtime(NoRuntime()) is None
    assert (openmp.find_runtime(ctypes.CDLL(None)) is not None) == openmp.has_runtime


@pytest.mark.parametrize("lanes", [1, 4])
def test_without_a_runtime_the_calling_thread_does_all_lanes(monkeypatch: pytest.MonkeyPatch, lanes: int) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: NoRuntime())
    spec = importlib.util.spec_from_file_location("openmp_without_runtime", openmp.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert not module.has_runtime and module.num_threads() == 1
    assert run(module, lanes, 2).tolist() == [[1, 0, lanes]] * lanes
