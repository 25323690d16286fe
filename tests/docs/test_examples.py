"""Each example runs on tiny input, and says with --help what it wants."""

import json
from pathlib import Path

import pytest
import torch

import aphq
from aphq.models.architecture import architecture_named

from .blocks import ROOT
from .world import run_script

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e.name != "classify_folder.py"], ids=lambda e: e.name)
def test_help_is_answered(example: Path, place: Path) -> None:
    text = run_script([str(example), "--help"])
    assert f"python examples/{example.name}" in text, "the usage shows a whole command"


def test_compare_recipes_takes_files_and_does_not_repeat_itself(place: Path) -> None:
    (place / "own.yaml").write_text(aphq.preset("w6a6", "fast").to_yaml())
    words = ["examples/compare_recipes.py", "deit_tiny_patch16_224", "calib", "--out", "runs", "--val", "val"]
    text = run_script([*words, "--recipe", "w8a8:fast", "--recipe", "own.yaml"])
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["w8a8-fast", "own"]
    assert (place / "runs" / "comparison.html").stat().st_size > 10_000
    run_script([*words, "--recipe", "own.yaml"])
    events = [json.loads(line)["event"] for line in (place / "runs" / "own" / "events.jsonl").read_text().splitlines()]
    assert "resumed" in events
    assert "stage_started" not in events[events.index("resumed") :], "a finished run is not done again"


def test_read_report_gives_json(place: Path) -> None:
    found = json.loads(run_script(["examples/read_report.py", "finished", "--json", "--worst", "2"]))
    assert found["recipe"] == "w8a8-fast"
    assert len(found["worst_layers_db"]) == 2
    assert found["accuracy"].keys() == {"float", "quantized"}
    assert found["not_quantized"] == {}


def test_the_custom_model_is_quantized_saved_and_loaded(place: Path) -> None:
    text = run_script(["examples/custom_model.py", "--out", "runs/custom", "--data", "calib"])
    assert "26 of 26 layers and products quantized" in text
    assert "equal to the model in memory: True" in text
    again = aphq.load("runs/custom")
    assert {row.weight_bits for row in aphq.coverage(again) if row.kind != "product"} == {8}
    assert {row.input_bits for row in aphq.coverage(again)} == {8}
    assert torch.isfinite(again(torch.randn(2, 3, 32, 32))).all()


def test_the_adapter_of_the_custom_model_is_short_and_whole(place: Path) -> None:
    run_script(["examples/custom_model.py", "--help"])
    lines = (ROOT / "examples" / "custom_model.py").read_text().split("[start:adapter]")[1].split("[end:adapter]")[0]
    assert len([line for line in lines.splitlines() if line.strip()]) <= 42, "about forty lines, as the page says"
    assert architecture_named("example.MyViT").task == "classification"
