import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from aphq.engine.folder import RunFolder
from aphq.engine.hooks import watch_inputs
from aphq.engine.workspace import Workspace
from aphq.stages.mlp_reconstruction import reconstruct_mlps, relu_and_clamped

from ..runs import all_images, pixels, short, workspace

CHANGES: dict[str, Any] = {
    "mlp_reconstruction__steps": 60,
    "mlp_reconstruction__learning_rate": 3e-3,
    "mlp_reconstruction__percentile": 0.98,
}


def reconstruct(work: Workspace, folder: Path | None = None) -> list[dict[str, Any]]:
    """Run the stage; its events."""
    work.folder = RunFolder(folder)
    try:
        reconstruct_mlps(work, work.recipe.stage("mlp_reconstruction"))  # type: ignore[arg-type]
    finally:
        work.folder.close()
    return [] if folder is None else [json.loads(s) for s in (folder / "events.jsonl").read_text().splitlines()]


def hidden(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """What each fc2 gets."""
    layers = {name: module for name, module in model.named_modules() if name.endswith("mlp.fc2")}
    seen: dict[str, Tensor] = {}
    with torch.no_grad(), watch_inputs(layers, lambda name, x: seen.update({name: x[0]})):
        model(images)
    return seen


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_relu_mlps_learn_to_say_what_the_gelu_ones_said(
    request: pytest.FixtureRequest, family: str, tmp_path: Path
) -> None:
    work = workspace(request.getfixturevalue(family)(), short(**CHANGES))
    before = {name: tensor.clone() for name, tensor in work.student.state_dict().items()}
    events = reconstruct(work, tmp_path)
    blocks = [unit for unit in work.units if unit.mlp]
    assert [event["unit"] for event in events] == [unit.name for unit in blocks]
    for event in events:
        losses = torch.tensor(event["losses"])
        assert losses[-10:].mean() < 0.8 * losses[:5].mean(), event["unit"]
    for name, tensor in work.student.state_dict().items():
        learned = ".mlp.fc" in name and "quantizer" not in name
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) != learned, name
    for unit in blocks:
        assert type(work.student.get_submodule(unit.mlp.act)) is nn.ReLU
        assert type(work.teacher.get_submodule(unit.mlp.act)) is nn.GELU
    assert not any(p.requires_grad for p in work.student.parameters())


@pytest.mark.parametrize("share", [0.9, 0.99])
def test_the_clamp_is_a_percentile_of_the_teachers_positive_activations(
    tiny_vit: nn.Module, tmp_path: Path, share: float
) -> None:
    work = workspace(tiny_vit, short(mlp_reconstruction__percentile=share, calibration__batch=5))
    events = reconstruct(work, tmp_path)
    found = hidden(work.teacher, all_images(work))
    for event, values in zip(events, found.values(), strict=True):
        positive = values[values > 0].sort().values
        rank = -(-len(positive) * share // 1)  # the smallest value with that share at or below it
        assert event["clamp"] == pytest.approx(float(positive[int(rank) - 1]), rel=1e-4)


def test_ranges_are_narrower_after_training(tiny_vit: nn.Module) -> None:
    work = workspace(
        tiny_vit, short(**CHANGES, mlp_reconstruction__alpha=20.0, mlp_reconstruction__importance__kind="mse")
    )
    x = all_images(work)
    before = hidden(work.teacher, x)
    reconstruct(work)
    after = hidden(work.student, x)
    for name in before:
        assert after[name].max() - after[name].min() < before[name].max() - before[name].min(), name


@pytest.mark.parametrize("kind", ["mse", "brecq", "ph", "aph", "fisher"])
def test_every_importance_works(tiny_vit: nn.Module, kind: str) -> None:
    work = workspace(tiny_vit, short(importance__kind=kind), pixels(8))
    reconstruct(work)
    assert torch.isfinite(work.student(all_images(work))).all()


def test_no_step_leaves_the_weights(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit, short(mlp_reconstruction__steps=0))
    reconstruct(work)
    assert torch.equal(
        work.student.get_parameter("blocks.0.mlp.fc1.weight"), work.teacher.get_parameter("blocks.0.mlp.fc1.weight")
    )


@settings(deadline=None, max_examples=50)
@given(st.floats(0.01, 4), st.sampled_from([(7,), (3, 5), (2, 3, 4)]), st.integers(0, 10**6))
def test_the_plain_activation_and_the_clamped_one_come_together(
    bound: float, shape: tuple[int, ...], seed: int
) -> None:
    x = (2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).requires_grad_()
    out = relu_and_clamped(x, bound)
    assert torch.equal(out, torch.stack([x.clamp_min(0), x.clamp(0, bound)]))
    for part, passes in ((out[0], x > 0), (out[1], (x > 0) & (x <= bound))):
        (grad,) = torch.autograd.grad(part.sum(), x, retain_graph=True)
        assert torch.equal(grad, passes.float()), "what is cut off learns nothing"
