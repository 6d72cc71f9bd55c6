"""Schedules: periodic entries, how far each has come, and the ticks that were sent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from .model import NewTask
from .terms import Term

#: Seconds for which ticks are kept after they were sent.
KEEP_TICKS = 7 * 86_400.0


class Source(str, Enum):
    """Where an entry comes from."""

    #: The app's code: synchronised by whoever leads.
    CODE = "code"
    #: Added at run time: stays until it is removed.
    ADDED = "added"
    #: Another scheduler keeps it (django-celery-beat, say); here is only how far it has come.
    FOREIGN = "foreign"


@dataclass(slots=True)
class Entry:
    """One schedule entry. Instants are milliseconds by the store's clock.

    Args:
        name: unique within its schedule; 1 to 255 characters.
        source: where it comes from.
        task: name of the task.
        schedule: its times, as text (``interval 30``, ``crontab 0 9 * * 1-5``, ``solar sunset 52.5 13.4``). Of an entry
            that is not ADDED it is shown, not read.
        timezone: name of its time zone; empty: the app's.
        args, kwargs, options: JSON of an ADDED entry's; empty: none.
        enabled: whether it is sent.
        no_overlap: no tick while the last one's task has not ended.
        one_off: disabled by its first tick.
        starting_deadline: seconds after a due time within which a missed tick is caught up; ``None``: the app's.
        base_at: the next due time is the first after this; ``None``: not known, so from when a leader first sees it.
        last_run_at, last_due_at: when it was last sent, and for which due time.
        total_run_count: how often it was sent.
        requested_at: somebody wants it sent now, once.
        created_at, changed_at: of its definition.
    """

    name: str
    source: Source = Source.ADDED
    task: str = ""
    schedule: str = ""
    timezone: str = ""
    args: str = ""
    kwargs: str = ""
    options: str = ""
    enabled: bool = True
    no_overlap: bool = False
    one_off: bool = False
    starting_deadline: float | None = None
    base_at: int | None = None
    last_run_at: int | None = None
    last_due_at: int | None = None
    total_run_count: int = 0
    requested_at: int | None = None
    created_at: int = 0
    changed_at: int = 0


#: What :meth:`Schedules.change` may change.
CHANGEABLE = frozenset(
    {
        "task",
        "schedule",
        "timezone",
        "args",
        "kwargs",
        "options",
        "enabled",
        "no_overlap",
        "one_off",
        "starting_deadline",
    }
)


class TickState(str, Enum):
    """What became of a tick."""

    #: Its message is about to be published to a broker that is elsewhere: published or not, nobody knows.
    SENDING = "sending"
    SENT = "sent"
    #: Nothing was sent: the last one's task still runs, say, or its message could not be made.
    SKIPPED = "skipped"


@dataclass(slots=True)
class Tick:
    """One due time of one entry.

    Args:
        name: of the entry.
        due_at: the due time, in milliseconds.
        task_id: Celery's id of the task that it became.
        state: what became of it.
        sent_at: when, by the store's clock; filled in by the store.
        term: number of the term under which; filled in by the store.
    """

    name: str
    due_at: int
    task_id: str = ""
    state: TickState = TickState.SENT
    sent_at: int = 0
    term: int = 0


@dataclass(slots=True)
class Progress:
    """How a tick changes its entry.

    Args:
        seen_base: the entry's ``base_at`` as the leader knows it; when it is another by now, nothing is done.
        base_at: the new one.
        disable: the entry has done its work.
        requested_at: the request that this answers; it is cleared if it is still that one. A disabled entry is sent on
            request too.
        source: FOREIGN: the entry is made if it is not there. Else one that is gone or disabled is not sent.
    """

    seen_base: int | None
    base_at: int | None
    disable: bool = False
    requested_at: int | None = None
    source: Source = Source.ADDED


class Schedules(Protocol):
    """Schedules by key. Every method is one transaction and may raise ``StoreUnavailable``.

    What takes a term is fenced: in the same transaction it is checked, and kept so until the commit, that the term is
    its holder's, has this number, and is not over by the store's clock. Otherwise ``NotLeader`` is raised and nothing
    done.
    """

    def entries(self, key: str) -> list[Entry]:
        """All entries of a schedule, by name.

        Rows may be written by hand: what is missing or makes no sense in one counts as not said.
        """

    def add(self, key: str, entry: Entry, *, replace: bool = False) -> bool:
        """Store an ADDED entry; returns whether it did: not when there is one of this name and ``replace`` is off.

        A new one is stored with the state that it has (``base_at``, say). With ``replace`` the definition of an ADDED
        one is replaced and its state kept, but as in :meth:`change`.

        Raises:
            ConfigError: the name or another field is out of bounds, or the name is an entry's that is not ADDED.
        """

    def change(self, key: str, name: str, **changes: object) -> bool:
        """Change an entry's definition (see ``CHANGEABLE``); returns whether it is there.

        A change of ``enabled``, ``schedule`` or ``timezone`` to another value makes ``base_at`` unknown: the entry
        counts from when the leader sees it, so that what was due before is not sent.

        Raises:
            ConfigError: an unknown field, a value that is out of bounds, or a field that is not ``enabled`` of an entry
                that is not ADDED.
        """

    def remove(self, key: str, name: str) -> bool:
        """Delete an entry; returns whether it was there. Its ticks stay.

        Raises:
            ConfigError: it is of the CODE, which would bring it back.
        """

    def request(self, key: str, name: str) -> bool:
        """Ask for one tick now, beside the entry's times; returns whether the entry is there.

        Each request has a ``requested_at`` of its own; one that was not answered gives way to the next.
        """

    def sync(self, term: Term, entries: Sequence[Entry]) -> None:
        """Let the CODE entries of the term's key be these. Fenced.

        New ones are stored with the state that they have. Of known ones the definition is replaced, but for
        ``enabled``, and ``base_at`` becomes unknown when schedule or timezone have changed. Those that are not among
        them are deleted, with their state. An ADDED entry of the same name is left alone, and is the one that counts; a
        FOREIGN one becomes the CODE's and keeps its state.

        Raises:
            NotLeader: see above.
            ConfigError: a name is out of bounds. Nothing is stored.
        """

    def tick(self, term: Term, tick: Tick, progress: Progress, tasks: Sequence[NewTask] = ()) -> bool:
        """Store a tick, what it changes in its entry, and its messages, all in one transaction. Fenced.

        The entry's ``last_run_at``, ``last_due_at`` and ``total_run_count`` follow unless the tick is SKIPPED.
        Returns whether it was stored. Not when the entry is gone, is disabled (unless on request), or has another
        base than was seen: then nothing is changed. Nor when the tick (entry, due time) is there already: then only
        the base (and the request) is, and no task is enqueued.

        Args:
            term: under which it is sent; names the schedule.
            tick: with state, due time and task id.
            progress: see there.
            tasks: executions to enqueue, where the broker is this database.

        Raises:
            NotLeader: see above.
            TaskExists: a task has a unique key that is taken. Nothing was stored.
            PayloadTooLarge: a task's payload is. Nothing was stored.
            ConfigError: a name is out of bounds, or there are tasks and the store has no queues (Redis).
        """

    def rebase(self, term: Term, name: str, seen_base: int | None, base_at: int | None) -> bool:
        """Change an entry's ``base_at`` if it is what was seen. Fenced. Returns whether it was.

        ``None`` makes it unknown again.
        """

    def sent(self, key: str, name: str, due_at: int, state: TickState = TickState.SENT) -> None:
        """A tick that was SENDING has been sent, now, or it has become clear that it is not (SKIPPED).

        Not fenced: whoever has sent it says so. Idempotent.
        """

    def unsent(self, key: str) -> list[Tick]:
        """Ticks that are SENDING, in the order of their due times."""

    def ticks(self, key: str, names: Collection[str] = (), limit: int = 100) -> list[Tick]:
        """The newest ticks, of some entries or of all, newest due time first."""

    def sweep(self, keep: float, limit: int = 1000) -> int:
        """Delete up to ``limit`` ticks that are not SENDING and were sent more than ``keep`` seconds ago; how many."""
