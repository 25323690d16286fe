import pytest
import torch

from aphq.models.distillation import LOGITS


@pytest.mark.parametrize("temperature", [1.0, 20.0])
def test_it_is_the_kl_divergence_from_teacher_to_student(temperature: float) -> None:
    student, teacher = torch.randn(2, 6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p, q = (teacher / temperature).softmax(-1), (student / temperature).softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean()
    assert torch.allclose(LOGITS.loss(student, teacher, temperature), expected)


def test_it_vanishes_for_equal_predictions_and_stays_finite_for_sure_ones() -> None:
    logits = torch.randn(3, 5)
    assert LOGITS.loss(logits, logits).abs() < 1e-6
    assert LOGITS.loss(logits + 7, logits).abs() < 1e-6, "a shift of all logits changes no probability"
    sure = torch.tensor([[1000.0, -1000.0]])
    assert torch.isfinite(LOGITS.loss(sure, -sure))
