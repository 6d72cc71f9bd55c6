"""docs/reports.md names tests that exist, and has a row for each number that a test names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
TEXT = (ROOT / "docs" / "reports.md").read_text()

NUMBER = re.compile(r"\bB\d{2,3}\b")
#: Numbers of reports about operation, which the page leaves to a later one.
LATER = {"B115", "B116"}


def rows() -> dict[str, tuple[str, set[str]]]:
    """What taskgate does and the tests that show it, by number."""
    found = {}
    for line in TEXT.splitlines():
        if line.startswith('| <a id="'):
            number, reported, happened, does, shown = (cell.strip() for cell in line.strip("|").split(" | "))
            assert reported, line
            assert happened, line
            anchor = re.fullmatch(r'<a id="(b\d+)"></a>(B\d+)', number)
            assert anchor is not None, line
            assert anchor[1] == anchor[2].lower()
            assert anchor[2] not in found, f"{anchor[2]} has two rows"
            found[anchor[2]] = (does, set(re.findall(r"`([^`]+::[^`]+)`", shown)))
    assert len(found) == TEXT.count("\n| <a"), "a row of the table can't be read"
    return found


def functions(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and docstring of each test function of a file, those of classes included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name, ast.get_docstring(node) or ""


FILES = {str(path.relative_to(TESTS)): path.read_text() for path in sorted(TESTS.rglob("test_*.py"))}
DOCSTRINGS = {
    f"{file}::{name}": docstring for file, text in FILES.items() for name, docstring in functions(ast.parse(text))
}


@pytest.mark.parametrize("number", rows())
def test_named_tests_exist(number):
    does, named = rows()[number]
    assert named <= set(DOCSTRINGS)
    assert named or does.startswith("Not built yet"), "neither a test nor a reason why there is none"


def test_a_test_that_names_a_report_is_in_its_row():
    named = {(number, test) for test, text in DOCSTRINGS.items() for number in NUMBER.findall(text)}
    shown = {(number, test) for number, (_, tests) in rows().items() for test in tests}
    assert {pair for pair in named - shown if pair[0] not in LATER} == set()


def test_every_number_in_the_tests_has_a_row():
    used = Counter(
        number
        for text in FILES.values()
        for line in text.splitlines()
        if "noqa" not in line  # where a rule of the linter has such a name
        for number in NUMBER.findall(line)
    )
    assert len(used) > 50
    assert set(used) - LATER - set(rows()) == set()
