"""Every error a user can cause has a name here, so that callers catch `AphqError` and the CLI prints one sentence."""


class AphqError(Exception):
    """A problem the user can act on; its message says what, where and what to do."""


class RecipeError(AphqError):
    """A recipe that cannot be read or does not make sense."""


class ModelError(AphqError):
    """A model that cannot be found, loaded or quantized."""


class DataError(AphqError):
    """Images that are missing, unreadable or do not fit the model."""


class RunError(AphqError):
    """A run folder that cannot be used or continued."""


class ArtifactError(AphqError):
    """A saved model that cannot be written or read."""


class ExportError(AphqError):
    """A model that cannot be exported, or an exported file that does not compute what it should."""


class RuntimeMissingError(AphqError):
    """A runtime that is not installed; the message names the extra that brings it."""


def describe(problem: BaseException) -> str:
    """Another library's exception in one short line of our own sentence."""
    words = " ".join(str(problem).split())[:200]
    return f"{type(problem).__name__}: {words}" if words else type(problem).__name__
