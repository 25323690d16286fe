"""Quantized models of transformers in its own format: `save_pretrained` here, `from_pretrained` there.

    import aphq.hf                                                    # makes the format known to transformers
    aphq.hf.save_pretrained(run.model, "vit-w4a4")
    model = AutoModelForImageClassification.from_pretrained("vit-w4a4")

The folder holds the usual config.json, with a `quantization_config` of method "aphq" that says what an artifact says,
and model.safetensors with packed integers. What is loaded equals what was saved bit for bit. The file is somebody
else's: the description in it is checked like an artifact's, and nothing in it is executed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from aphq import extras
from aphq.artifact.info import QuantizationInfo, attach, info_of
from aphq.artifact.loading import check_affine, info_from, read_weight, swap_activations
from aphq.artifact.saving import describe, to_tensors
from aphq.errors import ArtifactError
from aphq.models.architecture import architecture_named
from aphq.models.student import equip, finalise
from aphq.quant.layers import QuantizedLayer
from aphq.quant.packing import packed_size
from aphq.quant.quantizer import Quantizer

extras.require("transformers")
from transformers.quantizers import HfQuantizer  # noqa: E402  after the check that names the extra
from transformers.quantizers.auto import register_quantization_config, register_quantizer  # noqa: E402
from transformers.utils.quantization_config import QuantizationConfigMixin  # noqa: E402

METHOD = "aphq"


@register_quantization_config(METHOD)
class AphqConfig(QuantizationConfigMixin):
    """What `config.json` says beside the model's own configuration."""

    def __init__(self, **fields: Any) -> None:
        self.quant_method: Any = METHOD
        for name in ("architecture", "relu", "recipe", "preprocessing", "float_sha256", "float_parameters", "biases"):
            setattr(self, name, fields.get(name))

    @classmethod
    def of(cls, model: nn.Module) -> AphqConfig:
        info = info_of(model)
        if info is None or not info.family.startswith("transformers."):
            raise ArtifactError(
                f"this {type(model).__name__} is not a model of transformers that aphq quantized; "
                "for others there is aphq.save"
            )
        with_bias = [name for name, layer in layers_of(model).items() if layer.bias is not None]
        return cls(**describe(info), biases=with_bias)


@register_quantizer(METHOD)
class AphqQuantizer(HfQuantizer):
    """What transformers calls before and after it reads the weights, and when it writes them."""

    requires_calibration = True  # there is no way to quantize while loading

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        config = self.quantization_config.to_dict()
        info = info_from(config)
        architecture = architecture_named(info.family)
        if type(model) not in architecture.classes:
            raise ArtifactError(f"config.json describes a {info.family}, the model is a {type(model).__name__}")
        architecture.open_attention(model)
        units = architecture.units(model)
        equip(model, units, info.recipe)
        swap_activations(model, units, info.relu)
        for name, layer in layers_of(model).items():
            if layer.bias is None and name in (config["biases"] or ()):
                layer.bias = nn.Parameter(torch.empty(layer.weight.shape[layer.out_dim], device="meta"), False)
            if layer.weight_quantizer is not None:  # room for the packed codes, which are unpacked afterwards
                layer.full_shape = tuple(layer.weight.shape)  # type: ignore[assignment]
                size = packed_size(layer.weight.numel(), layer.weight_quantizer.bits)
                layer.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), False)
        for module in model.modules():  # every tensor is in the file, or made again below
            module._is_hf_initialized = True  # type: ignore[assignment]
        return model

    @torch.no_grad()
    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        for name, module in model.named_modules():
            if isinstance(module, Quantizer):
                module.zero_point = module.zero_point.float()
                check_affine(name, module, module.scale.data, module.zero_point)
        for layer in layers_of(model).values():
            if layer.weight_quantizer is not None:
                weight = read_weight(layer.weight.data, layer.weight_quantizer, layer.full_shape)  # type: ignore[arg-type]
                layer.weight = nn.Parameter(weight, requires_grad=False)
        info = info_from(self.quantization_config.to_dict())
        restore_buffers(model, info)
        finalise(model)
        attach(model, info)
        return model.requires_grad_(False).eval()

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
        return to_tensors(model, layers_of(model)), {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def restore_buffers(model: nn.Module, info: QuantizationInfo) -> None:
    """Tables that no file holds because they follow from the configuration: as a model built from it has them."""
    architecture = architecture_named(info.family)
    fresh = architecture.build(info.arguments)
    architecture.open_attention(fresh)
    saved = fresh.state_dict()
    for name, buffer in fresh.named_buffers():
        if name not in saved:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, buffer)


def layers_of(model: nn.Module) -> dict[str, QuantizedLayer]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}


def save_pretrained(model: nn.Module, folder: str | Path, **options: Any) -> None:
    """Write a quantized model of transformers so that its `from_pretrained` reads it; `options` are those of
    `PreTrainedModel.save_pretrained`."""
    target: Any = model
    config = AphqConfig.of(model)
    before = getattr(target, "hf_quantizer", None)
    target.hf_quantizer, target.config.quantization_config = AphqQuantizer(config), config
    try:
        target.save_pretrained(str(folder), **options)
    finally:
        target.hf_quantizer = before
        if before is None:
            del target.config.quantization_config
