import pytest
import torch
from torch import Tensor, nn

from aphq.engine.hooks import change_outputs, watch_inputs

X = torch.randn(2, 3)


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_inputs_are_seen_under_their_names_in_order(model: nn.Sequential) -> None:
    seen: list[tuple[str, tuple[Tensor, ...]]] = []
    with watch_inputs({"first": model[0], "last": model[2]}, lambda name, inputs: seen.append((name, inputs))):
        model(X)
    assert [name for name, _ in seen] == ["first", "last"]
    assert torch.equal(seen[0][1][0], X)
    assert torch.equal(seen[1][1][0], model[1](model[0](X)))
    model(X)
    assert len(seen) == 2, "nothing is watched after the block"


def test_only_tensors_are_seen() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None, flag: bool) -> Tensor:
            return x

    seen: list[int] = []
    module = Masked()
    with watch_inputs({"m": module}, lambda _, inputs: seen.append(len(inputs))):
        module(X, None, True)
        module(X, X, False)
    assert seen == [1, 2]


def test_outputs_are_replaced_inside_the_block_only(model: nn.Sequential) -> None:
    before = model(X)
    factor = {"first": 2.0, "last": 3.0}
    with change_outputs({"first": model[0], "last": model[2]}, lambda name, out: factor[name] * out):
        inside = model(X)
    torch.testing.assert_close(inside, 3 * model[2](torch.relu(2 * model[0](X))))
    assert torch.equal(model(X), before)


def test_hooks_go_even_after_an_error(model: nn.Sequential) -> None:
    def fail(*_: object) -> Tensor:
        raise KeyError

    for context in (watch_inputs({"m": model[0]}, fail), change_outputs({"m": model[0]}, fail)):
        with pytest.raises(KeyError), context:
            model(X)
        assert hooks(model) == 0
