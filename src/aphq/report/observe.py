"""What a run leaves behind for its report: teacher and student side by side on a handful of calibration images.

Looked at once, when the student is finished and before it is saved. It takes seconds, draws from a generator of its own
and changes nothing, so a run gives the same model with or without it.

A layer's output is compared with the float model's where both mean the same. The first layer of an MLP and the layer
of queries, keys and values do not: reconstruction and rescaling change them freely, as long as what follows makes up
for it. What rounding alone costs is measured at the input of every layer and product instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aphq.engine.files import write_json
from aphq.engine.hooks import change_outputs, watch_inputs
from aphq.engine.seeds import generator_for
from aphq.engine.workspace import Workspace
from aphq.models.architecture import Mlp, Unit, Value, made, mlps_of, predict
from aphq.models.attention import open_attentions
from aphq.models.coverage import operands
from aphq.quant.layers import QuantizedLayer, QuantizedProduct, quantized_sites
from aphq.quant.quantizer import Quantizer
from aphq.report.environment import command_line, environment
from aphq.stages.probes import Probed

MEASUREMENTS = "measurements.json"
VERSION = 1
IMAGES, SCENES = 16, 2  # looked at layer by layer; scenes are large
ASKED = 64  # whose predictions are compared
BATCH = 8
PROBES = 2  # backward passes per batch for the importance
VALUES = 2**13  # kept of a layer's input per pass
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
BINS = 60
MOST_DECIBELS = 99.0  # of two signals that are equal


def observe(work: Workspace) -> dict[str, Any]:
    """Everything as plain values, ready for JSON."""
    looked = Looked(work)
    count = min(len(work.images), SCENES if work.images.ragged else IMAGES)
    with torch.no_grad(), looked:
        for rows in batches(count, 1 if work.images.ragged else BATCH):
            looked.at(rows)
    return {
        "version": VERSION,
        "model": model_name(work.teacher),
        "environment": environment(work.device),
        "command": command_line(),
        "images": count,
        "units": [{"name": u.name, "kind": u.kind, "snr": looked.units[u.name].decibels} for u in work.units],
        "layers": looked.layers(),
        "mlps": [looked.mlp(mlp) for mlp in mlps_of(work.units).values()],
        "importance": [] if work.images.ragged else importance_of_blocks(work),
        "agreement": None if work.images.ragged else agreement(work),
    }


def write_measurements(work: Workspace, folder: Path) -> None:
    write_json(folder / MEASUREMENTS, observe(work))


def batches(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def model_name(model: nn.Module) -> str:
    """timm's name for the architecture, or the class."""
    known = getattr(model, "pretrained_cfg", None)
    name = known.get("architecture") if isinstance(known, Mapping) else getattr(known, "architecture", None)
    return str(name or type(model).__name__)


@dataclass
class Distance:
    """Signal and noise, summed over everything seen."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, expected: Tensor, got: Tensor) -> None:
        exact, other = (x.cpu().double() if x.device.type == "mps" else x.double() for x in (expected, got))
        self.signal += float(exact.square().sum())  # mps has no float64
        self.noise += float((other - exact).square().sum())

    @property
    def decibels(self) -> float | None:
        if self.signal <= 0 or not math.isfinite(self.noise):
            return None
        return round(min(MOST_DECIBELS, 10 * math.log10(self.signal / max(self.noise, 1e-30))), 2)


@dataclass
class Spread:
    """The extremes of everything seen, and an even sample of it."""

    lower: float = math.inf
    upper: float = -math.inf
    parts: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        self.lower, self.upper = min(self.lower, float(x.min())), max(self.upper, float(x.max()))
        flat = x.detach().flatten()
        stride = max(1, flat.numel() // VALUES) | 1  # odd: would an even one meet the same channels again and again?
        self.parts.append(flat[::stride].float().cpu())

    def box(self) -> list[float] | None:
        """[smallest, 1 %, 25 %, 50 %, 75 %, 99 %, largest]"""
        if not self.parts:
            return None
        inner = torch.quantile(torch.cat(self.parts), torch.tensor(QUANTILES)).tolist()
        return [short(x) for x in (self.lower, *inner, self.upper)]


class Looked:
    """Both models under observation, inside a `with` block."""

    def __init__(self, work: Workspace) -> None:
        self.work = work
        self.sites = dict(quantized_sites(work.student))
        self.names = [name for name, site in self.sites.items() if isinstance(site, QuantizedLayer)]
        self.units = {unit.name: Distance() for unit in work.units}
        rescaled = {mlp.fc1 for mlp in mlps_of(work.units).values()} | _turned(work.student)
        self.outputs = {n: Distance() for n in self.names if n not in rescaled}
        self.rounding = {name: {side: Distance() for side in incoming(site)} for name, site in self.sites.items()}
        self.before = {name: Spread() for name in self.names}
        self.after = {name: Spread() for name in self.names}
        self._said: dict[str, list[Tensor]] = {name: [] for name in self.outputs}
        self._open: list[Any] = []

    def __enter__(self) -> Looked:
        teacher = {name: self.work.teacher.get_submodule(name) for name in self.names}
        student = {name: self.work.student.get_submodule(name) for name in self.outputs}
        sites: dict[str, nn.Module] = dict(self.sites)
        self._open = [
            watch_inputs(teacher, lambda name, inputs: self.before[name].add(inputs[0])),
            watch_inputs(sites, self._student_input),
            change_outputs({name: teacher[name] for name in self.outputs}, self._teacher_output),
            change_outputs(student, self._student_output),
        ]
        for hook in self._open:
            hook.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        for hook in reversed(self._open):
            hook.__exit__(None, None, None)

    def at(self, rows: slice) -> None:
        """Some images through both chains."""
        work = self.work
        x = y = work.images.batch(rows, work.device)
        for unit in work.units:
            x, y = unit.run(work.teacher, x), unit.run(work.student, y)
            for expected, got in pairs(made(unit, x), made(unit, y)):
                self.units[unit.name].add(expected, got)
            x, y = unit.bridge(work.teacher, x), unit.bridge(work.student, y)

    def _teacher_output(self, name: str, output: Tensor) -> Tensor:
        self._said[name].append(output)
        return output

    def _student_output(self, name: str, output: Tensor) -> Tensor:
        self.outputs[name].add(self._said[name].pop(0), output)
        return output

    def _student_input(self, name: str, inputs: tuple[Tensor, ...]) -> None:
        if name in self.after:
            self.after[name].add(inputs[0])
        for (side, quantizer), x in zip(incoming(self.sites[name]).items(), inputs, strict=False):
            if quantizer is not None:
                # exponentials count as the probabilities they become
                total = inputs[2] if side == "left" and len(inputs) > 2 else 1
                self.rounding[name][side].add(x / total, quantizer(x) / total)

    def layers(self) -> list[dict[str, Any]]:
        owners = {name: unit.name for unit in self.work.units for name in self.sites if _inside(name, unit)}
        return [
            {
                "name": name,
                "unit": owners.get(name, ""),
                "output_snr": self.outputs[name].decibels if name in self.outputs else None,
                "rounding_snr": {side: distance.decibels for side, distance in self.rounding[name].items()},
                "before": self.before[name].box() if name in self.before else None,
                "after": self.after[name].box() if name in self.after else None,
            }
            for name in self.sites
        ]

    def mlp(self, mlp: Mlp) -> dict[str, Any]:
        """Histograms of the input and of the weight of its second layer."""
        name = mlp.fc2
        weights = [model.get_submodule(name).weight for model in (self.work.teacher, self.work.student)]
        before, after = (_kept(side.parts) for side in (self.before[name], self.after[name]))
        return {
            "name": mlp.name,
            "input": histograms(before, after),
            "weight": histograms(*(weight.detach().float().cpu().flatten() for weight in weights)),  # type: ignore[operator]
        }


def _turned(model: nn.Module) -> set[str]:
    """Layers of queries, keys and values, which may give them in another basis than the teacher's do."""
    found = set()
    for name, attention in open_attentions(model):
        if (around := attention.projections()) is not None:
            layers = [part.layer for part in (around.query, around.key, around.value)]
            found |= {f"{name}.{inner}" for inner, m in attention.named_modules() if any(m is x for x in layers)}
    return found


def incoming(site: QuantizedLayer | QuantizedProduct) -> dict[str, Quantizer | None]:
    """The quantizers of what comes in, in order."""
    return {name: quantizer for name, quantizer in operands(site).items() if name != "weight"}


def _inside(name: str, unit: Unit) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in unit.modules)


def _kept(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(1)


def pairs(x: Value, y: Value) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of two values of the same shape."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        yield x, y
    else:
        yield from ((x[name], y[name]) for name in x)


def histograms(before: Tensor, after: Tensor) -> dict[str, Any]:
    """Shares of both in the same bins."""
    lower, upper = (float(edge) for edge in torch.cat([before, after]).aminmax())
    counts = [torch.histc(x, BINS, lower, upper if upper > lower else lower + 1) / x.numel() for x in (before, after)]
    shares = [[short(share) for share in count.tolist()] for count in counts]
    return {"lower": short(lower), "upper": short(upper), "before": shares[0], "after": shares[1]}


def importance_of_blocks(work: Workspace) -> list[dict[str, Any]]:
    """Where the outputs of the blocks matter to the prediction, by token and by channel: the diagonal of the Fisher
    matrix from a few random probes, its square root, the mean over everything else scaled to 1."""
    blocks = [unit.name for unit in work.units if unit.kind == "block"]
    generator = generator_for(work.recipe.seed, "report")
    totals: dict[str, Tensor] = {}
    for rows in batches(min(len(work.images), IMAGES), BATCH) if blocks else ():
        probed = Probed(work, blocks, work.images.batch(rows, work.device))
        for grads in probed.gradients(PROBES, 1.0, generator):
            for name, grad in grads:
                totals[name] = totals.get(name, torch.zeros_like(grad[0])) + grad.square().sum(0)
    prefix = int(getattr(work.teacher, "num_prefix_tokens", 0))
    return [summary for name, total in totals.items() if (summary := _by_token(name, total.cpu(), prefix))]


def _by_token(name: str, diagonal: Tensor, prefix: int) -> dict[str, Any] | None:
    """Of [tokens, channels] or [height, width, channels]; None where the tokens make no square."""
    channels = _relative(diagonal.flatten(0, -2).mean(0).sqrt())
    if diagonal.ndim == 3:
        height, width = diagonal.shape[:2]
        prefix = 0
    else:
        height = width = math.isqrt(max(0, diagonal.shape[0] - prefix))
    tokens = _relative(diagonal.flatten(0, -2).mean(-1).sqrt())
    if height * width != len(tokens) - prefix or not tokens:
        return None
    return {
        "unit": name,
        "prefix": tokens[:prefix],
        "grid": [height, width],
        "tokens": tokens[prefix:],
        "channels": channels,
    }


def _relative(values: Tensor) -> list[float]:
    return [short(x) for x in (values / values.mean().clamp_min(1e-30)).tolist()]


@torch.no_grad()
def agreement(work: Workspace) -> dict[str, Any]:
    """How alike the predictions are, on images that the run has seen."""
    count, same, divergence = min(len(work.images), ASKED), 0, 0.0
    for rows in batches(count, BATCH):
        x = work.images.batch(rows, work.device)
        expected, got = predict(work.teacher, x), predict(work.student, x)
        same += int((expected.argmax(1) == got.argmax(1)).sum())
        divergence += float(work.distillation.loss(got, expected)) * len(expected)
    return {"images": count, "same": round(100 * same / count, 2), "kl": short(divergence / count)}


def short(x: float) -> float:
    """Four digits are enough for a picture."""
    return float(f"{x:.4g}")
