"""`--to openvino`: OpenVINO's own format, a .xml with the graph and a .bin with the weights beside it."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from aphq.engine.files import write_together
from aphq.export.onnx_file import build, parts
from aphq.export.registry import Draft, Options, register
from aphq.extras import require
from aphq.runtimes.batches import in_batches
from aphq.runtimes.openvino import SECTION, open_graph


@register("openvino")
class OpenVinoExporter:
    suffix = ".xml"

    def draft(self, model: nn.Module, images: Tensor, options: Options) -> Draft:
        """By way of ONNX, in the shape that OpenVINO likes best unless told otherwise."""
        require("openvino")  # before the work of building the graph
        if options.tuned_for == "any":
            options = replace(options, tuned_for="openvino")
        graph, infer = open_graph(build(model, images, options).SerializeToString())
        fused = partial(in_batches, infer, batch=options.batch)
        return Draft(options, {"openvino": fused}, partial(_write, graph), partial(parts, model, options))


def _write(graph: Any, path: Path, metadata: dict[str, str]) -> list[Path]:
    for key, value in metadata.items():
        graph.set_rt_info(value, [SECTION, key])
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        require("openvino").save_model(graph, draft, compress_to_fp16=False)  # half precision would be another model
        # the weights first: a graph without them is worse than weights without a graph
        files = [path.with_suffix(".bin"), path]
        write_together({file: partial(shutil.copyfile, draft.with_suffix(file.suffix)) for file in files})
    return files[::-1]
