import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from aphq.engine.files import (
    UnreadableError,
    is_disk_problem,
    read_json,
    read_sealed,
    seal_of,
    write_atomically,
    write_json,
    write_sealed,
    write_tensors,
    write_text,
    write_together,
)
from aphq.errors import RunError


def test_the_folder_is_made_and_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_json(path, {"x": [1, 2]})
    assert json.loads(path.read_text()) == {"x": [1, 2]}
    write_text(path, "später")
    assert path.read_text(encoding="utf-8") == "später"
    assert os.listdir(path.parent) == ["b.json"]


@pytest.mark.parametrize("problem", [ValueError("bug"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_a_failing_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path, problem: BaseException) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("half of the n")
        raise problem

    with pytest.raises((type(problem), RunError)):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
        RuntimeError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)"),  # as libraries wrap it
    ],
)
def test_a_full_or_closed_disk_is_a_run_error_that_names_the_file(tmp_path: Path, problem: Exception) -> None:
    def write(_: Path) -> None:
        raise problem

    with pytest.raises(RunError, match=r"cannot write .*model.safetensors: .*what was saved before is intact"):
        write_atomically(tmp_path / "model.safetensors", write)
    assert is_disk_problem(problem)


def test_other_errors_are_not_blamed_on_the_disk(tmp_path: Path) -> None:
    assert not is_disk_problem(ValueError("shapes differ"))
    with pytest.raises(TypeError):
        write_json(tmp_path / "file", {"x": object()})
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_a_run_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        write_text(tmp_path / "file" / "below", "x")


def test_tensors_of_any_layout_come_back(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "transposed": base.T,
        "shared": base[1:],
        "whole": base,
        "codes": torch.tensor([1, 2], dtype=torch.uint8),
    }
    path = tmp_path / "t.safetensors"
    write_tensors(path, {**tensors, "parameter": torch.nn.Parameter(base)}, {"note": "x"})
    found = load_file(path)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
    with safe_open(path, "pt") as handle:
        assert handle.metadata() == {"note": "x"}


def test_files_that_belong_together_come_together(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_together({first: lambda p: p.write_text("1"), second: lambda p: p.write_text("2")})

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(RunError, match=r"cannot write .*second"):
        write_together({first: lambda p: p.write_text("new"), second: full})
    assert (first.read_text(), second.read_text()) == ("1", "2")
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


def test_sealed_tensors_come_back_and_a_flipped_bit_does_not_pass(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3), "c": torch.empty(0)}
    write_sealed(path, tensors)
    found = read_sealed(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(bytes(content))
    with pytest.raises(UnreadableError, match="do not have the hash"):
        read_sealed(path)
    write_tensors(path, tensors)
    with pytest.raises(UnreadableError, match="do not have the hash"):
        read_sealed(path)
    path.write_bytes(b"garbage")
    with pytest.raises(UnreadableError):
        read_sealed(path)


@pytest.mark.parametrize("change", [{"a": torch.zeros(3, 2)}, {"a": torch.zeros(6).int()}, {"b": torch.zeros(6)}])
def test_the_seal_covers_names_shapes_and_types(change: dict[str, torch.Tensor]) -> None:
    assert seal_of({"a": torch.zeros(6)}) != seal_of(change)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_json_that_cannot_be_read_has_one_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UnreadableError):
        read_json(tmp_path / "x.json")
    with pytest.raises(UnreadableError, match="No such file"):
        read_json(tmp_path / "nowhere.json")
