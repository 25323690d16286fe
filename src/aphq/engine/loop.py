"""The one optimisation loop that every stage with gradients shares.

A step reads everything that changes from one step to the next (which samples, learning rates, schedules) out of tables
on the device by a counter that also lives there, so a step is the same program every time. On a CUDA device it is
recorded once as a graph and replayed; elsewhere, or where recording fails, it runs as it is, with the same result.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aphq import kernels
from aphq.engine.ranks import Ranks

log = logging.getLogger(__name__)
Now = Mapping[str, Tensor]  # the schedules' values at this step
LossOf = Callable[[Tensor, Now], Tensor | tuple[Tensor, Tensor]]  # (sample indices, now) -> loss, or (loss, its error)
LARGE = 16_384  # elements of a tensor that has a launch of its own
WARMUP_STEPS = 3  # run as they are before recording, so that the optimiser has its state
REPORT_EVERY = 50


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate, one value per step."""

    parameters: Sequence[Tensor]
    learning_rate: Tensor  # [steps]


@dataclass
class Loop:
    """`steps` steps of Adam over samples drawn in advance."""

    loss_of: LossOf
    groups: Sequence[Group]
    samples: Tensor  # [steps, batch] indices
    device: torch.device
    schedules: Mapping[str, Tensor] = field(default_factory=dict)  # each [steps]
    after_step: Callable[[], None] | None = None  # e.g. keep scales positive
    capture: bool = True
    clock: Tensor | None = None  # [1], the number of the step, for whoever draws random numbers by it
    ranks: Ranks = field(default_factory=Ranks)  # `loss_of` gets this process's share of a batch; losses add up
    refresh: Callable[[int], None] | None = None  # called with the step's number after every `refresh_every` steps
    refresh_every: int = 1
    apart: bool = False  # `loss_of` gives the error it contains too, which is kept beside the loss

    def run(self, report: Callable[[int], None] | None = None) -> Curve:
        """Every step; `report(n)` is called after every few."""
        return run_together([self], report)[0]

    def prepare(self) -> Callable[[], None]:
        """The program of one step. All that changes from step to step is one row of two tables."""
        device, steps = self.device, self.samples.shape[0]
        counter = torch.zeros(1, dtype=torch.long, device=device) if self.clock is None else self.clock.zero_()
        groups = [group for group in self.groups if len(group.parameters)]
        parameters = [p for group in groups for p in group.parameters]
        columns = [group.learning_rate for group in groups] + list(self.schedules.values())
        table = torch.stack([column.float() for column in columns], dim=1).to(device)  # [steps, rates + schedules]
        row = table[0].clone()
        samples = self.samples[:, self.ranks.share_of(self.samples.shape[1])].to(device)
        self.losses, self.errors = torch.zeros(2, steps, device=device)
        optimiser = Adam([(list(group.parameters), row[i]) for i, group in enumerate(groups)], counter)
        now = {name: row[len(groups) + i] for i, name in enumerate(self.schedules)}

        def step() -> None:
            row.copy_(table.index_select(0, counter)[0])
            found = self.loss_of(samples.index_select(0, counter)[0], now)
            seen = found if isinstance(found, tuple) else (found,)
            grads = torch.autograd.grad(seen[0], parameters)
            added = self.ranks.add([*grads, *(value.detach().reshape(1) for value in seen)])
            optimiser.step(added[: len(grads)])
            with torch.no_grad():
                if self.after_step:
                    self.after_step()
                for curve, value in zip((self.losses, self.errors), added[len(grads) :], strict=False):
                    curve.index_copy_(0, counter, value)
                counter.add_(1)

        return step


class Adam:
    """Adam over groups of (parameters, learning rate): large tensors by a kernel of ours where there is one."""

    def __init__(self, groups: Sequence[tuple[list[Tensor], Tensor]], counter: Tensor) -> None:
        self.counter = counter
        self.parameters = [p for parameters, _ in groups for p in parameters]
        rates = [rate for parameters, rate in groups for _ in parameters]
        self.own = {i: (rates[i], *_zeros_like(p, 2)) for i, p in enumerate(self.parameters) if _has_kernel(p)}
        rest = [{"params": [p for p in ps if not _has_kernel(p)], "lr": rate} for ps, rate in groups]
        rest = [group for group in rest if group["params"]]
        on_gpu = counter.device.type == "cuda"
        self.rest = torch.optim.Adam(rest, fused=True, capturable=on_gpu) if rest else None

    def step(self, grads: Sequence[Tensor]) -> None:
        for i, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            if i in self.own:
                from aphq.kernels.adam import adam_step

                rate, mean, square = self.own[i]
                adam_step(parameter.data, grad, mean, square, self.counter, rate)
            else:
                parameter.grad = grad
        if self.rest is not None:
            self.rest.step()


def _has_kernel(parameter: Tensor) -> bool:
    return kernels.usable(parameter) and parameter.numel() >= LARGE and parameter.is_contiguous()


def _zeros_like(x: Tensor, count: int) -> list[Tensor]:
    return [torch.zeros_like(x, requires_grad=False) for _ in range(count)]


@dataclass(frozen=True)
class Curve:
    """What a loop leaves behind: the loss of every step, and how long a step took."""

    losses: Tensor  # [steps], on the CPU
    milliseconds: float | None  # per step, warm-up and recording left out; of all loops that ran together
    together: int = 1  # how many loops shared these steps
    errors: Tensor | None = None  # [steps], the losses without what was added to the error; None if not kept apart

    def to_dict(self) -> dict[str, Any]:
        """For the log of a run."""
        step = None if self.milliseconds is None else round(self.milliseconds, 4)
        apart = {} if self.errors is None else {"errors": thin(self.errors)}
        return {"losses": thin(self.losses), **apart, "step_ms": step, "together": self.together}


def thin(losses: Tensor, points: int = 200) -> list[float]:
    """A loss curve short enough for a log: means over equal stretches."""
    chunks = losses.double().tensor_split(min(points, max(1, len(losses)))) if len(losses) else ()
    return [float(f"{chunk.mean().item():.5g}") for chunk in chunks]


def run_together(loops: Sequence[Loop], report: Callable[[int], None] | None = None) -> list[Curve]:
    """Independent loops of equal length, step by step side by side: small ones leave most of a GPU idle alone."""
    steps, device = loops[0].samples.shape[0], loops[0].device
    if steps == 0:
        return [Curve(torch.empty(0), None) for _ in loops]
    # TF32 on a GPU, bfloat16 factors on a CPU that has instructions for them: steps are noisy enough not to notice
    with matmul_precision("medium" if device.type == "cpu" else "high"):
        every = [loop.prepare() for loop in loops]
        done, reported = 0, 0
        if device.type == "cuda" and steps > WARMUP_STEPS and all(loop.capture for loop in loops):
            done, step = _record(every, device, partial(_refresh, loops))
        else:
            step = partial(_all, every)
        started, first = _synchronised_seconds(device), done
        while done < steps:
            _refresh(loops, done)
            step()
            done += 1
            if report and (done % REPORT_EVERY == 0 or done == steps):
                _synchronised_seconds(device)
                report((done - reported) * len(loops))
                reported = done
        milliseconds = 1000 * (_synchronised_seconds(device) - started) / (steps - first) if steps > first else None
    apart = [loop.errors.cpu() if loop.apart else None for loop in loops]
    return [
        Curve(loop.losses.cpu(), milliseconds, len(loops), errors) for loop, errors in zip(loops, apart, strict=True)
    ]


def _refresh(loops: Sequence[Loop], done: int) -> None:
    """Before the step with this number."""
    for loop in loops:
        if loop.refresh and done and done % loop.refresh_every == 0:
            loop.refresh(done)


def _all(every: Sequence[Callable[[], None]]) -> None:
    for step in every:
        step()


def _synchronised_seconds(device: torch.device) -> float:
    """The time when all work queued so far is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _record(
    every: Sequence[Callable[[], None]], device: torch.device, before: Callable[[int], None]
) -> tuple[int, Callable[[], None]]:
    """Run the first steps, `before` each what it does, record one of each loop as branches of a CUDA graph, and return
    how many were run and the graph's replay."""
    # The leaves were first touched on the default stream. Their gradients are asked for, never accumulated, so the
    # warning about it does not apply.
    quiet = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if quiet is not None:
        quiet(False)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for number in range(WARMUP_STEPS):
            before(number)
            _all(every)
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
            trunk = torch.cuda.current_stream(device)
            branches = [torch.cuda.Stream(device) for _ in every[1:]]
            for step, branch in zip(every[1:], branches, strict=True):
                branch.wait_stream(trunk)
                with torch.cuda.stream(branch):
                    step()
            every[0]()
            for branch in branches:
                trunk.wait_stream(branch)
    except RuntimeError as problem:
        reason = str(problem).split("\n")[0]
        log.info("this step cannot be recorded as a CUDA graph (%s); running it as it is", reason)
        torch.cuda.synchronize(device)
        return WARMUP_STEPS, partial(_all, every)
    return WARMUP_STEPS, graph.replay


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Inside the block, float32 products are exact ("highest"), may use TF32 on CUDA ("high"), or bfloat16 on CPUs too
    ("medium")."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def cosine(start: float, steps: int) -> Tensor:
    """From `start` to 0 over the steps."""
    return start * 0.5 * (1 + torch.cos(torch.pi * torch.arange(steps) / max(steps, 1)))


def constant(value: float, steps: int) -> Tensor:
    return torch.full((steps,), value)


def by_magnitude(parameters: Sequence[tuple[Tensor, float]], rate: float, steps: int) -> list[Group]:
    """Groups for (parameter, how large it is) with rates relative to the size, to a factor of two, cosine to zero."""
    alike: dict[int, list[Tensor]] = {}
    for parameter, size in parameters:
        alike.setdefault(round(math.log2(max(size, 1e-12))), []).append(parameter)
    return [Group(members, cosine(rate * 2.0**power, steps)) for power, members in sorted(alike.items())]


def draw_samples(count: int, batch: int, steps: int, generator: torch.Generator) -> Tensor:
    """[steps, batch] indices below `count`, each step a fresh draw without replacement."""
    batch = min(batch, count)
    draws = [torch.randperm(count, generator=generator)[:batch] for _ in range(steps)]
    return torch.stack(draws) if draws else torch.empty(0, batch, dtype=torch.long)
