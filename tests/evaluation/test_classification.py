from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aphq.data import Labelled, LabelledTensors, Preprocessing, as_labelled
from aphq.errors import DataError
from aphq.evaluation.classification import Accuracy, compare

SIZE = Preprocessing(size=(1, 10), channels=1, mean=(0.0,), std=(1.0,))


class ReadOff(nn.Module):
    """The image is the logits."""

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, x: Tensor) -> Tensor:
        return self.sign * x.flatten(1)


def evaluate(model: nn.Module, data: Labelled, preprocessing: Preprocessing, **options: Any) -> Accuracy:
    return compare({"model": model}, data, preprocessing, **options).accuracy["model"]


def labelled(logits: Tensor, labels: list[int]) -> LabelledTensors:
    return LabelledTensors(logits.reshape(len(labels), 1, 1, -1), torch.tensor(labels), SIZE)


def ranking(*orders: list[int]) -> Tensor:
    """Logits whose classes, from best to worst, begin with the given ones."""
    logits = torch.zeros(len(orders), 10)
    for row, order in enumerate(orders):
        for place, label in enumerate(order):
            logits[row, label] = 10.0 - place
    return logits


@pytest.mark.parametrize("batch", [1, 3, 50])
def test_top1_and_top5_by_hand(batch: int) -> None:
    data = labelled(ranking([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [7]), [1, 5, 6, 7])
    assert evaluate(ReadOff(), data, SIZE, batch=batch) == Accuracy(top1=50.0, top5=75.0, images=4)


def test_models_are_compared_on_the_same_images() -> None:
    data = labelled(torch.randn(20, 10, generator=torch.Generator().manual_seed(0)), list(range(10)) * 2)
    found = compare({"a": ReadOff(), "same": ReadOff(), "worst": ReadOff(-1)}, data, SIZE, batch=7)
    assert found.agreement == {"a": 100.0, "same": 100.0, "worst": 0.0}
    assert found.accuracy["a"] == found.accuracy["same"]


def test_fewer_than_five_classes() -> None:
    small = Preprocessing(size=(1, 3), channels=1, mean=(0.0,), std=(1.0,))
    data = LabelledTensors(torch.eye(3).reshape(3, 1, 1, 3), torch.tensor([0, 1, 0]), small)
    assert evaluate(ReadOff(), data, small) == Accuracy(pytest.approx(200 / 3), 100.0, 3)  # type: ignore[arg-type]


def test_a_limit_and_progress() -> None:
    data = labelled(torch.randn(20, 10), list(range(10)) * 2)
    steps: list[int] = []
    found = evaluate(ReadOff(), data, SIZE, batch=4, limit=10, progress=steps.append)
    assert found.images == 10
    assert steps == [4, 4, 2]


def test_nothing_to_measure_on_is_said() -> None:
    with pytest.raises(DataError, match="no image to evaluate on"):
        evaluate(ReadOff(), as_labelled([], 10), SIZE)
