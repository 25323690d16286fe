"""The artifact run as integers in PyTorch."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import aphq
from aphq.data.scenes import ScenePreprocessing
from aphq.errors import ArtifactError
from aphq.evaluation.coco import detect
from aphq.models.architecture import predict
from aphq.models.detection.family import family_of
from aphq.quant.layers import QuantizedLinear
from aphq.quant.quantizer import Quantizer
from aphq.runtimes.fusing import activation_of
from aphq.runtimes.int8 import AttentionInBytes, Int8Linear, Int8Patches, to_int8
from aphq.runtimes.int8_layers import OnBytes

from ..export.exports import calibrated, normalised, relative, small_run
from ..models.detection.rcnn import photo, rcnn
from ..models.families import FAMILIES
from ..models.variants import family
from ..runs import pixels
from ..scenes_of import pictures, short_recipe


@pytest.mark.parametrize("bits", ["w8a8", "w4a8", "w4a4", "w3a3"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_it_computes_what_the_simulation_does(tiny_vit: nn.Module, bits: str, symmetric: bool) -> None:
    model = calibrated(tiny_vit, bits, weights__symmetric=symmetric)
    images = normalised(model, 8)
    assert relative(to_int8(copy.deepcopy(model))(images), model(images)) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str) -> None:
    """Bytes flow wherever a tensor has one reader; whatever a family does between its layers needs floats."""
    model = calibrated(family(name))
    images = normalised(model, 4)
    assert relative(predict(to_int8(copy.deepcopy(model)), images), predict(model, images)) < 1e-4


def emitting(model: nn.Module) -> dict[str, str]:
    """The layers and attentions that give bytes, and the activation that they apply."""
    kinds = (Int8Linear, AttentionInBytes)
    found = ((name, part) for name, part in model.named_modules() if isinstance(part, kinds))
    return {name: getattr(part, "activation", "") for name, part in found if part.emits.numel()}


@pytest.mark.parametrize(("act", "activation"), [(nn.GELU, "gelu"), (nn.ReLU, "relu")])
def test_bytes_between_layers(vit: Any, act: type[nn.Module], activation: str) -> None:
    model = to_int8(calibrated(vit(act_layer=act)))
    blocks = ({f"blocks.{i}.attn.qkv": "", f"blocks.{i}.attn.in_bytes": ""} for i in range(2))
    assert emitting(model) == {k: v for block in blocks for k, v in block.items()} | {
        f"blocks.{i}.mlp.fc1": activation for i in range(2)
    }
    assert all(isinstance(block.mlp.act, nn.Identity) for block in model.blocks)  # type: ignore[union-attr]


def test_floats_where_a_reader_is_not_an_integer(vit: Any) -> None:
    """fc2 stays in float, the second product of an attention too: nobody has a scale for what reaches them."""
    model = calibrated(vit(), **{"overrides__*.fc2": None, "overrides__blocks.0.attn.pv": None})
    images = normalised(model, 4)
    integer = to_int8(copy.deepcopy(model))
    assert set(emitting(integer)) == {"blocks.1.attn.qkv", "blocks.1.attn.in_bytes"}
    assert relative(integer(images), model(images)) < 1e-4


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (nn.GELU(), "gelu"),
        (nn.ReLU(), "relu"),
        (nn.GELU(approximate="tanh"), ""),
        (nn.SiLU(), ""),
        (nn.Identity(), ""),
        (nn.Softmax(-1), ""),
        (nn.GLU(), ""),
    ],
)
def test_only_exact_activations_are_fused(act: nn.Module, found: str) -> None:
    assert activation_of(act) == found


def test_swin_and_sizes_that_kernels_do_not_like(tiny_swin: nn.Module, vit) -> None:  # type: ignore[no-untyped-def]
    for model in (calibrated(tiny_swin), calibrated(vit(num_classes=7, embed_dim=30))):
        images = normalised(model, 8)
        assert relative(to_int8(copy.deepcopy(model))(images), model(images)) < 1e-4


def test_images_that_patches_do_not_divide(vit, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """A convolution drops what makes no whole patch."""
    model = calibrated(vit(img_size=38, patch_size=16))
    images = normalised(model, 8)
    integer = to_int8(copy.deepcopy(model))
    assert any(isinstance(module, Int8Patches) for module in integer.modules())
    assert relative(integer(images), model(images)) < 1e-4
    found = aphq.export.export(model, "torch", out=tmp_path / "model.pt2", data=pixels(4, size=38))
    assert found.parity.matches["torch"].error < 1e-4


def test_what_is_zero_in_the_simulation_is_zero() -> None:
    """Rows of padding in a layer without a bias: Swin V2 divides by their length, which makes a lot of a little."""
    inputs, weights = Quantizer(8, False, ()), Quantizer(8, True, (6, 1))
    layer = QuantizedLinear(nn.Linear(24, 6, bias=False), weights, inputs)
    inputs.set_range(torch.tensor(-0.3), torch.tensor(1.0))
    weights.set_range(*(sign * layer.weight.detach().abs().amax(1, keepdim=True) for sign in (-1, 1)))
    x = torch.randn(3, 24)
    x[1] = 0
    assert torch.equal(Int8Linear(layer)(x)[1], torch.zeros(6))


def test_models_that_ask_a_layer_for_its_type_get_a_float_one(tiny_vit: Any) -> None:
    """transformers casts images to it."""
    model: Any = to_int8(calibrated(tiny_vit))
    for layer in (model.patch_embed.proj, model.head):
        assert layer.weight.dtype == torch.float32
    assert model.bfloat16().patch_embed.proj.weight.dtype == torch.bfloat16
    assert not any(name.endswith("weight") for name in model.head.state_dict())


def test_every_layer_is_integer_and_weights_are_bytes(tiny_vit: nn.Module) -> None:
    model = to_int8(calibrated(tiny_vit))
    layers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    assert len(layers) == 10
    assert all(layer.integers.dtype == torch.int8 for layer in layers)
    assert all(layer.weight.numel() == 0 for layer in layers)  # no float copy beside the bytes
    assert sum(isinstance(module, Int8Patches) for module in model.modules()) == 1


def test_what_stays_in_float_is_noted(tiny_vit: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    model = calibrated(tiny_vit, overrides__head=None)
    images = normalised(model, 8)
    expected = model(images)
    with caplog.at_level(logging.WARNING):
        found = to_int8(model)
    assert [record.getMessage() for record in caplog.records] == [
        "not integers on both sides by the recipe, so still in float: head"
    ]
    assert relative(found(images), expected) < 1e-4


def test_a_transposed_convolution_is_no_linear_layer(caplog: pytest.LogCaptureFixture) -> None:
    """It stays as it is, and a detector with integers finds what the simulated one finds."""
    model = aphq.quantize(rcnn(), short_recipe("w8a8", "fast"), pictures(), device="cpu").model
    with caplog.at_level(logging.WARNING):
        integer = to_int8(copy.deepcopy(model))
    (said,) = (record.getMessage() for record in caplog.records if record.name == "aphq.runtimes.int8")
    assert said.startswith("still simulated in float, for only linear layers and patch embeddings have an integer")
    assert "roi_heads.mask_predictor.conv5_mask" in said
    assert "by the recipe" not in said
    image, rules = Image.fromarray(photo(70, 90).permute(1, 2, 0).numpy()), ScenePreprocessing(64, 96)
    found, expected = (detect(m, image, rules) for m in (integer, model))
    assert family_of(integer).num_classes(integer) == family_of(model).num_classes(model) == 3
    torch.testing.assert_close(found.boxes, expected.boxes, rtol=0, atol=0.1)
    assert found.masks is not None
    assert expected.masks is not None
    assert (found.masks != expected.masks).float().mean() < 1e-2


def test_load_says_how_to_run(tmp_path: Path) -> None:
    run = small_run()
    aphq.save(run.model, tmp_path)
    images = normalised(run.model, 8)
    assert relative(aphq.load(tmp_path, runtime="int8")(images), run.model(images)) < 1e-4
    with pytest.raises(ArtifactError, match=r"no runtime 'int9'.*int8"):
        aphq.load(tmp_path, runtime="int9")


@pytest.mark.gpu
def test_on_a_gpu(tiny_vit: nn.Module) -> None:
    model = calibrated(tiny_vit)
    images = normalised(model, 8)
    found = to_int8(copy.deepcopy(model)).cuda()(images.cuda()).cpu()
    assert relative(found, model(images)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_compiled_on_a_gpu(kind: str, tiny_vit: nn.Module, tiny_swin: nn.Module) -> None:
    model = calibrated({"vit": tiny_vit, "swin": tiny_swin}[kind])
    images = normalised(model, 8)
    integer = to_int8(copy.deepcopy(model)).cuda()
    assert all(part.by_kernels for part in integer.modules() if isinstance(part, OnBytes))
    torch.compiler.reset()
    with torch.inference_mode():
        found = torch.compile(integer, fullgraph=True)(images.cuda())
    assert relative(found.cpu(), model(images)) < 1e-2


@pytest.mark.gpu
def test_exported_from_a_gpu_it_holds_operations_of_torch_alone(tiny_vit: nn.Module) -> None:
    model = calibrated(tiny_vit)
    images = normalised(model, 8).cuda()
    integer = to_int8(copy.deepcopy(model)).cuda()
    program = torch.export.export(integer, (images,), strict=False)
    assert "triton" not in str(program.graph)
    assert relative(program.module()(images).cpu(), integer(images).cpu()) < 1e-2


@pytest.mark.gpu
def test_moved_off_the_gpu_it_runs_without_kernels(tiny_vit: nn.Module) -> None:
    model = calibrated(tiny_vit)
    images = normalised(model, 8)
    back = to_int8(copy.deepcopy(model)).cuda().cpu()
    assert relative(back(images), model(images)) < 1e-4
