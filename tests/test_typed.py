from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aphq.typed import TypedError, convert, from_plain, nearest, to_plain


@dataclass(frozen=True)
class Inner:
    share: float
    kind: Literal["red", "green"] = "red"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    steps: int = 3
    on: bool = False
    limit: int | None = None
    pair: tuple[int, int] = (1, 2)
    names: tuple[str, ...] = ()
    table: Mapping[str, Inner | None] = field(default_factory=dict)


inners = st.builds(Inner, st.floats(allow_nan=False), st.sampled_from(["red", "green"]))
outers = st.builds(
    Outer,
    inners,
    st.integers(),
    st.booleans(),
    st.none() | st.integers(),
    st.tuples(st.integers(), st.integers()),
    st.lists(st.text()).map(tuple),
    st.dictionaries(st.text(), st.none() | inners),
)


@given(outers)
def test_to_plain_and_back_is_identity(value: Outer) -> None:
    assert from_plain(Outer, to_plain(value)) == value


def test_plain_holds_nothing_but_lists_dictionaries_and_scalars() -> None:
    value = Outer(Inner(0.5), names=("a",), table={"x": Inner(1.0), "y": None})
    assert to_plain(value) == {
        "inner": {"share": 0.5, "kind": "red"},
        "steps": 3,
        "on": False,
        "limit": None,
        "pair": [1, 2],
        "names": ["a"],
        "table": {"x": {"share": 1.0, "kind": "red"}, "y": None},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepz": 1}, "unknown key 'stepz': did you mean 'steps'"),
        ({"inner": {"share": 1.0, "shore": 2}}, "unknown key 'inner.shore': did you mean 'share'"),
        ({"inner": {}}, "missing key 'inner.share'"),
        ({"inner": 3}, "inner must be a mapping of fields, got 3"),
        ({"steps": "3"}, "steps must be of type int, got '3'"),
        ({"steps": 3.0}, "steps must be of type int, got 3.0"),
        ({"steps": True}, "steps must be of type int, got True"),
        ({"on": 1}, "on must be of type bool, got 1"),
        ({"limit": "none"}, "limit must be of type int, got 'none'"),
        ({"inner": {"share": "half"}}, "inner.share must be of type float, got 'half'"),
        ({"inner": {"share": 1.0, "kind": "gren"}}, "inner.kind cannot be 'gren': did you mean 'green'"),
        ({"pair": [1]}, "pair must have 2 entries, got 1"),
        ({"pair": [1, "x"]}, r"pair\[1\] must be of type int"),
        ({"names": "abc"}, "names must be a list, got 'abc'"),
        ({"names": ["a", 1]}, r"names\[1\] must be of type str"),
        ({"table": []}, "table must be a mapping"),
        ({"table": {"head": {"share": None}}}, "table.head.share must be of type float"),
        ({"table": {8: None}}, "a key of table must be of type str, got 8"),
    ],
)
def test_what_does_not_fit_is_named_by_its_path(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypedError, match=message):
        from_plain(Outer, {"inner": {"share": 0.5}, **change})


def test_a_missing_field_without_default_is_named() -> None:
    with pytest.raises(TypedError, match="missing key 'inner'"):
        from_plain(Outer, {})


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("4E5", 4e5), ("-2.5e+1", -25.0)])
def test_yaml_writes_exponents_that_it_reads_as_text(text: str, value: float) -> None:
    assert convert(text, float, "x") == value


def test_whole_numbers_pass_as_floats() -> None:
    found = convert(2, float, "x")
    assert isinstance(found, float)
    assert found == 2


def test_nearest_proposes_one_name_or_lists_all() -> None:
    assert nearest("stesp", ["steps", "batch"]) == "did you mean 'steps'?"
    assert nearest("zzz", ["steps", "batch"]) == "valid names: batch, steps"


def test_of_very_many_names_a_few_are_shown() -> None:
    names = [f"model_{i:04}" for i in range(1000)]
    text = nearest("?", names)
    assert text.startswith("1000 names are valid, such as model_0000, model_")
    assert len(text) < 250
    assert nearest("model_0500x", names) == "did you mean 'model_0500'?"
