"""How fast, how large: the same images through several runtimes by turns, so that a ratio means something.

A neighbour on the machine slows everybody in a round alike, so the models take turns, one run each, in one process.
Wall time is what a user waits; process CPU time is reported beside it, because it holds when the machine is loaded.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aphq.artifact.info import classifier_input, info_of
from aphq.artifact.loading import load
from aphq.artifact.saving import TENSORS
from aphq.errors import ExportError
from aphq.export.onnx_file import build
from aphq.export.registry import Options
from aphq.extras import EXTRAS, installed, require
from aphq.models.architecture import architecture_named, mlps_of, predict, replace_module
from aphq.quant.layers import QuantizedLayer, quantized_sites
from aphq.runtimes.session import open_session
from aphq.typed import nearest

RUNTIMES = ("onnxruntime", "openvino", "pytorch")
WARM_UP = 3
Run = Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    """One model in one runtime."""

    runtime: str
    kind: str  # "float32" or the recipe's name
    source: Path  # a file, or the run folder
    bytes: int


@dataclass(frozen=True)
class Row:
    """What was measured; times in milliseconds per run of `batch` images."""

    runtime: str
    model: str
    threads: int
    batch: int
    runs: int
    p10: float
    median: float
    p90: float
    cpu_median: float
    images_per_second: float
    bytes: int
    memory_bytes: int | None
    speedup: float | None  # over the fastest float32 of any runtime measured, by CPU time
    speedup_own: float | None  # over float32 in the same runtime

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench(
    run: str | Path,
    *,
    runtimes: Sequence[str] | None = None,
    threads: int = 1,
    batch: int = 1,
    with_float: bool = False,
    seconds: float = 20.0,
    memory: bool = True,
) -> list[Row]:
    """Measure the quantized model of a run folder, and with `with_float` the float32 one it came from."""
    if threads < 1 or batch < 1 or seconds <= 0:
        raise ExportError("threads and batch must be at least 1, and seconds more than 0")
    chosen = _choose(runtimes)
    model = load(run)
    images = torch.randn(batch, *classifier_input(model).shape, generator=torch.Generator().manual_seed(0))
    with _torch_threads(threads), tempfile.TemporaryDirectory() as folder:
        contenders = list(_contenders(Path(run), model, chosen, images, with_float, Path(folder)))
        runs = {contender: open_contender(contender, images, threads) for contender in contenders}
        times = race(list(runs.values()), seconds)
        memory = memory and Path("/proc/self/status").exists()
        used = [_memory(contender, images, threads) if memory else None for contender in contenders]
    return _rows(contenders, times, used, threads, batch)


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _choose(runtimes: Sequence[str] | None) -> list[str]:
    if runtimes is None:  # a runtime is there, but nothing to run in it, without the library that writes the files
        files = installed("onnx")
        return [name for name in RUNTIMES if name == "pytorch" or (files and installed(name))]
    for name in runtimes:
        if name not in RUNTIMES:
            raise ExportError(f"there is no runtime {name!r}: {nearest(name, RUNTIMES)}")
        if name in EXTRAS:
            require(name)
    return list(dict.fromkeys(runtimes))


def float_model(model: nn.Module) -> nn.Module:
    """What the quantized model came from: no quantizers, and the activations it had. Its weights are the quantized
    ones, which take the same time."""
    info = info_of(model)
    assert info is not None
    result = copy.deepcopy(model)
    for _, site in quantized_sites(result):
        if isinstance(site, QuantizedLayer):
            site.weight_quantizer = site.input_quantizer = None
        else:
            site.left = site.right = None
    architecture = architecture_named(info.family)
    original = architecture.build(info.arguments)
    mlps = mlps_of(architecture.units(original))
    for name in info.relu:
        replace_module(result, mlps[name].act, original.get_submodule(mlps[name].act))
    return result.eval()


def _contenders(
    run: Path, model: nn.Module, runtimes: list[str], images: Tensor, with_float: bool, folder: Path
) -> Iterator[Contender]:
    info = info_of(model)
    assert info is not None
    models = {info.recipe.name: model}
    if with_float:
        models = {"float32": float_model(model), **models}
    for kind, one in models.items():
        for runtime in runtimes:
            if runtime == "pytorch":
                size = 4 * info.float_parameters if kind == "float32" else (run / TENSORS).stat().st_size
                yield Contender(runtime, kind, run, size)
                continue
            tuned = "any" if kind == "float32" else runtime
            file = folder / f"{kind}-{runtime}.onnx"
            file.write_bytes(build(one, images, Options(len(images), tuned)).SerializeToString())
            yield Contender(runtime, kind, file, file.stat().st_size)


def open_contender(contender: Contender, images: Tensor, threads: int) -> Run:
    """A function that runs the images once."""
    if contender.runtime == "pytorch":
        if contender.kind == "float32":
            model = float_model(load(contender.source))
        else:
            model = load(contender.source, runtime="int8")
        return partial(run_torch, model, images)
    infer, _ = open_session(contender.source, contender.runtime, threads)
    return partial(infer, images.numpy())


def run_torch(model: nn.Module, images: Tensor) -> Tensor:
    """Without gradients, and without the bookkeeping for them."""
    with torch.inference_mode():
        out = predict(model, images)
    return out


def race(runs: Sequence[Run], seconds: float) -> list[tuple[list[float], list[float]]]:
    """(wall times, CPU times) of each, in seconds; one run of each per round until the time is up."""
    for run in runs:
        for _ in range(WARM_UP):
            run()
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in runs]
    end = time.monotonic() + seconds
    while time.monotonic() < end or not times[0][0]:
        for run, (wall, cpu) in zip(runs, times, strict=True):
            started, worked = time.perf_counter(), time.process_time()
            run()
            cpu.append(time.process_time() - worked)
            wall.append(time.perf_counter() - started)
    return times


def _memory(contender: Contender, images: Tensor, threads: int) -> int:
    """Bytes that loading and running it adds to a fresh process that has only imported what it needs."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_memory_inside, contender, tuple(images.shape), threads).result()


def _memory_inside(contender: Contender, shape: tuple[int, ...], threads: int) -> int:
    torch.set_num_threads(threads)
    if contender.runtime in EXTRAS:
        require(contender.runtime)
    images = torch.zeros(shape)
    run_torch(nn.Linear(8, 8), torch.zeros(1, 8))  # the libraries' own buffers come first
    before = _peak()
    open_contender(contender, images, threads)()
    return _peak() - before


def _peak() -> int:
    """The most memory this process has held; `ru_maxrss` would start from what its parent held."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def _rows(
    contenders: list[Contender],
    times: list[tuple[list[float], list[float]]],
    memory: list[int | None],
    threads: int,
    batch: int,
) -> list[Row]:
    cpu = {contender: 1000 * float(np.median(t[1])) for contender, t in zip(contenders, times, strict=True)}
    floats = {contender.runtime: value for contender, value in cpu.items() if contender.kind == "float32"}
    rows = []
    for contender, (wall, _), used in zip(contenders, times, memory, strict=True):
        p10, median, p90 = (1000 * float(value) for value in np.percentile(wall, (10, 50, 90)))
        own = floats.get(contender.runtime)
        rows.append(
            Row(
                runtime=contender.runtime,
                model=contender.kind,
                threads=threads,
                batch=batch,
                runs=len(wall),
                p10=round(p10, 3),
                median=round(median, 3),
                p90=round(p90, 3),
                cpu_median=round(cpu[contender], 3),
                images_per_second=round(1000 * batch / median, 2),
                bytes=contender.bytes,
                memory_bytes=used,
                speedup=round(min(floats.values()) / cpu[contender], 3) if floats else None,
                speedup_own=round(own / cpu[contender], 3) if own else None,
            )
        )
    return rows


def bench_text(rows: Sequence[Row]) -> str:
    """A table."""
    header = ("runtime", "model", "p10 ms", "median", "p90", "cpu ms", "images/s", "MB", "memory MB", "x", "x own")
    cells: list[tuple[str, ...]] = [header]
    for row in rows:
        numbers = (row.p10, row.median, row.p90, row.cpu_median, row.images_per_second, row.bytes / 1e6)
        used = "" if row.memory_bytes is None else f"{row.memory_bytes / 1e6:.1f}"
        ratios = ("" if ratio is None else f"{ratio:.2f}" for ratio in (row.speedup, row.speedup_own))
        cells.append((row.runtime, row.model, *(f"{number:.2f}" for number in numbers), used, *ratios))
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    first = rows[0]
    note = f"{first.threads} threads, batch {first.batch}, {first.runs} rounds; x: CPU time of the fastest float32 over"
    return "\n".join([*lines, f"{note} this one's, x own: of float32 in the same runtime"])
