"""ONNX Runtime on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aphq.errors import ExportError
from aphq.extras import require
from aphq.runtimes.batches import Infer


def open_session(
    model: Path | bytes, threads: int | None = None, *, literal: bool = False
) -> tuple[Infer, dict[str, str]]:
    """(function from images to logits, metadata); `literal` runs the operators one by one as the file has them."""
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors; what it folds away at loading is no news
    if threads is not None:
        options.intra_op_num_threads = threads
    if literal:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source: Any = model if isinstance(model, bytes) else str(model)
    try:
        session = runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as problem:  # its errors have no common base of their own
        where = "the exported graph" if isinstance(model, bytes) else str(model)
        raise ExportError(f"ONNX Runtime cannot load {where}: {str(problem).splitlines()[0]}") from None
    name = session.get_inputs()[0].name
    return lambda images: session.run(None, {name: images})[0], dict(session.get_modelmeta().custom_metadata_map)
