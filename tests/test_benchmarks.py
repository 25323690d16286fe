"""The benchmarks' runs are recipes that exist: those that scripts start, and those that records name."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aphq
from aphq.errors import RecipeError

from .runs import short, workspace

ROOT = Path(__file__).parents[1]
RECORDS = dict.fromkeys(("best", "balanced", "paper", "core", "search", "sites", "unit_alone"), "run")
RECORDS |= {"explore": "base", "classes_seen": "recipe"}


@pytest.fixture
def recipe_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The recipe of a run as the benchmarks write it."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    made = importlib.import_module("accuracy").recipe_of
    return lambda text: made(text, 0)


def started_by(script: str, folder: Path, *arguments: str) -> Iterator[str]:
    """The runs that a shell script hands to the benchmarks, which do not run."""
    said = folder / "said"
    python = folder / "python3"
    python.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >> {said}\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run([ROOT / "benchmarks" / script, *arguments], check=True, cwd=ROOT, env=environment, timeout=60)
    words = said.read_text().splitlines()
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--base":
            yield following
        elif word.startswith("--run="):
            yield word.removeprefix("--run=")


@pytest.mark.parametrize(
    ("script", "arguments", "runs"),
    [
        ("core.sh", ("data", "out"), 24),
        ("best.sh", ("data", "out"), 17),
        ("best_ablation.sh", ("deit_tiny_patch16_224", "data", "out"), 15),
    ],
)
def test_scripts_start_runs_that_exist(
    script: str, arguments: tuple[str, ...], runs: int, recipe_of: Callable[[str], Any], tmp_path: Path
) -> None:
    started = list(started_by(script, tmp_path, *arguments))
    assert len(started) == runs
    for text in started:
        recipe_of(text)


def test_an_ablation_leaves_out_one_ingredient_after_the_other(recipe_of: Callable[[str], Any], tmp_path: Path) -> None:
    whole, *others = map(recipe_of, started_by("best_ablation.sh", tmp_path, "model", "data", "out"))
    removed, added = others[:7], others[7:]
    for recipe in removed:
        assert recipe.stages != whole.stages
    kinds = [[stage.NAME for stage in recipe.stages] for recipe in added]
    assert [len(kind) for kind in kinds] == sorted(len(kind) for kind in kinds)
    assert "rotation" not in kinds[0]
    assert "rotation" in kinds[-1]


def test_a_run_that_was_measured_is_left_out_however_it_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    accuracy = importlib.import_module("accuracy")
    out = tmp_path / "out.jsonl"
    rows = [("vit", "w3a3:best:joint_tuning.steps=4000", 1), ("vit", "w3a3:best:gone=1", 2), ("deit", "w3a3:best", 2)]
    out.write_text("".join(json.dumps({"model": m, "run": run, "seed": seed}) + "\n" for m, run, seed in rows))
    started: list[list[str]] = []
    monkeypatch.setattr(accuracy, "side_by_side", lambda script, jobs, at_once: started.extend(jobs) or 0)
    arguments = ["--model", "vit", "--weights", "w", "--calib", "c", "--val", "v", "--out", str(out)]
    arguments += ["--run", "w3a3:best", "--run", "w4a4:best", "--seed", "1", "--seed", "2"]
    for more, expected in (([], 4), (["--skip-done"], 3)):
        started.clear()
        monkeypatch.setattr("sys.argv", ["accuracy.py", *arguments, *more])
        with pytest.raises(SystemExit, match="0"):
            accuracy.main()
        assert len(started) == expected
        assert (["--run", "w3a3:best", "--seed", "1"] in [job[-4:] for job in started]) == (not more)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_names_a_run_that_exists_or_says_why_not(name: str, recipe_of: Callable[[str], Any]) -> None:
    for line in (ROOT / "results" / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        try:
            recipe_of(row[RECORDS[name]].partition("@")[0])
        except RecipeError:
            assert row.get("note"), row[RECORDS[name]]


def test_images_that_are_held_out_leave_their_class_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    explore = importlib.import_module("explore")
    classes = [3, 1, 3, 2, 1, 3, 4]
    order = explore.held_last(classes, 3)
    assert sorted(order) == list(range(len(classes)))
    assert {classes[i] for i in order[:-3]} == set(classes)
    with pytest.raises(SystemExit, match="--hold 3"):
        explore.held_last(classes, 4)


def test_every_quantizer_is_measured_alone_and_switched_on_again(
    tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    sites = importlib.import_module("sites")
    model, images = tiny_vit, torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    quantized = aphq.quantize(model, "w3a3", images, effort="fast", device="cpu").model
    before = sites.logits(quantized, [images])
    found = sites.each_quantizer(model, quantized, [images])
    assert found["sites"].keys() == sites.activation_quantizers(quantized).keys()
    assert {"head.input", "blocks.0.attn.qk.left", "blocks.0.mlp.fc2.input"} < found["sites"].keys()
    assert found["all"] == sites.divergence(before, sites.logits(model, [images])) > found["weights"] > 0
    assert torch.equal(sites.logits(quantized, [images]), before)
    # alone a quantizer costs what it costs with all others off
    for name, quantizer in sites.activation_quantizers(quantized).items():
        quantizer.enabled = name == "head.input"
    alone = sites.logits(quantized, [images])
    sites.activation_quantizers(quantized)["head.input"].enabled = False
    assert found["sites"]["head.input"] == sites.divergence(alone, sites.logits(quantized, [images])) > 0


def test_a_unit_alone_is_all_that_is_quantized_and_learned(
    tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    alone = importlib.import_module("unit_alone")
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    # biases and norms learn as well, which those of units in float could
    recipe = alone.recipe_of("w3a4:balanced:steps=2:block_reconstruction.float_lr=0.01@mlp.fc1", "blocks.1", 0)
    with alone.only("blocks.1"):
        quantized = aphq.quantize(tiny_vit, recipe, images, device="cpu").model
    sites = {name: module.input_quantizer for name, module in quantized.named_modules() if hasattr(module, "rounding")}
    bits = {name: quantizer.bits for name, quantizer in sites.items() if quantizer is not None}
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    assert bits == {f"blocks.1.{layer}": 8 if layer == "mlp.fc1" else 4 for layer in layers}
    assert [type(block.mlp.act) for block in quantized.blocks] == [nn.GELU, nn.ReLU]
    for name in ("blocks.0.mlp.fc2.weight", "blocks.0.attn.proj.bias", "head.bias"):
        assert torch.equal(quantized.state_dict()[name], tiny_vit.state_dict()[name]), name
    assert not torch.equal(quantized.blocks[1].attn.proj.bias, tiny_vit.blocks[1].attn.proj.bias)


@pytest.mark.parametrize(
    ("wide", "weights", "inputs"), [("", 3, 4), ("@weights", 8, 4), ("@inputs", 3, 8), ("@mlp.fc2", 3, 8)]
)
def test_what_stands_behind_the_at_has_eight_bits(
    wide: str, weights: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    alone = importlib.import_module("unit_alone")
    recipe = alone.recipe_of(f"w3a4:balanced{wide}", "blocks.1", 0)
    assert recipe.bits_for("blocks.1.mlp.fc2") == (weights, inputs)
    assert recipe.bits_for("blocks.0.mlp.fc2") == (None, None)
    with pytest.raises(SystemExit, match="-joint_tuning"):
        alone.recipe_of(f"w3a3:best{wide}", "blocks.1", 0)


def test_compensation_is_measured_against_the_nearest_codes(
    tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    compensation = importlib.import_module("compensation")
    images = workspace(tiny_vit, short("w4a8", "fast")).images
    student = compensation.searched(tiny_vit, short("w4a8", "fast"), images, torch.device("cpu"))
    batches = [images.batch(slice(None))]
    torch.testing.assert_close(student(batches[0]), tiny_vit(batches[0]), rtol=1e-3, atol=1e-3)
    seen = compensation.inputs_of(student, batches, 10**6)
    assert len(seen["head"]) == len(images)
    found = compensation.summary(student, seen, seen, [0.01, 1e9])
    assert found["0.01"]["mean"] < 0.9
    assert found["1e+09"]["mean"] == pytest.approx(1, abs=0.02), "so much damping leaves the nearest codes"
    assert found["chosen"]["worst"] <= 1.05
