from pathlib import Path

import pytest
import typer

from aphq.cli.guard import guarded
from aphq.errors import DataError


def outcome(problem: BaseException, capsys: pytest.CaptureFixture[str], **options: object) -> tuple[int, str]:
    @guarded
    def command(**_: object) -> None:
        raise problem

    with pytest.raises(typer.Exit) as caught:
        command(**options)
    return caught.value.exit_code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (DataError("no images"), "aphq: no images\n"),
        (PermissionError(13, "Permission denied", "/x"), "aphq: [Errno 13] Permission denied: '/x'\n"),
        (MemoryError(), "aphq: out of memory: use fewer calibration images"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "aphq: the GPU is out of memory"),
    ],
)
def test_expected_trouble_is_one_line_and_exit_code_1(
    problem: Exception, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = outcome(problem, capsys)
    assert code == 1
    assert text.startswith(says)
    assert text.count("\n") == 1


def test_an_interruption_is_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(KeyboardInterrupt(), capsys) == (130, "aphq: interrupted\n")
    code, text = outcome(KeyboardInterrupt(), capsys, out=Path("runs/x"))
    assert code == 130
    assert "kept in runs/x: repeat the same command" in text


def test_a_bug_is_not_dressed_up_as_trouble() -> None:
    @guarded
    def command() -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        command()
