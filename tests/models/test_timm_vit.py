from collections.abc import Callable
from typing import Any

import pytest
from timm.layers import ConvMlp
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock
from timm.models.vision_transformer_hybrid import HybridEmbed
from torch import nn

from aphq.errors import ModelError
from aphq.models import architecture_of
from aphq.models.architecture import Mlp, NormPair
from aphq.models.timm_vit import TimmDistilledVit, TimmVit

Build = Callable[..., nn.Module]


def test_a_vit_is_embedding_blocks_and_head(tiny_vit: nn.Module) -> None:
    architecture = architecture_of(tiny_vit)
    assert type(architecture) is TimmVit
    units = architecture.units(tiny_vit)
    assert [(u.name, u.kind) for u in units] == [
        ("patch_embed", "patch_embed"),
        ("blocks.0", "block"),
        ("blocks.1", "block"),
        ("head", "head"),
    ]
    assert units[2].mlp == Mlp("blocks.1.mlp", "blocks.1.mlp.fc1", "blocks.1.mlp.act", "blocks.1.mlp.fc2")
    assert units[2].norms == (
        NormPair("blocks.1.norm1", "blocks.1.attn.qkv"),
        NormPair("blocks.1.norm2", "blocks.1.mlp.fc1"),
    )


def test_a_distilled_model_is_found_by_its_own_class(distilled: Build) -> None:
    model = distilled()
    architecture = architecture_of(model)
    assert type(architecture) is TimmDistilledVit
    assert architecture.units(model)[-1].modules == ("head", "head_dist")


def test_pooling_by_attention_belongs_to_the_head(vit: Build) -> None:
    model = vit(global_pool="map", class_token=False)
    assert architecture_of(model).units(model)[-1].modules == ("attn_pool", "head")


def hybrid(**arguments: Any) -> HybridEmbed:
    return HybridEmbed(nn.Conv2d(3, 16, 8, 8), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mlp_layer": ConvMlp}, r"module 'blocks.0.mlp' is a ConvMlp; supported there: Mlp or GluMlp or SwiGLU"),
        ({"block_fn": ParallelScalingBlock}, r"module 'blocks.0' is a ParallelScalingBlock; supported there: Block"),
        ({"block_fn": ResPostBlock}, r"module 'blocks.0' is a ResPostBlock"),
        ({"global_pool": "prr"}, r"module 'attn_pool' is a AttentionPoolPrr"),
        (
            {"embed_layer": hybrid, "patch_size": 1},
            r"module 'patch_embed' is a HybridEmbed; supported there: PatchEmbed",
        ),
    ],
)
def test_parts_the_adapter_does_not_know_are_named(vit: Build, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        architecture_of(vit(**arguments))


def test_an_attention_of_another_class_is_named(tiny_vit: Any) -> None:
    tiny_vit.blocks[1].attn = nn.Identity()
    with pytest.raises(ModelError, match=r"module 'blocks.1.attn' is a Identity; supported there: Attention"):
        architecture_of(tiny_vit)


def test_a_gated_attention_is_named(tiny_vit: Any) -> None:
    tiny_vit.blocks[1].attn.gate = nn.Linear(32, 32)
    with pytest.raises(ModelError, match=r"module 'blocks.1.attn' has a gate"):
        architecture_of(tiny_vit)


def test_an_activation_or_norm_that_no_file_could_name_is_refused(vit: Build) -> None:
    with pytest.raises(ModelError, match=r"module 'blocks.0.mlp.act' is a Tanh; supported activations: gelu"):
        TimmVit().describe(vit(act_layer=nn.Tanh))
    with pytest.raises(ModelError, match=r"module 'blocks.0.norm1' is a Identity; supported norms"):
        TimmVit().describe(vit(norm_layer=lambda *_, **__: nn.Identity()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"norm": {"type": "os.system", "eps": 1e-6}},
            "'os.system' is not among the layer types a model file may name",
        ),
        ({"norm": {"type": ["LayerNorm"], "eps": 1e-6}}, "not among the layer types"),
        ({"activation": "eval"}, "'eval' is not among the layer types"),
        ({"num_heads": 5}, "cannot build a VisionTransformer from its description"),
        ({"num_heads": 0}, "cannot build a VisionTransformer"),
        ({"surprise": 1}, "cannot build a VisionTransformer"),
    ],
)
def test_a_forged_description_is_refused(tiny_vit: nn.Module, change: dict[str, Any], message: str) -> None:
    description = TimmVit().describe(tiny_vit)
    with pytest.raises(ModelError, match=message):
        TimmVit().build({**description, **change})
