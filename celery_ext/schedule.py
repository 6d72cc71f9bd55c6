"""The schedule at run time: periodic entries are added, paused, run and removed without a restart of beat.

No beat need run. Whoever leads looks at the entries every second and follows what was changed.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta, tzinfo
from typing import TYPE_CHECKING, Any

from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.schedules import Entry, Source

from .beat import definitions
from .beat.due import next_due
from .beat.errors import EntryExists, EntryNotFound
from .beat.listing import Listing, ScheduleEntry, ScheduleTick, tick
from .beat.plan import of_row
from .beat.stores import Stores, open_stores

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["EntryExists", "EntryNotFound", "Schedule", "ScheduleEntry", "ScheduleTick"]


class Schedule:
    """The periodic entries of an app, where its beat keeps them. May be used from any thread.

    Every method may raise ``StoreUnavailable``, when the store can't be reached, and ``ConfigError``.

    Args:
        app: the Celery app; ``None``: the current one.
        stores: where the entries are; ``None``: where the app's settings say.
    """

    def __init__(self, app: Any = None, *, stores: Stores | None = None) -> None:
        if app is None:
            from celery import current_app

            app = current_app._get_current_object()
        self._app = app
        self._stores = stores if stores is not None else open_stores(app)

    def close(self) -> None:
        """Close the connections. Idempotent; a later call opens them again."""
        self._stores.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- looking -------------------------------------------------------------------------------------

    def list(self) -> list[ScheduleEntry]:
        """All entries, by name: those of the code are here once a leader has stored them."""
        listing = self._listing()
        return [listing.entry(row) for row in self._rows()]

    def get(self, name: str) -> ScheduleEntry | None:
        """One entry; ``None``: there is none of this name."""
        return next((self._listing().entry(row) for row in self._rows() if row.name == name), None)

    def ticks(self, name: str | None = None, limit: int = 20) -> Sequence[ScheduleTick]:
        """The newest ticks, of one entry or of all, the newest due time first. They are kept for a week.

        Those of an entry that was removed are still there.
        """
        names = () if name is None else (name,)
        return [tick(row) for row in self._stores.schedules.ticks(self._stores.key, names, limit)]

    # -- changing ------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        task: Any,
        *,
        every: float | timedelta | str | None = None,
        crontab: Any = None,
        solar: Any = None,
        schedule: Any = None,
        args: Sequence[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        timezone: str | tzinfo | None = None,
        expires: float | timedelta | None = None,
        no_overlap: bool = False,
        one_off: bool = False,
        enabled: bool = True,
        starting_deadline: float | timedelta | None = None,
        replace: bool = False,
    ) -> ScheduleEntry:
        """Add an entry. It is first due at its first time after the leader has seen it, within a second.

        Args:
            name: of the entry, 1 to 255 characters.
            task: its name, or the task itself.
            every: seconds, a timedelta, or a text such as ``5m``.
            crontab: a text such as ``0 9 * * 1-5``: minute, hour, day of month, month, day of week; or Celery's object.
            solar: event, latitude and longitude, as a text or one by one, or Celery's object.
            schedule: Celery's object, or a text such as ``interval 30``.
            args: of the task; kept as JSON, dates too.
            kwargs: the same.
            options: of ``apply_async``: queue, priority, expires …
            timezone: zone in which its times are meant; ``None``: the schedule's own, else the app's.
            expires: seconds after which a task that has not begun is dropped.
            no_overlap: no tick while the last one's task has not ended.
            one_off: disabled by its first tick.
            enabled: whether it is sent.
            starting_deadline: seconds after a due time within which a missed tick is caught up; ``None``: the app's.
            replace: an entry of this name that was added is replaced; how far it has come is kept.

        Raises:
            EntryExists: there is an entry of this name, and ``replace`` is off.
            ConfigError: something can't be right. Nothing was stored.
        """
        text = definitions.text_of(self._app, every=every, crontab=crontab, solar=solar, schedule=schedule)
        given = next(
            (each for each in (crontab, solar, schedule) if each is not None and not isinstance(each, str)), None
        )
        row = Entry(
            name=name,
            task=definitions.task_of(task),
            schedule=text,
            timezone=definitions.zone_of(given, timezone),
            args=definitions.json_of("args", definitions.checked_args(args)),
            kwargs=definitions.json_of("kwargs", definitions.checked_kwargs("kwargs", kwargs)),
            options=definitions.json_of(
                "options", definitions.checked_options(options, expires, no_overlap=no_overlap)
            ),
            enabled=enabled,
            no_overlap=no_overlap,
            one_off=one_off,
            starting_deadline=definitions.seconds("starting_deadline", starting_deadline),
        )
        if no_overlap and not self._stores.settings.is_broker:
            raise ConfigError("no_overlap needs a taskgate broker whose database is that of beat's leases")
        planned = of_row(self._app, row)
        if next_due(planned.schedule, _now_ms(), planned.zone) is None:
            raise ConfigError(f"the schedule {text!r} is never due: name a day that comes")
        if not self._stores.schedules.add(self._stores.key, row, replace=replace):
            raise EntryExists(f"there is an entry {name!r} already: remove it first, or replace it (replace=True)")
        return self._get(name)

    def pause(self, name: str) -> ScheduleEntry:
        """Send an entry no more until it is resumed. One of the code stays paused too, also over restarts.

        Raises:
            EntryNotFound: there is no entry of this name.
        """
        return self._enable(name, enabled=False)

    def resume(self, name: str) -> ScheduleEntry:
        """Send a paused entry again, from now on: what was due meanwhile is left out.

        Raises:
            EntryNotFound: there is no entry of this name.
        """
        return self._enable(name, enabled=True)

    def remove(self, name: str) -> None:
        """Remove an entry. Its ticks stay, and so do tasks that were sent.

        Raises:
            EntryNotFound: there is no entry of this name.
            ConfigError: it is in ``beat_schedule``, from where it would come back; it can be paused.
        """
        if not self._stores.schedules.remove(self._stores.key, name):
            raise self.not_found(name)

    def run_now(self, name: str) -> ScheduleEntry:
        """Have an entry sent once, as soon as the leader sees it; its times stay as they are. A paused one is sent too.

        Raises:
            EntryNotFound: there is no entry of this name.
            ConfigError: it is another scheduler's.
        """
        self._own(name)
        if not self._stores.schedules.request(self._stores.key, name):
            raise self.not_found(name)
        return self._get(name)

    # -- parts ---------------------------------------------------------------------------------------

    def _enable(self, name: str, *, enabled: bool) -> ScheduleEntry:
        self._own(name)
        if not self._stores.schedules.change(self._stores.key, name, enabled=enabled):
            raise self.not_found(name)
        return self._get(name)

    def _own(self, name: str) -> None:
        """Refuse what only another scheduler can do."""
        if any(row.name == name and row.source is Source.FOREIGN for row in self._rows()):
            raise ConfigError(f"the entry {name!r} is another scheduler's (beat_taskgate_scheduler): change it there")

    def _get(self, name: str) -> ScheduleEntry:
        found = self.get(name)
        if found is None:
            raise self.not_found(name)
        return found

    def not_found(self, name: str) -> EntryNotFound:
        """The error of a name that no entry has, with the nearest one."""
        near = difflib.get_close_matches(name, [row.name for row in self._rows()], n=1, cutoff=0.5)
        hint = f": did you mean {near[0]!r}?" if near else ""
        return EntryNotFound(f"there is no entry {name!r} in the schedule {self._stores.key!r}{hint}")

    def _rows(self) -> Sequence[Entry]:
        return self._stores.schedules.entries(self._stores.key)

    def _listing(self) -> Listing:
        return Listing(self._app, _now_ms())


def _now_ms() -> int:
    """This machine's clock: for what is shown only, beat goes by the store's."""
    return time.time_ns() // 1_000_000
