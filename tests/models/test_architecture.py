import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from aphq.errors import ModelError
from aphq.models import architecture_named, architecture_of
from aphq.models.architecture import check_units, predict, replace_module, run_units

from ..conftest import VIT, scramble
from .variants import assert_same, images_for, last_bits

Build = Callable[..., nn.Module]
# packed projections and loose biases become layers; the MLP behind Swin V2's position bias becomes a table
MAY_CHANGE = ("attn.", "attention.", "vision_model.head.")


def test_the_units_in_a_chain_are_the_model(variant: Any) -> None:
    units = architecture_of(variant).units(variant)
    images = images_for(variant)
    assert torch.equal(run_units(variant, units, images), predict(variant, images))
    check_units(variant, units, images)


def test_the_units_hold_every_multiplication_once(variant: Any) -> None:
    """A layer outside all units would never be calibrated; a layer in two would be calibrated twice."""
    architecture = architecture_of(variant)
    architecture.open_attention(variant)
    units = architecture.units(variant)
    owned = [f"{unit.name}/{prefix}" for unit in units for prefix in unit.modules]
    assert len(set(owned)) == len(owned)
    prefixes = [prefix for unit in units for prefix in unit.modules]
    for name, module in variant.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            assert sum(name == p or name.startswith(f"{p}.") for p in prefixes) == 1, name


def test_units_name_modules_that_exist(variant: Any) -> None:
    architecture = architecture_of(variant)
    architecture.open_attention(variant)
    for unit in architecture.units(variant):
        variant.get_submodule(unit.name)
        if unit.mlp:
            assert isinstance(variant.get_submodule(unit.mlp.fc1), nn.Linear)
            assert isinstance(variant.get_submodule(unit.mlp.fc2), nn.Linear)
            variant.get_submodule(unit.mlp.act)
        for pair in unit.norms:
            width = variant.get_submodule(pair.norm).weight.shape[0]
            for linear in pair.linears:
                assert variant.get_submodule(linear).weight.shape[1] == width


def test_a_description_rebuilds_the_model(variant: Any) -> None:
    architecture = architecture_of(variant)
    description = json.loads(json.dumps(architecture.describe(variant)))  # plain enough for a file
    again = architecture_named(architecture.family).build(description).eval().requires_grad_(False)
    again.load_state_dict(variant.state_dict())
    images = images_for(variant)
    assert torch.equal(predict(again, images), predict(variant, images))
    assert architecture.describe(again) == architecture.describe(variant)


def test_opening_the_attention_changes_no_bit(variant: Any) -> None:
    architecture = architecture_of(variant)
    images = images_for(variant)
    before, names, tolerance = predict(variant, images), set(variant.state_dict()), last_bits(variant)
    architecture.open_attention(variant)
    assert_same(predict(variant, images), before, tolerance)
    renamed = set(variant.state_dict()) ^ names
    assert all(any(part in name for part in MAY_CHANGE) for name in renamed), renamed
    architecture.check(variant)
    assert_same(run_units(variant, architecture.units(variant), images), before, tolerance)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_model_without_adapter_is_refused_by_the_module_it_stops_at() -> None:
    from torchvision.models.segmentation import fcn_resnet50

    with torch.device("meta"):
        model = fcn_resnet50(weights=None, weights_backbone=None)
    with pytest.raises(ModelError, match=r"a FCN \(no adapter knows its module 'backbone' of class Inter"):
        architecture_of(model)


def test_a_family_without_adapter_is_refused() -> None:
    with pytest.raises(ModelError, match=r"a ResNet \(.*'layer1.0' of class BasicBlock\); supported: .*timm's Vision"):
        architecture_of(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3))


def test_an_unknown_family_name_is_refused() -> None:
    with pytest.raises(ModelError, match=r"unknown model family 'x'; this aphq knows .*timm\.VisionTransformer"):
        architecture_named("x")


class OtherForward(VisionTransformer):
    """Looks like a VisionTransformer, computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(-1))


class SameForward(VisionTransformer):
    """A subclass that adds nothing to the forward pass is as good as its base."""


def test_a_subclass_with_its_own_forward_is_found_out(images: Tensor) -> None:
    model = scramble(OtherForward(**VIT))
    units = architecture_of(model).units(model)
    with pytest.raises(ModelError, match=r"OtherForward is not the chain patch_embed \.\.\. head"):
        check_units(model, units, images)
    model = scramble(SameForward(**VIT))
    check_units(model, architecture_of(model).units(model), images)


def test_a_model_that_gives_no_logits_is_refused(vit: Build, images: Tensor) -> None:
    model = vit(global_pool="")
    with pytest.raises(ModelError, match=r"shape \[batch, classes\] from the model, got shape \(2, 17, 10\)"):
        check_units(model, architecture_of(model).units(model), images)


def test_a_model_that_gives_nan_is_refused(tiny_vit: Any, images: Tensor) -> None:
    tiny_vit.blocks[1].mlp.fc1.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        check_units(tiny_vit, architecture_of(tiny_vit).units(tiny_vit), images)


def test_replacing_reaches_modules_at_any_depth(tiny_vit: Any) -> None:
    new = nn.Identity()
    replace_module(tiny_vit, "blocks.1.mlp.act", new)
    replace_module(tiny_vit, "head_drop", new)
    assert tiny_vit.blocks[1].mlp.act is new
    assert tiny_vit.head_drop is new
