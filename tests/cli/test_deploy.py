"""`aphq export`, `eval` of an exported file, and `bench`, as a user types them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .test_app import command, files, finished, refused, run

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
__all__ = ["files", "finished"]
EXAMPLE = Path(__file__).parents[2] / "examples" / "classify_folder.py"


@pytest.fixture(scope="module")
def exported(finished: tuple[Path, dict[str, Any]]) -> Path:
    result = run("export", finished[0], "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    path = Path(printed["path"])
    assert path == finished[0] / "model.onnx"
    assert printed["bytes"] == path.stat().st_size == printed["files"]["model.onnx"]
    assert printed["parity"]["reference"]["passed"]
    return path


def test_an_exported_file_evaluates_like_the_run(exported: Path, files: Path) -> None:
    where = ("--val", files / "val", "--json")
    simulated = json.loads(run("eval", exported.parent, *where, "--device=cpu").stdout)
    for source, runtime in ((exported, "onnxruntime"), (exported, "openvino"), (exported.parent, "int8")):
        if runtime == "openvino":
            pytest.importorskip("openvino")
        found = json.loads(run("eval", source, *where, "--runtime", runtime).stdout)
        assert found["images"] == simulated["images"] == 20
        assert abs(found["top1"] - simulated["top1"]) <= 5  # one image of twenty


def test_exports_as_text_and_to_elsewhere(exported: Path, tmp_path: Path) -> None:
    result = run("export", exported.parent, "--to", "torch", "--out", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "mine.pt2").is_file()
    assert "top-1 agreement" in result.stdout
    options = ("--batch", "any", "--for", "onnxruntime", "--out", tmp_path / "a")
    assert run("export", exported.parent, *options).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--to", "tflite"), "cannot export to 'tflite'"),
        (("--for", "cuda"), "cannot tune for 'cuda'"),
        (("--batch", "many"), "a number of images or `any`"),
        (("--batch", "0"), "a number of images or `any`"),
        (("--data", "nowhere"), "no such file or folder"),
    ],
)
def test_wrong_words_are_explained(exported: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(run("export", exported.parent, *arguments))


def test_wrong_runtimes_are_explained(exported: Path, files: Path) -> None:
    assert "no runtime 'int8' for exported" in refused(
        run("eval", exported, "--val", files / "val", "--runtime", "int8")
    )
    assert "runs on the CPU: --device cuda" in refused(
        run("eval", exported, "--val", files / "val", "--device", "cuda")
    )
    assert "no runtime 'cuda'" in refused(run("bench", exported.parent, "--runtime", "cuda"))


def test_bench_prints_a_table_or_json(exported: Path) -> None:
    options = ("--runtime", "onnxruntime", "--runtime", "pytorch", "--float", "--seconds", "0.2", "--no-memory")
    result = run("bench", exported.parent, *options, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["runtime"], row["model"]) for row in rows] == [
        ("onnxruntime", "float32"),
        ("pytorch", "float32"),
        ("onnxruntime", "w4a4-fast"),
        ("pytorch", "w4a4-fast"),
    ]
    for row in rows:
        assert 0 < row["p10"] <= row["median"] <= row["p90"]
        assert row["images_per_second"] == pytest.approx(1000 / row["median"], rel=0.01)
        assert row["speedup"] > 0
    assert rows[2]["bytes"] < rows[0]["bytes"]
    text = run("bench", exported.parent, "--runtime", "pytorch", "--seconds", "0.1", "--no-memory").stdout
    assert "median" in text
    assert "w4a4-fast" in text


def test_the_example_classifies_a_folder(exported: Path, files: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 40
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(exported), str(files / "calib")], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 16
    assert all("class" in line for line in lines)


def test_quantize_then_export_in_one_script(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(*command(files, out, "--bits=w8a8")).exit_code == 0
    result = run("export", out, "--to", "onnx", "--data", files / "calib", "--images", "4")
    assert result.exit_code == 0, result.output
    assert "on 4 images" in result.stdout
