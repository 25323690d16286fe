import sys

import pytest

from aphq.cli.console import open_progress
from aphq.engine.progress import PlainProgress, RichProgress


@pytest.mark.parametrize(("terminal", "kind"), [(False, PlainProgress), (True, RichProgress)])
def test_a_bar_on_a_terminal_and_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, kind: type, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with open_progress() as progress:
        assert type(progress) is kind
        progress.start("scale_search", 2)
        progress.advance(1, "blocks.0")
        progress.finish()
    assert not capsys.readouterr().out, "standard output is for results"
