"""From run folders to one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from aphq import __version__
from aphq.engine.files import write_text
from aphq.engine.progress import clock
from aphq.errors import AphqError, RunError, describe
from aphq.recipe import differences
from aphq.report import figures
from aphq.report.run_data import RunData, read_run

REPORT = "report.html"


def write_report(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """The report of one run, by default into its folder, or of several, by default beside the first."""
    if not runs:
        raise RunError("a report needs at least one run folder")
    read = [_read(run) for run in runs]
    if out is None:
        first = read[0].path
        out = first / REPORT if len(read) == 1 else first.resolve().parent / f"comparison-{len(read)}-runs.html"
    target = Path(out)
    try:
        page = report_page(read[0]) if len(read) == 1 else comparison_page(read)
    except AphqError:
        raise
    except Exception as problem:  # values of any kind may stand in files that were damaged or edited
        names = ", ".join(str(run.path) for run in read)
        raise RunError(f"the events or measurements in {names} are damaged ({describe(problem)})") from None
    write_text(target, page)
    return target


def _read(run: str | Path) -> RunData:
    try:
        return read_run(run)
    except AphqError:
        raise
    except Exception as problem:
        raise RunError(f"the events or measurements in {run} are damaged ({describe(problem)})") from None


def report_page(run: RunData) -> str:
    return _render(
        "run.html.j2",
        run=run,
        losses=figures.loss_figures(run),
        errors=figures.error_figures(run),
        ranges=figures.range_figures(run),
        histograms=figures.histogram_figures(run),
        importance=figures.importance_figures(run),
        recipe=run.recipe.to_yaml(),
    )


def comparison_page(runs: Sequence[RunData]) -> str:
    first = _by_name(runs[0])
    return _render(
        "comparison.html.j2",
        runs=_with_names_apart(runs),
        trade_off=figures.trade_off_figures(runs),
        units=figures.unit_figure(runs),
        losses=figures.curves_together(runs),
        layers=_layers_side_by_side(runs),
        changes=[(run.name, differences(first, _by_name(run))) for run in runs[1:]],
    )


def _by_name(run: RunData) -> dict[str, Any]:
    """The recipe with its stages by name, so that each is compared with its like."""
    plain = run.recipe.to_dict()
    return {**plain, "stages": {stage["kind"]: stage for stage in plain["stages"]}}


def _with_names_apart(runs: Sequence[RunData]) -> Sequence[RunData]:
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise RunError("the same run folder was given twice; a comparison needs different runs")
    return runs


def _layers_side_by_side(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """(layer, its bits and error in every run) for the layers that all runs have."""
    rows = [{row.name: row for row in run.layers} for run in runs]
    errors = [{layer["name"]: layer for layer in run.measurements.get("layers", ())} for run in runs]
    return [
        (name, [_cell(row[name], error.get(name)) for row, error in zip(rows, errors, strict=True)])
        for name in rows[0]
        if all(name in row for row in rows)
    ]


def _cell(row: Any, measured: dict[str, Any] | None) -> str:
    bits = f"{row.weight_bits or '-'} / {row.input_bits or '-'}"
    snr = None if measured is None else measured["output_snr"]
    return bits if snr is None else f"{bits}, {snr:.1f} dB"


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(version=__version__, **values)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("aphq.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"clock": clock, "megabytes": lambda size: f"{size / 1e6:.2f} MB", "words": _words}
    return made


def _words(name: str) -> str:
    """A stage's name as a title."""
    text = name.replace("_", " ").replace("mlp", "MLP").replace("layernorm", "LayerNorm")
    return text[:1].upper() + text[1:]
