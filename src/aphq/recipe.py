"""The recipe: everything a run depends on besides the model and the images, as frozen dataclasses.

Defaults are the hyper-parameters of the published method (its code where paper and code differ), so that
`Recipe(stages=(MlpReconstruction(), LayerNormReparameterisation(), ScaleSearch(), BlockReconstruction()))` is the
paper's recipe; `aphq.presets` names the combinations people use.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

from aphq.errors import RecipeError
from aphq.recipe_checks import check
from aphq.settings import (
    STAGES,
    Activations,
    BlockReconstruction,
    Calibration,
    ErrorCompensation,
    Importance,
    ImportanceKind,
    JointTuning,
    LayerNormReparameterisation,
    MlpReconstruction,
    Override,
    Rotation,
    ScaleSearch,
    SearchMethod,
    Stage,
    Views,
    Weights,
)
from aphq.typed import TypedError, convert, from_plain, nearest, shown, to_plain

VERSION = 1
MAX_CHARACTERS, MAX_VALUES = 2**20, 100_000  # of a recipe file; the longest, with bits for each layer, have thousands
__all__ = [
    "STAGES",
    "Activations",
    "BlockReconstruction",
    "Calibration",
    "ErrorCompensation",
    "Importance",
    "ImportanceKind",
    "JointTuning",
    "LayerNormReparameterisation",
    "MlpReconstruction",
    "Override",
    "Recipe",
    "Rotation",
    "ScaleSearch",
    "SearchMethod",
    "Stage",
    "Views",
    "Weights",
    "differences",
]


@dataclass(frozen=True)
class Recipe:
    """What to do to a model; the same recipe, model, images and seed give the same artifact."""

    name: str = "custom"
    version: int = VERSION
    seed: int = 3407
    weights: Weights = field(default_factory=Weights)
    activations: Activations = field(default_factory=Activations)
    overrides: Mapping[str, Override | None] = field(default_factory=dict)  # fnmatch pattern -> bits; None = float
    calibration: Calibration = field(default_factory=Calibration)
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        check(self)

    # -- reading and writing -----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Strict inverse of `to_dict`; fields left out take their defaults."""
        if not isinstance(data, Mapping):
            raise RecipeError(f"a recipe must be a mapping of fields, got {type(data).__name__}")
        if data.get("version", VERSION) != VERSION:
            raise RecipeError(
                f"recipe version {shown(data['version'])} is not supported; this aphq reads version {VERSION}"
            )
        plain = dict(data)
        try:
            plain["stages"] = tuple(_stage_from_dict(item, i) for i, item in enumerate(plain.get("stages", ())))
            return from_plain(cls, plain)
        except (ValueError, TypeError, OverflowError) as problem:
            raise RecipeError(f"recipe: {problem}") from None

    def to_yaml(self) -> str:
        import yaml

        return str(yaml.safe_dump(self.to_dict(), sort_keys=False))

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_text(cls, text: str) -> Recipe:
        """YAML or JSON, which is nearly YAML: tabs and escaped surrogate pairs are not."""
        import yaml

        if len(text) > MAX_CHARACTERS:
            raise RecipeError(f"{len(text)} characters are too many for a recipe")
        try:
            try:
                data = json.loads(text)
            except ValueError:
                data = yaml.safe_load(text)
            if _nodes(data, MAX_VALUES) > MAX_VALUES:
                raise RecipeError(f"the recipe has more than {MAX_VALUES} values, or contains itself")
            return cls.from_dict(data)
        except RecursionError:
            raise RecipeError("the recipe is nested too deeply to read") from None
        except RecipeError:
            raise
        except Exception as problem:  # besides its own error, yaml lets those of dates, numbers and tags through
            words = (str(problem) or type(problem).__name__).splitlines()[0]
            raise RecipeError(f"the recipe is neither YAML nor JSON: {words}") from None

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        try:
            with open(path, encoding="utf-8") as handle:
                return cls.from_text(handle.read(MAX_CHARACTERS + 1))
        except (OSError, UnicodeDecodeError) as problem:
            raise RecipeError(f"cannot read the recipe {path}: {problem}") from None

    @property
    def wants_views(self) -> bool:
        """Whether a stage draws fresh views of the images."""
        views = [getattr(stage, "views", Views()) for stage in self.stages]
        return any(v.every or v.copies for v in views)

    # -- changing ----------------------------------------------------------------------------------------------------

    def stage(self, name: str) -> Stage | None:
        return next((stage for stage in self.stages if stage.NAME == name), None)

    def without(self, *names: str) -> Recipe:
        """The recipe less some of its stages."""
        for name in names:
            if name not in STAGES:
                raise RecipeError(f"there is no stage {name!r}: {nearest(name, STAGES)}")
        return dataclasses.replace(self, stages=tuple(s for s in self.stages if s.NAME not in names))

    def including(self, *stages: Stage) -> Recipe:
        """The recipe with further stages, or others of the same name, each in its place."""
        chosen = {stage.NAME: stage for stage in (*self.stages, *stages)}
        return dataclasses.replace(self, stages=tuple(chosen[name] for name in STAGES if name in chosen))

    def with_value(self, path: str, value: Any) -> Recipe:
        """A copy with one field changed by its dotted path: `weights.bits`, `block_reconstruction.importance.kind`; or,
        for all stages that have them, `steps`, `importance.kind`, `views.every` and their like."""
        head, _, rest = path.partition(".")
        if head in STAGES:
            if self.stage(head) is None:
                raise RecipeError(f"cannot set {path!r}: the recipe has no stage {head}")
            changed = tuple(_replace(s, rest, value, path) if s.NAME == head else s for s in self.stages)
            return dataclasses.replace(self, stages=changed)
        if head in {"importance", "steps", "views"}:
            owners = [s for s in self.stages if hasattr(s, head)]
            if not owners:
                raise RecipeError(f"cannot set {path!r}: no stage of this recipe has it")
            changed = tuple(_replace(s, path, value, path) if s in owners else s for s in self.stages)
            return dataclasses.replace(self, stages=changed)
        return _replace(self, path, value, path)

    def bits_for(self, name: str, *, sees_image: bool = False) -> tuple[int | None, int | None]:
        """(weight bits, activation bits) of the layer `name`; of several patterns that match, the last one decides."""
        weights, activations = self.weights.bits, self.activations.bits
        if sees_image and activations is not None:
            activations = self.activations.image_bits
        for pattern, override in self.overrides.items():
            if fnmatchcase(name, pattern):
                wanted = override or Override(None, None)
                weights = weights if wanted.weights == "recipe" else wanted.weights
                activations = activations if wanted.activations == "recipe" else wanted.activations
        return weights, activations


def _nodes(data: Any, limit: int) -> int:
    """Values in a plain structure, counted to just over `limit`: a few lines of YAML can stand for billions."""
    count, waiting = 0, [data]
    while waiting and count <= limit:
        value = waiting.pop()
        count += 1
        if isinstance(value, Mapping):
            waiting += [*value, *value.values()]
        elif isinstance(value, (list, tuple, set)):
            waiting += value
    return count


class _Absent:
    """What a mapping has under a key it lacks; None is a value, and means float."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """The dotted names of the leaves in which two plain structures differ, with both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [*old, *(key for key in new if key not in old)]
        parts = ((old.get(key, ABSENT), new.get(key, ABSENT), f"{where}.{key}".lstrip(".")) for key in keys)
        found = [d for part in parts for d in differences(*part)]
        moved = not found and list(old) != list(new)  # of the patterns that match a layer, the last one decides
        return [f"{where}: order {list(old)} -> {list(new)}"] if moved else found
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in differences(a, b, f"{where}[{i}]")]
    return [] if old == new else [f"{where}: {old!r} -> {new!r}"]


def _stage_from_dict(data: Any, index: int) -> Stage:
    if isinstance(data, get_args(Stage)):
        return data
    where = f"stages[{index}]"
    if not isinstance(data, Mapping) or "kind" not in data:
        raise TypedError(f"{where} must be a mapping with a 'kind': one of {', '.join(STAGES)}")
    kind = data["kind"]
    if not isinstance(kind, str) or kind not in STAGES:
        raise TypedError(f"{where}.kind: there is no stage {shown(kind)}: {nearest(shown(kind), STAGES)}")
    return from_plain(STAGES[kind], data, where)


def _replace(owner: Any, path: str, value: Any, whole: str) -> Any:
    from typing import get_type_hints

    head, _, rest = path.partition(".")
    names = {f.name for f in dataclasses.fields(owner)}
    if head not in names:
        raise RecipeError(f"unknown recipe field {whole!r}: {nearest(head, names)}")
    current = getattr(owner, head)
    if rest and isinstance(current, Mapping):
        return dataclasses.replace(owner, **{head: {**current, rest: _convert_override(value, whole)}})
    if rest and not dataclasses.is_dataclass(current):
        raise RecipeError(f"recipe field {whole!r}: {head!r} has no parts")
    try:
        new = (
            _replace(current, rest, value, whole) if rest else convert(value, get_type_hints(type(owner))[head], whole)
        )
    except TypedError as problem:
        raise RecipeError(f"recipe: {problem}") from None
    return dataclasses.replace(owner, **{head: new})


def _convert_override(value: Any, where: str) -> Override | None:
    try:
        return None if value is None else convert(value, Override, where)
    except TypedError as problem:
        raise RecipeError(f"recipe: {problem}") from None
