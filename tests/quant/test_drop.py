import pytest
import torch
from torch import Tensor

from aphq.quant.drop import Drop, hashed_mask, random_bytes, threshold

SHAPE = torch.Size((64, 1001))


def hashed(share: float, seed: int = 5, step: int = 0) -> Tensor:
    return hashed_mask(SHAPE, Drop(share, seed, torch.tensor([step])))


@pytest.mark.parametrize("kind", ["random", "hashed"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_mask_has_its_share_and_no_pattern(kind: str, share: float) -> None:
    torch.manual_seed(0)
    mask = (random_bytes(SHAPE) < threshold(share) if kind == "random" else hashed(share)).float()
    assert mask.mean().item() == pytest.approx(share, abs=0.01)
    for shift in range(1, 9):  # random bytes come eight to a draw: neighbours must not know of each other
        assert (mask[:, shift:] * mask[:, :-shift]).mean().item() == pytest.approx(share**2, abs=0.01)


def test_a_hashed_mask_depends_on_seed_and_step_alone() -> None:
    first = hashed(0.5)
    assert torch.equal(first, hashed(0.5))
    for other in (hashed(0.5, seed=6), hashed(0.5, step=1), hashed(0.5, seed=2**31 - 1, step=19_999)):
        assert (first == other).float().mean().item() == pytest.approx(0.5, abs=0.01)


def test_on_the_cpu_every_call_draws_anew() -> None:
    drop, x = Drop(0.5, 1, torch.zeros(1, dtype=torch.long)), torch.empty(SHAPE)
    assert not torch.equal(drop.kept(x), drop.kept(x))
