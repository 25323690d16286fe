import pytest
import torch
from torch import Tensor

from aphq.engine.loop import (
    Group,
    Loop,
    Now,
    by_magnitude,
    constant,
    cosine,
    draw_samples,
    matmul_precision,
    run_together,
    thin,
)

CPU = torch.device("cpu")
STEPS, BATCH = 60, 8


def problem() -> tuple[Tensor, Tensor]:
    """x [40, 3] and y = x w for a hidden w."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    return x, x @ torch.tensor([1.0, -2.0, 0.5])


def samples(steps: int = STEPS) -> Tensor:
    return draw_samples(40, BATCH, steps, torch.Generator().manual_seed(1))


def start() -> tuple[Tensor, Tensor]:
    return torch.zeros(3, requires_grad=True), torch.zeros(1, requires_grad=True)


def run(steps: int = STEPS, rate: float = 0.1) -> tuple[Tensor, Tensor, Tensor]:
    """Two groups with different schedules, a penalty whose weight is scheduled; returns parameters and losses."""
    x, y = problem()
    weight, bias = start()

    def loss_of(index: Tensor, now: Now) -> Tensor:
        return (x[index] @ weight + bias - y[index]).square().mean() + now["penalty"] * bias.square().sum()

    groups = [Group([weight], cosine(rate, steps)), Group([bias], constant(rate / 2, steps))]
    schedules = {"penalty": torch.linspace(0, 1, steps)}
    losses = Loop(loss_of, groups, samples(steps), CPU, schedules).run().losses
    return weight.detach(), bias.detach(), losses


def test_a_least_squares_problem_is_solved() -> None:
    weight, bias, losses = run(steps=400)
    torch.testing.assert_close(weight, torch.tensor([1.0, -2.0, 0.5]), rtol=0, atol=1e-2)
    assert losses[-20:].mean() < 1e-3 * losses[0]
    assert bias.abs() < 1e-2


def test_each_step_is_one_of_plain_adam_with_that_steps_rates_and_schedules() -> None:
    x, y = problem()
    weight, bias = start()
    optimiser = torch.optim.Adam([{"params": [weight]}, {"params": [bias]}], lr=0.1, foreach=False)
    rates, penalty = cosine(0.1, STEPS), torch.linspace(0, 1, STEPS)
    wanted = []
    for step, index in enumerate(samples()):
        optimiser.param_groups[0]["lr"], optimiser.param_groups[1]["lr"] = rates[step].item(), 0.05
        loss = (x[index] @ weight + bias - y[index]).square().mean() + penalty[step] * bias.square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        wanted.append(loss.item())
    mine_weight, mine_bias, losses = run()
    torch.testing.assert_close(mine_weight, weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine_bias, bias.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses, torch.tensor(wanted), rtol=1e-4, atol=1e-6)


def test_the_same_loop_gives_the_same_bits() -> None:
    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


def test_work_after_each_step_sees_the_new_parameters() -> None:
    parameter = torch.ones(1, requires_grad=True)

    def keep_positive() -> None:
        parameter.clamp_(min=0.5)

    loop = Loop(
        lambda *_: parameter.sum(), [Group([parameter], constant(1.0, 5))], samples(5), CPU, after_step=keep_positive
    )
    losses = loop.run().losses
    assert parameter.item() == 0.5
    assert losses.tolist() == [1.0, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("steps", [1, 49, 50, 120])
def test_reports_add_up_to_the_steps(steps: int) -> None:
    parameter = torch.ones(1, requires_grad=True)
    reports: list[int] = []
    loop = Loop(lambda *_: parameter.sum(), [Group([parameter], constant(0.1, steps))], samples(steps), CPU)
    assert len(loop.run(reports.append).losses) == steps
    assert sum(reports) == steps
    assert all(n > 0 for n in reports)


def test_what_the_steps_read_is_refreshed_between_them() -> None:
    weight = torch.zeros(1, requires_grad=True)
    source, seen, refreshed = torch.zeros(1), [], []

    def loss_of(index: Tensor, now: Now) -> Tensor:
        seen.append(float(source))
        return (weight - source).square().sum()

    def refresh(step: int) -> None:
        refreshed.append(step)
        source.add_(1)

    loop = Loop(loss_of, [Group([weight], constant(0.1, 7))], samples(7), CPU, refresh=refresh, refresh_every=3)
    loop.run()
    assert refreshed == [3, 6]
    assert seen == [0, 0, 0, 1, 1, 1, 2]


def test_rates_follow_the_size_of_what_they_change() -> None:
    small, large, alike = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    groups = by_magnitude([(small, 0.01), (large, 4.0), (alike, 0.011)], 0.1, 5)
    assert [list(group.parameters) for group in groups] == [[small, alike], [large]]
    rates = [float(group.learning_rate[0]) for group in groups]
    assert rates[0] == pytest.approx(0.001, rel=0.5)
    assert rates[1] == pytest.approx(0.4)
    assert all(float(group.learning_rate[-1]) < 0.2 * float(group.learning_rate[0]) for group in groups)


def test_no_steps_change_nothing() -> None:
    parameter = torch.ones(1, requires_grad=True)
    loop = Loop(lambda *_: parameter.sum(), [Group([parameter], constant(0.1, 0))], samples(0), CPU)
    assert loop.run().losses.numel() == 0
    assert parameter.item() == 1


def test_a_group_without_parameters_is_left_out() -> None:
    parameter = torch.ones(1, requires_grad=True)
    groups = [Group([], constant(0.1, 5)), Group([parameter], constant(0.1, 5))]
    Loop(lambda *_: parameter.sum(), groups, samples(5), CPU).run()
    assert parameter.item() < 1


def test_parameters_elsewhere_get_no_gradient() -> None:
    learned, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    Loop(lambda *_: (learned * other).sum(), [Group([learned], constant(0.1, 3))], samples(3), CPU).run()
    assert other.grad is None
    assert other.item() == 1


def test_samples_are_drawn_without_replacement_within_a_step() -> None:
    drawn = draw_samples(10, 4, 200, torch.Generator().manual_seed(0))
    assert drawn.shape == (200, 4)
    assert all(row.unique().numel() == 4 for row in drawn)
    assert drawn.unique().tolist() == list(range(10))
    assert torch.equal(drawn, draw_samples(10, 4, 200, torch.Generator().manual_seed(0)))
    assert draw_samples(3, 8, 2, torch.Generator()).shape == (2, 3), "never more than there are"


def test_schedules_start_where_asked() -> None:
    rate = cosine(0.4, 100)
    assert rate[0] == pytest.approx(0.4)
    assert rate[50].item() == pytest.approx(0.2)
    assert (rate.diff() < 0).all()
    assert 0 < rate[-1] < 1e-3
    assert constant(0.3, 4).tolist() == pytest.approx([0.3] * 4)


def test_precision_is_as_before_after_the_block_even_after_an_error() -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    found = []
    with pytest.raises(ZeroDivisionError), matmul_precision("high"):
        found.append((torch.get_float32_matmul_precision(), 1 / len(found)))
    with matmul_precision("high"):
        assert torch.get_float32_matmul_precision() == "high"
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_a_thinned_curve_keeps_the_mean_of_equal_stretches() -> None:
    assert thin(torch.tensor([1.0, 3.0, 5.0, 7.0]), points=2) == [2.0, 6.0]
    assert thin(torch.empty(0)) == []
    assert len(thin(torch.rand(20_000))) == 200


def test_loops_run_together_end_where_they_end_alone() -> None:
    def loop(target: float) -> tuple[Loop, Tensor]:
        parameter = torch.zeros(1, requires_grad=True)
        group = Group([parameter], cosine(0.1, STEPS))
        return Loop(lambda *_: (parameter - target).square().sum(), [group], samples(), CPU), parameter

    alone = []
    for target in (1.0, -2.0):
        single, parameter = loop(target)
        single.run()
        alone.append(parameter.detach())
    both = [loop(1.0), loop(-2.0)]
    reports: list[int] = []
    curves = run_together([pair[0] for pair in both], reports.append)
    assert [pair[1].detach() for pair in both] == alone
    assert sum(reports) == 2 * STEPS
    for curve in curves:
        assert curve.together == 2
        assert curve.milliseconds is not None
        assert curve.milliseconds > 0
        assert set(curve.to_dict()) == {"losses", "step_ms", "together"}


def test_the_error_is_kept_apart_from_what_is_added_to_it_and_changes_nothing() -> None:
    x, y = problem()
    weight, bias = start()

    def loss_of(index: Tensor, now: Now) -> tuple[Tensor, Tensor]:
        error = (x[index] @ weight + bias - y[index]).square().mean()
        return error + now["penalty"] * bias.square().sum(), error

    groups = [Group([weight], cosine(0.1, STEPS)), Group([bias], constant(0.05, STEPS))]
    curve = Loop(loss_of, groups, samples(), CPU, {"penalty": torch.linspace(0, 1, STEPS)}, apart=True).run()
    for mine, plain in zip((weight.detach(), bias.detach(), curve.losses), run(), strict=True):
        assert torch.equal(mine, plain)
    assert curve.errors is not None
    assert curve.errors[0] == curve.losses[0], "the penalty's weight starts at 0"
    assert (curve.losses - curve.errors).max() > 1e-3, "the penalty is in the loss alone"
    assert set(curve.to_dict()) == {"losses", "errors", "step_ms", "together"}


def test_the_clock_counts_the_steps() -> None:
    clock, seen = torch.full((1,), 7), []
    parameter = torch.ones(1, requires_grad=True)

    def loss_of(*_: object) -> Tensor:
        seen.append(clock.item())
        return parameter.sum()

    Loop(loss_of, [Group([parameter], constant(0.1, 3))], samples(3), CPU, clock=clock).run()
    assert seen == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("every", [1, 2, 3])
def test_recorded_steps_are_refreshed_as_eager_ones_are(every: int) -> None:
    device, found = torch.device("cuda"), []
    for capture in (True, False):
        weight, source = torch.ones(1, device=device, requires_grad=True), torch.zeros(1, device=device)
        refreshed: list[int] = []

        def refresh(step: int, source: Tensor = source, refreshed: list[int] = refreshed) -> None:
            refreshed.append(step)
            source.fill_(step)

        def loss_of(index: Tensor, now: Now, weight: Tensor = weight, source: Tensor = source) -> Tensor:
            return (weight * source).sum()

        groups = [Group([weight], constant(0.0, 8))]
        options = {"refresh": refresh, "refresh_every": every, "capture": capture}
        curve = Loop(loss_of, groups, samples(8), device, **options).run()
        found.append((refreshed, curve.losses.tolist()))
    assert found[0] == found[1]


@pytest.mark.gpu
def test_a_recorded_step_does_what_an_eager_one_does() -> None:
    device = torch.device("cuda")
    x, y = (t.to(device) for t in problem())
    results = []
    for capture in (True, False):
        weight = torch.zeros(3, device=device, requires_grad=True)

        def loss_of(index: Tensor, now: Now, weight: Tensor = weight) -> tuple[Tensor, Tensor]:
            error = (x[index] @ weight - y[index]).square().mean()
            return now["factor"] * error, error

        schedules = {"factor": torch.linspace(1, 2, STEPS)}
        groups = [Group([weight], cosine(0.1, STEPS))]
        curve = Loop(loss_of, groups, samples(), device, schedules, capture=capture, apart=True).run()
        results.append((curve.losses, curve.errors, weight.detach().cpu()))
    for recorded, eager in zip(*results, strict=True):
        torch.testing.assert_close(recorded, eager, rtol=1e-5, atol=1e-6)
