"""``celery taskgate schedule``: the periodic entries, at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kombu_taskgate.core.errors import ConfigError

from ..beat.definitions import from_json
from ..beat.stores import Stores
from ..beat.texts import seconds_of
from ..schedule import Schedule, ScheduleEntry
from .output import json_option, need_tables, print_facts, print_json, print_table
from .running import app_of, ask


def _seconds(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """Seconds, or a number with a unit."""
    try:
        return None if value is None else seconds_of(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no duration: write 90, 90s, 5m, 2h or 1d") from None


def _json(kind: type, example: str) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """JSON of one kind, as kombu reads it."""

    def read(context: click.Context, option: click.Parameter, value: str | None) -> Any:
        if value is None:
            return None
        try:
            found = from_json(value)
        except ConfigError as error:
            raise click.BadParameter(f"it is no JSON ({error}): write it as {example}") from None
        if not isinstance(found, kind):
            raise click.BadParameter(f"write it as {example}")
        return found

    return read


@click.group(name="schedule")
def schedule() -> None:
    """Look at the periodic entries, and change them while beat runs."""


def _with(context: click.Context, work: Callable[[Schedule], Any], *, usage: bool = False) -> Any:
    app = app_of(context)

    def run(stores: Stores) -> Any:
        return work(Schedule(app, stores=stores))

    return ask(app, run, usage=usage)


def _show(entry: ScheduleEntry, as_json: bool) -> None:
    if as_json:
        print_json(entry)
        return
    facts: dict[str, object] = {
        "name": entry.name,
        "source": entry.source,
        "task": entry.task,
        "schedule": entry.schedule,
        "timezone": entry.timezone,
        "args": list(entry.args) or None,
        "kwargs": dict(entry.kwargs) or None,
        "options": dict(entry.options) or None,
        "state": _state(entry),
        "next due": entry.next_due,
        "last run": entry.last_run_at,
        "runs": entry.total_run_count,
        "problem": entry.problem,
    }
    print_facts(facts)


def _state(entry: ScheduleEntry) -> str:
    words = ["on" if entry.enabled else "paused"]
    words += [word for word, said in (("no overlap", entry.no_overlap), ("one-off", entry.one_off)) if said]
    if entry.requested_at is not None:
        words.append("to run now")
    return ", ".join(words)


@schedule.command(name="list")
@json_option
@click.pass_context
def list_entries(context: click.Context, as_json: bool) -> None:
    """Show all entries, and when they are due next."""
    if not as_json:
        need_tables()
    entries = _with(context, lambda entries: entries.list(), usage=True)
    if as_json:
        print_json(entries)
        return
    columns = ("name", "source", "task", "schedule", "timezone", "state", "next due", "last run", "runs")
    rows = [
        (
            each.name,
            each.source,
            each.task,
            each.schedule,
            each.timezone,
            _state(each),
            f"never: {each.problem}" if each.problem else each.next_due,
            each.last_run_at,
            each.total_run_count,
        )
        for each in entries
    ]
    print_table(columns, rows, "no entries")


@schedule.command(name="add")
@click.argument("name")
@click.argument("task")
@click.option("--every", help="An interval: seconds, or 5m, 2h, 1d.")
@click.option("--crontab", help='Five fields: minute, hour, day of month, month, day of week: "0 9 * * 1-5".')
@click.option("--solar", help='An event of the sun, latitude and longitude: "sunset 52.5 13.4".')
@click.option("--timezone", help="Time zone of its times: Europe/Berlin.  [default: the app's]")
@click.option("--args", callback=_json(list, "'[1, \"a\"]'"), help="Arguments of the task: a JSON array.")
@click.option("--kwargs", callback=_json(dict, "'{\"a\": 1}'"), help="Keyword arguments: a JSON object.")
@click.option("--options", callback=_json(dict, "'{\"priority\": 5}'"), help="Options of apply_async: a JSON object.")
@click.option("--queue", help="The queue it is sent to.")
@click.option("--priority", type=int, help="The priority of its messages.")
@click.option("--expires", callback=_seconds, help="Drop a task that has not begun after so long.")
@click.option(
    "--starting-deadline", callback=_seconds, help="How late a missed tick is still sent.  [default: the app's]"
)
@click.option("--no-overlap", is_flag=True, help="No tick while the last one's task has not ended.")
@click.option("--one-off", is_flag=True, help="Pause it after its first tick.")
@click.option("--paused", is_flag=True, help="Do not send it before it is resumed.")
@click.option("--replace", is_flag=True, help="Replace an entry of this name that was added.")
@json_option
@click.pass_context
def add_entry(
    context: click.Context, /, name: str, task: str, paused: bool, queue: str | None, priority: int | None,
    options: dict[str, Any] | None, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Add an entry that sends TASK at its times."""
    options = dict(options or {})
    for option, value in (("queue", queue), ("priority", priority)):
        if value is not None:
            if option in options:
                raise click.UsageError(f"{option} is given twice: as --{option} and in --options")
            options[option] = value
    entry = _with(
        context, lambda entries: entries.add(name, task, options=options, enabled=not paused, **given), usage=True
    )
    _show(entry, as_json)


@schedule.command(name="pause")
@click.argument("name")
@json_option
@click.pass_context
def pause_entry(context: click.Context, name: str, as_json: bool) -> None:
    """Send an entry no more until it is resumed."""
    _show(_with(context, lambda entries: entries.pause(name)), as_json)


@schedule.command(name="resume")
@click.argument("name")
@json_option
@click.pass_context
def resume_entry(context: click.Context, name: str, as_json: bool) -> None:
    """Send a paused entry again, from now on."""
    _show(_with(context, lambda entries: entries.resume(name)), as_json)


@schedule.command(name="run-now")
@click.argument("name")
@json_option
@click.pass_context
def run_entry(context: click.Context, name: str, as_json: bool) -> None:
    """Have an entry sent once, as soon as the leader sees it."""
    _show(_with(context, lambda entries: entries.run_now(name)), as_json)


@schedule.command(name="remove")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_context
def remove_entry(context: click.Context, name: str, yes: bool, as_json: bool) -> None:
    """Remove an entry that was added. What it has sent stays."""
    if not yes:

        def look(entries: Schedule) -> ScheduleEntry:
            found = entries.get(name)
            if found is None:
                raise entries.not_found(name)
            return found

        entry = _with(context, look)
        shown = f"{entry.name} ({entry.task}, {entry.schedule})"
        # On stderr, so that what is printed is JSON if that was asked for.
        click.confirm(f"Remove {shown}?", abort=True, err=True)
    _with(context, lambda entries: entries.remove(name))
    if as_json:
        print_json({"removed": name})
    else:
        click.echo(f"removed {name}")


@schedule.command(name="ticks")
@click.argument("name", required=False)
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True, help="How many, at most.")
@json_option
@click.pass_context
def list_ticks(context: click.Context, name: str | None, limit: int, as_json: bool) -> None:
    """Show the newest ticks: of one entry or of all."""
    if not as_json:
        need_tables()

    def look(entries: Schedule) -> Any:
        found = entries.ticks(name, limit)
        if not found and name is not None and entries.get(name) is None:
            raise entries.not_found(name)
        return found

    ticks = _with(context, look)
    if as_json:
        print_json(ticks)
        return
    rows = [(each.due_at, each.name, each.state, each.sent_at, each.task_id, each.term) for each in ticks]
    print_table(("due", "entry", "state", "sent", "task_id", "term"), rows, "no ticks")
