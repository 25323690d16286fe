import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aphq.engine.folder import RunFolder
from aphq.engine.workspace import Workspace
from aphq.models.distillation import EMBEDDINGS, LOGITS
from aphq.models.student import finalise
from aphq.quant.layers import QuantizedLayer
from aphq.quant.quantizer import Quantizer
from aphq.stages.block_reconstruction import reconstruct_blocks
from aphq.stages.layernorm import reparameterise_norms
from aphq.stages.learnable import Learnable
from aphq.stages.scale_search import search_scales

from ..runs import all_images, pixels, short, workspace

AS_PUBLISHED: dict[str, Any] = {
    "block_reconstruction__weight_lr": 0.0,
    "block_reconstruction__input_quantized_share": 0.5,
}
LONGER: dict[str, Any] = {
    **AS_PUBLISHED,
    "block_reconstruction__steps": 120,
    "block_reconstruction__rounding_lr": 1e-2,
    "block_reconstruction__scale_lr": 1e-3,
}


def searched(model: nn.Module, bits: str = "w3a3", **changes: Any) -> Workspace:
    work = workspace(model, short(bits, **changes).without("mlp_reconstruction"), pixels(32))
    reparameterise_norms(work, work.recipe.stage("layernorm_reparameterisation"))  # type: ignore[arg-type]
    search_scales(work, work.recipe.stage("scale_search"))  # type: ignore[arg-type]
    return work


def reconstruct(work: Workspace, folder: Path | None = None, what: str = "unit") -> list[dict[str, Any]]:
    """The events of that name."""
    work.folder = RunFolder(folder)
    try:
        reconstruct_blocks(work, work.recipe.stage("block_reconstruction"))  # type: ignore[arg-type]
    finally:
        work.folder.close()
    lines = [] if folder is None else (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == what]


def loss(work: Workspace, student: nn.Module) -> float:
    """KL at the logits on the calibration images."""
    with torch.no_grad():
        x = all_images(work)
        return float(LOGITS.loss(student(x), work.teacher(x)))


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_reconstruction_beats_scale_search_alone(request: pytest.FixtureRequest, family: str, tmp_path: Path) -> None:
    work = searched(request.getfixturevalue(family)(), **{**LONGER, "block_reconstruction__steps": 300})
    search_only = copy.deepcopy(work.student)
    finalise(search_only)
    weights = {n: m.weight.clone() for n, m in work.student.named_modules() if isinstance(m, QuantizedLayer)}
    before: dict[str, Tensor] = {
        n: q.scale.clone() for n, q in work.student.named_modules() if isinstance(q, Quantizer)
    }
    events = reconstruct(work, tmp_path)
    assert loss(work, work.student) < 0.9 * loss(work, search_only)

    assert [event["unit"] for event in events] == [unit.name for unit in work.units]
    for name, layer in work.student.named_modules():
        if isinstance(layer, QuantizedLayer):
            quantizer, scale = layer.weight_quantizer, before[f"{name}.weight_quantizer"]
            assert quantizer is not None
            assert torch.equal(quantizer.scale, scale), "weight scales stay as they were found"
            code = layer.weight / scale
            assert torch.allclose(code, code.round(), atol=1e-4)
            down = (weights[name] / scale).floor()
            up = down + 1
            low, high = -quantizer.zero_point, 2**quantizer.bits - 1 - quantizer.zero_point
            down, up = down.clamp(low, high), up.clamp(low, high)
            assert ((code.round() == down) | (code.round() == up)).all(), name
            assert layer.rounding is None
    changed = 0
    for name, quantizer in ((n, q) for n, q in work.student.named_modules() if isinstance(q, Quantizer)):
        assert quantizer.drop is None, "no more dropping"
        assert quantizer.enabled
        assert (quantizer.scale > 0).all()
        assert not quantizer.scale.requires_grad
        changed += not torch.equal(quantizer.scale, before[name])
    assert changed >= 8, "activation scales are learned"


def test_weights_settle_in_the_second_half(tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    monkeypatch.setattr(Learnable, "settle", lambda self, table: shares.append(float(table[self.clock])))
    work = searched(tiny_vit, block_reconstruction__weight_lr=0.01, block_reconstruction__steps=9)
    reconstruct(work)
    assert shares == []
    work = searched(
        tiny_vit,
        block_reconstruction__weight_lr=0.01,
        block_reconstruction__settling=0.2,
        block_reconstruction__steps=9,
    )
    reconstruct(work)
    expected = [0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.1, 0.15, 0.2]
    assert shares == pytest.approx(expected * len(work.units))


def test_weights_that_learn_straight_through_go_to_any_code(tiny_vit: nn.Module) -> None:
    by_rounding, straight = searched(tiny_vit, **LONGER), searched(tiny_vit, **LONGER)
    reconstruct(by_rounding)
    straight.recipe = straight.recipe.with_value("block_reconstruction.weight_lr", 0.05)
    weights = {n: m.weight.clone() for n, m in straight.student.named_modules() if isinstance(m, QuantizedLayer)}
    reconstruct(straight)
    assert loss(straight, straight.student) < 0.9 * loss(by_rounding, by_rounding.student)
    farthest = 0.0
    for name, layer in straight.student.named_modules():
        if isinstance(layer, QuantizedLayer):
            quantizer = layer.weight_quantizer
            assert quantizer is not None
            assert layer.rounding is None
            assert torch.equal(layer.weight, quantizer(layer.weight)), "on the grid"
            nearest = quantizer.codes(weights[name])
            farthest = max(farthest, float((quantizer.codes(layer.weight) - nearest).abs().max()))
    assert farthest >= 2, "farther than up or down"


def test_each_unit_learns(tiny_vit: nn.Module, tmp_path: Path) -> None:
    work = searched(tiny_vit, **LONGER, block_reconstruction__regulariser=0.0)
    for event in reconstruct(work, tmp_path):
        losses = torch.tensor(event["losses"])
        assert losses[0] == pytest.approx(2, rel=0.7), "scaled to start at first_loss"
        assert losses[-40:].mean() < losses[:40].mean(), event["unit"]


def test_the_error_is_recorded_apart_from_the_term_that_decides_the_rounding(
    tiny_vit: nn.Module, tmp_path: Path
) -> None:
    work = searched(tiny_vit, **AS_PUBLISHED, block_reconstruction__steps=10, block_reconstruction__warmup=0.5)
    for unit in reconstruct(work, tmp_path):
        losses, errors = unit["losses"], unit["errors"]
        assert errors[:5] == losses[:5], "there is no other term during the warm-up"
        assert all(loss > error > 0 for loss, error in zip(losses[5:], errors[5:], strict=True))


def test_the_classes_that_the_images_show_are_counted(tiny_vit: nn.Module, tmp_path: Path) -> None:
    work = searched(tiny_vit, block_reconstruction__views__copies=2)
    (note,) = reconstruct(work, tmp_path, "note")
    with torch.no_grad():
        seen = work.teacher(all_images(work)).argmax(1)
    assert (note["classes_shown"], note["classes"]) == (len(set(seen.tolist())), 10), "in the images, not in views"


def test_embeddings_have_no_classes_to_count(tiny_vit: nn.Module, tmp_path: Path) -> None:
    work = searched(tiny_vit)
    work.distillation = EMBEDDINGS
    assert reconstruct(work, tmp_path, "note") == []


@pytest.mark.parametrize("kind", ["mse", "brecq", "ph", "aph", "fisher"])
def test_every_importance_works(tiny_vit: nn.Module, kind: str) -> None:
    work = searched(tiny_vit, block_reconstruction__importance__kind=kind)
    reconstruct(work)
    assert torch.isfinite(work.student(all_images(work))).all()


def test_the_head_is_trained_on_the_prediction_itself(tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, ...]] = []
    real = LOGITS.loss

    def noted(logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
        used.append(tuple(logits.shape))
        return real(logits, target, temperature)

    work = searched(tiny_vit, block_reconstruction__steps=3)
    monkeypatch.setattr(work.distillation, "loss", noted)
    reconstruct(work)
    assert used == [(8, 10)] * 4, "one look ahead and three steps, for the head alone"


def test_zero_steps_only_round(tiny_vit: nn.Module) -> None:
    work = searched(tiny_vit, block_reconstruction__steps=0)
    expected = copy.deepcopy(work.student)
    finalise(expected)
    reconstruct(work)
    x = all_images(work)
    assert torch.equal(work.student(x), expected(x))


def test_fresh_views_are_seen_and_gone_after_the_unit(tiny_vit: nn.Module) -> None:
    plain = searched(tiny_vit, steps=6)
    fresh = searched(tiny_vit, steps=6, block_reconstruction__views__every=2)
    reconstruct(plain)
    reconstruct(fresh)
    weights = [w.student.get_parameter("blocks.1.mlp.fc1.weight") for w in (plain, fresh)]
    assert not torch.equal(*weights)
    assert torch.equal(next(fresh.walk()).teacher_in[slice(None)], all_images(fresh))


@pytest.mark.parametrize("importance", ["fisher", "aph"])
def test_views_beside_the_images_are_learned_from(tiny_vit: nn.Module, importance: str) -> None:
    plain = searched(tiny_vit, steps=6, importance__kind=importance)
    more = searched(tiny_vit, steps=6, importance__kind=importance, block_reconstruction__views__copies=2)
    reconstruct(plain)
    reconstruct(more)
    weights = [w.student.get_parameter("blocks.1.mlp.fc1.weight") for w in (plain, more)]
    assert not torch.equal(*weights)


def test_biases_and_norms_learn_when_asked(tiny_vit: nn.Module) -> None:
    for rate in (0.0, 1e-2):
        work = searched(tiny_vit, block_reconstruction__float_lr=rate)
        before = copy.deepcopy(work.student)
        reconstruct(work)
        for name in ("blocks.0.norm1.weight", "blocks.1.mlp.fc2.bias", "head.bias"):
            assert torch.equal(work.student.get_parameter(name), before.get_parameter(name)) == (rate == 0), name


def test_a_unit_left_in_float_is_passed_over(tiny_vit: nn.Module) -> None:
    work = searched(tiny_vit, overrides={"blocks.0.*": None})
    reconstruct(work)
    assert torch.equal(
        work.student.get_parameter("blocks.0.mlp.fc1.weight"), work.teacher.get_parameter("blocks.0.mlp.fc1.weight")
    )
