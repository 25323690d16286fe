"""`aphq analyze`: the ranking as a table, the proposed recipe as a file."""

from __future__ import annotations

from pathlib import Path

from aphq.analysis import Analysis
from aphq.engine.files import write_text

SHOWN = 20


def analysis_text(found: Analysis, recipe_file: Path | None) -> str:
    """The most sensitive layers, what to keep at more bits, and where the recipe is."""
    header = ("layer or product", "KL alone", "same class", "KL without", "same class")
    rows = [header] + [
        (
            site.name,
            f"{site.alone.kl:.4f}",
            f"{site.alone.agreement:.0f} %",
            f"{site.without.kl:.4f}",
            f"{site.without.agreement:.0f} %",
        )
        for site in found.sites[:SHOWN]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        f"{found.bits} on {found.images} held-out images: KL {found.everything.kl:.4f} to the float model, "
        f"{found.everything.agreement:.0f} % of the classes the same",
        "",
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]
    if len(found.sites) > SHOWN:
        lines.append(f"... and {len(found.sites) - SHOWN} less sensitive ones (--json lists all)")
    lines += ["", f"worth more bits: {', '.join(site.name for site in found.sites[:5])}"]
    if found.proposal is not None:
        proposal = found.proposal
        lines.append(
            f"{proposal.recipe.name}: {proposal.weight_bits:.2f} bits per weight, {proposal.activation_bits:.2f} per "
            f"activation, {len(proposal.recipe.overrides)} layers differ from the rest"
        )
        lines.append(f"written to {recipe_file}: aphq quantize ... --bits {recipe_file}")
    return "\n".join(lines)


def write_proposal(found: Analysis, out: Path | None, model: str) -> Path | None:
    """The recipe as YAML, by default into the working directory under the model's name; None if there is none."""
    if found.proposal is None:
        return None
    target = out or Path(f"{Path(model).resolve().name}-{found.proposal.recipe.name}.yaml")  # of a folder, its own name
    write_text(target, found.proposal.recipe.to_yaml())
    return target
