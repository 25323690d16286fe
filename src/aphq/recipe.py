"""The recipe: everything a run depends on besides the model and the images, as frozen dataclasses.

Defaults are the hyper-parameters of the published method (its code where paper and code differ), so that
`Recipe(stages=(MlpReconstruction(), LayerNormReparameterisation(), ScaleSearch(), BlockReconstruction()))` is the
paper's recipe; `aphq.presets` names the combinations people use.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from aphq.errors import RecipeError
from aphq.typed import TypedError, convert, from_plain, nearest, shown, to_plain

VERSION = 1
MAX_CHARACTERS, MAX_VALUES = 2**20, 100_000  # of a recipe file; the longest, with bits for each layer, have thousands
ImportanceKind = Literal["mse", "brecq", "ph", "aph", "fisher"]
SearchMethod = Literal["minmax", "percentile", "self_mse", "output_mse"]


@dataclass(frozen=True)
class Weights:
    """How weights become integers; `bits=None` leaves them in float."""

    bits: int | None = 4
    symmetric: bool = False
    granularity: Literal["channel", "tensor"] = "channel"  # one scale per output channel, or one for the layer


@dataclass(frozen=True)
class Activations:
    """How the inputs of linear layers, convolutions and attention products become integers."""

    bits: int | None = 4
    symmetric: bool = False
    attention: Literal["head", "tensor"] = "head"  # scales of q, k, softmax and v: one per head, or one for all
    image_bits: int | None = 8  # the input picture itself; it was made of 8-bit pixels
    attention_symmetric: bool = False  # q, k and v with their zero-points in the middle, as int8 kernels want them


@dataclass(frozen=True)
class Override:
    """Other bits for the layers whose name matches a pattern; a field left out keeps the recipe's value."""

    weights: int | Literal["recipe"] | None = "recipe"
    activations: int | Literal["recipe"] | None = "recipe"


@dataclass(frozen=True)
class Calibration:
    """Which images the run sees and how they are cropped."""

    images: int = 1024
    augment: bool = False  # the training augmentation (random crop, flip, colour), as the published code does
    batch: int = 32  # images per pass (a GPU may take more); random draws are made per batch


@dataclass(frozen=True)
class Importance:
    """What weights the reconstruction error (paper Sec. 3.2).

    mse: nothing; brecq: squared gradient of each sample; ph: perturbation Hessian of each sample (Eq. 7);
    aph: its average over the samples (Eq. 8), faithful to the published all-ones perturbation in float32;
    fisher: the diagonal of the Fisher matrix of the distillation loss by seeded random probes at the logits.
    """

    kind: ImportanceKind = "aph"
    temperature: float = 20.0  # of the KL divergence between teacher and student logits
    epsilon: float = 1e-6  # size of the perturbation (ph, aph)
    probes: int = 4  # backward passes per batch (fisher)
    power: float = 0.5  # fisher ** power; 1/2 has the dynamic range of aph, 1 is the Fisher diagonal itself


@dataclass(frozen=True)
class Views:
    """Fresh views of the calibration images while a stage learns, against over-fitting to a thousand pictures."""

    every: int = 0  # steps from one view of each image to the next; 0 keeps the images as they are
    copies: int = 0  # or: how many views of each image are held beside it from the start
    smallest_crop: float = 0.25  # share of the picture's area that a crop shows at least
    jitter: float = 0.4  # brightness, contrast and saturation each by a factor in 1 +- jitter
    mixup: float = 0.0  # share of the views that are blended with another image
    cutmix: float = 0.0  # share of the views with a rectangle out of another image


@dataclass(frozen=True)
class Rotation:
    """The residual stream and the attention heads in a random basis without outlying channels, folded into weights."""

    kind: Literal["rotation"] = "rotation"
    stream: bool = True
    heads: bool = True
    NAME: ClassVar[str] = "rotation"


@dataclass(frozen=True)
class MlpReconstruction:
    """GELU becomes ReLU in every MLP, retrained against the float MLP (paper Sec. 3.3, Eq. 11-14)."""

    kind: Literal["mlp_reconstruction"] = "mlp_reconstruction"
    steps: int = 20_000
    batch: int = 32
    learning_rate: float = 4e-5  # Adam, cosine to zero
    percentile: float = 0.99  # p of the clamp, over the positive post-GELU values of the teacher
    alpha: float = 2.0  # weight of the clamped loss
    loss_scale: float = 0.1
    importance: Importance = field(default_factory=Importance)
    views: Views = field(default_factory=Views)
    NAME: ClassVar[str] = "mlp_reconstruction"


@dataclass(frozen=True)
class LayerNormReparameterisation:
    """LayerNorm outputs are rescaled per channel, undone in the next weights, so that one scale fits all channels."""

    kind: Literal["layernorm_reparameterisation"] = "layernorm_reparameterisation"
    images: int = 128
    candidates: int = 128
    values: bool = False  # the same for the channels of the attention values, undone in the projection
    NAME: ClassVar[str] = "layernorm_reparameterisation"


@dataclass(frozen=True)
class ScaleSearch:
    """Scale and zero-point of every quantizer, without gradients.

    minmax and percentile read the range off the data; self_mse minimises the error of the tensor itself;
    output_mse goes on from there by turns over weights and inputs to minimise the error of the layer's output.
    """

    kind: Literal["scale_search"] = "scale_search"
    method: SearchMethod = "output_mse"
    images: int = 128
    candidates: int = 128
    rounds: int = 3
    percentile: float = 0.9999  # for method "percentile"
    narrowest: float = 0.9  # the quantile of |x| that the smallest candidate range still covers
    tokens: int = 4096  # rows drawn from the images to compare candidate activation scales on
    outlier_ratio: float = 20.0  # a layer input this much wider than its 99.9 % quantile is an outlier ...
    outlier_candidates: int = 0  # ... whose range is chosen among so many by the KL at the logits; 0 = never
    outlier_images: int = 32
    NAME: ClassVar[str] = "scale_search"


@dataclass(frozen=True)
class ErrorCompensation:
    """Weights rounded column by column, the columns still free and the bias making up for the error of each."""

    kind: Literal["error_compensation"] = "error_compensation"
    images: int = 64
    tokens: int = 8192  # rows drawn from the images for the Gram matrix of a layer's inputs
    NAME: ClassVar[str] = "error_compensation"


@dataclass(frozen=True)
class BlockReconstruction:
    """Learned rounding and activation scales, unit by unit, with QDrop (paper Sec. 3.2 and Algorithm 1)."""

    kind: Literal["block_reconstruction"] = "block_reconstruction"
    steps: int = 20_000
    batch: int = 32
    rounding_lr: float = 1e-3  # Adam, constant
    scale_lr: float = 4e-5  # Adam, cosine to zero
    float_lr: float = 0.0  # of what stays in float (biases, norms), cosine to zero; 0 leaves it alone, as published
    quantized_share: float = 0.5  # QDrop inside the unit: the chance of an activation to be quantized
    input_quantized_share: float = 0.5  # QDrop at the unit's input: the chance of coming from the quantized prefix
    regulariser: float = 0.01  # pulls the rounding variables to 0 or 1
    warmup: float = 0.2  # share of the steps without the regulariser
    beta_start: float = 20.0  # exponent of the regulariser, linear from start to end after the warm-up
    beta_end: float = 2.0
    first_loss: float = 2.0  # the reconstruction loss is scaled to start here, whatever the unit
    zeta: float = 1.1  # stretch of the rectified sigmoid (AdaRound)
    gamma: float = -0.1
    importance: Importance = field(default_factory=Importance)
    views: Views = field(default_factory=Views)
    NAME: ClassVar[str] = "block_reconstruction"


@dataclass(frozen=True)
class JointTuning:
    """The whole quantized network tuned against the float teacher, at its logits and after every unit, on fresh views.

    All rates fall to zero along a cosine. Weights stay where they are unless they get a rate: on a thousand images they
    learn the images, while scales, biases and norms are too few to.
    """

    kind: Literal["joint_tuning"] = "joint_tuning"
    steps: int = 4000
    batch: int = 32
    scale_lr: float = 1e-3  # relative to the scale; of weights and activations
    float_lr: float = 1e-4  # of what stays in float: biases, norms
    weight_lr: float = 0.0  # in steps of the weight's grid, straight through the rounding
    temperature: float = 1.0  # of the KL divergence at the logits
    logit_weight: float = 1.0  # of that divergence
    feature_weight: float = 5.0  # of the relative error of the units' outputs
    quantized_share: float = 1.0  # QDrop: the chance of an activation to be quantized
    views: Views = field(default_factory=lambda: Views(every=32, mixup=0.5, cutmix=0.5))
    NAME: ClassVar[str] = "joint_tuning"


Stage = (
    Rotation
    | MlpReconstruction
    | LayerNormReparameterisation
    | ScaleSearch
    | ErrorCompensation
    | BlockReconstruction
    | JointTuning
)
STAGES: dict[str, type[Stage]] = {cls.NAME: cls for cls in get_args(Stage)}  # in the order in which they run


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
        _check(self)

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


def _check(recipe: Recipe) -> None:
    """Values that have the right type and still make no sense."""

    def require(ok: bool, message: str) -> None:
        if not ok:
            raise RecipeError(f"recipe: {message}")

    bits: dict[str, Any] = {
        "weights.bits": recipe.weights.bits,
        "activations.bits": recipe.activations.bits,
        "activations.image_bits": recipe.activations.image_bits,
    }
    for pattern, override in recipe.overrides.items():
        if override is not None:
            bits |= {
                f"overrides.{pattern}.weights": override.weights,
                f"overrides.{pattern}.activations": override.activations,
            }
    for name, value in bits.items():
        require(
            value in (None, "recipe") or 2 <= value <= 8,
            f"{name} must be 2 to 8, or null for float; got {shown(value)}",
        )
    require(0 <= recipe.seed < 2**63, f"seed must be from 0 to 2^63 - 1; got {shown(recipe.seed)}")
    require(recipe.calibration.images >= 1, "calibration.images must be at least 1")
    require(recipe.calibration.batch >= 1, "calibration.batch must be at least 1")

    names = [stage.NAME for stage in recipe.stages]
    require(len(set(names)) == len(names), f"a stage may appear only once; got {', '.join(names)}")
    require(names == sorted(names, key=list(STAGES).index), f"stages must come in the order {', '.join(STAGES)}")
    quantizes = any(isinstance(value, int) for key, value in bits.items() if key != "activations.image_bits")
    if names and quantizes:
        require("scale_search" in names, "a recipe that quantizes needs the stage scale_search (or bits: null)")
    both = {"error_compensation", "block_reconstruction"} <= set(names)
    require(not both, "error_compensation and block_reconstruction both round the weights for good: leave one out")

    for stage in recipe.stages:
        for f in dataclasses.fields(stage):
            _check_number(stage, f.name, require)
        views = getattr(stage, "views", Views())
        require(views.mixup + views.cutmix <= 1, f"{stage.NAME}.views: mixup and cutmix share the views, at most 1")
        require(not (views.every and views.copies), f"{stage.NAME}.views: either `every` or `copies`, not both")
        if isinstance(stage, JointTuning):
            require(not views.copies, "joint_tuning.views: no copies here; fresh views come by `every`")
        if isinstance(stage, (MlpReconstruction, BlockReconstruction)) and (views.every or views.copies):
            fits = stage.importance.kind not in ("ph", "brecq")
            require(fits, f"{stage.NAME}: fresh views need an importance that all images share (fisher, aph or mse)")


SHARES = {"percentile", "quantized_share", "input_quantized_share", "warmup", "narrowest"}
SHARES |= {"smallest_crop", "jitter", "mixup", "cutmix"}  # of Views
MAY_BE_ZERO = {"steps", "rounds", "outlier_candidates", "alpha", "regulariser", "warmup", "gamma", "power"}
MAY_BE_ZERO |= {"every", "copies", "jitter", "mixup", "cutmix"}
MAY_BE_ZERO |= {"float_lr", "weight_lr", "scale_lr", "feature_weight", "logit_weight"}


def _check_number(owner: Any, name: str, require: Any) -> None:
    value = getattr(owner, name)
    where = f"{getattr(owner, 'NAME', type(owner).__name__.lower())}.{name}"
    if isinstance(value, (Importance, Views)):
        for f in dataclasses.fields(value):
            _check_number(value, f.name, require)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        finite = abs(value) <= sys.float_info.max  # math.isfinite fails on integers beyond that
        require(finite, f"{where} must be finite; got {shown(value)}")
        signed_right = value > 0 or (value == 0 and name in MAY_BE_ZERO) or name == "gamma"
        require(signed_right, f"{where} must be positive; got {shown(value)}")
        require(name not in SHARES or value <= 1, f"{where} must be at most 1; got {shown(value)}")
