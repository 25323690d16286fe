"""Optional libraries: imported when first needed, with an error that names the extra that brings them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from aphq.errors import RuntimeMissingError

EXTRAS = {"onnx": "onnx", "onnxruntime": "onnx", "openvino": "openvino", "transformers": "hf"}  # library -> our extra


def require(library: str) -> ModuleType:
    """The imported library."""
    try:
        return import_module(library)
    except ImportError as problem:
        raise RuntimeMissingError(
            f"{library} is needed for this and cannot be imported ({problem}): "
            f"install it with  pip install 'aphq[{EXTRAS[library]}]'"
        ) from None


def installed(library: str) -> bool:
    """Whether it is there, without importing it."""
    return find_spec(library) is not None
