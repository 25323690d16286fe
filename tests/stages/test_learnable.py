import pytest
import torch
from torch import nn

from aphq.models.student import swap_activation
from aphq.quant.layers import quantizers
from aphq.quant.rounding import LearnedRounding
from aphq.quant.straight_through import StraightThrough
from aphq.stages.learnable import Learnable

from ..runs import short, workspace
from .test_joint_tuning import searched


@pytest.mark.parametrize("rounding", [LearnedRounding, StraightThrough, None])
def test_an_error_on_the_way_leaves_nothing_that_drops_or_learns(rounding: type | None, tiny_vit: nn.Module) -> None:
    work = searched(tiny_vit)
    learned = Learnable.of(work, work.units, 0.5, seed=0)

    def interrupted() -> None:
        with learned.rounded_by(rounding, [*learned.scales, *learned.rest]):
            assert all(q.drop is not None and q.drop.share == 0.5 for q in learned.inputs)
            assert len(learned.roundings) == (0 if rounding is None else len(learned.layers))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(quantizer.drop is None for quantizer in quantizers(work.student))
    assert not any(p.requires_grad for p in work.student.parameters())
    assert learned.roundings == []


def test_everything_is_either_a_weight_a_scale_or_the_rest(tiny_swin: nn.Module) -> None:
    work = workspace(tiny_swin)
    learned = Learnable.of(work, work.units, 1.0, seed=0)
    inside = {id(p) for unit in work.units for m in unit.modules for p in work.student.get_submodule(m).parameters()}
    found = [*learned.scales, *learned.weight_scales, *learned.rest, *(layer.weight for layer in learned.layers)]
    assert len({id(p) for p in found}) == len(found)
    left = {name for name, p in work.student.named_parameters() if id(p) in inside - {id(p) for p in found}}
    assert all(name.endswith("relative_position_bias_table") for name in left)
    assert all(q.drop is None for q in learned.inputs)


def test_a_relu_is_part_of_the_quantizer_while_it_learns(tiny_vit: nn.Module) -> None:
    work = searched(tiny_vit, "w4a4")
    for unit in work.units:
        if unit.mlp is not None:
            swap_activation(work.student, unit.mlp)
    learned = Learnable.of(work, work.units, 1.0, seed=0)
    x = torch.randn(2, 3, 32, 32)
    expected = work.student(x)
    with learned.rounded_by(StraightThrough, []):
        assert [q.relu for q in learned.inputs].count(True) == 2
        assert torch.allclose(work.student(x), expected, atol=1e-5)
    assert not any(q.relu for q in learned.inputs)


def test_scales_stay_positive(tiny_vit: nn.Module) -> None:
    learned = Learnable.of(workspace(tiny_vit, short()), workspace(tiny_vit).units, 1.0, seed=0)
    for scale in (*learned.scales, *learned.weight_scales):
        scale.data.fill_(-1.0)
    learned.keep_scales_positive()
    assert all(bool((scale > 0).all()) for scale in (*learned.scales, *learned.weight_scales))


def test_weights_settle_towards_their_codes_as_the_clock_says(tiny_vit: nn.Module) -> None:
    work = searched(tiny_vit)
    learned = Learnable.of(work, work.units, 1.0, seed=0)
    with learned.rounded_by(StraightThrough, []):
        before = {id(r): r.master.data.clone() for r in learned.roundings if isinstance(r, StraightThrough)}
        for step, share in enumerate((0.0, 0.25, 1.0)):
            learned.clock.fill_(step)
            learned.settle(torch.tensor([0.0, 0.25, 1.0]))
            for rounding in learned.roundings:
                assert isinstance(rounding, StraightThrough)
                wanted = torch.lerp(before[id(rounding)], rounding.hard(), share)
                torch.testing.assert_close(rounding.master.data, wanted)
                before[id(rounding)] = rounding.master.data.clone()
    with learned.rounded_by(LearnedRounding, []):
        learned.settle(torch.ones(3))  # these do not go to and fro
