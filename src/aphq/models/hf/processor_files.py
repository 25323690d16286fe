"""Where the settings of a model's image processor are: beside its files, in a folder or in the hub's cache."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from aphq.engine.files import UnreadableError, read_json
from aphq.errors import ModelError

log = logging.getLogger(__name__)
NESTED, PLAIN = "processor_config.json", "preprocessor_config.json"  # transformers asks them in this order


def processor_settings(name: str) -> tuple[dict[str, Any], str]:
    """(settings, the file they are from) of a model that came from the folder or the hub's repository `name`; empty if
    there are none. The network is never asked: `fetch_processor` does so when a model of the hub is wanted."""
    for file in (_found(name, NESTED), _found(name, PLAIN)):
        if file is None:
            continue
        try:
            settings = read_json(file)
        except UnreadableError as problem:
            raise ModelError(f"{file} is damaged: {problem}") from None
        if file.name == NESTED:  # of several processors in one; an older one says nothing about images
            settings = settings.get("image_processor") if isinstance(settings, dict) else None
        elif not isinstance(settings, dict):
            raise ModelError(f"{file} is damaged: it holds no settings of an image processor")
        if isinstance(settings, dict):
            return settings, str(file)
    if name:
        log.warning(
            "%s has no %s: images are prepared as is usual for the family; pass `preprocessing` if that is wrong",
            *(name, PLAIN),
        )
    return {}, name


def fetch_processor(name: str) -> None:
    """Bring the settings of a model on the hub into its cache, beside the model; a repository may have none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for file in (NESTED, PLAIN):
        try:
            hf_hub_download(name, file)
        except EntryNotFoundError:  # also without a network: what the cache has is used, the lack of it reported
            continue
        except Exception as problem:  # whatever the hub client raises
            raise ModelError(f"cannot get {file} of {name!r} from the hub ({type(problem).__name__})") from None


def _found(name: str, file: str) -> Path | None:
    if not name:
        return None
    if Path(name).is_dir():
        beside = Path(name) / file
        return beside if beside.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, file)
    except ValueError:  # a folder that is gone: no name that the hub could have
        return None
    return Path(cached) if isinstance(cached, str) else None
