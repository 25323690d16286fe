import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

import aphq
from aphq.errors import RunError
from aphq.report import REPORT, comparison_page, report_page, write_report
from aphq.report.run_data import read_run

from ..models.detection.nets import detector
from ..scenes_of import RULES, pictures, short_recipe

VOID = {"meta", "link", "img", "br"}


class Outline(HTMLParser):
    """Headings, table headers, images without words; and that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.faults: list[str] = []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        have = dict(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        self.ids += [have["id"] or ""] if "id" in have else []
        if (have.get("href") or "").startswith("#"):
            self.targets.append((have["href"] or "")[1:])
        if (tag == "th" and "scope" not in have) or (tag == "img" and not have.get("alt")):
            self.faults.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(text: str) -> None:
    """What every page owes its readers."""
    outline = Outline(text)
    assert outline.headings[0] == 1
    assert outline.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(outline.headings, outline.headings[1:], strict=False)), "no level is skipped"
    assert len(set(outline.ids)) == len(outline.ids)
    assert set(outline.targets) <= set(outline.ids)
    assert not outline.faults
    assert len(text) < 3_000_000
    assert "<script" not in text
    assert not re.search(r"(src|href)=[\"']?(https?:|//)", text), "nothing comes from the network"
    assert "prefers-color-scheme: dark" in text


def test_every_run_has_its_report(runs: dict[str, Path]) -> None:
    for name, path in runs.items():
        text = (path / REPORT).read_text()
        check(text)
        assert ("top-1 in %" in text) == (name == "labelled")
        assert "Same prediction as float" in text
        assert "blocks.1" in text


def test_the_sections_of_the_paper_are_there(runs: dict[str, Path]) -> None:
    text = (runs["labelled"] / REPORT).read_text()
    for title in (
        "Loss of blocks.1",
        "Signal-to-noise ratio at the output of every unit",
        "Input of mlp.fc2 in every block",
        "Histogram of the input of blocks.0.mlp.fc2",
        "Histogram of the weight of blocks.0.mlp.fc2",
        "Importance of the patches of blocks.0",
        "Importance of the channels of blocks.0",
        "class token",
        "after MLP reconstruction",
        "kind: block_reconstruction",
    ):
        assert title in text
    assert "No stage of this recipe learns" in (runs["swin"] / REPORT).read_text()


def test_a_run_without_measurements_still_has_a_report(runs: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs["labelled"], tmp_path / "run")
    (run / "measurements.json").unlink()
    (run / "events.jsonl").unlink()
    text = write_report([run]).read_text()
    check(text)
    assert "has no measurements" in text


def test_names_from_outside_are_escaped(runs: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs["labelled"], tmp_path / "<img src=x onerror=alert(1)>")
    file = run / "measurements.json"
    found = json.loads(file.read_text())
    evil = "<script>alert('x')</script>"
    found |= {"model": evil, "command": evil, "environment": {evil: evil}}
    found["units"][0]["name"] = found["layers"][0]["name"] = found["mlps"][0]["name"] = evil
    found["importance"][0]["unit"] = evil
    file.write_text(json.dumps(found))
    text = write_report([run]).read_text()
    check(text)
    assert "<img src=x" not in text
    assert "&lt;script&gt;" in text


def test_several_runs_are_compared(runs: dict[str, Path], tmp_path: Path) -> None:
    out = write_report([runs["labelled"], runs["plain"]], tmp_path / "both.html")
    text = out.read_text()
    check(text)
    for words in (
        "2 runs compared",
        "accuracy or agreement, % against weight bits per parameter",
        "Loss of blocks.1",
        "output of every unit, by run",
        "weights.bits: 4 -&gt; 3",
    ):
        assert words in text


def test_runs_of_different_models_can_stand_side_by_side(runs: dict[str, Path]) -> None:
    text = comparison_page([read_run(runs["labelled"]), read_run(runs["swin"])])
    check(text)
    assert "no measurements of the same units" in text


def test_the_same_run_twice_and_none_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="given twice"):
        write_report([runs["swin"], runs["swin"]], tmp_path / "x.html")
    with pytest.raises(RunError, match="at least one"):
        write_report([])


def test_the_same_run_gives_the_same_page(runs: dict[str, Path]) -> None:
    run = read_run(runs["plain"])
    assert report_page(run) == report_page(run) == (runs["plain"] / REPORT).read_text()


def test_a_detector_has_a_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    aphq.quantize(detector(), short_recipe(), pictures(), preprocessing=RULES, out=run, device="cpu")
    assert "report" not in caplog.text, "no warning that something is missing"
    text = (run / REPORT).read_text()
    check(text)
    assert "Input of mlp.fc2 in every block" in text
    assert "No importance was measured" in text
    assert all(unit["snr"] is not None for unit in read_run(run).measurements["units"])
