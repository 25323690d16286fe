"""Frozen dataclasses to plain dictionaries and back, strictly.

Recipes and artifacts are edited by hand and read from strangers' disks, so a key that is unknown, missing or of the
wrong type is an error that names its place (`block_reconstruction.steps`) and, for a typo, the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import reprlib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 80, 60, 40
MOST_NAMES, FEW_NAMES = 60, 12  # an error lists so many names at most; of more, so few
NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class TypedError(ValueError):
    """A value that does not fit its field; callers turn it into their own named error."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """A clause that proposes the closest valid name, or lists them when nothing is close: all, or some of very many."""
    names = sorted(choices)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    if len(names) > MOST_NAMES:
        some = names[:: len(names) // FEW_NAMES + 1]
        return f"{len(names)} names are valid, such as {', '.join(some)}"
    return f"valid names: {', '.join(names)}"


def shown(value: Any) -> str:
    """A value in an error message: cut short, since it may be a forger's megabytes."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"a huge {type(value).__name__}"


def to_plain(value: Any) -> Any:
    """Dataclasses, tuples and mappings as dictionaries and lists that JSON and YAML can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], data: Any, where: str = "") -> T:
    """Build a dataclass from a dictionary, checking every key and type; missing keys take the field's default."""
    if not isinstance(data, Mapping):
        raise TypedError(f"{where or cls.__name__} must be a mapping of fields, got {shown(data)}")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            raise TypedError(f"unknown key {shown(_join(where, key))}: {nearest(shown(key), fields)}")
    required = (
        f.name for f in fields.values() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    for name in required:
        if name not in data:
            raise TypedError(f"missing key {_join(where, name)!r}")
    return cls(**{key: convert(item, hints[key], _join(where, key)) for key, item in data.items()})


def convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as the annotation `hint` asks for; integers pass as floats, lists as tuples, nothing else is coerced."""
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if isinstance(value, (str, int)) and value in get_args(hint) and not isinstance(value, bool):
            return value
        hint_words = nearest(shown(value), map(str, get_args(hint)))
        raise TypedError(f"{where} cannot be {shown(value)}: {hint_words}")
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), where)
    if origin is tuple:
        return _convert_tuple(value, get_args(hint), where)
    if origin in (dict, Mapping) or (origin is not None and issubclass(origin, Mapping)):
        if not isinstance(value, Mapping):
            raise TypedError(f"{where} must be a mapping, got {shown(value)}")
        key_hint, item_hint = get_args(hint)
        return {
            convert(key, key_hint, f"a key of {where}"): convert(item, item_hint, _join(where, key))
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_plain(hint, value, where)  # type: ignore[arg-type]
    return _convert_scalar(value, hint, where)


def _convert_scalar(value: Any, hint: Any, where: str) -> Any:
    if hint is types.NoneType:
        if value is None:
            return None
    elif hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise TypedError(f"{where} is too large for a number: {shown(value)}") from None
    elif hint is float and isinstance(value, str) and NUMBER.fullmatch(value):
        return float(value)  # YAML 1.1 reads 1e-3 as a string for want of a dot
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    wanted = "null" if hint is types.NoneType else hint.__name__
    raise TypedError(f"{where} must be of type {wanted}, got {shown(value)}")


def _convert_union(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value is None and types.NoneType in options:
        return None
    problems = []
    for option in options:
        if option is types.NoneType:
            continue
        try:
            return convert(value, option, where)
        except TypedError as problem:
            problems.append(str(problem))
    raise TypedError(problems[0])


def _convert_tuple(value: Any, items: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypedError(f"{where} must be a list, got {shown(value)}")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(convert(item, items[0], f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(items):
        raise TypedError(f"{where} must have {len(items)} entries, got {len(value)}")
    pairs = zip(value, items, strict=True)
    return tuple(convert(item, hint, f"{where}[{i}]") for i, (item, hint) in enumerate(pairs))


def _join(where: str, key: Any) -> str:
    name = key if isinstance(key, str) else shown(key)
    return f"{where}.{name}" if where else name
