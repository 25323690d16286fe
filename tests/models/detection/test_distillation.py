import pytest
import torch
from torch import Tensor

from aphq.models.architecture import State
from aphq.models.detection.distillation import DETECTIONS, binary_divergence

NAMES = ("rpn.cls", "rpn.reg", "box.0.cls", "box.0.reg", "mask.0")


def prediction(seed: int = 0, objectness: float = 0.0, background: float = 0.0) -> State:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    classes = 3 * normal(7, 4)
    classes[:, -1] += background
    return {
        "rpn.cls": 2 * normal(50) + objectness,
        "rpn.reg": normal(50, 4),
        "box.0.cls": classes,
        "box.0.reg": normal(7, 12),
        "mask.0": 2 * normal(5, 6, 6),
    }


def test_equal_predictions_are_no_distance_apart_and_others_are() -> None:
    teacher = prediction()
    assert DETECTIONS.loss(teacher, teacher).abs() < 1e-12
    for name in NAMES:
        moved = {**teacher, name: teacher[name] + 0.3 * prediction(1)[name]}
        assert DETECTIONS.loss(moved, teacher) > 1e-4, name


def test_boxes_count_only_where_the_teacher_is_confident() -> None:
    teacher = prediction()
    sure = teacher["rpn.cls"].sigmoid() > 0.7
    assert 0 < sure.sum() < 50
    moved = {**teacher, "rpn.reg": teacher["rpn.reg"] + (~sure).double()[:, None]}
    assert DETECTIONS.loss(moved, teacher).abs() < 1e-12
    chosen = teacher["box.0.cls"].softmax(1)[:, :-1] > 0.5
    moved = {**teacher, "box.0.reg": teacher["box.0.reg"] + (~chosen).double().repeat_interleave(4, 1)}
    assert DETECTIONS.loss(moved, teacher).abs() < 1e-12


def test_an_image_without_a_confident_anchor_or_region_is_finite() -> None:
    teacher, student = prediction(objectness=-40, background=60), prediction(1)
    loss = DETECTIONS.loss(student, teacher)
    assert torch.isfinite(loss)
    leaves = {name: x.clone().requires_grad_() for name, x in student.items()}
    grads = torch.autograd.grad(DETECTIONS.loss(leaves, teacher), list(leaves.values()))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[1].any()
    probes = DETECTIONS.probe(teacher, 1.0, torch.Generator().manual_seed(0))
    assert all(torch.isfinite(x).all() for x in probes.values())


def test_nothing_at_all_is_no_distance() -> None:
    teacher = {name: x[:0] for name, x in prediction().items()}
    assert DETECTIONS.loss(teacher, teacher) == 0


def test_extreme_logits_stay_finite() -> None:
    sure = torch.tensor([500.0, -500.0])
    assert torch.isfinite(binary_divergence(sure, -sure)).all()


def test_a_single_head_is_compared_on_its_own_outputs() -> None:
    teacher, student = prediction(), prediction(1)
    parts = [("rpn.cls", "rpn.reg"), ("box.0.cls", "box.0.reg"), ("mask.0",)]
    losses = [DETECTIONS.loss({n: student[n] for n in part}, {n: teacher[n] for n in part}) for part in parts]
    assert sum(losses) == pytest.approx(float(DETECTIONS.loss(student, teacher)))


def test_probes_have_the_covariance_of_the_curvature() -> None:
    """The variance of each probe's element is the second derivative of the loss there."""
    teacher = prediction()
    leaves = {name: x.clone().requires_grad_() for name, x in teacher.items()}
    generator = torch.Generator().manual_seed(0)
    probes = [DETECTIONS.probe(teacher, 1.0, generator) for _ in range(4000)]
    for name in NAMES:
        (grad,) = torch.autograd.grad(DETECTIONS.loss(leaves, teacher), leaves[name], create_graph=True)
        curvature = torch.stack(
            [
                torch.autograd.grad(element, leaves[name], retain_graph=True)[0].flatten()[i]
                for i, element in enumerate(grad.flatten())
            ]
        )
        variance = torch.stack([probe[name].flatten() for probe in probes]).var(0)
        torch.testing.assert_close(variance, curvature, rtol=0.15, atol=1e-6)
