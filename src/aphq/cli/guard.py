"""What stands between a command and the user: logging set up, and every expected trouble as one clear sentence."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from aphq.cli.options import is_first_process

F = TypeVar("F", bound=Callable[..., None])
USER_ERROR, INTERRUPTED = 1, 130


def guarded(command: F) -> F:
    """Decorator: run a command, turning errors into a message on standard error and a non-zero exit."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        from aphq.engine.files import is_disk_problem
        from aphq.errors import AphqError

        verbose = bool(kwargs.get("verbose"))
        _set_up_logging(verbose)
        try:
            command(*args, **kwargs)
        except AphqError as problem:
            if verbose:
                logging.getLogger("aphq").exception("traceback")
            _fail(str(problem), USER_ERROR)
        except KeyboardInterrupt:
            _fail(_how_to_go_on(kwargs), INTERRUPTED)
        except OSError as problem:
            if verbose or not is_disk_problem(problem):
                raise
            _fail(str(problem), USER_ERROR)
        except MemoryError:
            _fail("out of memory: use fewer calibration images (--images) or a smaller --host-memory", USER_ERROR)
        except RuntimeError as problem:
            if verbose or "out of memory" not in str(problem):
                raise
            _fail("the GPU is out of memory: set --gpu-memory lower, or --set calibration.batch=8", USER_ERROR)

    return wrapper  # type: ignore[return-value]


def _how_to_go_on(options: dict[str, Any]) -> str:
    out = options.get("out")
    if out is None:
        return "interrupted"
    return f"interrupted; finished units are kept in {out}: repeat the same command to go on"


def _fail(message: str, code: int) -> None:
    printable = message.encode("utf-8", "backslashreplace").decode()  # a damaged file may name half a character
    typer.echo(f"aphq: {printable}", err=True)
    raise typer.Exit(code)


def _set_up_logging(verbose: bool) -> None:
    level = logging.DEBUG if verbose else logging.INFO if is_first_process() else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("aphq").setLevel(level)
    if not verbose:  # without a network it repeats itself for a minute; the one sentence at the end says it all
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
