"""What subcommands print: JSON for programs, tables for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from .running import UNUSABLE, fail

#: The option that every subcommand has.
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(value: Any) -> None:
    """Print a value as JSON; times are in ISO 8601 with their zone."""
    click.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False, default=str))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, datetime) else value


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str) -> None:
    """Print rows as a table, or a line when there are none."""
    table = _rich("rich.table").Table(*columns, box=_rich("rich.box").SIMPLE_HEAD, pad_edge=False)
    text = _rich("rich.text").Text
    for row in rows:
        table.add_row(*(text(cell(each)) for each in row))
    if not table.row_count:
        click.echo(empty)
        return
    console = _rich("rich.console").Console()
    if not console.is_terminal:
        # Whoever reads it from a pipe wants lines whole.
        console.width = max(console.width, 240)
    console.print(table)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print one thing, a line for each of its properties."""
    shown = {name: cell(value) for name, value in facts.items()}
    width = max(map(len, shown))
    for name, value in shown.items():
        if value:
            click.echo(f"{name:<{width}}  {value}")


def need_tables() -> None:
    """End with a hint when tables can't be made: before anything is done."""
    _rich("rich.table")


def cell(value: Any) -> str:
    """A value as people read it; nothing for what is not there."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    return ("yes" if value else "") if isinstance(value, bool) else str(value)


def _rich(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        fail("tables need the package rich: pip install 'celery-taskgate[cli]', or ask for --json", UNUSABLE)
