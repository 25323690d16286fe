"""What stands between a command and the user: logging set up, and every expected trouble as one clear sentence."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from aphq.cli.hints import NONE, Hints
from aphq.engine.launch import is_first_process

F = TypeVar("F", bound=Callable[..., None])
USER_ERROR, INTERRUPTED = 1, 130
HUB_LEVEL = "HF_HUB_VERBOSITY"  # the hub's client reads it
HOST_MEMORY = "DefaultCPUAllocator"  # in the RuntimeError of torch when the host has no more


def guarded(hints: Hints = NONE) -> Callable[[F], F]:
    """Decorator: run a command, turning errors into a message on standard error and a non-zero exit."""

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def wrapper(*args: Any, **kwargs: Any) -> None:
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
                _fail(_interruption(hints, kwargs.get("out")), INTERRUPTED)
            except (OSError, MemoryError, RuntimeError) as problem:
                message = _trouble_of_the_machine(problem, hints)
                if verbose or message is None:
                    raise
                _fail(message, USER_ERROR)

        return wrapper  # type: ignore[return-value]

    return decorate


def _interruption(hints: Hints, out: object) -> str:
    return _with("interrupted", "; ", hints.go_on.format(out=out) if out is not None else "")


def _trouble_of_the_machine(problem: Exception, hints: Hints) -> str | None:
    """A disk or a memory that is full; None for anything else, which is a bug."""
    from aphq.engine.files import is_disk_problem

    if isinstance(problem, MemoryError) or HOST_MEMORY in str(problem):
        return _with("out of memory", ": ", hints.host_memory)
    if isinstance(problem, OSError):
        return str(problem) if is_disk_problem(problem) else None
    return _with("the GPU is out of memory", ": ", hints.gpu_memory) if "out of memory" in str(problem) else None


def _with(words: str, separator: str, hint: str) -> str:
    return f"{words}{separator}{hint}" if hint else words


def _fail(message: str, code: int) -> None:
    printable = message.encode("utf-8", "backslashreplace").decode()  # a damaged file may name half a character
    typer.echo(f"aphq: {printable}", err=True)
    raise typer.Exit(code)


def _set_up_logging(verbose: bool) -> None:
    level = logging.DEBUG if verbose else logging.INFO if is_first_process() else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("aphq").setLevel(level)
    # without a network it repeats itself for a minute; the one sentence at the end says it all
    if not verbose and HUB_LEVEL not in os.environ:
        os.environ[HUB_LEVEL] = "critical"  # when it is imported, which sets its level anew
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # where it is already
