"""aphq: trained Vision Transformers and a thousand unlabelled images in, low-bit integer models that work out."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from aphq.analysis import analyze
    from aphq.api import evaluate, quantize
    from aphq.artifact import load, save
    from aphq.models.coverage import coverage
    from aphq.presets import preset
    from aphq.recipe import Recipe
    from aphq.run import Run

# Imported when first asked for: `import aphq` and `aphq --help` must not wait for torch.
_HOMES = {
    "Recipe": "aphq.recipe",
    "Run": "aphq.run",
    "analyze": "aphq.analysis",
    "coverage": "aphq.models.coverage",
    "evaluate": "aphq.api",
    "load": "aphq.artifact",
    "preset": "aphq.presets",
    "quantize": "aphq.api",
    "save": "aphq.artifact",
}
__all__ = ["Recipe", "Run", "analyze", "coverage", "evaluate", "load", "preset", "quantize", "save"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'aphq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
