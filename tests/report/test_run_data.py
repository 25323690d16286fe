import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aphq.errors import RunError
from aphq.report.figures import loss_figures
from aphq.report.run_data import LossCurve, classes_shown, loss_curves, read_events, read_run, stage_runs


def copied(runs: dict[str, Path], to: Path) -> Path:
    shutil.copytree(runs["labelled"], to)
    return to


def test_a_run_is_read(runs: dict[str, Path]) -> None:
    run = read_run(runs["labelled"])
    assert run.name == "labelled"
    assert [stage.name for stage in run.stages] == [stage.NAME for stage in run.recipe.stages]
    assert run.seconds == pytest.approx(sum(stage.seconds for stage in run.stages))
    assert {curve.stage for curve in run.curves} == {"mlp_reconstruction", "block_reconstruction"}
    assert all(len(curve.losses) == 5 for curve in run.curves)
    assert run.accuracy.keys() == {"float", "quantized"}
    assert run.accuracy_images == 20
    assert run.agreement is not None
    assert run.agreement[1] == "20 labelled images"
    assert run.average_bits == 4
    assert run.images == 16


def test_without_labels_the_agreement_is_that_on_calibration_images(runs: dict[str, Path]) -> None:
    run = read_run(runs["plain"])
    assert not run.accuracy
    assert run.agreement is not None
    assert run.agreement[1] == "16 calibration images"


def test_what_is_no_finished_run_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunError, match="is not a run folder"):
        read_run(tmp_path)
    run = copied(runs, tmp_path / "run")
    (run / "result.json").rename(run / "elsewhere.json")
    with pytest.raises(RunError, match="is not finished: repeat its command"):
        read_run(run)


@pytest.mark.parametrize("damage", ['{"event": "unit"', "[1]", "\x00"])
def test_a_damaged_line_of_events_is_named(runs: dict[str, Path], tmp_path: Path, damage: str) -> None:
    run = copied(runs, tmp_path / "run")
    file = run / "events.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], damage, *lines[1:]]))
    with pytest.raises(RunError, match=r"events.jsonl, line 2 is damaged .* remove that line"):
        read_run(run)


def test_events_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match="cannot be read"):
        read_events(tmp_path / "events.jsonl")


def test_damaged_results_are_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    run = copied(runs, tmp_path / "run")
    (run / "result.json").write_text("[]")
    with pytest.raises(RunError, match=r"result\.json is damaged"):
        read_run(run)


def test_measurements_may_be_missing_or_of_another_version(runs: dict[str, Path], tmp_path: Path) -> None:
    run = copied(runs, tmp_path / "run")
    file = run / "measurements.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 99}))
    assert not read_run(run).measurements
    file.unlink()
    assert not read_run(run).measurements


def event(time: float, kind: str, **values: Any) -> dict[str, Any]:
    return {"time": time, "event": kind, **values}


def test_the_time_of_an_interrupted_stage_counts() -> None:
    events = [
        event(0, "started"),
        event(1, "stage_started", stage="a"),
        event(5, "unit", stage="a", unit="x"),
        event(100, "resumed"),
        event(101, "stage_started", stage="a"),
        event(103, "stage_finished", stage="a", seconds=2.0, memory={"host": 7}),
    ]
    (stage,) = stage_runs(events)
    assert stage.seconds == pytest.approx(4 + 2)
    assert stage.memory == {"host": 7}


def test_of_a_unit_that_was_trained_twice_the_later_counts() -> None:
    events = [event(0, "unit", stage="a", unit="x", losses=[value]) for value in (1.0, 2.0)]
    assert loss_curves([*events, event(0, "unit", stage="b", unit="x")]) == (LossCurve("a", "x", (2.0,)),)


def test_a_curve_shows_the_error_alone_where_it_was_recorded() -> None:
    (curve,) = loss_curves([event(0, "unit", stage="a", unit="x", losses=[1.0, 9.0, 1.0], errors=[1.0, 1.0, 1.0])])
    assert curve.shown == (1.0, 1.0, 1.0)
    assert curve.fluctuation == 0
    assert LossCurve("a", "x", (1.0, 3.0)).shown == (1.0, 3.0), "a run of an earlier aphq"


def test_the_page_says_what_was_learned_and_not_kept() -> None:
    learned = [event(0, "unit", stage="a", unit=unit, losses=[2.0, 1.0], put_back=unit == "y") for unit in "xy"]
    kept, put_back = loss_curves(learned)
    assert (kept.put_back, put_back.put_back) == (False, True)
    run: Any = SimpleNamespace(name="run", curves=(kept, put_back))
    said = [figure.text for figure in loss_figures(run)["a"]]
    assert ["not kept" in text for text in said] == [False, True]


def test_classes_that_the_images_show_are_found_among_other_notes() -> None:
    notes = [event(0, "note", stage="a", views=3), event(1, "note", stage="b", classes_shown=7, classes=10)]
    assert classes_shown(notes) == (7, 10)
    assert classes_shown(notes[:1]) is None


def test_fluctuation_is_zero_for_a_constant_and_grows_with_noise() -> None:
    assert LossCurve("a", "x", (2.0, 2.0, 2.0)).fluctuation == 0
    assert LossCurve("a", "x", (1.0, 3.0, 1.0)).fluctuation == pytest.approx(1)
    assert LossCurve("a", "x", (1.0, 1.0, 900.0, 900.0)).fluctuation == 0, "one jump is not noise"
    assert LossCurve("a", "x", ()).fluctuation == 0
