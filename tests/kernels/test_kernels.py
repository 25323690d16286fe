"""Every kernel against its plain torch twin: on the GPU where there is one, else in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from aphq import kernels
from aphq.kernels import fake_quantize as fused_quantize
from aphq.kernels.adam import adam_step
from aphq.kernels.linear import linear, weight_gradient
from aphq.kernels.relu import relu_and_clamped
from aphq.kernels.rounding import soft_weight
from aphq.kernels.rows import mixed_rows, weighted_error
from aphq.kernels.softmax import quantized_softmax
from aphq.models.attention import biased as biased_scores
from aphq.models.attention import exponentials, probabilities
from aphq.quant.affine import fake_quantize_learned
from aphq.quant.drop import Drop, hashed_mask
from aphq.quant.quantizer import Quantizer
from aphq.quant.rounding import LearnedRounding
from aphq.quant.search import output_cost, self_cost

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def kernels_are_off_for_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "switched_on", False)


@pytest.fixture
def random() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)


class Hashed(Drop):
    """Drops by hash on any device, elements counted in the layout `shape`."""

    def kept(self, like: Tensor) -> Tensor:
        return hashed_mask(like.shape, self)


class HashedTransposed(Drop):
    def kept(self, like: Tensor) -> Tensor:
        return hashed_mask(like.mT.shape, self).mT


def drop(kind: type[Drop] = Hashed, share: float = 0.5) -> Drop:
    return kind(share, 123_456_789, torch.tensor([7], device=DEVICE))


def same(fused: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor, tolerance: float = 1e-5) -> None:
    """Equal values and equal gradients for every input."""
    results = []
    for function in (fused, plain):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = function(*leaves)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        results.append([y.detach(), *torch.autograd.grad((y * weight).sum(), leaves)])
    for mine, wanted in zip(*results, strict=True):
        assert mine.shape == wanted.shape
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=tolerance * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("layout", ["tensor", "image", "heads", "transposed", "one scale for all heads"])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dropping", [False, True])
def test_quantizer(random: Callable[..., Tensor], layout: str, relu: bool, dropping: bool) -> None:
    kind: type[Drop] = Hashed
    if layout == "tensor":
        x, scale = random(3, 50, 48), torch.tensor([0.3], device=DEVICE)
    elif layout == "image":
        x, scale = random(2, 3, 33, 31), torch.tensor([0.2], device=DEVICE)
    else:
        x = random(2, 19, 3, 4, 16).permute(2, 0, 3, 1, 4)[1]  # one of q, k, v, as attention cuts it out
        scale = (
            random(4, 1, 1).abs() + 0.2 if layout != "one scale for all heads" else torch.tensor([0.4], device=DEVICE)
        )
        if layout == "transposed":
            x, kind = x.mT, HashedTransposed
    zero_point = torch.full_like(scale, 3)
    drops = drop(kind) if dropping else None
    same(
        lambda x, scale: fused_quantize.fake_quantize(x, scale, zero_point, 7, drops, relu),
        lambda x, scale: fake_quantize_learned(x, scale, zero_point, 3, drops, relu),
        x,
        scale,
    )


@pytest.mark.parametrize(
    ("shape", "groups"),
    [((6, 8), (6, 1)), ((6, 3, 2, 2), (6, 1, 1, 1)), ((6, 8), (8,)), ((6, 6, 2, 2), (1, 6, 1, 1))],
)
def test_scales_that_are_not_heads_are_left_to_torch(
    random: Callable[..., Tensor], shape: tuple[int, ...], groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, scale = random(*shape), 0.2 + random(*groups).abs()
    zero_point = torch.full_like(scale, 3)
    wanted = fake_quantize_learned(x, scale, zero_point, 3)
    monkeypatch.setattr(kernels, "switched_on", True)
    monkeypatch.setattr(kernels, "interpreted", True)
    assert torch.equal(fake_quantize_learned(x, scale, zero_point, 3), wanted)
    if x.ndim == 4:  # as some users keep their models
        x = x.to(memory_format=torch.channels_last)
        assert torch.equal(fake_quantize_learned(x, scale, zero_point, 3), wanted)


@pytest.mark.parametrize("one_scale", [False, True])
def test_quantizer_with_extra_rows(random: Callable[..., Tensor], one_scale: bool) -> None:
    x = random(2, 19, 3, 4, 16).permute(2, 0, 3, 1, 4)[1]
    scale = torch.full((1,) if one_scale else (4, 1, 1), 0.3, device=DEVICE)
    zero_point, drops = torch.full_like(scale, 3), drop()
    same(
        lambda x, scale: fused_quantize.fake_quantize(x, scale, zero_point, 7, drops, extra_rows=1),
        lambda x, scale: F.pad(fake_quantize_learned(x, scale, zero_point, 3, drops), (0, 0, 0, 1)),
        x,
        scale,
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_softmax_of_padded_scores(random: Callable[..., Tensor], biased: bool, relative: bool) -> None:
    scores, bias = random(4, 2, 8, 12), random(2, 2, 5, 9) if biased else None
    scale = torch.full((2, 1, 1), 0.05, device=DEVICE)
    zero_point, drops = torch.zeros_like(scale), drop()

    def plain(scores: Tensor, scale: Tensor) -> Tensor:
        weights = exponentials(biased_scores(scores[:, :, :5, :9], 0.7, bias))
        total = weights.sum(-1, keepdim=True)
        before, after = (1, total) if relative else (total, 1)
        return F.pad(fake_quantize_learned(weights / before, scale, zero_point, 3, drops) / after, (0, 3, 0, 3))

    def fused(scores: Tensor, scale: Tensor) -> Tensor:
        return quantized_softmax(scores, 0.7, bias, scale, zero_point, 7, drops, (5, 9), relative=relative)

    same(fused, plain, scores, scale)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("columns", [7, 17])
@pytest.mark.parametrize("relative", [False, True])
def test_softmax(random: Callable[..., Tensor], biased: bool, grouped: bool, columns: int, relative: bool) -> None:
    scores = 2 * random(4, 3, columns, columns)
    bias = random(2, 3, columns, columns) if biased else None
    scale = random(3, 1, 1).abs() * 0.1 + 0.02 if grouped else torch.tensor([0.05], device=DEVICE)
    zero_point, drops = torch.zeros_like(scale), drop()

    def plain(scores: Tensor, scale: Tensor) -> Tensor:
        if not relative:
            return fake_quantize_learned(probabilities(scores, 0.7, bias), scale, zero_point, 3, drops)
        weights = exponentials(biased_scores(scores, 0.7, bias))
        return fake_quantize_learned(weights, scale, zero_point, 3, drops) / weights.sum(-1, keepdim=True)

    def fused(scores: Tensor, scale: Tensor) -> Tensor:
        return quantized_softmax(scores, 0.7, bias, scale, zero_point, 7, drops, relative=relative)

    same(fused, plain, scores, scale)


@pytest.mark.parametrize("shape", [(13, 37), (8, 3, 4, 4)])
@pytest.mark.parametrize("per_row", [False, True])
def test_rounding(random: Callable[..., Tensor], shape: tuple[int, ...], per_row: bool) -> None:
    weight = random(*shape)
    quantizer = Quantizer(3, False, (shape[0], *(1,) * (len(shape) - 1)) if per_row else (1,)).to(DEVICE)
    low, high = (weight.flatten(1).amin(1), weight.flatten(1).amax(1)) if per_row else (weight.min(), weight.max())
    quantizer.set_range(0.8 * low, 0.8 * high)  # so that some weights are clamped
    if weight.ndim == 4:
        weight = weight.to(memory_format=torch.channels_last)  # as some users keep their models
    rounding = LearnedRounding(weight, quantizer).to(DEVICE)
    start = rounding.alpha.detach() + 2 * random(*shape)
    beta = torch.tensor(5.3, device=DEVICE)

    def fused(alpha: Tensor) -> Tensor:
        affine = (quantizer.scale.data, quantizer.zero_point, 7)
        soft, penalty = soft_weight(alpha, rounding.floor_code, *affine, 1.1, -0.1, beta)
        return torch.cat([soft.flatten(), 0.37 * penalty.sum().reshape(1)])

    def plain(alpha: Tensor) -> Tensor:
        del rounding.alpha
        rounding.alpha = alpha  # type: ignore[assignment]
        penalty = rounding.soften(beta)
        return torch.cat([rounding().flatten(), 0.37 * penalty])

    same(fused, plain, start)


def test_weights_on_their_grid_learn_alike(random: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros and extremes start exactly at a bound, where some versions of torch give a clamp no gradient."""
    quantizer = Quantizer(4, True, (6, 1)).to(DEVICE)
    weight = torch.arange(-7, 9, device=DEVICE).expand(6, 16) * 0.5
    quantizer.set_range(torch.full((6, 1), -3.5, device=DEVICE), torch.full((6, 1), 3.5, device=DEVICE))
    rounding, beta = LearnedRounding(weight, quantizer).to(DEVICE), torch.tensor(5.3, device=DEVICE)
    upstream, found = random(6, 16), []
    for fused in (False, True):
        monkeypatch.setattr(kernels, "switched_on", fused)
        monkeypatch.setattr(kernels, "interpreted", fused)
        penalty = rounding.soften(beta).sum()
        found.append(torch.autograd.grad((rounding() * upstream).sum() + 0.1 * penalty, rounding.alpha)[0])
    assert (found[0].abs() > 0).float().mean() > 0.9
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


def test_the_columns_of_a_transposed_convolution_round_as_in_torch(
    random: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scales count output channels, which are the columns, here as many as there are rows."""
    weight = random(6, 6, 2, 2)
    quantizer = Quantizer(4, True, (1, 6, 1, 1)).to(DEVICE)
    quantizer.set_range(-random(1, 6, 1, 1).abs() - 1, random(1, 6, 1, 1).abs() + 1)
    rounding, beta = LearnedRounding(weight, quantizer).to(DEVICE), torch.tensor(5.3, device=DEVICE)
    penalty = rounding.soften(beta).sum()
    wanted = rounding()
    monkeypatch.setattr(kernels, "switched_on", True)
    monkeypatch.setattr(kernels, "interpreted", True)
    torch.testing.assert_close(rounding.soften(beta).sum(), penalty)
    torch.testing.assert_close(rounding(), wanted)


def test_mixed_rows(random: Callable[..., Tensor]) -> None:
    teacher, student, index = random(9, 5, 700), random(9, 5, 700), torch.tensor([3, 1, 8], device=DEVICE)
    drops = drop(share=0.3)
    wanted = torch.where(hashed_mask(torch.Size((3, 5, 700)), drops), student[index], teacher[index])
    assert torch.equal(mixed_rows(teacher, student, index, drops), wanted)


@pytest.mark.parametrize("weights", ["none", "shared", "each"])
def test_weighted_error(random: Callable[..., Tensor], weights: str) -> None:
    target, index, factors = random(9, 5, 700), torch.tensor([3, 1, 8], device=DEVICE), random(3).abs()
    shared = random(1, 5, 700).abs() if weights == "shared" else None
    each = random(9, 5, 700).abs() if weights == "each" else None
    weight = shared if shared is not None else 1.0 if each is None else each[index]
    same(
        lambda out: weighted_error(out, target, index, shared, each, factors),
        lambda out: ((out - target[index]).square() * weight).flatten(1).sum(1) @ factors,
        random(3, 5, 700),
    )


def test_relu_and_clamped(random: Callable[..., Tensor]) -> None:
    same(
        lambda x: relu_and_clamped(x, 0.8),
        lambda x: torch.stack([x.relu(), x.relu().clamp_max(0.8)]),
        random(3, 9, 1111),
    )


@pytest.mark.parametrize("bias", [False, True])
def test_linear(random: Callable[..., Tensor], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = (random(2, 6, 50, 24), random(40, 24), *([random(40)] if bias else []))
    same(lambda x, w, *b: linear(x, w, *(b or [None])), lambda x, w, *b: F.linear(x, w, *b), *leaves)


def test_weight_gradients_in_pieces(random: Callable[..., Tensor]) -> None:
    grad, x = random(96, 20), random(96, 12)
    torch.testing.assert_close(weight_gradient(grad, x), grad.T @ x, rtol=1e-3, atol=1e-3)


def test_adam(random: Callable[..., Tensor]) -> None:
    mine, theirs = (torch.full((3, 700), 0.5, device=DEVICE, requires_grad=True) for _ in range(2))
    mean, square = torch.zeros_like(mine.data), torch.zeros_like(mine.data)
    optimiser = torch.optim.Adam([theirs], lr=0.01)
    for step in range(5):
        theirs.grad = random(3, 700)
        counter, rate = torch.tensor([step], device=DEVICE), torch.tensor(0.01, device=DEVICE)
        adam_step(mine.data, theirs.grad, mean, square, counter, rate)
        optimiser.step()
        torch.testing.assert_close(mine.data, theirs.data, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("groups", [(1,), (3, 1, 1), (8,)])
def test_search_by_the_tensors_own_error(random: Callable[..., Tensor], groups: tuple[int, ...]) -> None:
    x = random(2, 3, 6, 8)
    cost, candidates = self_cost(x, groups, 3), some_candidates(random, groups)
    torch.testing.assert_close(cost.fused(*candidates), cost.plain(*candidates), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [5, 20])  # on either side of the inner dimension: with and without a Gram matrix
@pytest.mark.parametrize("site", ["weight", "one scale", "rows", "product", "product, one scale"])
def test_search_by_the_products_error(random: Callable[..., Tensor], site: str, columns: int) -> None:
    if site.startswith("product"):
        x, other = random(2, 3, 6, 8), random(2, 3, 8, columns)
    else:
        x, other = random(10, 8), random(8, columns)
    groups = {"weight": (10, 1), "one scale": (1, 1), "rows": (1,), "product": (3, 1, 1), "product, one scale": (1,)}[
        site
    ]
    cost = output_cost(x, other, other + 0.1 * random(*other.shape), groups, 3)
    candidates = some_candidates(random, groups)
    torch.testing.assert_close(cost.fused(*candidates), cost.plain(*candidates), rtol=1e-4, atol=1e-3)


def some_candidates(random: Callable[..., Tensor], groups: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    scale = 0.1 + random(4, *groups).abs()
    return scale, torch.full_like(scale, 3)


def test_what_is_not_a_number_stays_that(random: Callable[..., Tensor]) -> None:
    x = random(3, 40)
    x[1, 2] = torch.nan
    scale = torch.tensor([0.3], device=DEVICE)
    found = fused_quantize.fake_quantize(x, scale, torch.full_like(scale, 3), 7, None)
    assert found.isnan().sum() == 1
    assert found[1, 2].isnan()


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_an_undecided_weight_has_a_finite_gradient(beta: float) -> None:
    alpha = torch.zeros(4, 8, device=DEVICE, requires_grad=True)  # h is exactly one half
    ones = torch.ones(4, 1, device=DEVICE)
    affine = (torch.ones(4, 8, device=DEVICE), ones, ones, 7)
    soft, penalty = soft_weight(alpha, *affine, 1.1, -0.1, torch.tensor(beta, device=DEVICE))
    (soft.sum() + penalty.sum()).backward()
    assert alpha.grad is not None
    assert torch.isfinite(alpha.grad).all()


def test_without_a_compiler_the_twins_run_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no C compiler\nand a long trace")

    monkeypatch.setattr("aphq.kernels.relu.relu_and_clamped", broken)
    monkeypatch.setattr(kernels, "switched_on", True)
    monkeypatch.setattr(kernels, "interpreted", True)
    kernels._triton_works.cache_clear()
    try:
        assert not kernels.usable(torch.zeros(1))
        assert "Triton kernels do not work here (no C compiler); running without them" in caplog.text
    finally:
        kernels._triton_works.cache_clear()


def test_kernels_are_not_for_the_cpu_nor_for_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "switched_on", True)
    assert not kernels.usable(torch.zeros(1))
    monkeypatch.setattr(kernels, "interpreted", True)
    assert not kernels.usable(torch.zeros(1, dtype=torch.float64))
    monkeypatch.setattr(kernels, "switched_on", False)
    assert not kernels.usable(torch.zeros(1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton then compiles for the GPU and does not interpret")
def test_kernels_run_on_a_cpu_where_they_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "switched_on", True)
    monkeypatch.setattr(kernels, "interpreted", True)
    assert kernels.usable(torch.zeros(1))
