import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from aphq.cli import hints
from aphq.cli.guard import guarded
from aphq.cli.hints import Hints
from aphq.errors import DataError

GPU = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
HOST = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
)


def outcome(
    problem: BaseException, capsys: pytest.CaptureFixture[str], known: Hints = hints.QUANTIZE, **options: object
) -> tuple[int, str]:
    @guarded(known)
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
        (HOST, "aphq: out of memory: use fewer calibration images"),
        (GPU, "aphq: the GPU is out of memory: set --gpu-memory lower"),
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
    for other in (hints.NONE, hints.PREDICT, hints.EXPORT, hints.ANALYZE):
        found = outcome(KeyboardInterrupt(), capsys, other, out=Path("out.png"))
        assert found == (130, "aphq: interrupted\n"), "nothing is kept, there is nothing to go on with"
    code, text = outcome(KeyboardInterrupt(), capsys, out=Path("runs/x"))
    assert code == 130
    assert "kept in runs/x: repeat the same command" in text


def test_a_bug_is_not_dressed_up_as_trouble() -> None:
    @guarded(hints.QUANTIZE)
    def command() -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        command()


def test_advice_is_about_options_that_the_command_has(capsys: pytest.CaptureFixture[str]) -> None:
    from typer.main import get_command

    from aphq.cli.app import app

    commands: Any = get_command(app)
    for name, command in commands.commands.items():
        if name == "recipe":
            continue
        has = {option for parameter in command.params for option in parameter.opts}
        known = getattr(hints, name.upper(), hints.NONE)
        for problem in (GPU, HOST, KeyboardInterrupt()):
            advised = re.findall(r"--[a-z-]+", outcome(problem, capsys, known, out="runs/x")[1])
            assert set(advised) <= has, name


def test_a_command_without_advice_names_the_trouble_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(GPU, capsys, hints.NONE)[1] == "aphq: the GPU is out of memory\n"
    assert outcome(MemoryError(), capsys, hints.NONE)[1] == "aphq: out of memory\n"


def test_the_words_of_torch_are_still_those(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert outcome(caught.value, capsys, hints.NONE)[1] == "aphq: out of memory\n"


@pytest.mark.parametrize(("verbose", "level"), [(False, "CRITICAL"), (True, "WARNING")])
def test_the_hub_repeats_itself_only_when_asked_to(verbose: bool, level: str) -> None:
    """A hub that cannot be reached warns of every try; the library sets its level when it is imported."""
    program = (
        f"from aphq.cli.guard import _set_up_logging; _set_up_logging({verbose}); "
        "import huggingface_hub.utils, logging; "
        "print(logging.getLevelName(logging.getLogger('huggingface_hub.utils._http').getEffectiveLevel()))"
    )
    without = {key: value for key, value in os.environ.items() if key != "HF_HUB_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", program], env=without, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == level
