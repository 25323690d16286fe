from pathlib import Path

from torch import nn

import aphq
from aphq.cli.inspection import inspection, inspection_text

from ..runs import pixels, short


def test_what_stayed_in_float_is_said(tiny_vit: nn.Module, tmp_path: Path) -> None:
    recipe = short("w4a4", "fast", overrides__head=None, weights__bits=3)
    aphq.quantize(tiny_vit, recipe, pixels(), out=tmp_path / "run", device="cpu")
    found = inspection(tmp_path / "run")
    rows = {row["name"]: row for row in found["layers"]}
    assert rows["head"]["weight_bits"] is None
    assert rows["head"]["ranges"] == {}
    assert "float by the recipe" in rows["head"]["note"]
    text = inspection_text(found)
    line = next(line for line in text.splitlines() if line.startswith("head "))
    assert "float by the recipe" in line
    assert f"{len(rows) - 1} of {len(rows)} layers and products fully quantized" in text
    assert "3 bit / channel" in text
