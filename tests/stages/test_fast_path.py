"""The fast path (kernels, compiled passes, TF32, recorded steps) against plain float32 torch, on every kind of unit.

Each unit starts from the same state on both paths, with the same draws and the same drops. What may differ: the order
of sums, TF32's shorter mantissa, and then now and then an activation or a weight that rounds the other way.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aphq import kernels
from aphq.engine.loop import Adam
from aphq.engine.ranks import Ranks
from aphq.engine.store import Store, push
from aphq.engine.workspace import Visit, Workspace
from aphq.kernels import compiled
from aphq.models.student import enable, swap_activation
from aphq.recipe import JointTuning, Views
from aphq.stages import block_reconstruction, joint_tuning, mlp_reconstruction
from aphq.stages.importance import Importances
from aphq.stages.layernorm import reparameterise_norms
from aphq.stages.scale_search import search_scales

from ..runs import pixels, short, workspace

pytest.importorskip("triton")
CUDA = torch.device("cuda")
KINDS = {"tiny_vit": {"patch_embed", "block", "head"}, "tiny_swin": {"patch_embed", "block", "merge", "head"}}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on the CPU, by Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("the GPU itself is tested below")
    monkeypatch.setattr(kernels, "interpreted", True)


@pytest.fixture
def all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled passes of the CPU, for tensors of any size."""
    if not compiled.compiler_works():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(compiled, "LARGE", 1)


@contextmanager
def path(*, fast: bool, tf32: bool) -> Iterator[list[list[Tensor]]]:
    """Run one path inside the block; the gradients of its eager steps are kept."""
    grads: list[list[Tensor]] = []
    step = Adam.step

    def noting(self: Adam, found: Any) -> None:
        grads.append([grad.detach().clone() for grad in found])
        step(self, found)

    @contextmanager
    def exact(_: str) -> Iterator[None]:
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "switched_on", fast)
        patch.setattr(Adam, "step", noting)
        if not tf32:
            patch.setattr("aphq.engine.loop.matmul_precision", exact)
        if not fast:
            patch.setattr("aphq.engine.loop.WARMUP_STEPS", 10**9)  # never recorded
        yield grads


def prepared(
    model: nn.Module,
    device: torch.device,
    steps: int,
    kind: str,
    batch: int = 8,
    weight_lr: float = 0.0,
    softmax: str = "probabilities",
) -> Workspace:
    """A student with ReLU MLPs and ranges, on the device."""
    recipe = short(
        "w3a3",
        steps=steps,
        activations__softmax=softmax,
        importance__kind=kind,
        scale_search__method="minmax",
        mlp_reconstruction__batch=batch,
        block_reconstruction__batch=batch,
        block_reconstruction__weight_lr=weight_lr,
    )
    work = workspace(model, recipe, pixels(16))
    for unit in work.units:
        if unit.mlp is not None:
            swap_activation(work.student, unit.mlp)
    reparameterise_norms(work, recipe.stage("layernorm_reparameterisation"))  # type: ignore[arg-type]
    search_scales(work, recipe.stage("scale_search"))  # type: ignore[arg-type]
    work.teacher.to(device)
    work.student.to(device)
    work.device, work.ranks = device, Ranks(device=device)
    work.store = Store(device, gpu_bytes=None, host_bytes=None, folder=None)
    return work


def visits(work: Workspace) -> Iterator[Visit]:
    """Every unit on the teacher's activations, the student's input a little off."""
    for unit, rows in work.walk_one(work.teacher):
        generator = torch.Generator().manual_seed(0)

        def disturb(x: Tensor, generator: torch.Generator = generator) -> Tensor:
            return x + 0.05 * x.std() * torch.randn(x.shape, generator=generator).to(x)

        cached = push(lambda x: x, rows, work.store, len(rows))
        yield Visit(
            unit,
            cached,
            push(lambda x, unit=unit: unit.run(work.teacher, x), cached, work.store, len(rows)),
            push(disturb, cached, work.store, len(rows)),
        )


def reconstruct(work: Workspace, visit: Visit, *, fast: bool, tf32: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(losses, gradients of the first step, weights at the end) of one unit, on a copy of the student"""
    config: Any = work.recipe.stage("block_reconstruction")
    own = copy.copy(work)
    own.student = copy.deepcopy(work.student)
    for module in block_reconstruction.unit_modules(own, visit.unit):
        enable(module)
    with path(fast=fast, tf32=tf32) as grads:
        curve = block_reconstruction._reconstruct(own, config, Importances(own, config.importance), visit)
    weights = [w for module in visit.unit.modules for w in own.student.get_submodule(module).state_dict().values()]
    return curve.losses, grads[0], weights


def assert_close(what: str, mine: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """The difference is small in the norm, tensor by tensor."""
    for a, b in zip(mine, wanted, strict=True):
        distance = float((a - b).norm()) / max(float(b.norm()), 1e-8)
        assert distance <= tolerance, f"{what}: {tuple(b.shape)} is {distance:.4f} off, {tolerance} is allowed"


def compare(
    model: nn.Module, kinds: set[str], device: torch.device, tf32: bool, steps: int, kind: str, **more: Any
) -> None:
    # Both paths compute in TF32, or both in float32: at three bits TF32 itself makes enough activations of these tiny
    # models round the other way to move gradients by a third, in plain torch as well.
    of_gradients, of_losses, of_weights = 2e-3, 0.02, 0.05
    work = prepared(model, device, steps, kind, **more)
    seen = set()
    for visit in visits(work):
        if visit.unit.kind in seen and device.type == "cpu":
            continue  # the interpreter is slow
        seen.add(visit.unit.kind)
        fast, plain = (reconstruct(work, visit, fast=f, tf32=tf32) for f in (True, False))
        where = f"{visit.unit.name} ({kind})"
        assert_close(f"gradients of {where}", fast[1], plain[1], of_gradients)
        distance = (fast[0] - plain[0]).abs().sum() / plain[0].abs().sum()
        assert distance < of_losses, f"losses of {where} are {distance:.3f} apart"
        assert_close(f"weights of {where}", fast[2], plain[2], of_weights)
    assert seen == kinds


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize(("weight_lr", "softmax"), [(0.0, "probabilities"), (0.003, "exponentials")])
def test_blocks_in_the_interpreter(family: str, weight_lr: float, softmax: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(family)
    how: Any = {"steps": 2, "kind": "fisher", "batch": 2, "weight_lr": weight_lr, "softmax": softmax}
    compare(model, KINDS[family], torch.device("cpu"), tf32=False, **how)


@pytest.mark.usefixtures("all_compiled")
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("weight_lr", [0.0, 0.003])
def test_blocks_compiled(family: str, weight_lr: float, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(family)
    compare(model, KINDS[family], torch.device("cpu"), tf32=False, steps=5, kind="mse", weight_lr=weight_lr)


@pytest.mark.gpu
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("kind", ["mse", "brecq", "ph", "aph", "fisher"])
@pytest.mark.parametrize("tf32", [False, True])
def test_blocks_on_the_gpu(family: str, kind: str, tf32: bool, request: pytest.FixtureRequest) -> None:
    compare(request.getfixturevalue(family), KINDS[family], CUDA, tf32, steps=50, kind=kind)


@pytest.mark.gpu
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("tf32", [False, True])
def test_weights_that_learn_straight_through_on_the_gpu(
    family: str, tf32: bool, request: pytest.FixtureRequest
) -> None:
    how: Any = {"steps": 50, "kind": "fisher", "weight_lr": 0.003, "softmax": "exponentials"}
    compare(request.getfixturevalue(family), KINDS[family], CUDA, tf32, **how)


def train_mlps(work: Workspace, *, fast: bool, tf32: bool) -> tuple[list[Tensor], list[Tensor]]:
    """(gradients of the first steps, parameters at the end)"""
    config: Any = work.recipe.stage("mlp_reconstruction")
    own = copy.copy(work)
    own.student = copy.deepcopy(work.student)
    with path(fast=fast, tf32=tf32) as grads:
        mlp_reconstruction.reconstruct_mlps(own, config)
    return grads[0], list(own.student.state_dict().values())


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", ["tiny_vit", pytest.param("tiny_swin", marks=pytest.mark.slow)])
def test_mlps_in_the_interpreter(family: str, request: pytest.FixtureRequest) -> None:
    work = prepared(request.getfixturevalue(family), torch.device("cpu"), steps=2, kind="fisher", batch=2)
    fast, plain = (train_mlps(work, fast=f, tf32=False) for f in (True, False))
    assert_close("gradients", fast[0], plain[0], 1e-4)
    assert_close("weights", fast[1], plain[1], 1e-4)


@pytest.mark.usefixtures("all_compiled")
@pytest.mark.parametrize("family", KINDS)
def test_mlps_compiled(family: str, request: pytest.FixtureRequest) -> None:
    work = prepared(request.getfixturevalue(family), torch.device("cpu"), steps=5, kind="mse")
    compiled_path, plain = (train_mlps(work, fast=f, tf32=False) for f in (True, False))
    assert_close("gradients", compiled_path[0], plain[0], 1e-4)
    assert_close("weights", compiled_path[1], plain[1], 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("kind", ["mse", "ph", "aph", "fisher"])
def test_mlps_on_the_gpu(family: str, kind: str, request: pytest.FixtureRequest) -> None:
    work = prepared(request.getfixturevalue(family), CUDA, steps=50, kind=kind)
    plain = train_mlps(work, fast=False, tf32=False)
    for tf32, tolerance in ((False, 1e-3), (True, 0.02)):
        fast = train_mlps(work, fast=True, tf32=tf32)
        assert_close("gradients", fast[0], plain[0], tolerance)
        assert_close("weights", fast[1], plain[1], tolerance)


@pytest.mark.gpu
def test_a_step_that_cannot_be_recorded_runs_as_it_is(tiny_vit: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    work = prepared(tiny_vit, CUDA, steps=20, kind="fisher")
    visit = next(v for v in visits(work) if v.unit.kind == "block")
    recorded = reconstruct(work, visit, fast=True, tf32=True)

    @contextmanager
    def refused(*_: object, **__: object) -> Iterator[None]:
        raise RuntimeError("no graphs today")
        yield

    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr(torch.cuda, "graph", refused)
        eager = reconstruct(work, visit, fast=True, tf32=True)
    assert "cannot be recorded" in caplog.text
    torch.testing.assert_close(eager[0], recorded[0], rtol=1e-3, atol=1e-6)


def tune(work: Workspace, *, fast: bool, steps: int, every: int) -> tuple[list[Tensor], list[Tensor]]:
    """(gradients of the first step, weights at the end) of joint tuning, on a copy of the student"""
    own = copy.copy(work)
    own.student = copy.deepcopy(work.student)
    config = JointTuning(steps=steps, batch=4, quantized_share=0.5, views=Views(every=every))
    with path(fast=fast, tf32=False) as grads:
        joint_tuning.tune_jointly(own, config)
    return grads[0], list(own.student.state_dict().values())


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("family", ["tiny_vit", pytest.param("tiny_swin", marks=pytest.mark.slow)])
def test_joint_tuning_in_the_interpreter(family: str, request: pytest.FixtureRequest) -> None:
    work = prepared(request.getfixturevalue(family), torch.device("cpu"), steps=1, kind="mse", batch=2)
    fast, plain = (tune(work, fast=f, steps=1, every=0) for f in (True, False))
    assert_close("gradients", fast[0], plain[0], 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("family", KINDS)
def test_joint_tuning_on_the_gpu(family: str, request: pytest.FixtureRequest) -> None:
    work = prepared(request.getfixturevalue(family), CUDA, steps=1, kind="mse")
    fast, plain = (tune(work, fast=f, steps=20, every=7) for f in (True, False))
    assert_close("gradients", fast[0], plain[0], 5e-3)
    assert_close("weights", fast[1], plain[1], 0.05)
