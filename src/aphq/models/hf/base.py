"""What the adapters of transformers share: a model is its class and its configuration."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any, ClassVar

from torch import nn

from aphq.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from aphq.errors import ModelError
from aphq.models.architecture import Architecture, TaskName, replace_module
from aphq.models.hf.attention import SplitAttention, is_split
from aphq.models.hf.processor import Family, preprocessing_from
from aphq.models.hf.processor_files import processor_settings

OLDEST_RELEASE = "5.22"  # of transformers, as pyproject.toml has it
HALF = (0.5, 0.5, 0.5)
NOT_THE_MODEL = {"architectures", "auto_map", "dtype", "torch_dtype", "quantization_config", "transformers_version"}


class HfArchitecture(Architecture):
    """Subclasses say what a family is made of."""

    body: ClassVar[str]  # where a model with a head keeps the bare one
    # What counts unless a file says so: the processor of the family, and what its published weights were trained with,
    # which for DeiT, Swin and DINOv2 is not what the class of the processor would take.
    processor: ClassVar[str] = "ViT"
    mean: ClassVar[tuple[float, ...]] = IMAGENET_MEAN
    std: ClassVar[tuple[float, ...]] = IMAGENET_STD
    any_size: ClassVar[bool] = False  # whether positions are interpolated without being asked

    def root(self, model: Any) -> tuple[str, Any]:
        """The bare model, and the prefix of its modules' names."""
        return (f"{self.body}.", getattr(model, self.body)) if hasattr(model, self.body) else ("", model)

    def config(self, model: Any) -> Any:
        """The configuration of the images' side."""
        return getattr(model.config, "vision_config", model.config)

    def heads(self, model: Any) -> tuple[str, ...]:
        """The names of the layers that make the prediction of pooled features."""
        return tuple(name for name in ("classifier",) if isinstance(getattr(model, name, None), nn.Module))

    def task_of(self, model: Any) -> TaskName:
        classifier = getattr(model, "classifier", None) or getattr(model, "cls_classifier", None)
        return "embedding" if classifier is None or isinstance(classifier, nn.Identity) else "classification"

    def num_classes(self, model: Any) -> int:
        if self.task_of(model) == "classification":
            return int(model.config.num_labels)
        config = self.config(model)
        return int(config.projection_dim if hasattr(model, "visual_projection") else config.hidden_size)

    def preprocessing(self, model: Any) -> Preprocessing:
        """From the image processor beside the model's files, or as the family's processor does by default."""
        config = self.config(model)
        size = config.image_size
        said, where = processor_settings(getattr(model.config, "_name_or_path", "") or "")
        known = Family(
            processor=self.processor,
            mean=self.mean,
            std=self.std,
            size=(size, size) if isinstance(size, int) else tuple(size),
            channels=config.num_channels,
            any_size=self.any_size,
        )
        return preprocessing_from(said, known, where)

    def open_attention(self, model: Any) -> None:
        for name, module in list(model.named_modules()):
            if is_split(module):
                replace_module(model, name, SplitAttention(module))

    def describe(self, model: Any) -> dict[str, Any]:
        _, root = self.root(model)
        pooled = {"pooler": root.pooler is not None} if root is model and hasattr(root, "pooler") else {}
        return {
            "class": type(model).__name__,
            "config": _plain(model.config.to_diff_dict()),
            "eager": model.config._attn_implementation == "eager",
            **pooled,
        }

    def build(self, description: dict[str, Any]) -> nn.Module:
        classes = {cls.__name__: cls for cls in self.classes}
        cls: Any = classes.get(description["class"])
        if cls is None:
            raise ModelError(
                f"{description['class']!r} is not among the classes of {self.family}: {', '.join(classes)}"
            )
        options = {} if "pooler" not in description else {"add_pooling_layer": bool(description["pooler"])}
        try:
            config = cls.config_class(**_plain(description["config"]))
            config._attn_implementation = "eager" if description["eager"] else "sdpa"
            model: nn.Module = cls(config, **options)
        except Exception as problem:  # configurations check themselves with errors of many kinds
            reason = " ".join(str(problem).split())[:300]
            raise ModelError(f"cannot build a {cls.__name__} from its description: {reason}") from None
        return model


def known_classes() -> dict[str, type[nn.Module]]:
    """The classes of transformers that have an adapter, by name."""
    import aphq.models.hf  # noqa: F401  all of them

    found: list[type[Any]] = HfArchitecture.__subclasses__()
    for adapter in found:  # grows while it is walked
        found += adapter.__subclasses__()
    return {cls.__name__: cls for adapter in found for cls in getattr(adapter, "classes", ())}


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """What of a configuration makes the model: nothing that could load code or kernels, and JSON's types only."""

    def kept(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            str(key): kept(inner)
            for key, inner in value.items()
            if not str(key).startswith("_") and "implementation" not in str(key) and key not in NOT_THE_MODEL
        }

    plain: dict[str, Any] = json.loads(json.dumps(kept(config)))
    return plain


def require_parts(module: Any, name: str, *parts: str) -> None:
    """The layout of the releases since `OLDEST_RELEASE`, by attributes: models were rearranged more than once."""
    for part in parts:
        inner = module
        for step in part.split("."):
            inner = getattr(inner, step, None)
        if inner is None:
            raise ModelError(
                f"module {name!r} is a {type(module).__name__} without {part!r}; supported there: the layout of "
                f"transformers {OLDEST_RELEASE} and later (installed: {version('transformers')})"
            )
