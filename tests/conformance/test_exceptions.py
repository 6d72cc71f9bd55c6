"""A list of tests that do not pass is right in both directions, and says why."""

from __future__ import annotations

import pytest

from tests.conformance.exceptions import covers, expected, surprises

LIST = """
[[expected]]
tests = ["m::a", "m::B"]
reason = "everywhere"

[[expected]]
tests = ["m::old"]
versions = "<5.5"
stores = ["sqlite"]
outcome = "skipped"
reason = "once"
"""


def test_an_entry_holds_for_its_stores_and_versions(tmp_path):
    """What is listed for one store and version is not listed for others."""
    file = tmp_path / "list.toml"
    file.write_text(LIST)
    always = {"m::a": "failed", "m::B": "failed"}
    assert expected(file, store="sqlite", version="5.4.0") == {**always, "m::old": "skipped"}
    assert expected(file, store="mysql", version="5.4.0") == always
    assert expected(file, store="sqlite", version="5.7.0") == always


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('"everywhere"', '" "', "no reason"),
        ("stores", "store", "unknown keys"),
        ('"skipped"', '"skip"', "no outcome"),
    ],
)
def test_an_entry_that_says_nothing_is_refused(tmp_path, old, new, word):
    """An entry without a reason, or with a word misspelt, would let a failure pass unseen."""
    file = tmp_path / "list.toml"
    file.write_text(LIST.replace(old, new))
    with pytest.raises(AssertionError, match=word):
        expected(file, store="sqlite", version="5.4.0")


def test_what_fails_or_is_skipped_has_to_be_listed():
    """A failure and a skip that nobody has explained are reported."""
    outcomes = {"m::a": "failed", "m::b": "skipped", "m::c": "passed", "m::d": "xfailed"}
    assert surprises(outcomes, {"m::a": "failed", "m::b": "skipped"}) == []
    assert surprises(outcomes, {}) == ["m::a failed and is not listed", "m::b was skipped and is not listed"]


def test_what_is_listed_has_to_happen():
    """An exception that is none any more is reported, and so is one of a test that is gone."""
    assert surprises({"m::a": "passed"}, {"m::a": "failed"}) == ["m::a is listed as failed and passed"]
    assert surprises({"m::a": "failed"}, {"m::a": "skipped"}) == ["m::a is listed as skipped and failed"]
    assert surprises({}, {"m::a": "failed"}) == ["m::a is listed and did not run"]
    assert surprises({}, {"m::a": "failed"}, whole=False) == []


def test_an_entry_stands_for_all_that_is_within_it():
    """The name of a module or a class, or of a test without its parameters, is enough; a part of a name is not."""
    assert covers("m", "m::B::c[1]")
    assert covers("m::B", "m::B::c[1]")
    assert covers("m::B::c", "m::B::c[1]")
    assert not covers("m::B::c", "m::B::cd")
