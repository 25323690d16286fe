"""Getting the float model: a name in timm or torchvision with hub weights or a local checkpoint, a folder that
transformers wrote, a detector, or a module the caller has."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import logging
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aphq import extras
from aphq.engine.files import DISK_CODES
from aphq.errors import ModelError
from aphq.models.architecture import Architecture, architecture_of
from aphq.models.detection.config import DETECTORS
from aphq.typed import nearest

log = logging.getLogger(__name__)
CLASSIFIERS = (  # ViT, Swin, torchvision's ViT and its detectors: rows are classes
    *("head.weight", "head.fc.weight", "heads.head.weight"),
    "roi_heads.box_predictor.cls_score.weight",
)
TIMM_SOURCES = ("hf_hub:", "hf-hub:", "local-dir:")  # timm's own ways to name a place
HASH = re.compile(r"-([0-9a-f]{8,64})\.[a-z]+$")  # torch hub's and MMDetection's habit
FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's own switch, stronger than what a caller says
SHOWN = 3  # names of each kind in a message
NO_SUCH_TAG, NO_SUCH_WEIGHTS = "Invalid pretrained tag", "No pretrained weights exist"  # as timm says it
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # keys under which trainers keep the weights


def load_model(
    name: str, weights: str | Path | None = None, num_classes: int | None = None, **arguments: Any
) -> nn.Module:
    """`timm.create_model(name)` with weights from the hub, or from a local .safetensors, .pth, .pt or .bin file.

    The number of classes comes from the local file unless given; other `arguments` go to timm. A name that only
    torchvision has (vit_b_16, swin_v2_t, maskrcnn_resnet50_fpn) is looked up there. A folder with a config.json, or a
    name with a slash, is a model of transformers, from the folder or from the hub; a folder that has a model's name,
    as a run's may, is written ./NAME. The names of our own detectors (`aphq.detection.DETECTORS`) always need a local
    file; `arguments` are then fields of their DetectorConfig.
    """
    import timm

    if name in DETECTORS:
        from aphq.models.detection.checkpoint import load_detector

        return load_detector(name, weights, num_classes, **arguments)
    base = name.split(".")[0]
    of_timm = timm.is_model(base)
    if not of_timm and _is_of_torchvision(name):
        return _from_torchvision(name, weights, num_classes, arguments)
    if not of_timm and _is_of_transformers(name):
        extras.require("transformers")
        from aphq.models.hf.loading import load_pretrained

        if weights is not None or num_classes is not None or arguments:
            raise ModelError(
                f"{name} has its own weights and configuration: --weights and model arguments do not apply"
            )
        return load_pretrained(name)
    if not of_timm:
        raise ModelError(f"timm has no model {name!r}: {nearest(base, [*timm.list_models(), *DETECTORS])}")
    if weights is None:
        return _published(name, lambda pretrained: _create(name, num_classes, arguments, pretrained))
    state = read_checkpoint(Path(weights))
    if num_classes is None:
        num_classes = next((state[key].shape[0] for key in CLASSIFIERS if key in state), None)
    model = _create(name, num_classes, arguments, pretrained=False)
    load_strictly(model, state, weights)
    return model.eval()


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint file in float32; nothing in it is executed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        there = path.is_file()
    except (OSError, ValueError):  # a name that no disk can have
        there = False
    if not there:
        raise ModelError(f"there is no weights file {path}")
    check_name(path)
    try:
        found = load_file(path) if path.suffix == ".safetensors" else _load_pickle(path)
    except (SafetensorError, OSError, ValueError, RuntimeError, EOFError) as problem:
        raise ModelError(f"cannot read the weights in {path}: {_first_line(problem)}") from None
    except Exception as problem:  # the unpickler's own errors have no common base
        raise ModelError(
            f"{path} holds more than tensors or is damaged ({type(problem).__name__}); "
            "save its state_dict as .safetensors"
        ) from None
    for key in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found or not all(isinstance(v, Tensor) for v in found.values()):
        raise ModelError(f"{path} does not hold a state_dict (a mapping of names to tensors)")
    return {k.removeprefix("module."): v.float() if v.is_floating_point() else v for k, v in found.items()}


def _load_pickle(path: Path) -> Any:
    """Tensors alone. A plain pickle (of torch before 1.6) is read from memory: a forged length in it would otherwise
    have as much memory set aside as it says."""
    if zipfile.is_zipfile(path):
        return torch.load(path, "cpu", weights_only=True)
    return torch.load(io.BytesIO(path.read_bytes()), "cpu", weights_only=True)


def check_name(path: Path) -> None:
    """Published files often carry the start of their sha256 in their name, as in `deit_small-cd65a155.pth`."""
    match = HASH.search(path.name)
    if match is None:
        return
    with open(path, "rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found.startswith(match[1]):
        return
    words = f"{path} has the hash {match[1]} in its name, and its sha256 starts with {found[: len(match[1])]}"
    if match[1].isdecimal():
        log.warning("%s: damaged, unless the number is a date or a count", words)
        return
    raise ModelError(f"{words}: the download is damaged or was changed; get it again, or rename it if you made it")


def model_fingerprint(model: nn.Module, architecture: Architecture) -> str:
    """sha256 of what the model is: its architecture and every tensor."""
    digest = hashlib.sha256(json.dumps([architecture.family, architecture.describe(model)], sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_of_transformers(name: str) -> bool:
    if Path(name).is_dir():
        if (Path(name) / "config.json").is_file():
            return True
        raise ModelError(f"the folder {name} holds no model: there is no config.json in it")
    return "/" in name and not name.startswith(TIMM_SOURCES)


def _is_of_torchvision(name: str) -> bool:
    from torchvision.models import list_models

    return name in list_models()


def _from_torchvision(
    name: str, weights: str | Path | None, num_classes: int | None, arguments: dict[str, Any]
) -> nn.Module:
    from torchvision.models import get_model, get_model_builder

    state = None if weights is None else read_checkpoint(Path(weights))
    if num_classes is None and state is not None:
        num_classes = next((state[key].shape[0] for key in CLASSIFIERS if key in state), None)
    extra: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    if "weights_backbone" in inspect.signature(get_model_builder(name)).parameters:
        extra["weights_backbone"] = None  # a detector's would be downloaded only to be overwritten

    def build(pretrained: bool) -> nn.Module:
        try:
            model: nn.Module = get_model(name, weights="DEFAULT" if pretrained else None, **extra, **arguments)
        except OSError:  # of a download
            raise
        except Exception as problem:  # arguments that do not fit, or a download that is damaged
            reason = " ".join(str(problem).split())[:200]
            raise ModelError(f"torchvision cannot create {name!r} ({type(problem).__name__}: {reason})") from None
        return model

    if state is None:
        return _published(name, build)
    from aphq.models.detection.torchvision_checkpoint import current_names

    model = build(False)
    load_strictly(model, current_names(state, model.state_dict()), str(weights))
    return model.eval()


def _published(name: str, build: Callable[[bool], nn.Module]) -> nn.Module:
    """What `build` makes with the library's published weights, or ModelError. It is made without them first, because a
    model that cannot be quantized is to be refused before anything is fetched. (Not on the meta device, which would
    save a second or two: older timm and torchvision's RegNet compute with values while they build.)"""
    with _careful_downloads():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is about a model without weights
            architecture_of(build(False))
        log.info(
            "%s: fetching its published weights, unless they are in the cache (--weights takes a local file)", name
        )
        try:
            return build(True).eval()
        except ModelError:
            raise
        except Exception as problem:  # whatever the library's client raises: no network, no such weights, no disk
            if isinstance(problem, OSError) and problem.errno in DISK_CODES:
                raise ModelError(f"cannot keep the pretrained weights for {name!r}: {problem}") from None
            raise ModelError(
                f"cannot get pretrained weights for {name!r} ({type(problem).__name__}); "
                "check the network, or pass a local file with --weights"
            ) from None


@contextmanager
def _careful_downloads() -> Iterator[None]:
    """Hashes in the addresses of files are checked, and pickles read as tensors alone, whichever version timm has."""
    import timm.models

    switch = getattr(timm.models, "set_pretrained_check_hash", None)
    before = os.environ.get(FORCE)
    os.environ[FORCE] = "1"
    if switch is not None:
        switch(True)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(FORCE, None)
        else:
            os.environ[FORCE] = before


def _create(name: str, num_classes: int | None, arguments: dict[str, Any], pretrained: bool) -> nn.Module:
    import timm

    extra: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **extra, **arguments)
    except (
        Exception
    ) as problem:  # arguments that do not fit, whatever they make fail; or whatever fetching weights raises
        if NO_SUCH_TAG in str(problem):
            raise ModelError(f"timm cannot create {name!r}: {problem}") from None
        if NO_SUCH_WEIGHTS in str(problem):
            raise ModelError(f"timm has no published weights of {name!r}: pass a local file with --weights") from None
        if pretrained:
            raise
        raise ModelError(f"timm cannot create {name!r} with {arguments}: {problem}") from None
    return model


def _first_line(problem: Exception) -> str:
    return (str(problem) or type(problem).__name__).splitlines()[0]


def load_strictly(model: nn.Module, state: dict[str, Tensor], path: str | Path) -> None:
    """Put every tensor into the model; ModelError, naming some, if one is missing, left over or of another shape."""
    if misfit := misfit_of(model, state):
        raise ModelError(
            f"{path} does not fit this model ({misfit}); check the model name, its arguments and num_classes"
        )
    model.load_state_dict(state)


def misfit_of(model: nn.Module, state: dict[str, Tensor]) -> str:
    """How many tensors are missing, left over or of another shape, and the names of some; empty if all fit."""
    own = model.state_dict()
    differing = [k for k in own if k in state and state[k].shape != own[k].shape]
    troubles = {
        "missing": [k for k in own if k not in state],
        "unexpected": [k for k in state if k not in own],
        "of another shape": [f"{k} {tuple(state[k].shape)} instead of {tuple(own[k].shape)}" for k in differing],
    }
    return "; ".join(
        f"{len(names)} {what}: {', '.join(names[:SHOWN])}{' ...' if len(names) > SHOWN else ''}"
        for what, names in troubles.items()
        if names
    )
