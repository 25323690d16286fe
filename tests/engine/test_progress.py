import logging
import time

import pytest

from aphq.engine.progress import PlainProgress, Progress, RichProgress, clock


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.4, "0:59"),
        (59.6, "1:00"),
        (123, "2:03"),
        (3600, "1:00:00"),
        (3723, "1:02:03"),
        (90000, "25:00:00"),
    ],
)
def test_a_clock_reads_like_one(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_nobody_asked_nothing_said(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.DEBUG):
        use(Progress())
    assert not caplog.records
    assert capsys.readouterr() == ("", "")


def use(progress: Progress) -> None:
    progress.start("block_reconstruction", 100)
    progress.advance(25, "blocks.0")
    progress.advance(25, "blocks.1")
    progress.finish()
    progress.close()


def test_plain_lines_tell_share_and_time_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 30.0, 31.0, 95.0])  # start, two advances of which the second comes too soon for a line, finish
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    with caplog.at_level(logging.INFO, "aphq.progress"):
        use(PlainProgress())
    started, line, done = [record.getMessage() for record in caplog.records]
    assert started == "block_reconstruction: started"
    assert "25 %" in line
    assert "blocks.0" in line
    assert "ETA 1:30" in line
    assert done == "block_reconstruction: done in 1:35"


def test_plain_lines_survive_a_stage_with_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 100.0, 200.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    progress = PlainProgress()
    progress.start("scale_search", 0)
    progress.advance(0)
    progress.finish()


def test_a_bar_goes_to_the_error_stream_so_that_results_can_be_piped(capfd: pytest.CaptureFixture[str]) -> None:
    use(RichProgress())
    out, err = capfd.readouterr()
    assert out == ""
    assert "block reconstruction" in err
