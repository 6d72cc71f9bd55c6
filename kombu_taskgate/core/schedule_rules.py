"""What becomes of schedule entries: the rules that all stores share. Here they are only worked out, not stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import ConfigError, NotLeader
from .model import MAX_NAME, NewTask
from .schedules import CHANGEABLE, Entry, Progress, Source, Tick, TickState
from .settings import LONGEST, check_name, storable
from .terms import Term

#: What a change of makes the base unknown: what was due before must not be sent.
_TIMES = ("enabled", "schedule", "timezone")
_FLAGS = frozenset({"enabled", "no_overlap", "one_off"})


# -- bounds -----------------------------------------------------------------------------------------


def check_key(key: str) -> None:
    """Raise ConfigError for what can't be the key of a schedule."""
    check_name(key, "schedule")


def check_added(entry: Entry) -> None:
    """Raise ConfigError for an ADDED entry that can't be stored."""
    check_name(entry.name, "schedule entry")
    if entry.source is not Source.ADDED:
        raise ConfigError(f"schedule entry {entry.name!r} can't be added as {entry.source.value!r}: only as 'added'")
    check_changes(entry.name, {field: getattr(entry, field) for field in CHANGEABLE})


def check_changes(name: str, changes: Mapping[str, object]) -> None:
    """Raise ConfigError for fields that can't be changed, or not to that."""
    unknown = sorted(set(changes) - CHANGEABLE)
    if unknown:
        raise ConfigError(
            f"{unknown[0]!r} of schedule entry {name!r} can't be changed; what can: {', '.join(sorted(CHANGEABLE))}"
        )
    for field, value in changes.items():
        what = f"{field} of schedule entry {name!r}"
        if field in _FLAGS:
            if not isinstance(value, bool):
                raise ConfigError(f"{what} must be True or False, not {value!r}")
        elif field == "starting_deadline":
            if value is not None and not (isinstance(value, (int, float)) and 0 <= value <= LONGEST):
                raise ConfigError(f"{what} must be None or 0 seconds to 100 years, not {value!r}")
        elif not isinstance(value, str) or value != storable(value):
            raise ConfigError(f"{what} must be a text without NUL and lone surrogates, not {value!r}")
        elif field in {"task", "schedule"} or (field == "timezone" and value):
            check_name(value, what)


def check_tick(tick: Tick) -> None:
    """Raise ConfigError for a tick that can't be stored."""
    check_name(tick.name, "schedule entry")
    if tick.task_id:
        check_name(tick.task_id, "task_id")


def check_no_tasks(tasks: Sequence[NewTask], store: str) -> None:
    """Raise ConfigError where there are tasks and no queues."""
    if tasks:
        raise ConfigError(f"{store} has no queues: send the {len(tasks)} tasks of a tick elsewhere")


def not_leader(term: Term) -> NotLeader:
    """The error of a holder whose term is over, or somebody else's."""
    return NotLeader(
        f"{term.holder!r} does not lead {term.key!r} any more: its term {term.number} is over. Nothing was stored"
    )


# -- definitions ------------------------------------------------------------------------------------


def added(entry: Entry, now: int) -> Entry:
    """A new entry as it is stored."""
    return replace(entry, created_at=now, changed_at=now)


def wanted(entry: Entry, now: int) -> Entry:
    """The entry with a new request."""
    return replace(entry, requested_at=requested(entry, now))


def same_definition(entry: Entry, other: Entry) -> bool:
    """Whether two entries have the same definition, of the same instant."""
    return entry.changed_at == other.changed_at and all(
        getattr(entry, field) == getattr(other, field) for field in CHANGEABLE
    )


def requested(entry: Entry, now: int) -> int:
    """The instant of a new request: no two of an entry have the same."""
    return now if entry.requested_at is None or entry.requested_at < now else entry.requested_at + 1


def changed(entry: Entry, changes: Mapping[str, Any], now: int) -> Entry:
    """The entry with another definition.

    Raises:
        ConfigError: it is not ADDED, and what is changed is kept where it comes from.
    """
    foreign = sorted(set(changes) - {"enabled"})
    if entry.source is not Source.ADDED and foreign:
        raise ConfigError(
            f"{foreign[0]} of schedule entry {entry.name!r} can't be changed here: it comes from "
            f"{_WHERE[entry.source]}. Change it there, or add an entry of another name"
        )
    return _with(entry, changes, now)


def replaced(entry: Entry, new: Entry, now: int) -> Entry:
    """The ADDED entry of the same name with another's definition.

    Raises:
        ConfigError: it is not ADDED.
    """
    if entry.source is not Source.ADDED:
        raise ConfigError(
            f"schedule entry {entry.name!r} comes from {_WHERE[entry.source]} and can't be replaced: use another name"
        )
    return _with(entry, {field: getattr(new, field) for field in CHANGEABLE}, now)


def refuse_to_remove(entry: Entry) -> None:
    """Raise ConfigError for an entry that would come back."""
    if entry.source is Source.CODE:
        raise ConfigError(
            f"schedule entry {entry.name!r} comes from {_WHERE[Source.CODE]}, which would bring it back: remove it "
            "there, or pause it"
        )


_WHERE = {Source.CODE: "the app's code", Source.FOREIGN: "another scheduler", Source.ADDED: "here"}


def _with(entry: Entry, changes: Mapping[str, Any], now: int) -> Entry:
    different = {field: value for field, value in changes.items() if getattr(entry, field) != value}
    if not different:
        return entry
    base = None if any(field in different for field in _TIMES) else entry.base_at
    return replace(entry, **different, base_at=base, changed_at=now)


@dataclass(slots=True)
class Synced:
    """What makes the CODE entries of a schedule be others."""

    new: list[Entry]
    changed: list[Entry]
    gone: list[str]


def synced(known: Iterable[Entry], wanted: Sequence[Entry], now: int) -> Synced:
    """How to let the CODE entries be these.

    Raises:
        ConfigError: a name is out of bounds.
    """
    code = {entry.name: _of_code(entry, now) for entry in wanted}
    there = {entry.name: entry for entry in known}
    found = Synced([], [], [])
    for name, entry in code.items():
        old = there.get(name)
        if old is None:
            found.new.append(entry)
        elif old.source is not Source.ADDED:
            fields = CHANGEABLE - {"enabled"}
            as_wanted = _with(old, {"source": Source.CODE, **{field: getattr(entry, field) for field in fields}}, now)
            if as_wanted is not old:
                found.changed.append(as_wanted)
    found.gone = sorted(name for name, entry in there.items() if entry.source is Source.CODE and name not in code)
    return found


def _of_code(entry: Entry, now: int) -> Entry:
    check_name(entry.name, "schedule entry")
    check_name(entry.task, f"task of schedule entry {entry.name!r}")
    # Only shown, so it is made to fit.
    schedule, timezone = (storable(text)[:MAX_NAME] for text in (entry.schedule, entry.timezone))
    return replace(entry, source=Source.CODE, schedule=schedule, timezone=timezone, created_at=now, changed_at=now)


# -- ticks ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Advance:
    """What a tick makes of its entry.

    Args:
        entry: as it is to be stored; ``None``: nothing is changed.
        made: it was not there.
        stored: whether the tick (and its tasks) is to be stored.
    """

    entry: Entry | None
    made: bool = False
    stored: bool = False


def advanced(entry: Entry | None, tick: Tick, progress: Progress, *, known: bool, now: int) -> Advance:
    """What a tick makes of its entry; ``known``: a tick of this entry and due time is stored already."""
    made = entry is None
    if entry is None:
        if progress.source is not Source.FOREIGN:
            return Advance(None)
        entry = Entry(tick.name, Source.FOREIGN, base_at=progress.seen_base, created_at=now, changed_at=now)
    if entry.base_at != progress.seen_base or not (entry.enabled or progress.requested_at is not None):
        return Advance(None)
    answered = progress.requested_at is not None and entry.requested_at == progress.requested_at
    after = replace(entry, base_at=progress.base_at, requested_at=None if answered else entry.requested_at)
    if known:
        return Advance(after, made)
    if progress.disable:
        after.enabled = False
    if tick.state is not TickState.SKIPPED:
        after.last_run_at, after.last_due_at, after.total_run_count = now, tick.due_at, entry.total_run_count + 1
    return Advance(after, made, stored=True)


# -- rows -------------------------------------------------------------------------------------------


def entry_of(values: Mapping[str, Any]) -> Entry:
    """The entry that a stored row tells of, whoever wrote it."""
    texts = {field: _text(values.get(field)) for field in ("task", "schedule", "timezone", "args", "kwargs", "options")}
    instants = {
        field: _number(values.get(field)) for field in ("base_at", "last_run_at", "last_due_at", "requested_at")
    }
    return Entry(
        name=str(values["name"]),
        source=_one_of(Source, values.get("source"), Source.ADDED),
        enabled=_flag(values.get("enabled"), default=True),
        no_overlap=_flag(values.get("no_overlap"), default=False),
        one_off=_flag(values.get("one_off"), default=False),
        starting_deadline=_seconds(values.get("starting_deadline")),
        total_run_count=_number(values.get("total_run_count")) or 0,
        created_at=_number(values.get("created_at")) or 0,
        changed_at=_number(values.get("changed_at")) or 0,
        **texts,  # type: ignore[arg-type]  # the names are the fields'
        **instants,  # type: ignore[arg-type]  # as above
    )


def tick_of(values: Mapping[str, Any]) -> Tick:
    """The tick that a stored row tells of."""
    return Tick(
        name=str(values["name"]),
        due_at=_number(values["due_at"]) or 0,
        task_id=_text(values.get("task_id")),
        state=_one_of(TickState, values.get("state"), TickState.SENT),
        sent_at=_number(values.get("sent_at")) or 0,
        term=_number(values.get("term")) or 0,
    )


def newest(ticks: Iterable[Tick], limit: int) -> list[Tick]:
    """The newest ticks, newest due time first."""
    return sorted(ticks, key=lambda tick: (-tick.due_at, tick.name))[: max(0, limit)]


def _one_of(kind: Any, value: object, default: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        return default


def _text(value: object) -> str:
    return "" if value is None else value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _number(value: Any) -> int | None:
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _flag(value: Any, *, default: bool) -> bool:
    number = _number(value)
    return default if number is None else number != 0


def _seconds(value: Any) -> float | None:
    try:
        seconds = None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if seconds is not None and math.isfinite(seconds) and seconds >= 0 else None
