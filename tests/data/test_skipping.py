"""Corrupt images that a loader passes over."""

from __future__ import annotations

import logging

import pytest

from aphq.data.images import CorruptImage
from aphq.data.skipping import WARNINGS, Skipping
from aphq.errors import DataError


def bad(number: int) -> CorruptImage:
    return CorruptImage(f"{number}.jpg", "truncated")


def test_one_image_may_always_be_bad_and_too_many_are_refused_with_what_to_do() -> None:
    few = Skipping(wanted=3)
    few.add(bad(0), seen=1)
    with pytest.raises(DataError, match=r"2 of the first 5 images .* '1.jpg', truncated; repair .*of 3 at most 1 may"):
        few.add(bad(1), seen=5)
    assert few.skipped == (("0.jpg", "truncated"), ("1.jpg", "truncated"))


def test_the_first_are_named_and_the_rest_counted(caplog: pytest.LogCaptureFixture) -> None:
    many = Skipping(wanted=1000, what="labelled images", instead="left out")
    with caplog.at_level(logging.WARNING):
        for number in range(WARNINGS + 2):
            many.add(bad(number), seen=number + 1)
        many.close()
    assert len(caplog.messages) == WARNINGS + 1
    assert caplog.messages[0] == "cannot decode image '0.jpg': truncated; left out"
    assert caplog.messages[-1] == f"{WARNINGS + 2} labelled images cannot be decoded in all"


def test_a_few_need_no_sum(caplog: pytest.LogCaptureFixture) -> None:
    some = Skipping(wanted=100)
    some.add(bad(0), seen=1)
    some.close()
    assert len(caplog.messages) == 1
