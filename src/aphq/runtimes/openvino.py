"""OpenVINO on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aphq.errors import ExportError
from aphq.extras import require
from aphq.runtimes.batches import Infer

SECTION = "aphq"  # of the run-time information of an OpenVINO model, which keeps our metadata


def open_session(model: Path | bytes, threads: int | None = None) -> tuple[Infer, dict[str, str]]:
    """(function from images to logits, metadata)"""
    graph, infer = open_graph(model, threads)
    return infer, metadata_of(graph)


def open_graph(model: Path | bytes, threads: int | None = None) -> tuple[Any, Infer]:
    """(OpenVINO's own model, function from images to logits)"""
    core = require("openvino").Core()
    where = "the exported graph" if isinstance(model, bytes) else str(model)
    try:
        graph = core.read_model(model)
        request = core.compile_model(graph, "CPU", settings(threads)).create_infer_request()
    except RuntimeError as problem:
        raise ExportError(f"OpenVINO cannot load {where}: {str(problem).strip().splitlines()[-1]}") from None
    return graph, lambda images: request.infer({0: images})[0]


def settings(threads: int | None) -> dict[str, Any]:
    # float operators stay in float32: on some CPUs the default is bfloat16, which is another model
    chosen: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    return chosen if threads is None else {**chosen, "INFERENCE_NUM_THREADS": threads}


def metadata_of(model: Any) -> dict[str, str]:
    """What the exporter wrote: ONNX metadata shows up under `framework`, our own IR has its section."""
    for section in (SECTION, "framework"):
        if model.has_rt_info([section]):
            found = model.get_rt_info([section])
            values = getattr(found, "value", found)
            return {str(key): str(getattr(value, "value", value)) for key, value in dict(values).items()}
    return {}
