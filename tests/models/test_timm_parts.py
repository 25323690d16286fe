from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import LayerNorm
from torch import nn

from aphq.errors import ModelError
from aphq.models.timm_parts import (
    ACTIVATIONS,
    NORMS,
    activation_factory,
    describe_activation,
    describe_norm,
    mlp_ratio,
    norm_factory,
    require_type,
)


@given(st.integers(1, 20_000), st.integers(1, 4096))
def test_a_ratio_gives_the_hidden_width_back(hidden: int, width: int) -> None:
    assert int(width * mlp_ratio(hidden, width)) == hidden


@pytest.mark.parametrize("key", NORMS)
def test_norms_keep_their_class_and_epsilon(key: str) -> None:
    again = norm_factory(describe_norm(NORMS[key](8, eps=3e-4), "norm"))(8)
    assert type(again) is NORMS[key]
    assert again.eps == 3e-4


@pytest.mark.parametrize("key", ACTIVATIONS)
def test_activations_keep_their_name(key: str) -> None:
    assert describe_activation(activation_factory(key)(), "act") == key


class OtherNorm(LayerNorm):
    pass


def test_a_subclass_may_compute_something_else() -> None:
    with pytest.raises(ModelError, match=r"module 'blocks.0.norm1' is a OtherNorm; supported norms"):
        describe_norm(OtherNorm(4), "blocks.0.norm1")
    with pytest.raises(ModelError, match="module 'x' is a OtherNorm; supported there: LayerNorm or Identity"):
        require_type(OtherNorm(4), "x", LayerNorm, nn.Identity)


@pytest.mark.parametrize("key", ["os.system", "", None, 3, ["gelu"]])
def test_only_listed_types_are_looked_up(key: Any) -> None:
    with pytest.raises(ModelError, match="not among the layer types"):
        activation_factory(key)
    with pytest.raises(ModelError, match="not among the layer types"):
        norm_factory({"type": key, "eps": 1e-6})
