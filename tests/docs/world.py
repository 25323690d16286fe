"""Where the commands of the documentation are run: the same names, everything a thousand times smaller.

Commands are run word by word as they stand, but for the tables here; what they find in the working directory (images,
weights, finished runs) is made up.
"""

import contextlib
import io
import runpy
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision.models._api as torchvision_models
import torchvision.models.detection as torchvision_detection
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import aphq
import aphq.detection
import aphq.models.hf  # its adapters register when they are first needed: not in a registry that is only patched in
from aphq import presets
from aphq.cli.app import app
from aphq.detection import timm_backbone
from aphq.models import architecture
from aphq.models.detection.config import DETECTORS, DetectorConfig
from aphq.recipe import Recipe, Stage
from aphq.tasks import TASKS

from ..coco_set import write as write_coco
from ..conftest import scramble
from ..models.detection.nets import TINY, detector
from ..models.detection.rcnn import OUTPUTS, WIDTH, rcnn, rcnn_builder
from ..runs import pixels, shortened
from ..scenes_of import RULES, pictures
from .blocks import ROOT, Block

CLASSES = ("cat", "dog", "fox", "owl")
SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": len(CLASSES)}
STAND_INS = {  # timm's models in the documentation, and what they are here
    "deit_tiny_patch16_224": SMALL_VIT,
    "deit_small_patch16_224": SMALL_VIT,
    "vit_tiny_patch16_224": SMALL_VIT,
    "vit_small_patch16_224": SMALL_VIT,
    "swin_tiny_patch4_window7_224": {"img_size": 64, "embed_dim": 8, "depths": (1, 2, 1, 1), "num_heads": (1, 2, 2, 4)},
}
SHORTER = {  # words of commands, and what stands for them here; steps of presets are cut in `shrink`
    "steps=500": "steps=3",
    "steps=2000": "steps=3",
    "--float": "--float --seconds 0.5 --no-memory",
}


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Models and presets of a size for tests, whoever asks for them."""
    create, stages = timm.create_model, presets._stages

    def small(name: str, pretrained: bool = False, **arguments: Any) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return scramble(create(name, pretrained=False, **{**STAND_INS[name], **arguments}))

    def short(*arguments: Any) -> tuple[Stage, ...]:
        return shortened(Recipe(stages=stages(*arguments))).stages

    patch.setattr(timm, "create_model", small)
    patch.setattr(presets, "_stages", short)
    patch.setattr(architecture, "_REGISTRY", list(architecture._REGISTRY))  # examples add adapters to it
    patch.setattr(type(TASKS["detection"]), "preprocessing_of", lambda *_: RULES)
    patch.setattr(aphq.detection, "timm_backbone", partial(timm_backbone, width=WIDTH))
    patch.setattr(torchvision_detection, "MaskRCNN", small_mask_rcnn)
    patch.setitem(torchvision_models.BUILTIN_MODELS, "maskrcnn_resnet50_fpn", rcnn_builder)
    for name, config in list(DETECTORS.items()):
        patch.setitem(DETECTORS, name, DetectorConfig.from_dict({**TINY, "kind": config.kind}))


def small_mask_rcnn(backbone: nn.Module, num_classes: int) -> nn.Module:
    """For torchvision's own, whose heads are wide."""
    assert num_classes == OUTPUTS
    model: nn.Module = rcnn(trunk=backbone)
    return model


def furnish(folder: Path) -> None:
    """The files that the documentation speaks of."""
    for name, seed in (("calib", 0), ("images", 1), *((f"val/{name}", 2 + i) for i, name in enumerate(CLASSES))):
        (folder / name).mkdir(parents=True)
        for number, picture in enumerate(pixels(16 if name == "calib" else 3, seed, size=40)):
            Image.fromarray(picture.permute(1, 2, 0).numpy()).save(folder / name / f"{seed}-{number}.png")
    save_file(timm.create_model("vit_small_patch16_224").state_dict(), folder / "best.safetensors")
    (folder / "examples").symlink_to(ROOT / "examples")
    small = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.ViTConfig(**small, intermediate_size=64, num_labels=len(CLASSES))
    transformers.ViTForImageClassification(config).save_pretrained(folder / "my-vit")


def furnish_for_detectors(folder: Path) -> None:
    for name in ("mask_rcnn_swin_tiny.pth", "checkpoint.pth"):
        torch.save({"state_dict": dict(detector().state_dict())}, folder / name)
    torch.save({"state_dict": dict(detector("cascade_mask_rcnn").state_dict())}, folder / "cascade.pth")
    torch.save(rcnn().state_dict(), folder / "maskrcnn.pth")
    swin = aphq.detection.timm_backbone("swin_tiny_patch4_window7_224")
    torch.save(rcnn(trunk=swin).state_dict(), folder / "maskrcnn_swin.pth")
    (folder / "train2017").mkdir()
    for number, picture in enumerate(pictures()):
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(folder / "train2017" / f"{number}.png")
    labels, images = write_coco(folder / "coco")
    shutil.copytree(images, folder / "val2017")
    (folder / "annotations").mkdir()
    for name in ("instances.json", "annotations/instances_val2017.json"):
        shutil.copyfile(labels, folder / name)
    Image.open(images / "0.png").save(folder / "street.jpg")


def finished_run(folder: Path) -> Path:
    """A run like any other, to be copied to where a page expects one."""
    model = timm.create_model("deit_small_patch16_224")
    aphq.quantize(model, "w8a8", folder / "calib", effort="fast", out=folder / "finished", val=folder / "val")
    return folder / "finished"


def run_block(block: Block) -> str:
    """Run it in the working directory; what it printed."""
    return RUNNERS[block.language](block)


def run_commands(block: Block) -> str:
    return "".join(run_command(words) for words in block.commands)


def run_command(words: list[str]) -> str:
    words = [word for long in words for word in SHORTER.get(long, long).split(" ")]
    target = None
    if ">" in words:
        words, target = words[: words.index(">")], words[-1]
    if words[0] == "aphq":
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, f"{' '.join(words)}\n{done.output}"
        printed = done.stdout
    elif words[0] == "python":
        printed = run_script(words[1:])
    else:
        raise AssertionError(f"what is {words[0]!r}? Put `<!-- not run: reason -->` before the block if it cannot run")
    if target:
        Path(target).write_text(printed)
    return printed


def run_script(words: list[str]) -> str:
    """A Python script with its arguments, in this process."""
    printed, before, status = io.StringIO(), sys.argv, None
    sys.argv = words
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:  # argparse ends --help this way too
        status = stop.code
    finally:
        sys.argv = before
    if status:
        raise AssertionError(f"{' '.join(words)} ended with {status}")
    return printed.getvalue()


def run_python(block: Block) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.text, f"{block.page}:{block.line}", "exec"), {})
    return printed.getvalue()


def load_recipe(block: Block) -> str:
    return Recipe.from_text(block.text).name


RUNNERS: dict[str, Callable[[Block], str]] = {"sh": run_commands, "python": run_python, "yaml": load_recipe}
