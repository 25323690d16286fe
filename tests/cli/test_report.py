import json
from pathlib import Path

import pytest

from .test_app import command, files, finished, refused, run

__all__ = ["files", "finished"]


def test_a_run_has_its_report_and_gets_it_again(finished: tuple[Path, object]) -> None:
    out, _ = finished
    page = out / "report.html"
    before = page.read_text()
    page.unlink()
    result = run("report", out)
    assert result.exit_code == 0
    assert str(page) in result.stdout
    assert page.read_text() == before


def test_several_runs_go_into_one_file(files: Path, finished: tuple[Path, object], tmp_path: Path) -> None:
    assert run(*command(files, tmp_path / "other", "--bits=w8a8")).exit_code == 0
    target = tmp_path / "both.html"
    result = run("report", finished[0], tmp_path / "other", "--out", target, "--json")
    assert json.loads(result.stdout) == {"out": str(target), "runs": [str(finished[0]), str(tmp_path / "other")]}
    assert "2 runs compared" in target.read_text()


@pytest.mark.parametrize(
    ("content", "says"),
    [({}, "is not a run folder"), ({"run.json": "{}"}, "not finished: repeat its command")],
)
def test_other_folders_are_refused(tmp_path: Path, content: dict[str, str], says: str) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    assert says in refused(run("report", tmp_path))
    assert "there is no folder" in refused(run("report", tmp_path / "nowhere"))
