"""What a run leaves in the caller's hands."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from aphq.artifact.saving import Sizes
from aphq.engine.progress import clock
from aphq.engine.workspace import Images
from aphq.errors import describe
from aphq.models.coverage import Coverage, coverage
from aphq.recipe import Recipe
from aphq.report import REPORT
from aphq.tasks import Task

if TYPE_CHECKING:
    from aphq.export import Exported

log = logging.getLogger(__name__)


@dataclass
class Run:
    """What `quantize` gives back: the model, where it is, and what it cost."""

    model: nn.Module  # quantized, eval mode
    recipe: Recipe
    path: Path | None
    seconds: dict[str, float] = field(default_factory=dict)  # per stage
    sizes: Sizes | None = None
    accuracy: dict[str, Any] = field(default_factory=dict)  # "float" and "quantized", if labels were given
    agreement: float | None = None  # per cent of equal predictions
    resumed: bool = False
    images: Images | None = None  # what it was calibrated on

    @property
    def coverage(self) -> list[Coverage]:
        return coverage(self.model)

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": None if self.path is None else str(self.path),
            "recipe": self.recipe.name,
            "seed": self.recipe.seed,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "sizes": None if self.sizes is None else asdict(self.sizes),
            "accuracy": {name: asdict(value) for name, value in self.accuracy.items()},
            "agreement": self.agreement,
            "float_layers": [row.name for row in self.coverage if row.note],
        }

    def export(self, to: str = "onnx", *, out: str | Path | None = None, data: Any = None, **options: Any) -> Exported:
        """Write the model for another runtime, into the run folder unless `out` says so; see `aphq.export.export`."""
        from aphq.export import export

        target = self.path / "model" if out is None and self.path is not None else out
        return export(self.model, to, out=target, data=self.images if data is None else data, **options)

    def recall(self, earlier: dict[str, Any], task: Task) -> None:
        """Take over what an earlier, finished run of the same folder measured."""
        try:
            seconds = {str(name): float(value) for name, value in (earlier.get("seconds") or {}).items()}
            accuracy = {name: task.recall(value) for name, value in (earlier.get("accuracy") or {}).items()}
            agreement = None if earlier.get("agreement") is None else float(earlier["agreement"])
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as problem:
            log.warning("what the finished run measured cannot be read any more: %s", describe(problem))
            return
        self.seconds, self.accuracy, self.agreement = seconds, accuracy, agreement

    def summary(self) -> str:
        """A few lines for a person."""
        rows = self.coverage
        stayed = [row.name for row in rows if row.note]
        lines = [f"{self.recipe.name}: {len(rows) - len(stayed)} of {len(rows)} layers and products quantized"]
        if stayed:
            lines.append(f"  in float or partly: {', '.join(stayed[:6])}{' ...' if len(stayed) > 6 else ''}")
        for name, accuracy in self.accuracy.items():
            lines.append(f"  {name:<10} {accuracy}")
        if self.agreement is not None:
            lines.append(f"  agreement with float {self.agreement:.2f} %")
        if self.sizes is not None:
            small, big = self.sizes.artifact / 1e6, self.sizes.float32 / 1e6
            lines.append(f"  size       {small:.2f} MB, float32 {big:.2f} MB ({self.sizes.ratio:.1f} times smaller)")
        if self.seconds:
            parts = ", ".join(f"{name.replace('_', ' ')} {clock(value)}" for name, value in self.seconds.items())
            lines.append(f"  time       {clock(sum(self.seconds.values()))} ({parts})")
        if self.path is not None:
            lines.append(f"  saved in   {self.path}")
            if (self.path / REPORT).is_file():
                lines.append(f"  report     {self.path / REPORT}")
        return "\n".join(lines)
