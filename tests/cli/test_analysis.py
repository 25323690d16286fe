import json
from pathlib import Path

import pytest

from aphq.analysis import Analysis
from aphq.analysis.findings import Distances, Proposal
from aphq.cli.analysis import write_proposal
from aphq.presets import preset

from .test_app import NAME, SHAPE, files, refused, run

__all__ = ["files"]


def command(files: Path, *extra: str) -> list[str]:
    shape = [f"--model-arg={pair}" for pair in SHAPE]
    where = ["--weights", str(files / "weights.safetensors"), "--data", str(files / "calib")]
    return ["analyze", NAME, *where, "--device=cpu", "--images=6", *shape, *extra]


def test_the_ranking_is_printed(files: Path) -> None:
    result = run(*command(files))
    assert result.exit_code == 0, result.output
    for words in ("w4a4 on 6 held-out images", "KL alone", "worth more bits: ", "blocks.1.mlp.fc2"):
        assert words in result.stdout


def test_a_recipe_is_proposed_and_written(files: Path, tmp_path: Path) -> None:
    target = tmp_path / "mixed.yaml"
    result = run(*command(files, "--target-bits=3.5", "--effort=fast", "--json", "--out", str(target)))
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["recipe_file"] == str(target)
    assert printed["proposal"]["mean_bits"]["weights"] <= 3.5 + 1e-6
    shown = run("recipe", "show", target, "--json")
    assert json.loads(shown.stdout) == printed["proposal"]["recipe"]


@pytest.mark.parametrize(
    ("extra", "says"), [("--target-bits=12", "between 2 and 8"), ("--bits=w44", "there is no preset 'w44'")]
)
def test_nonsense_is_refused(files: Path, extra: str, says: str) -> None:
    assert says in refused(run(*command(files, extra)))


@pytest.mark.parametrize("model", ["somebody/vit", "/models/vit", "./vit/", "vit"])
def test_a_proposal_goes_into_the_working_directory(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = Analysis("w4a4", 1, Distances(0, 100), [], Proposal(preset("w4a4", "fast"), 4, 4))
    assert write_proposal(found, None, model) == Path("vit-w4a4-fast.yaml")
    assert [file.name for file in tmp_path.iterdir()] == ["vit-w4a4-fast.yaml"]
