"""What machines and people do to a run: each fault by its name, and what the user gets instead of a traceback."""

import copy
import errno
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import aphq
from aphq.engine.folder import RunFolder
from aphq.errors import AphqError, DataError, ModelError, RunError
from aphq.export import export
from aphq.report import write_report
from aphq.report.run_data import read_run

from .disks import SmallDisk
from .runs import pixels, sha256, short

Build = Callable[..., nn.Module]
RESULT = "model.safetensors"


def run(model: nn.Module, out: Path | None = None, data: Any = None, **options: Any) -> aphq.Run:
    recipe = options.pop("recipe", None) or short()
    return aphq.quantize(model, recipe, pixels() if data is None else data, out=out, device="cpu", **options)


@pytest.fixture(scope="module")
def whole(vit: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to which nothing happened."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(vit(), out)
    return out


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    made = SmallDisk(tmp_path / "disk")
    if not made.mount(64):
        pytest.skip("mounting a small disk is not permitted here")
    yield made
    made.unmount()


def check_whole_files(folder: Path) -> None:
    """Whatever has a final name can be read; temporaries are gone."""
    for file in folder.rglob("*"):
        if file.suffix == ".safetensors":
            load_file(file)
        elif file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix == ".jsonl":
            assert all(json.loads(line) for line in file.read_text().splitlines())
        assert file.suffix != ".tmp"


# -- disks -----------------------------------------------------------------------------------------------------------


def test_disk_full_at_every_stage_of_a_run(tiny_vit: nn.Module, disk: SmallDisk, whole: Path) -> None:
    """The disk grows a little whenever it was full; in the end the artifact is the one of an endless disk."""
    out, full, said = disk.path / "run", set(), []
    for kib in (8, 24, 56, 104, 168, 232, 296, 360, 424, 488, 552, 1024, 4096):
        disk.remount(f"size={kib}k")
        try:
            run(tiny_vit, out)
        except RunError as problem:
            said.append(str(problem))
            saved = {file: sha256(file) for file in out.rglob("*.safetensors")}
            check_whole_files(out)
            full.add(len(saved))
        if (out / "result.json").exists():
            break
    assert len(full) >= 3, "the disk was full at several moments"
    assert all("No space left" in sentence for sentence in said)
    assert sha256(out / RESULT) == sha256(whole / RESULT)


@pytest.mark.parametrize("kib", [1, 12, 30])
def test_a_limit_on_the_size_of_files(tiny_vit: nn.Module, tmp_path: Path, whole: Path, kib: int) -> None:
    """As a quota has it; unlike a small disk, everybody may set this one."""

    def work() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (kib * 1024, resource.RLIM_INFINITY))
        try:
            run(tiny_vit, tmp_path / "run")
        except RunError as problem:
            return str(problem)
        return "finished"

    assert "File too large" in said_by_a_child(work)
    check_whole_files(tmp_path / "run")
    run(tiny_vit, tmp_path / "run")
    assert sha256(tmp_path / "run" / RESULT) == sha256(whole / RESULT)


def said_by_a_child(work: Callable[[], str]) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as handle:
        said = handle.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("to", ["onnx", "openvino", "torch"])
def test_disk_full_during_an_export(whole: Path, disk: SmallDisk, to: str) -> None:
    if to != "torch":
        pytest.importorskip(to)
    suffix = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2"}[to]
    disk.remount("size=16k")
    (disk.path / f"model{suffix}").write_text("an earlier export")
    with pytest.raises(AphqError, match=r"cannot write .*(No space left|space)"):
        export(whole, to, out=disk.path / f"model{suffix}")
    assert [file.name for file in disk.path.iterdir()] == [f"model{suffix}"]
    assert (disk.path / f"model{suffix}").read_text() == "an earlier export"


def test_disk_full_while_an_event_is_written(disk: SmallDisk) -> None:
    """Half a line would make the whole file unreadable."""
    folder = RunFolder(disk.path / "run")

    def fill() -> None:
        for number in range(10_000):
            folder.event("unit", number=number, note="x" * 77)

    with pytest.raises(RunError, match="No space left"):
        fill()
    folder.close()
    check_whole_files(disk.path / "run")


def test_no_space_for_cached_activations(tiny_vit: nn.Module, disk: SmallDisk) -> None:
    disk.remount("size=400k")
    with pytest.raises(RunError, match=r"cannot cache .*No space left.*fewer calibration images"):
        run(tiny_vit, disk.path / "run", host_memory_gb=0)


def test_read_only_output_folder(tiny_vit: nn.Module, disk: SmallDisk) -> None:
    disk.remount("ro")
    with pytest.raises(RunError, match=r"cannot use .* as a run folder: .*Read-only"):
        run(tiny_vit, disk.path / "run")


def test_output_folder_becomes_read_only(
    tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    """No system makes a disk read-only below an open file at will: the renaming stands in for it."""
    replace = os.replace

    def refuse(source: Any, target: Any) -> None:
        if Path(target).parent.name == "scale_search" and Path(target).name.startswith("blocks.1"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(RunError, match=r"cannot write .*blocks.1.safetensors: .*Read-only.*saved before is intact"):
            run(tiny_vit, tmp_path / "run")
    check_whole_files(tmp_path / "run")
    assert run(tiny_vit, tmp_path / "run").resumed
    assert sha256(tmp_path / "run" / RESULT) == sha256(whole / RESULT)


def test_output_folder_vanishes(tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = RunFolder.event

    def vanish(self: RunFolder, kind: str, **values: Any) -> None:
        if kind == "stage_finished":
            shutil.rmtree(tmp_path / "run")
        event(self, kind, **values)

    monkeypatch.setattr(RunFolder, "event", vanish)
    with pytest.raises(RunError, match=r"cannot write to .*run: .*No such file"):
        run(tiny_vit, tmp_path / "run")


# -- folders and paths -----------------------------------------------------------------------------------------------


def image_folder(folder: Path, count: int = 20, size: tuple[int, int] = (40, 36)) -> Path:
    folder.mkdir(parents=True)
    for number, picture in enumerate(pixels(count)):
        image = Image.fromarray(picture.permute(1, 2, 0).numpy()).resize(size)
        image.save(folder / f"{number:03}.png")
    return folder


def test_input_folder_vanishes(tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = image_folder(tmp_path / "images")
    from aphq.data import calibration

    original = calibration.open_images

    def open_and_vanish(data: Any) -> Any:
        found = original(data)
        shutil.rmtree(folder)
        return found

    monkeypatch.setattr(calibration, "open_images", open_and_vanish)
    with pytest.raises(DataError, match=r"cannot be decoded.*No such file"):
        run(tiny_vit, tmp_path / "run", folder)
    assert not (tmp_path / "run").exists(), "nothing is begun without images"


def test_input_folder_is_not_there(tiny_vit: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        run(tiny_vit, None, tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["Größe ☃ 日本 'quoted' \"x\"", "a" * 200, "/".join(["deep"] * 100), "new\nline", " "])
def test_unusual_paths(tiny_vit: nn.Module, tmp_path: Path, name: str, whole: Path) -> None:
    images = image_folder(tmp_path / name / "images")
    out = tmp_path / name / "run"
    found = run(tiny_vit, out, images)
    assert str(out) in found.summary()
    assert (out / "report.html").is_file()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(aphq.load(out)(x), found.model(x))


def test_a_path_that_is_no_text(tiny_vit: nn.Module, tmp_path: Path) -> None:
    """Names on a disk are bytes; one that is no UTF-8 is refused before the work, not after it."""
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff"))
    with pytest.raises(RunError, match=r"cannot use .*run-"):
        run(tiny_vit, out)
    assert not out.exists()


@pytest.mark.parametrize("name", ["a" * 300, "/".join(["a" * 100] * 50), "nul\0"])
def test_impossible_paths(tiny_vit: nn.Module, tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="cannot use"):
        run(tiny_vit, tmp_path / name)
    with pytest.raises(AphqError):
        run(tiny_vit, None, tmp_path / name)
    with pytest.raises(AphqError):
        aphq.load(tmp_path / name)


def test_the_lock_of_a_dead_process_does_not_block(tiny_vit: nn.Module, tmp_path: Path) -> None:
    out, ready = tmp_path / "run", tmp_path / "ready"
    child = os.fork()
    if child == 0:
        held = RunFolder(out)
        ready.touch()
        time.sleep(600)
        held.close()
        os._exit(0)
    try:
        while not ready.exists():
            time.sleep(0.01)
        with pytest.raises(RunError, match="another process is working in"):
            run(tiny_vit, out)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (out / ".lock").exists(), "it is still there"
    run(tiny_vit, out)


def test_what_dead_processes_left_is_removed_and_of_living_ones_not(tmp_path: Path) -> None:
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    (tmp_path / "run").mkdir()
    left, living = (tmp_path / "run" / f".model.onnx.{process}.tmp" for process in (dead, os.getpid()))
    left.touch()
    living.touch()
    RunFolder(tmp_path / "run").close()
    assert not left.exists()
    assert living.exists()


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.event("started")
    folder.close()
    with open(tmp_path / "run" / "events.jsonl", "a") as handle:
        handle.write('{"time": 1, "ev')
    (tmp_path / "run" / "run.json").write_text("{}")
    folder = RunFolder(tmp_path / "run")
    folder.event("resumed")
    folder.close()
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["started", "resumed"]


def test_a_clock_that_goes_backwards(tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**6, 0, -1000))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    found = run(tiny_vit, tmp_path / "run")
    assert all(seconds >= 0 for seconds in found.seconds.values())
    assert all(stage.seconds >= 0 for stage in read_run(tmp_path / "run").stages)
    assert write_report([tmp_path / "run"]).is_file()


# -- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [torch.empty(0, 3, 32, 32), [], iter(())])
def test_no_images(tiny_vit: nn.Module, data: Any) -> None:
    with pytest.raises(DataError, match="no usable calibration image"):
        run(tiny_vit, None, data)


@pytest.mark.parametrize("effort", ["fast", "balanced", "best"])
def test_one_image(tiny_vit: nn.Module, effort: str) -> None:
    found = run(tiny_vit, None, pixels(1), recipe=short(effort=effort))
    assert torch.isfinite(found.model(torch.randn(2, 3, 32, 32))).all()


def test_images_smaller_than_a_patch(tiny_vit: nn.Module, tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "images", size=(3, 2))
    found = run(tiny_vit, tmp_path / "run", folder, recipe=short(effort="best"))
    assert torch.isfinite(found.model(torch.randn(2, 3, 32, 32))).all()


def test_small_images_in_memory_are_refused_by_their_shape(tiny_vit: nn.Module) -> None:
    with pytest.raises(DataError, match=r"needs images of shape \[N, 3, 32, 32\], got \[4, 3, 2, 2\]"):
        run(tiny_vit, None, pixels(4, size=2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_images_that_are_not_numbers(tiny_vit: nn.Module, value: float) -> None:
    images = torch.randn(8, 3, 32, 32)
    images[3, 0, 5, 5] = value
    with pytest.raises(DataError, match="NaN or infinite"):
        run(tiny_vit, None, images)


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["blocks.1.mlp.fc2.weight", "patch_embed.proj.bias", "norm.weight"])
def test_weights_that_are_not_numbers(tiny_vit: nn.Module, tmp_path: Path, name: str, value: float) -> None:
    tiny_vit.get_parameter(name).view(-1)[3] = value
    with pytest.raises(ModelError, match=r"NaN|finite"):
        run(tiny_vit, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_activations_that_overflow_on_some_images_name_their_unit(tiny_vit: nn.Module) -> None:
    images = torch.randn(16, 3, 32, 32).clamp_(-1, 1)
    images[7] *= 3e38
    with pytest.raises(RunError, match=r"NaN or infinite activations in patch_embed"):
        run(tiny_vit, None, images)


def dead(model: nn.Module) -> None:
    """Channels that are always zero: of the patches, of a hidden layer, of a norm, of an attention value."""
    for name in ("patch_embed.proj", "blocks.0.mlp.fc1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.attn.qkv"):
        layer = model.get_submodule(name)
        layer.weight[-3:] = 0  # type: ignore[operator, index]
        layer.bias[-3:] = 0  # type: ignore[operator, index]


def constant(model: nn.Module) -> None:
    for name in ("patch_embed.proj", "blocks.0.mlp.fc1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.attn.qkv"):
        layer = model.get_submodule(name)
        layer.weight[-3:] = 0  # type: ignore[operator, index]
        layer.bias[-3:] = 7.0  # type: ignore[operator, index]


def all_dead(model: nn.Module) -> None:
    """A whole layer that gives nothing."""
    model.get_parameter("blocks.0.mlp.fc1.weight").zero_()
    model.get_parameter("blocks.0.mlp.fc1.bias").zero_()
    model.get_parameter("blocks.1.attn.qkv.weight").zero_()


@pytest.mark.parametrize("change", [dead, constant, all_dead])
@pytest.mark.parametrize(("bits", "effort"), [("w8a8", "fast"), ("w4a4", "balanced"), ("w3a3", "best")])
def test_dead_and_constant_channels(
    tiny_vit: nn.Module, tmp_path: Path, change: Callable[[nn.Module], None], bits: str, effort: str
) -> None:
    change(tiny_vit)
    found = run(tiny_vit, tmp_path / "run", recipe=short(bits, effort))
    assert found.images is not None
    x = found.images.batch(slice(None))
    got = found.model(x)
    assert torch.isfinite(got).all()
    assert torch.equal(aphq.load(tmp_path / "run")(x), got)
    if bits == "w8a8":
        assert (got - tiny_vit(x)).norm() < 0.1 * tiny_vit(x).norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_in_other_precisions(tiny_vit: nn.Module, tmp_path: Path, dtype: torch.dtype) -> None:
    """The same artifact as of the same numbers in float32, and the caller's model as it was."""
    other = copy.deepcopy(tiny_vit).to(dtype)
    run(other, tmp_path / "other")
    run(copy.deepcopy(other).float(), tmp_path / "float")
    assert sha256(tmp_path / "other" / RESULT) == sha256(tmp_path / "float" / RESULT)
    assert {p.dtype for p in other.parameters()} == {dtype}


def test_a_model_in_training_mode_with_dropout(vit: Build, tmp_path: Path, whole: Path) -> None:
    model = vit(proj_drop_rate=0.5, attn_drop_rate=0.5, drop_rate=0.5).train()
    found = run(model, tmp_path / "run")
    assert model.training, "the caller's model is as it was"
    assert not found.model.training
    assert sha256(tmp_path / "run" / RESULT) == sha256(whole / RESULT)


def test_a_model_that_wants_gradients_and_has_some(vit: Build, tmp_path: Path, whole: Path) -> None:
    model = vit().requires_grad_(True)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    run(model, tmp_path / "run")
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())
    assert sha256(tmp_path / "run" / RESULT) == sha256(whole / RESULT)


def test_a_model_without_values(vit: Build) -> None:
    model = vit().to("meta")
    with pytest.raises(ModelError, match="is on the meta device, which holds no values: load the weights first"):
        run(model)


def test_a_model_with_one_part_elsewhere(tiny_vit: nn.Module) -> None:
    tiny_vit.get_submodule("blocks.1.mlp").to("meta")
    with pytest.raises(ModelError, match=r"blocks.1.mlp.fc1.weight is on the meta device"):
        run(tiny_vit)
