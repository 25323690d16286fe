from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import SwiGLU
from torch import Tensor, nn

from aphq.errors import ModelError
from aphq.models import architecture_of
from aphq.models.timm_swin import TimmSwin

from .variants import SWINS, images_for

Build = Callable[..., nn.Module]


def test_a_swin_is_embedding_blocks_merges_and_head(tiny_swin: nn.Module) -> None:
    architecture = architecture_of(tiny_swin)
    assert type(architecture) is TimmSwin
    assert [(u.name, u.kind) for u in architecture.units(tiny_swin)] == [
        ("patch_embed", "patch_embed"),
        ("layers.0.blocks.0", "block"),
        ("layers.0.blocks.1", "block"),
        ("layers.1.downsample", "merge"),
        ("layers.1.blocks.0", "block"),
        ("layers.1.blocks.1", "block"),
        ("head", "head"),
    ]


def padded_blocks(model: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The blocks that, watched while they run, put zeros between their first norm and their attention."""
    blocks = {n: m for n, m in model.named_modules() if type(m).__name__ == "SwinTransformerBlock"}
    found: set[str] = set()
    running: list[str] = []
    original = F.pad

    def pad(x: Tensor, widths: Any, *rest: Any) -> Tensor:
        if running and any(widths):
            found.add(running[-1])
        return original(x, widths, *rest)

    for name, block in blocks.items():
        block.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        block.register_forward_hook(lambda *_: running.clear())
    with monkeypatch.context() as patch:
        patch.setattr(F, "pad", pad)
        model(images)
    return found


@pytest.mark.parametrize("name", [name for name in SWINS if name != "any size"])
def test_a_norm_may_shift_where_no_zeros_follow_it(name: str, swin: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    model = swin(**SWINS[name])
    padded = padded_blocks(model, images_for(model), monkeypatch)
    assert bool(padded) == ("padded" in name or name == "always partition"), "the variants are what they claim"
    for unit in architecture_of(model).units(model):
        for pair in unit.norms:
            expected = not (pair.norm.endswith("norm1") and unit.name in padded)
            assert pair.may_shift == expected, pair.norm


def test_no_first_norm_may_shift_when_images_may_have_any_size(swin: Build) -> None:
    model = swin(strict_img_size=False)
    pairs = [pair for unit in architecture_of(model).units(model) for pair in unit.norms]
    assert not any(pair.may_shift for pair in pairs if pair.norm.endswith("norm1"))
    assert all(pair.may_shift for pair in pairs if not pair.norm.endswith("norm1"))


@pytest.mark.parametrize("name", ["padded", "padded on odd maps", "window divides"])
@torch.no_grad()
def test_shifting_where_allowed_leaves_the_output_alone(name: str, swin: Build) -> None:
    """The meaning of `may_shift`: a constant added to the norm can be taken back in the next bias."""
    model = swin(**SWINS[name])
    images = images_for(model)
    before = model(images)
    for unit in architecture_of(model).units(model):
        for pair in unit.norms:
            norm, linear = model.get_submodule(pair.norm), model.get_submodule(pair.linear)
            if pair.may_shift and linear.bias is not None:
                shift = torch.linspace(-1, 1, norm.bias.numel())
                norm.bias += shift
                linear.bias -= linear.weight @ shift
    torch.testing.assert_close(model(images), before, rtol=1e-4, atol=1e-4)


def test_a_model_without_classifier_embeds(swin: Build) -> None:
    model = swin(num_classes=0)
    assert architecture_of(model).task_of(model) == "embedding"
    assert architecture_of(model).task_of(swin()) == "classification"


@pytest.mark.parametrize(
    ("place", "part", "message"),
    [
        ("mlp", SwiGLU(16, 32), "module 'layers.0.blocks.1.mlp' is a SwiGLU; supported there: Mlp"),
        ("attn", nn.Identity(), "module 'layers.0.blocks.1.attn' is a Identity; supported there: WindowAttention"),
    ],
)
def test_parts_the_adapter_does_not_know_are_named(tiny_swin: Any, place: str, part: nn.Module, message: str) -> None:
    setattr(tiny_swin.layers[0].blocks[1], place, part)
    with pytest.raises(ModelError, match=message):
        architecture_of(tiny_swin)


def test_an_activation_that_a_rebuilt_model_would_not_have_is_refused(tiny_swin: Any) -> None:
    tiny_swin.layers[1].blocks[0].mlp.act = nn.ReLU()
    with pytest.raises(ModelError, match=r"module 'layers.1.blocks.0.mlp.act' is a ReLU; supported there: GELU"):
        architecture_of(tiny_swin)


def test_another_embedding_is_named(tiny_swin: Any) -> None:
    tiny_swin.patch_embed = nn.Identity()
    with pytest.raises(ModelError, match=r"module 'patch_embed' is a Identity"):
        architecture_of(tiny_swin)
