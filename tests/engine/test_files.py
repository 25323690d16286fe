import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from aphq.engine.files import is_disk_problem, write_atomically, write_json, write_tensors, write_text
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
