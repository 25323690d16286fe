import os
from pathlib import Path

import pytest
import torch

from aphq.engine import memory
from aphq.engine.memory import CLEAR, STATUS, PeakMemory, cache_bytes, private_bytes

CPU = torch.device("cpu")
MIB = 2**20
told = pytest.mark.skipif(
    not (os.access(CLEAR, os.W_OK) and STATUS.exists() and "VmHWM:" in STATUS.read_text()),
    reason="this system does not tell, or reset, a process's largest size",
)


@told
def test_the_largest_size_stays_until_counting_starts_again() -> None:
    first = PeakMemory(CPU)
    start = first.read()["host"]
    big = torch.ones(32 * MIB)  # 128 MiB, touched
    held = first.read()["host"]
    assert start + 120 * MIB < held < start + 200 * MIB
    del big
    assert first.read()["host"] > held - 2 * MIB, "it is a peak, but for what the system counts late"
    assert PeakMemory(CPU).read()["host"] < held - 100 * MIB


@told
def test_on_the_cpu_only_the_host_is_counted() -> None:
    assert PeakMemory(CPU).read().keys() == {"host"}


def test_a_system_that_tells_nothing_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none" / "status")
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "none" / "clear_refs")
    assert PeakMemory(CPU).read() == {}


@pytest.mark.skipif(not STATUS.exists(), reason="this system does not tell")
def test_private_memory_is_what_was_written_to() -> None:
    before = private_bytes()
    big = torch.ones(32 * MIB)
    assert private_bytes() - before > 100 * MIB
    del big


def test_the_cache_gets_what_the_process_and_computing_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "private_bytes", lambda: 2 * 2**30)
    assert cache_bytes(8 * 2**30, CPU) == 2 * 2**30
    assert cache_bytes(8 * 2**30, torch.device("cuda:0")) == 5 * 2**30
    assert cache_bytes(2**30, CPU) == 0
    assert cache_bytes(0, torch.device("cuda:0")) == 0
