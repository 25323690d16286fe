"""Detectors on timm's models as chains of units, held against the modules that people write."""

import json
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork

from aphq.detection import TimmBackbone, timm_backbone
from aphq.errors import ModelError
from aphq.evaluation.coco import detect
from aphq.models.architecture import architecture_of, run_units
from aphq.models.attention import open_attentions
from aphq.models.coverage import coverage
from aphq.models.detection.family import family_of
from aphq.models.detection.rpn import flatten_anchors
from aphq.models.student import make_student, opened_copy
from aphq.recipe import Recipe

from .rcnn import WIDTH, photo, rcnn
from .timm_nets import BACKBONES, SWIN, ChannelsFirst, Features, WholeVit, on_timm, pyramid, swin, vit

SIZES = [(96, 128), (64, 160), (160, 96)]


def opened(model: nn.Module) -> Any:
    return opened_copy(model, architecture_of(model))


def as_image(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("kind", BACKBONES)
@pytest.mark.parametrize("size", SIZES)
def test_the_chain_is_the_detector(kind: str, size: tuple[int, int]) -> None:
    """Every answer of the opened chain is what the user's own backbone and torchvision's heads say."""
    model = on_timm(kind)
    teacher = opened(model)
    family, image = family_of(model), torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1))
    known = family.regions_of(model, image, size)
    found = run_units(teacher, architecture_of(model).units(teacher), {"image": image, **known})
    features, heads = model.backbone(image), model.roi_heads
    logits, deltas = model.rpn.head(list(features.values()))
    cls, reg = heads.box_predictor(heads.box_head(heads.box_roi_pool(features, [known["regions.0"]], [size])))
    masks = heads.mask_predictor(heads.mask_head(heads.mask_roi_pool(features, [known["regions.mask"]], [size])))
    expected = {
        "rpn.cls": torch.cat([flatten_anchors(x, 1)[:, 0] for x in logits]),
        "rpn.reg": torch.cat([flatten_anchors(x, 4) for x in deltas]),
        "box.0.cls": cls[:, [1, 2, 3, 0]],
        "box.0.reg": reg[:, 4:],
        "mask.0": masks[torch.arange(len(masks)), known["labels"].long()],
    }
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        if kind == "swin, other names":  # maps that lie otherwise in memory are convolved in another order
            torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(found[name], x), name


@pytest.mark.parametrize("kind", BACKBONES)
def test_every_layer_and_product_has_a_unit_and_is_quantized(kind: str) -> None:
    model = on_timm(kind)
    architecture, teacher = architecture_of(model), opened(model)
    units = architecture.units(teacher)
    assert [unit.kind for unit in units if unit.kind in ("neck", "head")] == ["neck", "head", "head", "head"]
    owned = [f"{m}.{n}" for unit in units for m in unit.modules for n in teacher.get_submodule(m).state_dict()]
    tokens = {"cls_token", "reg_token", "pos_embed"}  # added between the embedding and the first block
    assert len(owned) == len(set(owned))
    assert {name for name in teacher.state_dict() if name.split(".")[-1] not in tokens} == set(owned)
    student = make_student(teacher, architecture, units, Recipe())
    rows = {row.name: row for row in coverage(student)}
    multiplying = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    layers = {name for name, module in teacher.named_modules() if isinstance(module, multiplying)}
    attentions = [name for name, _ in open_attentions(teacher)]
    assert len(attentions) == sum(unit.kind == "block" for unit in units) > 2
    assert rows.keys() == layers | {f"{name}.{product}" for name in attentions for product in ("qk", "pv")}
    assert all(not row.note and row.input_bits for row in rows.values())
    (embedding,) = (row for name, row in rows.items() if name.endswith("patch_embed.proj"))
    assert embedding.input_bits == 8
    image = torch.randn(1, 3, 96, 64, generator=torch.Generator().manual_seed(1))
    for name, x in teacher.backbone(image).items():
        assert torch.equal(student.backbone(image)[name], x), name  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("kind", BACKBONES)
def test_description_builds_an_equal_detector(kind: str) -> None:
    """From the model as it is given, and from the opened one, which is what a run describes."""
    model = on_timm(kind, masks=False)
    architecture, teacher = architecture_of(model), opened(model)
    description = json.loads(json.dumps(architecture.describe(model)))
    assert json.loads(json.dumps(architecture.describe(teacher))) == description
    again: Any = architecture.build(description).eval()
    architecture.open_attention(again)
    again.load_state_dict(teacher.state_dict())
    rules = family_of(model).scenes(model)
    for size in ((80, 70), (50, 90)):
        found, expected = (detect(m, as_image(photo(*size)), rules) for m in (again, teacher))
        assert len(found) > 3
        assert torch.equal(found.boxes, expected.boxes)
        assert torch.equal(found.scores, expected.scores)


def test_what_is_found_is_what_torchvision_finds() -> None:
    model, pixels = on_timm("swin"), photo(64, 96)
    found = detect(model, as_image(pixels), family_of(model).scenes(model))
    (expected,) = model([pixels / 255])
    assert len(found) > 3
    torch.testing.assert_close(found.boxes, expected["boxes"], rtol=0, atol=1e-3)
    assert torch.equal(found.labels, expected["labels"] - 1)


def test_the_given_model_stays_as_it_was() -> None:
    """Opening takes the head off a whole classifier, in its copy alone; a probe must not leave it in eval mode."""
    model = on_timm("swin, whole")
    model.train()
    model.backbone.swin.norm.eval()
    names, kind = list(model.state_dict()), type(model.backbone)
    teacher = opened(model)
    assert list(model.state_dict()) == names
    assert "backbone.swin.head.fc.weight" in names
    assert type(model.backbone) is kind
    assert model.backbone.swin.layers.training
    assert not model.backbone.swin.norm.training
    assert type(teacher.backbone) is TimmBackbone
    assert not any("head" in name for name in teacher.backbone.state_dict())


def test_scales_are_those_that_torchvision_would_infer() -> None:
    patches = vit(patch_size=14, img_size=56, features_only=True, out_indices=1, dynamic_img_pad=True)
    trunk = ChannelsFirst(patches)
    for model in (rcnn(trunk=trunk), on_timm("swin"), on_timm("swin, some stages")):
        pool, (height, width) = model.roi_heads.box_roi_pool, (448, 896)
        pool.featmap_names = [name for name in model.backbone(torch.zeros(1, 3, 64, 64)) if name != "pool"]
        levels = [model.backbone(torch.zeros(1, 3, height, width))[name] for name in pool.featmap_names]
        inferred = [2.0 ** float(torch.tensor(x.shape[-2] / height).log2().round()) for x in levels]
        architecture_of(model).open_attention(model)
        assert pool.scales == inferred


def test_norms_before_the_pyramid_belong_to_it() -> None:
    for kind, convolutions in (("swin, whole", ["2"]), ("vit, whole", ["0"])):
        teacher = opened(on_timm(kind))
        (neck,) = (unit for unit in architecture_of(teacher).units(teacher) if unit.kind == "neck")
        (pair,) = neck.norms
        assert pair.norm == "backbone.body.model.norm"
        assert list(pair.linears) == [f"backbone.fpn.inner_blocks.{i}.0" for i in convolutions]


def refusal(backbone: nn.Module, **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        architecture_of(rcnn(trunk=backbone, **changes))
    return str(caught.value)


def test_models_of_one_size_are_refused_with_the_argument_that_helps() -> None:
    strict = refusal(Features(swin(features_only=True, strict_img_size=True)))
    assert "SwinTransformer in 'backbone' takes images of one size, (64, 64)" in strict
    assert "strict_img_size=False" in strict
    fixed = vit(features_only=True, out_indices=1, dynamic_img_size=False)
    assert "dynamic_img_size=True" in refusal(ChannelsFirst(fixed))


def test_patches_that_images_do_not_fill_are_refused() -> None:
    patches = vit(patch_size=14, img_size=56, features_only=True, out_indices=1)
    message = refusal(ChannelsFirst(patches))
    assert "patches of 14 x 14" in message
    assert "size_divisible" in message
    architecture_of(rcnn(trunk=ChannelsFirst(patches), size_divisible=28))
    flat = vit(patch_size=(8, 16), features_only=True, out_indices=1)
    assert "of (8, 16); supported there: squares" in refusal(ChannelsFirst(flat))


def test_what_is_not_timm_and_a_pyramid_is_named() -> None:
    class Normed(Features):
        def __init__(self, body: Any) -> None:
            super().__init__(body)
            self.norms = nn.ModuleList(nn.LayerNorm(width) for width in body.feature_info.channels())

        def maps(self, images: Tensor) -> list[Tensor]:
            return [norm(x).permute(0, 3, 1, 2) for norm, x in zip(self.norms, self.body(images), strict=True)]

    assert "'backbone.norms.0.weight' belongs to neither" in refusal(Normed(swin(features_only=True)))

    class NoPyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.out_channels = vit(features_only=True, out_indices=1), 16

        def forward(self, images: Tensor) -> Tensor:
            return self.body(images)[0]  # type: ignore[no-any-return]

    message = refusal(NoPyramid())
    assert "'backbone' is a NoPyramid; supported there: BackboneWithFPN on a ResNet, or a module that holds" in message
    convolutions = timm.create_model("resnet10t", features_only=True, out_indices=(3, 4))
    assert "'backbone.body' has the parts conv1" in refusal(ChannelsFirst(convolutions))
    other = timm.create_model("beit_base_patch16_224", embed_dim=16, depth=3, num_heads=2, features_only=True)
    assert "'backbone.body.model' is a Beit; supported there: SwinTransformer" in refusal(ChannelsFirst(other))
    changed = swin(features_only=True)
    changed["layers_1"].blocks[1].mlp.act = nn.SiLU()
    assert "in 'backbone.body': module 'layers.1.blocks.1.mlp.act' is a SiLU" in refusal(Features(changed))


def test_a_forward_pass_of_its_own_is_found_out() -> None:
    class Doubling(Features):
        def maps(self, images: Tensor) -> list[Tensor]:
            return [2 * x for x in super().maps(images)]

    assert "(Doubling) is not its timm model's maps" in refusal(Doubling(swin(features_only=True)))

    class Fewer(Features):
        def __init__(self, body: Any) -> None:
            super().__init__(body)
            self.fpn = pyramid([16, 32, 64])

        def maps(self, images: Tensor) -> list[Tensor]:
            return super().maps(images)[1:]

    assert "(Fewer) is not its timm model's maps" in refusal(Fewer(swin(features_only=True)))

    class LastLeftOut(WholeVit):
        def forward(self, images: Tensor) -> Any:
            (found,) = self.vit.forward_intermediates(images, [1], intermediates_only=True)
            return self.fpn({"only": found})

    assert "(LastLeftOut) is not its timm model's maps" in refusal(LastLeftOut(vit()))

    class Failing(WholeVit):
        def forward(self, images: Tensor) -> Any:
            raise ValueError("224 x 224 alone")

    assert "cannot take an image of 64 x 96: 224 x 224 alone" in refusal(Failing(vit()))
    ours = TimmBackbone(swin(features_only=True), FeaturePyramidNetwork([16, 32, 64], WIDTH))
    assert "'backbone.body' gives 4 maps and 'backbone.fpn' takes 3" in refusal(ours)


def test_parts_that_no_map_needs_are_refused() -> None:
    """Nothing would ever quantize them."""
    ours: Any = timm_backbone("swin_tiny_patch4_window7_224", WIDTH, pretrained=False, **SWIN)
    model = rcnn(trunk=ours)
    model.backbone.body["layers_3"].extra = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"'backbone.body.layers_3.extra.bias' is not what"):
        architecture_of(model).describe(model)


def test_descriptions_that_make_no_sense_are_refused() -> None:
    model = on_timm("swin", masks=False)
    architecture = architecture_of(model)
    for key, value in (
        ("family", "timm.Eva"),
        ("read", [7]),
        ("read", []),
        ("names", ["0"]),
        ("arguments", {}),
        ("flat", "yes"),
    ):
        description = architecture.describe(model)
        description["body"][key] = value
        with pytest.raises(ModelError):
            architecture.build(description)
