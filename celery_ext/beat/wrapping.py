"""Another scheduler class, wrapped: it decides what is due, and sends only what its leader's term allows.

Each term has a scheduler of its own, so that nothing it remembered while another led is ever believed. What it has sent
is in the store, so the next leader's knows that, however seldom the class itself writes it down.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import Any

from celery.beat import PersistentScheduler, Scheduler
from celery.utils.imports import load_extension_class_names, symbol_by_name
from celery.utils.time import maybe_make_aware

from kombu_taskgate.core.errors import ConfigError, TaskgateError
from kombu_taskgate.core.schedules import Entry, Progress, Source

from .due import next_due
from .plan import zone_of
from .publishing import connect_once
from .sending import Due, NotSent, Outcome, Sender
from .settings import PRE
from .stores import Stores

logger = logging.getLogger("celery_ext.beat")


#: What a setting may name instead of a class that is wrapped.
OWN = ("taskgate", "celery_ext.beat.scheduler:TaskgateScheduler", "celery_ext.beat.scheduler.TaskgateScheduler")
#: Celery's default, whose entries are those of the code: taskgate's own scheduler has them too.
_DEFAULT = tuple(f"celery.beat{dot}{name}" for dot in ":." for name in ("PersistentScheduler", "Scheduler"))
_DJANGO = "django_celery_beat.schedulers:DatabaseScheduler"


def to_wrap(app: Any, named: object, own: type[Scheduler]) -> tuple[str, type[Scheduler] | None]:
    """The name of the class that is to be wrapped, and the class; empty and ``None``: none.

    Args:
        app: the Celery app.
        named: see :func:`scheduler_name`.
        own: the class that wraps. One that is derived from it is the app's own kind of it, and wraps as well.

    Raises:
        ConfigError: there is no such class, or it is no scheduler.
    """
    name = scheduler_name(app, named)
    cls = scheduler_class(name) if name else None
    if cls is not None and issubclass(cls, own):
        name = "" if named else _without()
        cls = scheduler_class(name) if name else None
    return name, cls


def scheduler_name(app: Any, named: object) -> str:
    """The class that is to be wrapped; empty: none.

    Args:
        app: the Celery app.
        named: what ``beat_taskgate_scheduler`` says. If it says nothing, it is the one that the app had before: that of
            ``beat_scheduler``, or django-celery-beat's where that is among the installed apps of a Django project.
    """
    name = _path(named)
    if not name:
        before = _path(app.conf.beat_scheduler)
        name = before if before not in (*OWN, *_DEFAULT, "") else _without()
    return "" if name in OWN else name


def _path(named: object) -> str:
    """The path of a class, which may be named by itself."""
    return f"{named.__module__}:{named.__qualname__}" if isinstance(named, type) else str(named or "")


def _without() -> str:
    """What is wrapped where no setting names anything."""
    return _DJANGO if _has_django_celery_beat() else ""


def _has_django_celery_beat() -> bool:
    # Whoever has it installed has loaded it by now, and Django with it.
    apps = sys.modules.get("django.apps")
    if apps is None or "django_celery_beat" not in sys.modules:
        return False
    return bool(apps.apps.ready and apps.apps.is_installed("django_celery_beat"))


def scheduler_class(name: str) -> type[Scheduler]:
    """The class that a setting names, by its path or by its name among Celery's entry points.

    Raises:
        ConfigError: there is none, or it is no scheduler.
    """
    try:
        found = symbol_by_name(name, aliases=dict(load_extension_class_names("celery.beat_schedulers")))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"the scheduler {name!r} ({PRE}scheduler) can't be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise ConfigError(f"the scheduler {name!r} ({PRE}scheduler) is no subclass of celery.beat.Scheduler")
    return found


class _NoFile(dict[str, Any]):
    """What a PersistentScheduler writes, kept in memory: its file would be one replica's own, and old on the others."""

    @classmethod
    def open(cls, *_: Any, **__: Any) -> _NoFile:
        return cls()

    def sync(self) -> None:
        """There is nothing behind it."""

    def close(self) -> None:
        """Nor to close."""


class Guard:
    """What a wrapped scheduler asks before it sends anything.

    Args:
        stores: where progress and ticks are.
        sender: sends ticks under the term.
        leads: whether the term is still trusted.
        rows: what the store knows of the entries.
    """

    def __init__(self, stores: Stores, sender: Sender, leads: Callable[[], bool], rows: Iterable[Entry]) -> None:
        self.stores = stores
        self.sender = sender
        self.leads = leads
        self._know(rows)
        #: Why nothing more is to be sent under this term by this scheduler.
        self.failed: Exception | None = None

    def send(self, scheduler: Any, entry: Any, publish: Callable[[str], object]) -> None:
        """Send an entry that the scheduler thinks is due.

        Raises:
            NotLeader, NotSent, StoreUnavailable: nothing was sent, and nothing more will be by this scheduler.
        """
        if self.failed is not None:
            raise self.failed
        now = _ms(datetime.now(timezone.utc))
        kept = scheduler.schedule.get(entry.name, entry)
        # What the scheduler itself will count from, if it counts from the past at all.
        base = min(now, _ms(kept.last_run_at)) if kept is not entry and kept.last_run_at else now
        progress = Progress(self.bases.get(entry.name), base, source=Source.FOREIGN)
        due = Due(entry.name, _due_at(scheduler.app, entry, now), progress, now)
        try:
            if self.sender.send(due, publish) is Outcome.REPEATED:
                # Somebody has changed the row, say paused it: the next due time is compared with what is so.
                self._know(self.stores.schedules.entries(self.stores.key))
            else:
                self.bases[entry.name] = base
        except (TaskgateError, NotSent) as error:
            self.failed = error
            raise

    def _know(self, rows: Iterable[Entry]) -> None:
        rows = list(rows)
        self.bases = {row.name: row.base_at for row in rows}
        self._counts = {row.name: row.total_run_count for row in rows}

    def refresh(self, entry: Any) -> None:
        """Let an entry know when it was last sent, and that it was, if another replica sent it since."""
        base = self.bases.get(entry.name)
        if base is None:
            return
        known = entry.last_run_at
        if known is not None and _ms(known) >= base:
            return
        then = datetime.fromtimestamp(base / 1000, timezone.utc)
        last = then if known is None or known.tzinfo is not None else then.replace(tzinfo=None)
        # django-celery-beat's entries are views of a model, which is what is counted on.
        for one in (entry, getattr(entry, "model", None)):
            if one is not None:
                one.last_run_at = last
                # Entries that are sent once go by it.
                one.total_run_count = max(one.total_run_count or 0, self._counts.get(entry.name, 0))


def _ms(instant: datetime) -> int:
    aware: datetime = maybe_make_aware(instant)
    return round(aware.timestamp() * 1000)


def _due_at(app: Any, entry: Any, now: int) -> int:
    """The due time that an entry is sent for: the first after its last run, but not one that is still to come."""
    try:
        due = next_due(entry.schedule, _ms(entry.last_run_at), zone_of(entry.schedule, app))
    except Exception as error:  # noqa: BLE001  # a class may have schedules that answer nothing but is_due
        logger.debug("the due time of %r can't be told: %s", entry.name, error)
        return now
    return now if due is None else min(due, now)


def wrapped(cls: type[Scheduler]) -> type[Scheduler]:
    """A subclass that sends through a :class:`Guard`, which is given to it as ``guard``."""

    class Wrapped(cls):
        def __init__(self, *args: Any, guard: Guard, **kwargs: Any) -> None:
            self._guard = guard
            super().__init__(*args, **kwargs)

        def is_due(self, entry: Any) -> Any:
            self._guard.refresh(entry)
            return super().is_due(entry)

        def apply_async(self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any) -> Any:
            if advance:
                before, entry = entry, self.reserve(entry)
                entry.last_run_at = before.last_run_at
            parent: Any = super()
            results: list[Any] = []

            def publish(task_id: str) -> object:
                options = entry.options
                entry.options = {"task_id": task_id, **options}
                try:
                    results.append(parent.apply_async(entry, producer=producer, advance=False, **kwargs))
                finally:
                    entry.options = options
                return results[-1]

            self._guard.send(self, entry, publish)
            return results[-1] if results else None

        def _ensure_connected(self) -> Any:
            return connect_once(self.connection)

        def sync(self) -> None:
            # Who does not lead any more would write what is old over what its successor has written.
            if self._guard.leads():
                super().sync()

    if issubclass(cls, PersistentScheduler):
        Wrapped.persistence = _NoFile
    Wrapped.__name__ = Wrapped.__qualname__ = cls.__name__
    Wrapped.__module__ = cls.__module__
    return Wrapped


class Foreign:
    """A wrapped scheduler under one term.

    Args:
        cls: the class.
        app: the Celery app.
        options: its keyword arguments.
        stores, sender, leads: see :class:`Guard`.
    """

    def __init__(
        self,
        cls: type[Scheduler],
        app: Any,
        options: dict[str, Any],
        stores: Stores,
        sender: Sender,
        leads: Callable[[], bool],
    ) -> None:
        self._app = app
        rows = stores.schedules.entries(stores.key)
        self._guard = Guard(stores, sender, leads, rows)
        code = set(app.conf.beat_schedule or {})
        gone = {row.name for row in rows if row.source is Source.CODE} - code
        self._note_code(code)
        self._scheduler = wrapped(cls)(app=app, guard=self._guard, lazy=False, **options)
        _retire(self._scheduler, gone)
        self._unsent = [] if sender.together else stores.schedules.unsent(stores.key)

    def _note_code(self, names: Iterable[str]) -> None:
        """Remember which entries the code has, so that those it has no longer can be told."""
        given = self._app.conf.beat_schedule or {}
        entries = [
            Entry(name=name, source=Source.CODE, task=str(_task_of(given[name])), schedule="-") for name in names
        ]
        self._guard.stores.schedules.sync(self._guard.sender.term, entries)

    @property
    def schedule(self) -> Any:
        """The scheduler's own."""
        return self._scheduler.schedule

    def tick(self) -> float:
        """One pass of the scheduler; returns after how many seconds it wants the next.

        Raises:
            NotLeader, NotSent, StoreUnavailable: it could not send, and is not to be used any more.
        """
        self._send_again()
        try:
            wait = self._scheduler.tick()
        except Exception:
            if self._guard.failed is None:
                raise
            logger.debug("the pass was given up", exc_info=True)
        if self._guard.failed is not None:
            # Celery's scheduler has logged it, and gone on as if it had sent.
            raise self._guard.failed
        if wait and wait > 0 and self._scheduler.should_sync():
            try:
                self._scheduler._do_sync()
            except Exception:
                # What was sent is in the store, so nothing depends on it.
                logger.exception("beat: %s could not write down its entries", type(self._scheduler).__name__)
        return float(wait or 0.0)

    def _send_again(self) -> None:
        """Send what an earlier leader may not have sent, unless a later tick makes up for it anyway."""
        guard = self._guard
        while self._unsent:
            tick = self._unsent[0]
            entry = self._scheduler.schedule.get(tick.name)
            if entry is None:
                logger.warning("beat: a tick of %r may not have been sent, and the entry is gone", tick.name)
                guard.sender.give_up(tick)
            elif self._scheduler.is_due(entry)[0]:
                logger.warning("beat: %r may not have been sent by an earlier leader, and is due again", tick.name)
                guard.sender.give_up(tick)
            else:
                logger.warning("beat: %r may not have been sent by an earlier leader; sent again", tick.name)
                guard.sender.resend(tick, lambda task_id, entry=entry: self._publish(entry, task_id))  # type: ignore[misc]  # mypy can't infer a lambda with a default
            self._unsent.pop(0)

    def _publish(self, entry: Any, task_id: str) -> object:
        scheduler = self._scheduler
        unguarded: Any = super(type(scheduler), scheduler)
        options = entry.options
        entry.options = {"task_id": task_id, **options}
        try:
            return unguarded.apply_async(entry, producer=scheduler.producer, advance=False)
        finally:
            entry.options = options

    def sync(self) -> None:
        """Let the scheduler write down what it wants to, while it leads."""
        self._scheduler.sync()

    def close(self) -> None:
        """Let it close what it has opened; it writes only if it leads."""
        try:
            self._scheduler.close()
        except Exception:
            logger.exception("beat: %s could not be closed", type(self._scheduler).__name__)


def _task_of(given: Any) -> Any:
    return given.get("task") if isinstance(given, dict) else getattr(given, "task", "")


def _retire(scheduler: Any, names: set[str]) -> None:
    """End entries that only an earlier version of the code had: a database would keep them for ever."""
    if not names:
        return
    model = getattr(scheduler, "Model", None)
    if model is None:
        for name in names:
            scheduler.schedule.pop(name, None)
        return
    # django-celery-beat's way to turn entries off, and to say so to whoever has read them.
    if model._default_manager.filter(name__in=names, enabled=True).update(enabled=False):
        scheduler.Changes.update_changed()
    logger.warning("beat: not in beat_schedule any more, so disabled: %s", ", ".join(sorted(names)))
