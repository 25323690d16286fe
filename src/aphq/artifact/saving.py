"""The artifact on disk: `config.json` and `model.safetensors`.

Quantized weights are packed at their true width; zero-points are bytes; scales, biases, LayerNorms and embeddings stay
float32. The configuration is written last and holds the hash of the tensors, so half an artifact is never read.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aphq.artifact.info import QuantizationInfo, info_of
from aphq.engine.files import write_json, write_tensors
from aphq.errors import ArtifactError
from aphq.quant.layers import QuantizedLayer
from aphq.quant.packing import pack
from aphq.quant.quantizer import Quantizer

FORMAT = "aphq"
VERSION = 1
CONFIG, TENSORS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class Sizes:
    """Bytes of the float32 model and of the artifact."""

    float32: int
    artifact: int
    packed_weights: int

    @property
    def ratio(self) -> float:
        return self.float32 / self.artifact


def save(model: nn.Module, path: str | Path) -> Sizes:
    """Write a quantized model into the folder `path`."""
    from aphq import __version__

    info = info_of(model)
    if info is None:
        raise ArtifactError(f"this {type(model).__name__} was not quantized by aphq; save what aphq.quantize gave")
    folder = Path(path)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
    tensors = to_tensors(model, layers)
    file = folder / TENSORS
    write_tensors(file, tensors, {"format": FORMAT})
    packed = {f"{n}.weight": q for n, layer in layers.items() if (q := layer.weight_quantizer) is not None}
    sizes = Sizes(
        float32=4 * info.float_parameters,
        artifact=file.stat().st_size,
        packed_weights=sum(tensors[name].numel() for name in packed),
    )
    config: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "aphq": __version__,
        **describe(info),
        "packed": {
            name: {"bits": q.bits, "shape": list(model.get_parameter(name).shape)} for name, q in packed.items()
        },
        "sizes": asdict(sizes),
        "file": {"name": TENSORS, "bytes": sizes.artifact, "sha256": file_sha256(file)},
    }
    write_json(folder / CONFIG, config)
    return sizes


def describe(info: QuantizationInfo) -> dict[str, Any]:
    return {
        "architecture": {"family": info.family, "arguments": info.arguments},
        "relu": list(info.relu),
        "recipe": info.recipe.to_dict(),
        "preprocessing": info.preprocessing.to_dict(),
        "float_sha256": info.float_sha256,
        "float_parameters": info.float_parameters,
    }


@torch.no_grad()
def to_tensors(model: nn.Module, layers: dict[str, QuantizedLayer]) -> dict[str, Tensor]:
    """The state dictionary with quantized weights packed and zero-points as bytes."""
    tensors = dict(model.state_dict())
    for name, layer in layers.items():
        if layer.weight_quantizer is not None:
            tensors[f"{name}.weight"] = pack(layer.weight_quantizer.codes(layer.weight), layer.weight_quantizer.bits)
    for name, module in model.named_modules():
        if isinstance(module, Quantizer):
            if not module.calibrated:
                raise ArtifactError(f"the quantizer {name} has no scale; run scale_search before saving")
            tensors[f"{name}.zero_point"] = module.zero_point.to(torch.uint8)
    return tensors


def file_sha256(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
