"""The commands as a user types them: what they print, what they return, and how they fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from typer.testing import CliRunner, Result

import aphq
from aphq.cli.app import app

from ..conftest import VIT, builder
from ..data.conftest import picture
from ..runs import SHORT, sha256

NAME = "vit_tiny_patch16_224"
SHAPE = ["img_size=32", "patch_size=8", "depth=2", "embed_dim=32", "num_heads=2"]
SOURCE = str(Path(aphq.__file__).parents[1])


def settings(effort: str) -> list[str]:
    skipped = ("steps", "mlp_reconstruction.batch", "block_reconstruction.batch") if effort == "fast" else ()
    settable = {path: value for path, value in SHORT.items() if not path.startswith("joint_tuning.")}
    return [f"--set={path}={value}" for path, value in settable.items() if path not in skipped]


def command(files: Path, out: Path, *extra: str, effort: str = "fast") -> list[str]:
    shape = [f"--model-arg={pair}" for pair in SHAPE]
    where = ["--weights", str(files / "weights.safetensors"), "--data", str(files / "calib"), "--out", str(out)]
    return ["quantize", NAME, *where, "--device=cpu", f"--effort={effort}", *shape, *settings(effort), *extra]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def process(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    command_line = [sys.executable, "-m", "aphq", *arguments]
    return subprocess.Popen(
        command_line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd="/",
        # a shell starts background jobs with Ctrl-C ignored, and what they start inherits that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def refused(result: Result) -> str:
    """The one line that a failure puts on standard error."""
    assert result.exit_code != 0
    assert "Traceback" not in result.stderr
    assert not result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("aphq: ")]
    assert len(lines) == 1, result.stderr
    assert result.stderr.splitlines()[-1] == lines[0], "and it is the last"
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return lines[0]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, calibration images, labelled images."""
    root = tmp_path_factory.mktemp("files")
    model: nn.Module = builder(VisionTransformer, VIT)()
    save_file(model.state_dict(), root / "weights.safetensors")
    (root / "calib").mkdir()
    for i in range(16):
        picture(seed=i).save(root / "calib" / f"{i:02d}.png")
    for i in range(20):
        (root / "val" / f"{i % 10}").mkdir(parents=True, exist_ok=True)
        picture(seed=100 + i).save(root / "val" / f"{i % 10}" / f"{i:02d}.png")
    return root


@pytest.fixture(scope="module")
def finished(files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run folder, and the JSON that `quantize` printed."""
    out = tmp_path_factory.mktemp("runs") / "run"
    result = run(*command(files, out, "--val", str(files / "val"), "--json"))
    assert result.exit_code == 0, result.output
    return out, json.loads(result.stdout)


def test_importing_the_command_line_is_cheap() -> None:
    code = (
        f"import sys; sys.path.insert(0, {SOURCE!r}); import aphq, aphq.cli; "
        "heavy = {'torch', 'timm', 'numpy', 'PIL', 'safetensors'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("quantize",),
        ("eval",),
        ("inspect",),
        ("report",),
        ("analyze",),
        ("demo",),
        ("recipe",),
        ("recipe", "show"),
        ("recipe", "list"),
    ],
)
def test_every_command_explains_itself(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"aphq {aphq.__version__}\n"


def test_recipes_are_listed_and_shown(tmp_path: Path) -> None:
    listed = json.loads(run("recipe", "list", "--json").stdout)
    assert "w4a4" in listed["presets"]
    assert "balanced" in listed["efforts"]
    assert all(name in run("recipe", "list").stdout for name in (*listed["presets"], *listed["efforts"]))
    shown = json.loads(run("recipe", "show", "w3a3", "--json", "--set", "seed=7").stdout)
    assert aphq.Recipe.from_dict(shown) == aphq.preset("w3a3", seed=7)
    file = tmp_path / "mine.yaml"
    file.write_text(run("recipe", "show", "w4a8", "--effort", "fast").stdout)
    assert aphq.Recipe.load(file) == aphq.preset("w4a8", "fast")
    assert json.loads(run("recipe", "show", file, "--json").stdout) == aphq.preset("w4a8", "fast").to_dict()


def test_quantize_from_end_to_end(finished: tuple[Path, dict[str, Any]]) -> None:
    out, printed = finished
    assert printed["path"] == str(out)
    assert printed["recipe"] == "w4a4-fast"
    assert printed["accuracy"]["float"]["images"] == printed["accuracy"]["quantized"]["images"] == 20
    assert 0 <= printed["agreement"] <= 100
    assert printed["sizes"]["artifact"] == (out / "model.safetensors").stat().st_size
    assert set(printed["seconds"]) == {"layernorm_reparameterisation", "scale_search", "error_compensation"}
    assert json.loads((out / "result.json").read_text()) == printed
    assert isinstance(aphq.load(out), nn.Module)


def test_the_text_says_accuracy_size_and_place(files: Path, tmp_path: Path) -> None:
    result = run(*command(files, tmp_path / "run", "--val", str(files / "val"), "--val-limit", "10"))
    assert result.exit_code == 0
    for words in ("w4a4-fast", "top-1", "(10 images)", "times smaller", str(tmp_path / "run")):
        assert words in result.stdout


def test_eval_measures_what_quantize_measured(files: Path, finished: tuple[Path, dict[str, Any]]) -> None:
    out, printed = finished
    found = json.loads(run("eval", out, "--val", files / "val", "--json", "--device=cpu").stdout)
    assert found == {**printed["accuracy"]["quantized"], "skipped": []}
    text = run("eval", out, "--val", files / "val", "--limit", "10", "--device=cpu").stdout
    assert "top-1" in text
    assert "(10 images)" in text


def test_inspect_names_every_layer_with_its_range(finished: tuple[Path, dict[str, Any]]) -> None:
    out, _ = finished
    found = json.loads(run("inspect", out, "--json").stdout)
    rows = {row["name"]: row for row in found["layers"]}
    assert rows["blocks.0.attn.qkv"]["weight_bits"] == 4
    assert rows["blocks.0.attn.qkv"]["input_granularity"] == "tensor"
    assert rows["blocks.0.attn.pv"]["ranges"].keys() == {"left", "right"}
    assert rows["patch_embed.proj"]["input_bits"] == 8
    for row in rows.values():
        for lower, upper in row["ranges"].values():
            assert lower <= 0 <= upper
            assert lower < upper
    text = run("inspect", out).stdout
    assert all(name in text for name in rows)
    assert "11 of 11 layers and products" in text or f"{len(rows)} of {len(rows)} layers and products" in text


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_missing_images_are_named(files: Path, tmp_path: Path) -> None:
    line = refused(run(*command(files, tmp_path / "run", "--data", str(tmp_path / "nowhere"))))
    assert "nowhere" in line
    line = refused(run(*command(files, tmp_path / "run", "--val", str(tmp_path / "novalidation"))))
    assert "novalidation" in line


def test_too_many_corrupt_images_are_refused(files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "calib"
    folder.mkdir()
    for i in range(16):
        (folder / f"{i}.png").write_bytes(b"this is no picture")
    Image.new("RGB", (40, 40)).save(folder / "good.png")
    assert "cannot be decoded" in refused(run(*command(files, tmp_path / "run", "--data", str(folder))))


def test_a_model_of_another_kind_is_refused(files: Path, tmp_path: Path) -> None:
    import timm

    save_file(timm.create_model("resnet18").state_dict(), tmp_path / "resnet.safetensors")
    arguments = ["--weights", tmp_path / "resnet.safetensors", "--data", files / "calib", "--out", tmp_path / "run"]
    assert "cannot quantize a ResNet" in refused(run("quantize", "resnet18", *arguments))


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--bits", "w9a9"], "there is no preset 'w9a9'"),
        (["--effort", "hard"], "there is no effort 'hard'"),
        (["--set", "steps"], "expected NAME=VALUE, got 'steps'"),
        (["--set", "scale_search.candidate=3"], "did you mean"),
        (["--set", "scale_search.candidates=many"], "scale_search.candidates"),
        (["--set", "overrides.blocks.9.*=null"], "matches no layer"),
        (["--without", "scale"], "there is no stage 'scale'"),
        (["--without", "scale_search"], "scale_search"),
        (["--model-arg", "depth=3"], "does not fit this model (12 missing: blocks.2"),
        (["--model-arg", "colour=3"], "timm cannot create"),
        (["--num-classes", "7"], "does not fit this model"),
        (["--weights", "nowhere.pth"], "there is no weights file nowhere.pth"),
        (["--device", "quantum"], "cannot use the device 'quantum'"),
    ],
)
def test_wrong_options_are_refused_by_name(files: Path, tmp_path: Path, extra: list[str], says: str) -> None:
    effort = ["--effort=fast"] if "--effort" not in extra else []
    result = run(*[a for a in command(files, tmp_path / "run", *extra) if a != "--effort=fast" or effort])
    line = refused(result)
    assert says in line
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *(("eval", "run", option) for option in ("--batch=0", "--limit=-5", "--limit=0")),
        *(("bench", "run", option) for option in ("--threads=0", "--batch=0")),
        ("export", "run", "--images=0"),
        *(("analyze", NAME, "--data=x", option) for option in ("--images=0", "--num-classes=-1")),
        *(("quantize", NAME, "--data=x", "--out=y", o) for o in ("--images=0", "--val-limit=0", "--short-side=0")),
    ],
)
def test_counts_are_at_least_one(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert arguments[-1].partition("=")[0] in result.stderr


def test_the_short_form_of_out_is_there_wherever_it_is() -> None:
    from typer.main import get_command

    commands: Any = get_command(app)
    outs = [p for c in commands.commands.values() for p in c.params if "--out" in p.opts]
    assert len(outs) >= 6
    assert all("-o" in parameter.opts for parameter in outs)


def test_a_rank_without_company_does_not_silence_the_command(
    finished: tuple[Path, dict[str, Any]], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run(*command(files, finished[0])).stdout


def test_options_of_eval_that_do_not_apply_are_refused(
    files: Path, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    kept = tmp_path / "found.json"
    line = refused(run("eval", finished[0], "--val", files / "val", "--detections", kept))
    assert "--detections is for detectors" in line
    assert not kept.exists()
    line = refused(run("eval", tmp_path / "model.pt2", "--val", files / "val"))
    assert "torch.export.load" in line
    assert ".onnx and .xml" in line
    assert "eval takes run folders" in refused(run("eval", files / "weights.safetensors", "--val", files / "val"))


def test_an_unknown_model_and_an_unknown_recipe_key(files: Path, tmp_path: Path) -> None:
    line = refused(run("quantize", "vit_tini_patch16_224", "--data", files / "calib", "--out", tmp_path / "run"))
    assert "did you mean" in line
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("weights: {bitz: 4}\n")
    line = refused(run("recipe", "show", recipe))
    assert "bitz" in line
    assert "did you mean 'bits'" in line
    assert "nowhere.yaml" in refused(run("recipe", "show", tmp_path / "nowhere.yaml"))


def test_a_run_that_is_not_there_or_not_finished(files: Path, tmp_path: Path) -> None:
    for arguments in (["inspect", tmp_path / "no"], ["eval", tmp_path / "no", "--val", files / "val"]):
        assert "there is no folder" in refused(run(*arguments))
    (tmp_path / "run.json").write_text("{}")
    assert "the run is not finished" in refused(run("inspect", tmp_path))


def test_a_folder_in_use_for_something_else_is_left_alone(files: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    assert "not empty and holds no run" in refused(run(*command(files, tmp_path)))
    assert [file.name for file in tmp_path.iterdir() if not file.name.startswith(".")] == ["thesis.tex"]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to another process")
def test_an_interrupted_run_says_how_to_go_on_and_goes_on(files: Path, tmp_path: Path) -> None:
    """A real process, a real Ctrl-C during the last stage, and the same command again."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    recipe = [*command(files, out, effort="balanced"), "--set", "block_reconstruction.steps=100", "--json"]
    with process(*recipe) as running:
        deadline = time.monotonic() + 120
        while not (out / "checkpoints" / "block_reconstruction" / "patch_embed.safetensors").exists():
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        running.send_signal(signal.SIGINT)
        printed, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert not printed
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == (
        f"aphq: interrupted; finished units are kept in {out}: repeat the same command to go on"
    )
    assert run(*recipe).exit_code == 0
    assert run(*[str(whole) if a == str(out) else a for a in recipe]).exit_code == 0
    assert sha256(out / "model.safetensors") == sha256(whole / "model.safetensors")
