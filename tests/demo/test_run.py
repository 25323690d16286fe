from dataclasses import replace
from pathlib import Path

import pytest

import aphq
from aphq.demo import run as demo
from aphq.demo.assets import Assets, load_assets
from aphq.demo.run import demo_recipe, demo_text, run_demo
from aphq.engine.progress import Progress

from ..runs import shortened as cut_down


@pytest.fixture
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo in seconds: few images, few steps, the same path."""

    def few() -> Assets:
        assets = load_assets()
        test = replace(assets.test, images=assets.test.images[:100], labels=assets.test.labels[:100])
        return replace(assets, calibration=assets.calibration[:16], test=test)

    def recipe(bits: str) -> aphq.Recipe:
        return cut_down(demo_recipe(bits))

    monkeypatch.setattr(demo, "load_assets", few)
    monkeypatch.setattr(demo, "demo_recipe", recipe)


@pytest.mark.usefixtures("shortened")
def test_the_demo_compares_and_keeps_its_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    found = run_demo("w3a3", out=out, device="cpu", progress=Progress())
    assert found["images"] == {"calibration": 16, "test": 100}
    assert found["top1"]["float"] > 85
    assert found["top1"]["aphq"] > found["top1"]["round_to_nearest"]
    assert found["path"] == str(out)
    assert found["sizes"]["artifact"] < 0.25 * found["sizes"]["float32"]
    text = demo_text(found)
    for words in ("W3A3 round-to-nearest", "W3A3 aphq", "float32", str(out)):
        assert words in text
    assert aphq.load(out) is not None


@pytest.mark.slow
def test_the_whole_demo_recovers_what_rounding_loses() -> None:
    found = run_demo("w3a3", out=None, device="cpu", progress=Progress())
    assert found["path"] is None
    assert found["top1"]["float"] - found["top1"]["aphq"] < 3
    assert found["top1"]["aphq"] > found["top1"]["round_to_nearest"] + 10
