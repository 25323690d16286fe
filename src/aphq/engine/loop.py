"""The one optimisation loop that every stage with gradients shares.

A step reads everything that changes from one step to the next (which samples, learning rates, schedules) out of tables
on the device by a counter that also lives there, so a step is the same program every time. On a CUDA device it is
recorded once as a graph and replayed; elsewhere, or where recording fails, it runs as it is, with the same result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

log = logging.getLogger(__name__)
Now = Mapping[str, Tensor]  # the schedules' values at this step
LossOf = Callable[[Tensor, Now], Tensor]  # (sample indices, now) -> loss
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

    def run(self, report: Callable[[int], None] | None = None) -> Tensor:
        """Returns the loss of every step, on the CPU; `report(n)` is called after every few steps."""
        with matmul_precision("high"):  # TF32 where there is such a thing: steps are noisy enough not to notice
            return self._run(report)

    def _run(self, report: Callable[[int], None] | None) -> Tensor:
        steps = self.samples.shape[0]
        if steps == 0:
            return torch.empty(0)
        step = self._make_step(steps)
        done, reported = 0, 0
        if self.device.type == "cuda" and self.capture and steps > WARMUP_STEPS:
            done, step = self._record(step)
        while done < steps:
            step()
            done += 1
            if report and (done % REPORT_EVERY == 0 or done == steps):
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                report(done - reported)
                reported = done
        return self._losses.cpu()

    def _make_step(self, steps: int) -> Callable[[], None]:
        device = self.device
        self._losses = torch.zeros(steps, device=device)
        samples = self.samples.to(device)
        schedules = {name: table.to(device, torch.float32) for name, table in self.schedules.items()}
        counter = torch.zeros(1, dtype=torch.long, device=device)
        groups = [group for group in self.groups if len(group.parameters)]
        rates = [group.learning_rate.to(device, torch.float32) for group in groups]
        parameters = [p for group in groups for p in group.parameters]
        optimiser = torch.optim.Adam(
            [{"params": list(g.parameters), "lr": rate[0].clone()} for g, rate in zip(groups, rates, strict=True)],
            fused=True,
            capturable=device.type == "cuda",
        )

        def step() -> None:
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"].copy_(rate.index_select(0, counter)[0])
            now = {name: table.index_select(0, counter)[0] for name, table in schedules.items()}
            loss = self.loss_of(samples.index_select(0, counter)[0], now)
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = grad
            optimiser.step()
            with torch.no_grad():
                if self.after_step:
                    self.after_step()
                self._losses.index_copy_(0, counter, loss.detach().reshape(1))
                counter.add_(1)

        return step

    def _record(self, step: Callable[[], None]) -> tuple[int, Callable[[], None]]:
        """Run the first steps, record one as a CUDA graph, and return how many were run and its replay."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_STEPS):
                step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                step()
        except RuntimeError as problem:
            reason = str(problem).split("\n")[0]
            log.info("this step cannot be recorded as a CUDA graph (%s); running it as it is", reason)
            torch.cuda.synchronize(self.device)
            return WARMUP_STEPS, step
        return WARMUP_STEPS, graph.replay


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Inside the block, float32 products on CUDA are exact ("highest") or may use TF32 ("high")."""
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


def draw_samples(count: int, batch: int, steps: int, generator: torch.Generator) -> Tensor:
    """[steps, batch] indices below `count`, each step a fresh draw without replacement."""
    batch = min(batch, count)
    draws = [torch.randperm(count, generator=generator)[:batch] for _ in range(steps)]
    return torch.stack(draws) if draws else torch.empty(0, batch, dtype=torch.long)
