"""A run that is stopped, in whatever way and at whatever moment, ends as if nothing had happened."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aphq
from aphq.engine import folder as folders
from aphq.engine.folder import RunFolder
from aphq.errors import RunError
from aphq.recipe import Recipe

from .runs import forked, pixels, sha256, short

Build = Callable[..., nn.Module]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
RESULT = "model.safetensors"


def run(model: nn.Module, out: Path | None, recipe: Recipe | None = None, **options: Any) -> aphq.Run:
    return aphq.quantize(model, recipe or short(), pixels(), out=out, device="cpu", **options)


def killed(work: Callable[[], object]) -> int:
    """Run `work` in a process of its own; the signal that ended it, 0 if it came to its end."""
    child = forked(work)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the run failed by itself"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def die_at(monkeypatch: pytest.MonkeyPatch, stage: str, unit: str, *, after_writing: bool) -> None:
    """SIGKILL when the checkpoint of `unit` is about to be written, or has just been."""
    save = RunFolder.save

    def save_and_die(self: RunFolder, of_stage: str, of_unit: str, tensors: Any) -> None:
        here = (of_stage, of_unit) == (stage, unit)
        if here and not after_writing:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, of_stage, of_unit, tensors)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(RunFolder, "save", save_and_die)


@pytest.fixture(scope="module")
def uninterrupted(vit: Build, swin: Build, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The hash of the artifact of a run that nobody stopped."""
    found = {}
    for name, build in (("vit", vit), ("swin", swin)):
        out = tmp_path_factory.mktemp(name) / "run"
        run(build(), out)
        found[name] = sha256(out / RESULT)
    return found


@pytest.mark.parametrize(
    ("stage", "unit", "after_writing"),
    [
        ("importance", "fisher-4-20", False),
        ("mlp_reconstruction", "blocks.0", True),
        ("layernorm_reparameterisation", "blocks.0", True),
        ("scale_search", "patch_embed", True),
        ("scale_search", "blocks.1", False),
        ("importance", "fisher-4-20", True),
        ("block_reconstruction", "blocks.0", True),
        ("block_reconstruction", "head", False),
        ("block_reconstruction", "head", True),
    ],
)
def test_a_killed_run_ends_bit_by_bit_as_an_uninterrupted_one(
    tiny_vit: nn.Module,
    tmp_path: Path,
    uninterrupted: dict[str, str],
    stage: str,
    unit: str,
    after_writing: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, stage, unit, after_writing=after_writing)
        assert killed(lambda: run(tiny_vit, tmp_path / "run")) == signal.SIGKILL
    assert not (tmp_path / "run" / "config.json").exists()
    again = run(tiny_vit, tmp_path / "run")
    assert again.resumed
    assert sha256(tmp_path / "run" / RESULT) == uninterrupted["vit"]


@pytest.mark.parametrize(
    ("stage", "unit"),
    [("layernorm_reparameterisation", "layers.1.downsample"), ("block_reconstruction", "layers.1.downsample")],
)
def test_a_swin_gets_its_new_biases_back(
    tiny_swin: nn.Module, tmp_path: Path, uninterrupted: dict[str, str], stage: str, unit: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, stage, unit, after_writing=True)
        assert killed(lambda: run(tiny_swin, tmp_path / "run")) == signal.SIGKILL
    run(tiny_swin, tmp_path / "run")
    assert sha256(tmp_path / "run" / RESULT) == uninterrupted["swin"]


@pytest.mark.parametrize(
    ("stage", "unit"), [("block_reconstruction", "blocks.0"), ("joint_tuning", "blocks.0"), ("joint_tuning", "head")]
)
def test_a_run_on_a_turned_model_and_fresh_views_goes_on(
    stage: str, unit: str, tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = {"block_reconstruction": 2, "mlp_reconstruction": 3}
    none = {f"{stage}__views__copies": 0 for stage in fresh}
    recipe = short(effort="best", **none, **{f"{stage}__views__every": every for stage, every in fresh.items()})
    run(tiny_vit, tmp_path / "whole", recipe)
    with monkeypatch.context() as patch:
        die_at(patch, stage, unit, after_writing=True)
        assert killed(lambda: run(tiny_vit, tmp_path / "stopped", recipe)) == signal.SIGKILL
    run(tiny_vit, tmp_path / "stopped", recipe)
    assert sha256(tmp_path / "stopped" / RESULT) == sha256(tmp_path / "whole" / RESULT)


def test_killed_again_and_again(tiny_vit: nn.Module, tmp_path: Path, uninterrupted: dict[str, str]) -> None:
    """Every life finishes exactly one more unit."""
    save = RunFolder.save

    def save_once(self: RunFolder, stage: str, unit: str, tensors: Any) -> None:
        save(self, stage, unit, tensors)
        os.kill(os.getpid(), signal.SIGKILL)

    lives = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save", save_once)
        while killed(lambda: run(tiny_vit, tmp_path / "run")):
            lives += 1
            assert lives <= 13, "a run that is started again must get further"
    assert lives == 13  # the importances, 2 MLPs, 2 pairs of norms, 4 units searched, 4 reconstructed
    assert sha256(tmp_path / "run" / RESULT) == uninterrupted["vit"]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "result.json"])
def test_killed_while_the_result_is_written(
    tiny_vit: nn.Module, tmp_path: Path, uninterrupted: dict[str, str], file: str
) -> None:
    replace = os.replace

    def die(source: Any, target: Any) -> None:
        if Path(target).name == file:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", die)
        assert killed(lambda: run(tiny_vit, tmp_path / "run")) == signal.SIGKILL
    run(tiny_vit, tmp_path / "run")
    assert sha256(tmp_path / "run" / RESULT) == uninterrupted["vit"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["sizes"]["artifact"] > 0


def test_the_same_seed_gives_the_same_file_and_another_does_not(
    tiny_vit: nn.Module, tmp_path: Path, uninterrupted: dict[str, str]
) -> None:
    torch.manual_seed(99)  # what the caller did with the default generator is of no account
    run(tiny_vit, tmp_path / "same")
    assert sha256(tmp_path / "same" / RESULT) == uninterrupted["vit"]
    run(tiny_vit, tmp_path / "other", short(seed=1))
    assert sha256(tmp_path / "other" / RESULT) != uninterrupted["vit"]


def test_the_callers_random_numbers_are_left_alone(tiny_vit: nn.Module) -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    run(tiny_vit, None)
    assert torch.equal(torch.rand(4), expected)


def test_without_memory_everything_goes_to_disk_with_the_same_result(
    tiny_vit: nn.Module, tmp_path: Path, uninterrupted: dict[str, str]
) -> None:
    run(tiny_vit, tmp_path / "run", host_memory_gb=0)
    assert sha256(tmp_path / "run" / RESULT) == uninterrupted["vit"]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    cached = [event["cached"] for event in events if event["event"] == "stage_finished"]
    assert all(set(tiers) == {"disk"} for tiers in cached)
    assert not list((tmp_path / "run").glob(".activations*")), "nothing is left behind"


def test_a_run_in_memory_gives_the_same_model(tiny_vit: nn.Module, tmp_path: Path) -> None:
    kept, memory = run(tiny_vit, tmp_path / "run"), run(tiny_vit, None)
    assert memory.path is None
    assert memory.sizes is None
    left, right = kept.model.state_dict(), memory.model.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_finished_run_is_not_done_again(tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tiny_vit, tmp_path / "run")
    before = sha256(tmp_path / "run" / RESULT)
    assert not (tmp_path / "run" / "checkpoints").exists(), "the artifact holds all they held"
    monkeypatch.setattr("aphq.api._run_stages", lambda work: pytest.fail("the work was done again"))
    again = run(tiny_vit, tmp_path / "run")
    assert again.resumed
    assert sha256(tmp_path / "run" / RESULT) == before
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again.model(x), first.model(x))


def test_a_run_with_other_settings_is_refused_by_the_name_of_the_field(tiny_vit: nn.Module, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(tiny_vit, out)
    before = sha256(out / RESULT)
    with pytest.raises(RunError, match=r"recipe.weights.bits: 4 -> 3"):
        run(tiny_vit, out, short(weights__bits=3))
    with pytest.raises(RunError, match=r"changed: images: "):
        aphq.quantize(tiny_vit, short(), pixels(seed=1), out=out)
    with torch.no_grad():
        tiny_vit.get_parameter("head.bias").add_(1)
    with pytest.raises(RunError, match=r"changed: model: "):
        run(tiny_vit, out)
    assert sha256(out / RESULT) == before, "and what is there stays"


def test_a_damaged_checkpoint_is_named(tiny_vit: nn.Module, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, "scale_search", "blocks.0", after_writing=True)
        killed(lambda: run(tiny_vit, tmp_path / "run"))
    checkpoint = tmp_path / "run" / "checkpoints" / "scale_search" / "blocks.0.safetensors"
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match=r"blocks.0.safetensors is damaged"):
        run(tiny_vit, tmp_path / "run")


def test_two_runs_at_once_in_one_folder_are_refused(tiny_vit: nn.Module, tmp_path: Path) -> None:
    holder = folders.RunFolder(tmp_path / "run")
    try:
        with pytest.raises(RunError, match="another process is working in"):
            run(tiny_vit, tmp_path / "run")
    finally:
        holder.close()


def test_a_failed_run_lets_go_of_its_folder(
    tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aphq.api._run_stages", lambda work: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tiny_vit, tmp_path / "run")
    monkeypatch.undo()
    assert run(tiny_vit, tmp_path / "run").resumed
