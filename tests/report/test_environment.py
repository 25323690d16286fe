import pytest
import torch

from aphq import __version__
from aphq.report.environment import command_line, environment


def test_versions_and_machine_are_named() -> None:
    found = environment(torch.device("cpu"))
    assert found["aphq"] == __version__
    assert found["device"] == "cpu"
    assert "threads" in found["processor"]
    assert all(isinstance(value, str) for value in found.values())


@pytest.mark.parametrize("program", ["/usr/bin/aphq", "/lib/python/aphq/__main__.py"])
def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr("sys.argv", [program, "quantize", "x", "--data", "my images"])
    assert command_line() == "aphq quantize x --data 'my images'"


def test_other_programs_have_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/pytest", "-x"])
    assert command_line() is None
