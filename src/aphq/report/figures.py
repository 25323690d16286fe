"""The figures of a report, each made from a run's data; an empty list where the run has nothing to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from aphq.recipe import MlpReconstruction
from aphq.report.charts import Series, box_plot, heat_map, histogram, line_chart, number, scatter, spark
from aphq.report.run_data import LossCurve, RunData

CHOSEN = 0.6  # how deep the block lies that stands for the others: the paper shows block 7 of 12
MOST_KINDS = 8  # lines that can be told apart


@dataclass(frozen=True)
class Figure:
    """A chart with a caption; `text` is what the chart says in numbers."""

    chart: Markup
    caption: str
    text: str = ""


def by_kind(run: RunData, what: str, part: str = "") -> tuple[list[str], dict[str, list[Any]]]:
    """(names of blocks, kind of layer -> value per block): layers that every block has are comparable."""
    blocks = [unit["name"] for unit in run.measurements.get("units", ()) if unit["kind"] == "block"]
    kinds: dict[str, list[Any]] = {}
    for layer in run.measurements.get("layers", ()):
        if layer["unit"] in blocks:
            kind = layer["name"].removeprefix(f"{layer['unit']}.")
            value = layer[what].get(part) if part and layer[what] else layer[what]
            if value is not None:
                kinds.setdefault(kind, [None] * len(blocks))[blocks.index(layer["unit"])] = value
    return [short_name(block) for block in blocks], dict(list(kinds.items())[:MOST_KINDS])


def short_name(unit: str) -> str:
    """`blocks.7` is 7, `layers.2.blocks.1` is 2.1."""
    return ".".join(part for part in unit.split(".") if part.isdigit()) or unit


def loss_figures(run: RunData) -> dict[str, list[Figure]]:
    """By stage, one for each unit."""
    found: dict[str, list[Figure]] = {}
    for curve in run.curves:
        found.setdefault(curve.stage, []).append(_spark([(run.name, curve)]))
    return found


def _spark(curves: Sequence[tuple[str, LossCurve]]) -> Figure:
    unit = curves[0][1].unit or "all units"
    chart = spark(f"Loss of {unit}", [Series(name, curve.shown) for name, curve in curves])
    numbers = (
        f"{number(c.shown[0])} to {number(c.shown[-1])}, fluctuation {100 * c.fluctuation:.1f} %"
        + (", not kept: it took the calibration images further from the float model" if c.put_back else "")
        for _, c in curves
    )
    return Figure(chart, unit, "; ".join(numbers))


def error_figures(run: RunData) -> list[Figure]:
    units = run.measurements.get("units", ())
    if not units:
        return []
    names = [short_name(unit["name"]) for unit in units]
    options: dict[str, Any] = {"y_label": "signal to noise, dB", "x_label": "block"}
    figures = [
        Figure(
            line_chart(
                "Signal-to-noise ratio at the output of every unit",
                [Series("units", [unit["snr"] for unit in units])],
                names=names,
                **{**options, "x_label": "unit"},
            ),
            "Output of every unit against the float model: errors add up from left to right.",
        )
    ]
    blocks, outputs = by_kind(run, "output_snr")
    if outputs:
        series = [Series(kind, values) for kind, values in outputs.items()]
        chart = line_chart("Signal-to-noise ratio at the output of layers", series, names=blocks, **options)
        figures.append(Figure(chart, "Output of layers against the float model, where both mean the same."))
    rounding: list[Series] = []
    for side in ("input", "left", "right"):
        blocks, values = by_kind(run, "rounding_snr", side)
        rounding += [Series(kind if side == "input" else f"{kind}, {side}", value) for kind, value in values.items()]
    if rounding:
        chart = line_chart("What rounding an input leaves of it", rounding[:MOST_KINDS], names=blocks, **options)
        figures.append(Figure(chart, "Rounding alone: the input of a layer or product before and after its quantizer."))
    return figures


def range_figures(run: RunData) -> list[Figure]:
    """The paper's first figure: what the linear layers get, before and after."""
    blocks, before = by_kind(run, "before")
    _, after = by_kind(run, "after")
    said = "MLP reconstruction" if run.recipe.stage(MlpReconstruction.NAME) else "quantization"
    return [
        Figure(
            box_plot(
                f"Input of {kind} in every block",
                blocks,
                [("float", boxes), (f"after {said}", after.get(kind, [None] * len(blocks)))],
                x_label="block",
                y_label="value",
                size=(480, 250),
            ),
            f"Input of {kind}: half of the values in the box, 98 % between the whiskers, dots at the extremes.",
        )
        for kind, boxes in before.items()
    ]


def histogram_figures(run: RunData) -> list[tuple[str, list[Figure]]]:
    """(MLP, its two histograms), the widest input first."""
    mlps = run.measurements.get("mlps", ())
    ordered = sorted(mlps, key=lambda mlp: mlp["input"]["lower"] - mlp["input"]["upper"])
    return [(mlp["name"], [_histogram(mlp, what) for what in ("input", "weight")]) for mlp in ordered]


def _histogram(mlp: dict[str, Any], what: str) -> Figure:
    found = mlp[what]
    series = [Series("float", found["before"]), Series("quantized model", found["after"])]
    title = f"Histogram of the {what} of {mlp['name']}.fc2"
    chart = histogram(title, found["lower"], found["upper"], series, x_label=f"{what} of fc2")
    return Figure(chart, f"{what.capitalize()} of {mlp['name']}.fc2")


@dataclass(frozen=True)
class ImportanceFigures:
    """The paper's last figures, for the block that stands for the others and for all of them."""

    unit: str
    tokens: Figure
    special: list[tuple[str, float]]  # (token, its importance)
    largest: list[tuple[str, float]]
    channels: Figure
    every_map: list[Figure]
    every_channel: Markup | None


def importance_figures(run: RunData) -> ImportanceFigures | None:
    blocks = run.measurements.get("importance") or []
    if not blocks:
        return None
    # never the last: behind it only the class token is read
    chosen = blocks[min(max(0, len(blocks) - 2), int(CHOSEN * len(blocks)))]
    width = chosen["grid"][1]
    ranked = sorted(enumerate(chosen["tokens"]), key=lambda pair: -pair[1])[:5]
    special = [("class token" if i == 0 else f"special token {i + 1}", v) for i, v in enumerate(chosen["prefix"])]
    same_width = len({len(block["channels"]) for block in blocks}) == 1
    return ImportanceFigures(
        unit=chosen["unit"],
        tokens=_token_map(chosen),
        special=special,
        largest=[(f"patch in row {i // width + 1}, column {i % width + 1}", value) for i, value in ranked],
        channels=Figure(
            line_chart(
                f"Importance of the channels of {chosen['unit']}",
                [Series("importance", chosen["channels"])],
                x_label="channel",
                y_label="relative importance",
                dots=False,
            ),
            f"Channels of {chosen['unit']}; 1 is the mean.",
        ),
        every_map=[_token_map(block) for block in blocks],
        every_channel=heat_map("Importance of channels, a row for each block", [b["channels"] for b in blocks])
        if same_width
        else None,
    )


def _token_map(block: dict[str, Any]) -> Figure:
    width, tokens = block["grid"][1], block["tokens"]
    rows = [tokens[i : i + width] for i in range(0, len(tokens), width)]
    title = f"Importance of the patches of {block['unit']}, as they lie in the image"
    ratio = max(tokens) / max(min(tokens), 1e-9)
    return Figure(heat_map(title, rows), block["unit"], f"the most important is {ratio:.1f} times the least")


# -- several runs ------------------------------------------------------------------------------------------------------


def trade_off_figures(runs: Sequence[RunData]) -> list[Figure]:
    """Bits and size against accuracy, or against agreement where nothing was measured."""
    values = [_quality(run) for run in runs]
    known = [(run, value) for run, value in zip(runs, values, strict=True) if value is not None]
    if len(known) < 2:
        return []
    label = quality_label(runs)
    axes: dict[str, Callable[[RunData], float]] = {
        "weight bits per parameter": lambda run: run.average_bits,
        "size of the artifact, MB": lambda run: run.sizes["artifact"] / 1e6,
    }
    return [
        Figure(
            scatter(
                f"{label} against {name}", [(r.name, of(r), value) for r, value in known], x_label=name, y_label=label
            ),
            f"{label} against {name}",
        )
        for name, of in axes.items()
    ]


def _quality(run: RunData) -> float | None:
    if "quantized" in run.accuracy:
        return run.accuracy["quantized"]
    return run.agreement[0] if run.agreement else None


def quality_label(runs: Sequence[RunData]) -> str:
    if all("quantized" in run.accuracy for run in runs):
        return f"{runs[0].accuracy_name}, %"
    return "accuracy or agreement, %" if any(run.accuracy for run in runs) else "agreement with float, %"


def unit_figure(runs: Sequence[RunData]) -> Figure | None:
    """The signal-to-noise ratio of the units, a line for each run; only for runs of models of the same shape."""
    shapes = {tuple(unit["name"] for unit in run.measurements.get("units", ())) for run in runs}
    if len(shapes) != 1 or not (names := shapes.pop()):
        return None
    series = [Series(run.name, [unit["snr"] for unit in run.measurements["units"]]) for run in runs]
    chart = line_chart(
        "Signal-to-noise ratio at the output of every unit, by run",
        series,
        names=[short_name(name) for name in names],
        x_label="unit",
        y_label="signal to noise, dB",
    )
    return Figure(chart, "Output of every unit against the float model.")


def curves_together(runs: Sequence[RunData]) -> dict[str, list[Figure]]:
    """By stage, the loss curves of every unit that at least two runs trained."""
    found: dict[str, list[Figure]] = {}
    keys = dict.fromkeys((curve.stage, curve.unit) for run in runs for curve in run.curves)
    for stage, unit in keys:
        same = [(r.name, c) for r in runs for c in r.curves if (c.stage, c.unit) == (stage, unit)]
        if len(same) == len(runs):
            found.setdefault(stage, []).append(_spark(same))
    return found
