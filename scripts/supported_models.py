"""Write docs/models.md: which models of timm, torchvision and transformers `aphq` supports, found out by trying.

Models are built without memory (on torch's meta device) and with their own configurations, cut by their adapters,
opened, and given quantizers; one is supported if nothing in it multiplies in float. What is refused is refused by the
same error that a user gets. The numerical side, that a wrapped model is the original bit for bit, is the tests'
(tests/models).

    python scripts/supported_models.py                 # everything: some minutes
    python scripts/supported_models.py --only cait deit
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aphq.errors import ModelError
from aphq.models.architecture import architecture_of, families
from aphq.models.coverage import coverage
from aphq.models.student import make_student
from aphq.recipe import Recipe

TARGET = Path(__file__).parent.parent / "docs" / "models.md"
SHOWN = 3  # examples and reasons in a row
NO_ADAPTER = "no adapter for this class"
UNBUILT = "not built"


@dataclass
class Row:
    """The models of one source file and class."""

    source: str
    cls: str
    supported: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # reason -> names

    def text(self) -> str:
        total = len(self.supported) + sum(map(len, self.refused.values()))
        reasons = [f"{reason} ({len(names)})" for reason, names in sorted(self.refused.items(), key=_by_size)]
        examples = ", ".join(f"`{name}`" for name in self.supported[:SHOWN])
        more = " ..." if len(self.supported) > SHOWN else ""
        note = "; ".join(reasons[:SHOWN]) + (" ..." if len(reasons) > SHOWN else "")
        return f"| {self.source} | `{self.cls}` | {len(self.supported)} of {total} | {examples}{more} | {note} |"


def _by_size(item: tuple[str, list[str]]) -> tuple[int, str]:
    return -len(item[1]), item[0]


class NotBuilt(nn.Module):
    """Stands for a model of a source file without any class that has an adapter."""


def verdict(model: nn.Module) -> str:
    """Empty if the model is supported, else why not."""
    try:
        architecture = architecture_of(model)
        architecture.describe(model)
        architecture.open_attention(model)
        units = architecture.units(model)
        rows = coverage(make_student(model, architecture, units, Recipe()))
    except ModelError as problem:
        text = str(problem)
        return NO_ADAPTER if text.startswith("cannot quantize a") else text.split(";")[0]
    left = [row.name for row in rows if row.note]
    return f"in float: {left[0]}" if left else ""


def tried(names: dict[str, list[tuple[str, Callable[[], nn.Module]]]]) -> list[Row]:
    """Rows of everything that the makers make, by source."""
    rows: dict[tuple[str, str], Row] = {}
    for source, makers in names.items():
        for name, make in makers:
            try:
                with torch.device("meta"), quiet():
                    model = make().eval()
                    cls, reason = type(model).__name__, verdict(model)
            except Exception as problem:  # libraries refuse to build some of their own models in many ways
                cls, reason = UNBUILT, f"cannot be built here ({type(problem).__name__})"
            row = rows.setdefault((source, cls), Row(source, cls))
            row.refused[reason].append(name) if reason else row.supported.append(name)
    return [rows[key] for key in sorted(rows)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def timm_models(only: list[str] | None) -> dict[str, list[tuple[str, Callable[[], nn.Module]]]]:
    import timm
    from timm.models import list_modules

    found = {}
    for source in sorted(list_modules()):
        if only and source not in only:
            continue
        names = timm.list_models(module=source)
        makers = [(name, lambda name=name: timm.create_model(name)) for name in names]  # type: ignore[misc]
        found[source] = makers if _may_have_an_adapter(source) else [(name, NotBuilt) for name in names]
    return found


def _may_have_an_adapter(source: str) -> bool:
    """Whether a source file of timm knows a class with an adapter; the models of others, most of all, are not built."""
    known = tuple(cls for architecture in families() for cls in architecture.classes)
    classes = [value for value in vars(import_module(f"timm.models.{source}")).values() if isinstance(value, type)]
    return any(issubclass(cls, known) for cls in classes)


def torchvision_models(only: list[str] | None) -> dict[str, list[tuple[str, Callable[[], nn.Module]]]]:
    import torchvision.models as library

    found: dict[str, list[tuple[str, Callable[[], nn.Module]]]] = defaultdict(list)
    for name in library.list_models(module=library):
        source = library.get_model_builder(name).__module__.rpartition(".")[2]
        if not only or source in only:
            found[source].append((name, lambda name=name: library.get_model(name, weights=None)))  # type: ignore[misc]
    return found


def transformers_models(only: list[str] | None) -> dict[str, list[tuple[str, Callable[[], nn.Module]]]]:
    import transformers
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    found: dict[str, list[tuple[str, Callable[[], nn.Module]]]] = defaultdict(list)
    towers = {kind: name for kind, name in auto.MODEL_MAPPING_NAMES.items() if kind.endswith("_vision_model")}
    images = {**auto.MODEL_FOR_IMAGE_MAPPING_NAMES, **towers}
    for mapping in (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, images):
        for kind, names in mapping.items():
            if only and kind not in only:
                continue
            for name in (names,) if isinstance(names, str) else names:

                def make(kind: str = kind, name: str = name) -> nn.Module:
                    model: nn.Module = getattr(transformers, name)(CONFIG_MAPPING[kind]())
                    return model

                if name not in [known for known, _ in found[kind]]:
                    found[kind].append((name, make))
    return found


SECTIONS: dict[str, tuple[str, Callable[..., dict[str, Any]]]] = {
    "timm": ("source file", timm_models),
    "torchvision": ("source file", torchvision_models),
    "transformers": ("model type", transformers_models),
}
HEADER = "| {} | class | supported | for example | refused because |\n|---|---|---|---|---|"
TOP = """# Supported models

Made by `python scripts/supported_models.py` with {versions}; do not edit.

The models were built with their own configurations, without weights, cut into units, opened and given quantizers;
"supported" means that an adapter knows every part and nothing multiplies in float. No forward pass runs here: that
a wrapped model computes what the original does is tested on small models of every class (`tests/models`), and
checked again at the start of every run. Of timm, source files that know no class with an adapter were not built;
all their models count as refused. Families are missing because they are no Vision Transformers or because nobody
has written their adapter yet (CONTRIBUTING.md says how); such a model is refused with an error that names the
module. Detectors: [detect.md](detect.md)."""


def versions() -> str:
    import timm
    import torchvision
    import transformers

    vision = torchvision.__version__.split("+")[0]  # what it was compiled for does not matter
    return f"timm {timm.__version__}, torchvision {vision}, transformers {transformers.__version__}"


def rows_of(section: str, only: list[str] | None = None) -> list[Row]:
    return tried(SECTIONS[section][1](only))


def page() -> str:
    parts = [TOP.format(versions=versions())]
    for section, (column, _) in SECTIONS.items():
        rows = rows_of(section)
        good = sum(len(row.supported) for row in rows)
        total = good + sum(len(names) for row in rows for names in row.refused.values())
        lines = [row.text() for row in rows if row.supported]
        others = sorted({row.source for row in rows} - {row.source for row in rows if row.supported})
        parts.append(f"## {section}: {good} of {total} models\n\n{HEADER.format(column)}\n" + "\n".join(lines))
        parts.append(f"Nothing of: {', '.join(others)}.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="print the rows of these source files or model types alone")
    only = parser.parse_args().only
    logging.disable(logging.WARNING)
    if only:
        for section in SECTIONS:
            sys.stdout.writelines(f"{row.text()}\n" for row in rows_of(section, only))
        return
    TARGET.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
