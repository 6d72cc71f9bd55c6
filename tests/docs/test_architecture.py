"""docs/architecture.md draws the states and lists the tables as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kombu_taskgate.core.dialects.sqlite import SQLite
from kombu_taskgate.core.model import FINAL, TRANSITIONS, State
from kombu_taskgate.core.schema import Tables

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "architecture.md").read_text()


def diagram() -> set[tuple[str, str]]:
    """Arrows of the mermaid state diagram."""
    block = re.search(r"```mermaid\nstateDiagram-v2\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None, "docs/architecture.md has no mermaid state diagram"
    arrows = set()
    for line in block.group(1).splitlines():
        arrow = re.fullmatch(r"\s*(\[\*\]|\w+) --> (\[\*\]|\w+)(?: : .+)?", line)
        assert arrow is not None or not line.strip(), f"not an arrow: {line!r}"
        if arrow is not None:
            arrows.add((arrow.group(1), arrow.group(2)))
    return arrows


def test_state_diagram_is_the_transition_table():
    drawn = {arrow for arrow in diagram() if arrow[1] != "[*]"}
    allowed = {
        ("[*]" if before is None else before.value, after.value)
        for before, followers in TRANSITIONS.items()
        for after in followers
    }
    assert drawn == allowed


def test_final_states_end_the_diagram():
    assert {before for before, after in diagram() if after == "[*]"} == {state.value for state in FINAL}


def test_transition_table_covers_every_state():
    assert set(TRANSITIONS) == {None, *State}


def documented_tables() -> dict[str, set[str]]:
    """Columns by table, from the rows ``| `table` | `column` `column` … |`` of the schema section."""
    section = TEXT.split("## The tables", 1)[1].split("\n## ", 1)[0]
    return {
        name: set(re.findall(r"`(\w+)`", columns))
        for name, columns in re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE)
    }


def actual_tables() -> dict[str, set[str]]:
    return {
        name.removeprefix("taskgate_"): set(table.columns.keys())
        for name, table in Tables("taskgate_", None, SQLite(), {}).metadata.tables.items()
    }


def test_every_table_is_documented():
    assert set(documented_tables()) == set(actual_tables())


@pytest.mark.parametrize("name", sorted(actual_tables()))
def test_columns_are_documented(name):
    assert documented_tables()[name] == actual_tables()[name]
