"""`aphq inspect`: coverage, ranges and sizes of a saved model, as data and as a table."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from aphq.artifact import load
from aphq.artifact.loading import read_config
from aphq.models.coverage import coverage, operands
from aphq.quant.layers import quantized_sites
from aphq.quant.quantizer import Quantizer


def inspection(run: Path) -> dict[str, Any]:
    """Everything as plain values."""
    config, model = read_config(run), load(run)
    ranges = {
        name: {operand: _range(q) for operand, q in operands(site).items() if q is not None}
        for name, site in quantized_sites(model)
    }
    return {
        "recipe": config["recipe"]["name"],
        "architecture": config["architecture"],
        "relu": config["relu"],
        "preprocessing": config["preprocessing"],
        "sizes": config["sizes"],
        "layers": [{**asdict(row), "ranges": ranges.get(row.name, {})} for row in coverage(model)],
    }


def _range(quantizer: Quantizer) -> list[float]:
    lower, upper = quantizer.limits()
    return [float(f"{lower.min().item():.5g}"), float(f"{upper.max().item():.5g}")]


def inspection_text(found: dict[str, Any]) -> str:
    header = ("layer", "kind", "weights", "inputs", "weight range", "input range", "note")
    rows = [header]
    for row in found["layers"]:
        ranges = row["ranges"]
        spans = [f"{lower:.3g} .. {upper:.3g}" for key, (lower, upper) in ranges.items() if key != "weight"]
        weight = f"{ranges['weight'][0]:.3g} .. {ranges['weight'][1]:.3g}" if "weight" in ranges else ""
        product = row["kind"] == "product"
        rows.append(
            (
                row["name"],
                row["kind"],
                "" if product else _format(row["weight_bits"], row["weight_granularity"]),
                _format(row["input_bits"], row["input_granularity"]),
                weight,
                " x ".join(spans),
                row["note"],
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    sizes = found["sizes"]
    quantized = sum(not row["note"] for row in found["layers"])
    lines += [
        "",
        f"recipe {found['recipe']}; {quantized} of {len(found['layers'])} layers and products fully quantized",
        f"{sizes['artifact']:,} bytes, {sizes['packed_weights']:,} of packed weights; float32 {sizes['float32']:,}",
    ]
    return "\n".join(lines)


def _format(bits: int | None, granularity: str) -> str:
    return "float" if bits is None else f"{bits} bit / {granularity}"
