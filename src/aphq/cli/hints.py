"""What a user can do about trouble, in words of the command that met it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hints:
    """Empty where there is nothing to advise."""

    go_on: str = ""  # after an interruption; `{out}` is the command's --out, without which the hint is left out
    gpu_memory: str = ""
    host_memory: str = ""


NONE = Hints()
QUANTIZE = Hints(
    go_on="finished units are kept in {out}: repeat the same command to go on",
    gpu_memory="set --gpu-memory lower, or --set calibration.batch=8",
    host_memory="use fewer calibration images (--images) or a smaller --host-memory",
)
EVAL = Hints(gpu_memory="use a smaller --batch, or --device cpu", host_memory="use a smaller --batch")
PREDICT = Hints(gpu_memory="use --device cpu")
EXPORT = Hints(host_memory="compare on fewer images (--images)")
BENCH = Hints(host_memory="use a smaller --batch")
ANALYZE = Hints(
    gpu_memory="measure on fewer images (--images), or use --device cpu",
    host_memory="measure on fewer images (--images)",
)
DEMO = Hints(go_on=QUANTIZE.go_on, gpu_memory="use --device cpu")
