from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import aphq
from aphq.engine.files import write_json
from aphq.errors import ArtifactError
from aphq.quant.layers import QuantizedLayer

from ..runs import pixels, short

Build = Callable[..., nn.Module]


def quantized(model: nn.Module, bits: str = "w4a4", **changes: Any) -> nn.Module:
    return aphq.quantize(model, short(bits, "fast", **changes), pixels(), device="cpu").model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_weights_take_their_true_width(tiny_vit: nn.Module, tmp_path: Path, bits: int) -> None:
    model = quantized(tiny_vit, f"w{bits}a8")
    sizes = aphq.save(model, tmp_path)
    stored = tensors_of(tmp_path)
    packed = 0
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLayer):
            count = layer.weight.numel()
            found = stored[f"{name}.weight"]
            assert found.dtype == torch.uint8
            assert found.numel() == -(-bits * count // 8)
            packed += found.numel()
    assert sizes.packed_weights == packed
    assert sizes.artifact == (tmp_path / "model.safetensors").stat().st_size
    assert sizes.float32 == 4 * sum(p.numel() for p in tiny_vit.parameters())
    assert sizes.ratio == sizes.float32 / sizes.artifact


def test_an_odd_number_of_three_bit_codes_is_rounded_up_to_a_byte(vit: Build, tmp_path: Path) -> None:
    model = quantized(vit(num_classes=7, embed_dim=30, num_heads=2), "w3a8")
    aphq.save(model, tmp_path)
    assert tensors_of(tmp_path)["head.weight"].numel() == 79  # 210 codes, 630 bits


def test_zero_points_are_bytes_and_nothing_is_pickled(tiny_vit: nn.Module, tmp_path: Path) -> None:
    aphq.save(quantized(tiny_vit), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    stored = tensors_of(tmp_path)
    zero_points = [tensor for name, tensor in stored.items() if name.endswith("zero_point")]
    assert zero_points
    assert all(tensor.dtype == torch.uint8 for tensor in zero_points)


def test_a_layer_left_in_float_is_stored_in_float(tiny_vit: nn.Module, tmp_path: Path) -> None:
    aphq.save(quantized(tiny_vit, overrides__head=None), tmp_path)
    stored = tensors_of(tmp_path)
    assert torch.equal(stored["head.weight"], tiny_vit.get_parameter("head.weight"))


def test_a_float_model_cannot_be_saved(tiny_vit: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="this VisionTransformer was not quantized by aphq"):
        aphq.save(tiny_vit, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_without_scales_cannot_be_saved(tiny_vit: nn.Module, tmp_path: Path) -> None:
    model = quantized(tiny_vit)
    model.get_parameter("head.input_quantizer.scale").data.fill_(torch.nan)
    with pytest.raises(ArtifactError, match=r"head.input_quantizer has no scale"):
        aphq.save(model, tmp_path)


def test_the_config_is_written_last(tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(path: Path, value: Any) -> None:
        order.extend(sorted(file.name for file in path.parent.iterdir()))
        write_json(path, value)

    monkeypatch.setattr("aphq.artifact.saving.write_json", note)
    aphq.save(quantized(tiny_vit), tmp_path)
    assert order == ["model.safetensors"]
