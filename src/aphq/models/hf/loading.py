"""A model of transformers from a `from_pretrained` folder, or from the hub if the user names it. No code is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aphq.errors import ModelError
from aphq.models.hf.processor_files import fetch_processor
from aphq.typed import nearest

CONFIG = "config.json"
# of a model with two towers the one that sees, with what makes its embedding comparable
TOWERS = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}


def load_pretrained(name: str | Path) -> nn.Module:
    """The float32 model in eval mode; a folder is read without any network, another name is looked up on the hub."""
    folder = Path(name)
    local = folder.is_dir()
    config = _read(folder / CONFIG) if local else _from_hub(str(name))
    cls = _class_for(config, str(name))
    try:
        model, info = cls.from_pretrained(
            str(name),
            local_files_only=local,
            use_safetensors=True,  # the other format is a pickle
            dtype=torch.float32,
            attn_implementation="sdpa",  # whatever the file would like to fetch
            output_loading_info=True,
        )
    except Exception as problem:  # files that do not fit, no network, no such model: of many kinds
        reason = " ".join(str(problem).split())[:300]
        raise ModelError(f"cannot load a {cls.__name__} from {name}: {reason}") from None
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise ModelError(
            f"{name} has no weights for {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}: "
            f"it does not hold a trained {cls.__name__}"
        )
    if not local:
        fetch_processor(str(name))
    loaded: nn.Module = model
    return loaded.eval()


def _class_for(config: dict[str, Any], where: str) -> Any:
    from aphq.models.hf.base import known_classes

    if config.get("format") == "aphq":
        raise ModelError(f"{where} holds a model that aphq has quantized already; start from the float model")
    if config.get("quantization_config"):
        raise ModelError(f"{where} holds a model that is quantized already; start from the float model")
    named = config.get("architectures")
    names = [TOWERS.get(name, name) for name in named] if isinstance(named, list) else []
    known = known_classes()
    for name in names:
        if name in known:
            return known[name]
    wanted = ", ".join(map(str, names)) or f"a model of type {config.get('model_type')!r}"
    hint = nearest(str(names[0]), list(known)) if names else f"supported: {', '.join(sorted(known))}"
    raise ModelError(f"{where} holds {wanted}, which has no adapter: {hint}")


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelError(f"{file} is damaged: {problem}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file} does not describe a model")
    return found


def _from_hub(name: str) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict()
    except Exception as problem:  # whatever the hub client raises
        raise ModelError(
            f"cannot get {name!r} from the hub ({type(problem).__name__}); check the name and the network, "
            "or give a folder that save_pretrained wrote"
        ) from None
    return config
