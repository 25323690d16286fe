"""Reading an artifact back: an `nn.Module` whose outputs equal the saved model's exactly. Nothing is unpickled.

The file is somebody else's: every name, shape and number is checked before it is used, and the empty model is laid
out without memory first, so a forged description cannot ask for more than its tensors hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aphq.artifact.info import QuantizationInfo, attach
from aphq.artifact.plausibility import (
    check_depth,
    check_derived,
    check_dtypes,
    check_finite,
    check_input,
    limited_modules,
)
from aphq.artifact.saving import CONFIG, FORMAT, TENSORS, VERSION, file_sha256
from aphq.engine.files import UnreadableError, read_json
from aphq.engine.workspace import add_missing_biases
from aphq.errors import AphqError, ArtifactError
from aphq.models.architecture import Unit, architecture_named, mlps_of
from aphq.models.student import built_again, finalise, make_student, swap_activation
from aphq.quant.affine import dequantize, top_code
from aphq.quant.layers import QuantizedLayer
from aphq.quant.packing import unpack
from aphq.quant.quantizer import Quantizer
from aphq.recipe import Recipe
from aphq.tasks import TASKS
from aphq.typed import nearest, shown

LONGEST = 1000  # characters of another's words in a message of ours: they may quote the file
RUNTIMES = ("simulated", "int8")


def load(path: str | Path, device: torch.device | str = "cpu", *, runtime: str = "simulated") -> nn.Module:
    """The quantized model saved in the folder `path`, in eval mode.

    Args:
        path: a run folder, or one that `save` wrote.
        device: where the model goes.
        runtime: "simulated" passes float tensors through the integers' values, and can be exported; "int8" multiplies
            real integers, for use on a CPU with VNNI or on a GPU.
    """
    if runtime not in RUNTIMES:
        raise ArtifactError(f"there is no runtime {runtime!r}: {nearest(runtime, RUNTIMES)}")
    folder = Path(path)
    config = read_config(folder)
    tensors = _read_tensors(folder, config)
    try:
        info = info_from(config)
        check_depth(info.arguments, len(tensors))
        with torch.device("meta"), limited_modules(len(tensors)):
            layout = _skeleton(info)
            _fill(layout, {k: t.to("meta") for k, t in tensors.items()}, config, check=False)
        check_derived(layout, tensors)
        check_input(layout, info.preprocessing)
        model = _skeleton(info)
        _fill(model, tensors, config, check=True)
        check_finite(model)
    except ArtifactError:
        raise
    except AphqError as problem:
        raise ArtifactError(f"{folder / CONFIG}: {str(problem)[:LONGEST]}") from None
    except Exception as problem:  # timm's constructors, fed with somebody's numbers, raise whatever they like
        reason = " ".join(str(problem).split())[:300] or type(problem).__name__
        raise ArtifactError(f"{folder} does not hold a usable model: {reason}") from None
    finalise(model)
    attach(model, info)
    if runtime == "int8":
        from aphq.runtimes.int8 import to_int8

        model = to_int8(model)
    return model.to(device)


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json`, its format and version checked."""
    file = folder / CONFIG
    try:
        there = folder.is_dir()
    except (OSError, ValueError) as problem:  # a name that no disk can have
        raise ArtifactError(f"there is no folder {folder}: {problem}") from None
    if not there:
        raise ArtifactError(f"there is no folder {folder}")
    if not file.is_file():
        hint = "; the run is not finished: start it again to go on" if (folder / "run.json").exists() else ""
        raise ArtifactError(f"{folder} holds no quantized model (no {CONFIG}){hint}")
    try:
        config = read_json(file)
    except UnreadableError as problem:
        raise ArtifactError(f"{file} is damaged: {problem}") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ArtifactError(f"{file} does not describe an aphq model")
    if config.get("version") != VERSION:
        raise ArtifactError(f"{file} has version {shown(config.get('version'))}; this aphq reads version {VERSION}")
    return config


def info_from(config: dict[str, Any]) -> QuantizationInfo:
    architecture = config["architecture"]
    task = TASKS[architecture_named(architecture["family"]).task]
    return QuantizationInfo(
        family=architecture["family"],
        arguments=dict(architecture["arguments"]),
        relu=tuple(config["relu"]),
        recipe=Recipe.from_dict(config["recipe"]),
        preprocessing=task.preprocessing_from(config["preprocessing"]),
        float_sha256=str(config["float_sha256"]),
        float_parameters=int(config["float_parameters"]),
    )


def _read_tensors(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / TENSORS
    if not file.is_file():
        raise ArtifactError(f"{folder} has no {TENSORS}")
    wanted = config.get("file", {})
    if not isinstance(wanted, dict) or wanted.get("sha256") != file_sha256(file):
        raise ArtifactError(f"{file} is not the file that {CONFIG} describes (its sha256 differs): copy both again")
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError) as problem:
        raise ArtifactError(f"{file} is damaged: {problem}") from None


def _skeleton(info: QuantizationInfo) -> nn.Module:
    architecture = architecture_named(info.family)
    model = built_again(architecture, info.arguments)
    units = architecture.units(model)
    student = make_student(model, architecture, units, info.recipe)
    swap_activations(student, units, info.relu)
    return student


def swap_activations(model: nn.Module, units: Sequence[Unit], names: Sequence[str]) -> None:
    """ReLU in the MLPs that a file names."""
    mlps = mlps_of(units)
    for name in names:
        if name not in mlps:
            raise ArtifactError(f"{CONFIG} names an MLP {shown(name)} that the model has not: the file is damaged")
        swap_activation(model, mlps[name])


def _fill(model: nn.Module, tensors: dict[str, Tensor], config: dict[str, Any], check: bool) -> None:
    """Put the tensors into the model; with `check`, look at their values too (a meta tensor has none)."""
    state = dict(tensors)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(module, Quantizer):
            state[f"{name}.zero_point"] = state[f"{name}.zero_point"].float()
            if check:
                check_affine(name, module, state[f"{name}.scale"], state[f"{name}.zero_point"])
    for name, module in modules.items():
        if isinstance(module, QuantizedLayer) and (quantizer := module.weight_quantizer) is not None:
            key, shape = f"{name}.weight", tuple(module.weight.shape)
            if config["packed"][key] != {"bits": quantizer.bits, "shape": list(shape)}:
                raise ArtifactError(f"{key} is packed as {shown(config['packed'][key])}, which does not fit the model")
            codes = unpack(state[key], quantizer.bits, shape).float() if check else torch.empty(shape)
            state[key] = dequantize(codes, state[f"{key}_quantizer.scale"], state[f"{key}_quantizer.zero_point"])
    add_missing_biases(model, state)
    check_dtypes(model, state)
    model.load_state_dict(state, strict=True)


def read_weight(packed: Tensor, quantizer: Quantizer, shape: tuple[int, ...]) -> Tensor:
    """The values of packed codes."""
    return dequantize(unpack(packed, quantizer.bits, shape).float(), quantizer.scale.data, quantizer.zero_point)


def check_affine(name: str, quantizer: Quantizer, scale: Tensor, zero_point: Tensor) -> None:
    codes = (zero_point >= 0) & (zero_point <= top_code(quantizer.bits)) & (zero_point == zero_point.round())
    if not (torch.isfinite(scale).all() and (scale > 0).all() and codes.all()):
        raise ArtifactError(f"the quantizer {name} has an impossible scale or zero-point: the file is damaged")
