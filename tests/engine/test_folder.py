import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import aphq
from aphq.engine.folder import RunFolder
from aphq.errors import RunError
from aphq.presets import preset
from aphq.recipe import Recipe


def identity(recipe: Recipe | None = None, **changes: Any) -> dict[str, Any]:
    recipe = recipe or preset("w4a4")
    return {"recipe": recipe.to_dict(), "model": "abc", "images": "def", "aphq": "1.0", **changes}


@contextmanager
def folder(path: Path | None) -> Iterator[RunFolder]:
    held = RunFolder(path)
    try:
        yield held
    finally:
        held.close()


def test_a_new_folder_is_claimed_and_the_same_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    with folder(path) as run:
        assert run.claim(identity()) is False
    assert Recipe.load(path / "recipe.yaml") == preset("w4a4")
    with folder(path) as run:
        assert run.claim(identity()) is True


def test_another_version_of_the_program_may_go_on(tmp_path: Path) -> None:
    with folder(tmp_path) as run:
        run.claim(identity())
        assert run.claim(identity(aphq="2.0")) is True


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (identity(preset("w4a4").with_value("weights.bits", 3)), "recipe.weights.bits: 4 -> 3"),
        (identity(preset("w4a4").with_value("scale_search.rounds", 2)), r"recipe.stages\[2\].rounds: 1 -> 2"),
        (identity(preset("w4a4").with_value("overrides.head", None)), "recipe.overrides.head: absent -> None"),
        (identity(model="xyz"), "model: 'abc' -> 'xyz'"),
        (identity(images="xyz"), "images: 'def' -> 'xyz'"),
    ],
)
def test_a_run_with_other_settings_is_refused_and_the_change_named(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with folder(tmp_path) as run:
        run.claim(identity())
        with pytest.raises(RunError, match=f"other settings; changed: {named}"):
            run.claim(change)


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match=r"not empty and holds no run \(thesis.tex"):
        RunFolder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]  # nothing was left behind
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_run_killed_before_it_wrote_its_identity_starts_over(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: half")
    with folder(tmp_path) as run:
        assert run.claim(identity()) is False
    assert (tmp_path / "run.json").exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot use .*file as a run folder"):
        RunFolder(tmp_path / "file")


@pytest.mark.parametrize("text", ["{", "", "[]", "null", "\x00"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with folder(tmp_path) as run, pytest.raises(RunError, match=r"run.json is damaged"):
        run.claim(identity())


HOLD = """
import sys
from pathlib import Path
from aphq.engine.folder import RunFolder
held = RunFolder(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no locks on Windows")
def test_two_processes_never_share_a_folder(tmp_path: Path) -> None:
    source = str(Path(aphq.__file__).parents[1])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{HOLD}", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="another process is working in"):
            RunFolder(tmp_path)
        other.communicate("\n")
    with folder(tmp_path) as run:
        assert run.claim(identity()) is False


def test_checkpoints_come_back_as_they_were(tmp_path: Path) -> None:
    tensors = {"blocks.0.weight": torch.randn(3, 4), "codes": torch.tensor([1, 2], dtype=torch.uint8)}
    with folder(tmp_path) as run:
        assert run.load("scale_search", "blocks.0") is None
        run.save("scale_search", "blocks.0", tensors)
        found = run.load("scale_search", "blocks.0")
        assert found is not None
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert run.load("block_reconstruction", "blocks.0") is None
        run.drop_checkpoints()
        assert run.load("scale_search", "blocks.0") is None


@pytest.mark.parametrize("content", [b"", b"garbage" * 20])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    with folder(tmp_path) as run:
        run.save("scale_search", "blocks.0", {"x": torch.zeros(3)})
        (tmp_path / "checkpoints" / "scale_search" / "blocks.0.safetensors").write_bytes(content)
        with pytest.raises(RunError, match=r"blocks.0.safetensors is damaged .*remove it to redo"):
            run.load("scale_search", "blocks.0")


def test_events_are_lines_of_json_with_a_time(tmp_path: Path) -> None:
    for kind in ("started", "resumed"):
        with folder(tmp_path) as run:
            run.claim(identity())
            run.event(kind, unit="blocks.0")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(e["event"], e["unit"]) for e in lines] == [("started", "blocks.0"), ("resumed", "blocks.0")]
    assert lines[0]["time"] <= lines[1]["time"]


def test_the_result_is_a_file(tmp_path: Path) -> None:
    with folder(tmp_path) as run:
        run.write_result({"top1": 80.1})
    assert json.loads((tmp_path / "result.json").read_text()) == {"top1": 80.1}


def test_a_run_in_memory_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with folder(None) as run:
        assert run.claim(identity()) is False
        run.event("started")
        run.save("stage", "unit", {"x": torch.zeros(1)})
        assert run.load("stage", "unit") is None
        run.write_result({})
        run.drop_checkpoints()
    assert not list(tmp_path.iterdir())
