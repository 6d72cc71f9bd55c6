"""Schedules: entries, ticks, and the term that fences what a leader writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import ConfigError, NotLeader, PayloadTooLarge, StoreUnavailable, TaskExists
from kombu_taskgate.core.model import NewTask, StateChange
from kombu_taskgate.core.schedules import CHANGEABLE, KEEP_TICKS, Entry, Progress, Schedules, Source, Tick, TickState
from kombu_taskgate.core.terms import LeaseStore, Term
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.faults import FailAt
from kombu_taskgate.testing.threads import errors_of, together

from .base import QUEUE, Cases, put, take
from .store import SQL, Store, require

if TYPE_CHECKING:
    from kombu_taskgate.core.sql import SqlBroker

KEY = "beat"
ADDED, CODE, FOREIGN = Source.ADDED, Source.CODE, Source.FOREIGN
SENDING, SENT, SKIPPED = TickState.SENDING, TickState.SENT, TickState.SKIPPED
ROUNDS = 50
#: A value for each field of a definition, none of them its default.
DEFINITION: dict[str, Any] = {
    "task": "tasks.other",
    "schedule": "crontab 0 9 * * 1-5",
    "timezone": "Europe/Berlin",
    "args": '["\N{SNOWMAN}"]',
    "kwargs": '{"a": 1}',
    "options": '{"queue": "q"}',
    "enabled": False,
    "no_overlap": True,
    "one_off": True,
    "starting_deadline": 2.5,
}


def new(name: str = "one", source: Source = ADDED, **values: Any) -> Entry:
    """An entry to be stored."""
    return Entry(name, source, **{"task": "tasks.one", "schedule": "interval 30", **values})


def the(schedules: Schedules, name: str = "one", key: str = KEY) -> Entry:
    """An entry that must be there."""
    return {entry.name: entry for entry in schedules.entries(key)}[name]


def lead(terms: LeaseStore, holder: str = "a", key: str = KEY, ttl: float = 10.0) -> Term:
    """Begin or renew a term that must be free or the holder's."""
    term = terms.try_acquire(key, holder, ttl)
    assert term is not None
    return term


def picture(schedules: Schedules) -> tuple[list[Entry], list[Tick]]:
    """All that is stored."""
    return schedules.entries(KEY), schedules.ticks(KEY, limit=10_000)


class ScheduleStoreCases:
    """Cases of any :class:`~kombu_taskgate.core.schedules.Schedules`, under a clock that the test moves.

    The fixture ``open_schedules`` opens terms and schedules on the same data as other processes would, ``clock`` is
    their clock, and ``delete_term`` deletes what is stored of a term.
    """

    @pytest.fixture
    def opened(self, open_schedules: Callable[[], tuple[LeaseStore, Schedules]]) -> tuple[LeaseStore, Schedules]:
        return open_schedules()

    @pytest.fixture
    def leases(self, opened: tuple[LeaseStore, Schedules]) -> LeaseStore:
        return opened[0]

    @pytest.fixture
    def schedules(self, opened: tuple[LeaseStore, Schedules]) -> Schedules:
        return opened[1]

    @pytest.fixture
    def term(self, leases: LeaseStore) -> Term:
        return lead(leases)

    # -- entries -------------------------------------------------------------------------------------

    def test_entries_round_trip(self, schedules: Schedules, clock: FakeClock) -> None:
        """An entry comes back as it was stored, with its state; the instants of its definition are the store's."""
        now = clock.now_ms()
        whole = new("whole", **DEFINITION, base_at=1, last_run_at=2, last_due_at=3, total_run_count=4, requested_at=5)
        assert {field.name for field in fields(Entry)} == {
            *DEFINITION, "name", "source", "base_at", "last_run_at", "last_due_at", "total_run_count", "requested_at",
            "created_at", "changed_at",
        }  # fmt: skip
        for entry in (whole, new("plain", created_at=7, changed_at=7)):
            assert schedules.add(KEY, entry) is True
        assert schedules.entries(KEY) == [
            new("plain", created_at=now, changed_at=now),
            replace(whole, created_at=now, changed_at=now),
        ]

    def test_entries_are_by_name_and_key(self, schedules: Schedules) -> None:
        """By name, whatever case and language it is in; each schedule has its own."""
        names = ["A", "Z", "a", "a ", "aa", "e", "z", "\u00e9", "\N{GRINNING FACE}" * 255]
        for name in reversed(names):
            assert schedules.add(KEY, new(name))
        assert schedules.add("other", new("a", task="tasks.other"))
        assert [entry.name for entry in schedules.entries(KEY)] == names
        assert [entry.task for entry in schedules.entries("other")] == ["tasks.other"]
        assert schedules.entries("BEAT") == []

    def test_entries_are_shared(self, open_schedules: Callable[[], tuple[LeaseStore, Schedules]]) -> None:
        """Whoever opens the same data sees them; changing what was read changes nothing."""
        open_schedules()[1].add(KEY, new())
        other = open_schedules()[1]
        other.entries(KEY)[0].task = "changed"
        assert the(other).task == "tasks.one"

    def test_add_a_known_name(self, schedules: Schedules, clock: FakeClock) -> None:
        """It stays as it is, unless it is to be replaced: then its definition is, and its state stays."""
        schedules.add(KEY, new(base_at=1, total_run_count=4, last_run_at=2))
        before, now = the(schedules), clock.advance(1)
        assert schedules.add(KEY, new(task="tasks.other")) is False
        assert the(schedules) == before
        assert schedules.add(KEY, new(task="tasks.other", args="[1]", base_at=9), replace=True) is True
        assert the(schedules) == replace(before, task="tasks.other", args="[1]", changed_at=now)
        clock.advance(1)
        schedules.add(KEY, new(task="tasks.other", args="[1]"), replace=True)
        assert the(schedules).changed_at == now, "it is the same"
        assert schedules.add(KEY, new(schedule="interval 60"), replace=True)
        assert (the(schedules).base_at, the(schedules).total_run_count) == (None, 4)

    def test_add_refuses(self, schedules: Schedules, term: Term) -> None:
        """What can't be stored, what is not ADDED, and the name of what is not ADDED. Nothing is changed."""
        schedules.sync(term, [new("code", CODE)])
        before = picture(schedules)
        wrong = [
            new(""), new("x" * 256), new("a\0b"), new(task=""), new(task="x" * 256), new(schedule=""),
            new(schedule="x" * 256), new(timezone="x" * 256), new(args="\0"), new(kwargs="\ud800"), new(options=None),
            new(enabled=1), new(one_off=None), new(starting_deadline=-1.0), new(starting_deadline=float("nan")),
            new(starting_deadline=float("inf")), new(starting_deadline="1"), new("two", CODE), new("two", FOREIGN),
            new("code"),
        ]  # fmt: skip
        for entry in wrong:
            for again in (False, True):
                with pytest.raises(ConfigError, match=r"name|schedule entry"):
                    schedules.add(KEY, entry, replace=again)
        for key in ("", "x" * 256):
            with pytest.raises(ConfigError):
                schedules.add(key, new())
        assert picture(schedules) == before

    def test_change(self, schedules: Schedules, clock: FakeClock) -> None:
        """One field after the other; the base is unknown after what changes the times, and after nothing else."""
        assert frozenset(DEFINITION) == CHANGEABLE
        assert schedules.change(KEY, "one", enabled=False) is False
        schedules.add("other", new())
        for field, value in DEFINITION.items():
            schedules.remove(KEY, "one")
            schedules.add(KEY, new(base_at=1, total_run_count=4, requested_at=3))
            before, now = the(schedules), clock.advance(1)
            same = {field: getattr(before, field)}
            assert schedules.change(KEY, "one", **same) is True
            assert the(schedules) == before
            assert schedules.change(KEY, "one", **{field: value}) is True
            base = None if field in {"enabled", "schedule", "timezone"} else 1
            assert the(schedules) == replace(before, **{field: value}, base_at=base, changed_at=now), field
        assert the(schedules, key="other").enabled is True
        assert schedules.change(KEY, "one", **DEFINITION)
        assert {field: getattr(the(schedules), field) for field in DEFINITION} == DEFINITION

    def test_change_refuses(self, schedules: Schedules, term: Term) -> None:
        """An unknown field, a wrong value, and of what is not ADDED all but whether it is enabled."""
        schedules.sync(term, [new("code", CODE)])
        schedules.tick(term, Tick("foreign", 1), Progress(None, 1, source=FOREIGN))
        schedules.add(KEY, new())
        before = picture(schedules)
        for changes in (
            {"last_run_at": 1},
            {"base_at": 1},
            {"source": CODE},
            {"task": ""},
            {"enabled": "no"},
            {"args": 1},
        ):
            for name in ("one", "nobody"):
                with pytest.raises(ConfigError, match=next(iter(changes))):
                    schedules.change(KEY, name, **changes)
        for name in ("code", "foreign"):
            with pytest.raises(ConfigError, match="task"):
                schedules.change(KEY, name, enabled=False, task="tasks.other")
        assert picture(schedules) == before
        for name in ("code", "foreign"):
            assert schedules.change(KEY, name, enabled=False) is True
            assert (the(schedules, name).enabled, the(schedules, name).base_at) == (False, None)

    def test_remove(self, schedules: Schedules, term: Term) -> None:
        """What is of the CODE would come back; all else can be removed, and its ticks stay."""
        assert schedules.remove(KEY, "one") is False
        schedules.sync(term, [new("code", CODE)])
        schedules.tick(term, Tick("foreign", 1), Progress(None, 1, source=FOREIGN))
        schedules.add(KEY, new())
        schedules.add("other", new())
        schedules.tick(term, Tick("one", 1), Progress(None, 1))
        with pytest.raises(ConfigError, match="code"):
            schedules.remove(KEY, "code")
        assert [schedules.remove(KEY, name) for name in ("one", "foreign", "one")] == [True, True, False]
        assert [entry.name for entry in schedules.entries(KEY)] == ["code"]
        assert {tick.name for tick in schedules.ticks(KEY)} == {"one", "foreign"}
        assert the(schedules, key="other").name == "one"

    def test_request(self, schedules: Schedules, clock: FakeClock) -> None:
        """A request is an instant that no other request of the entry has."""
        assert schedules.request(KEY, "one") is False
        schedules.add(KEY, new())
        assert schedules.request(KEY, "one") is True
        first = the(schedules)
        assert first.requested_at == clock.now_ms()
        assert schedules.request(KEY, "one")
        assert the(schedules).requested_at == clock.now_ms() + 1
        clock.advance(5)
        schedules.request(KEY, "one")
        assert the(schedules) == replace(first, requested_at=clock.now_ms())

    # -- what the code says --------------------------------------------------------------------------

    def test_sync(self, schedules: Schedules, term: Term, clock: FakeClock) -> None:
        """The CODE entries are those that are given, and what is known of them stays."""
        start = clock.now_ms()
        state: dict[str, Any] = {"base_at": 1, "last_run_at": 2, "last_due_at": 3, "total_run_count": 4}
        schedules.sync(term, [new(name, **state) for name in ("same", "task", "schedule", "zone", "paused", "gone")])
        before = {entry.name: entry for entry in schedules.entries(KEY)}
        assert before["same"] == new("same", CODE, **state, created_at=start, changed_at=start)
        schedules.change(KEY, "paused", enabled=False)
        now = clock.advance(1)
        schedules.sync(
            term,
            [
                new("same"),
                new("task", task="tasks.other", args="[1]"),
                new("schedule", schedule="interval 60"),
                new("zone", timezone="UTC"),
                new("paused", base_at=8),
                new("fresh"),
            ],
        )
        found = {entry.name: entry for entry in schedules.entries(KEY)}
        assert set(found) == {"same", "task", "schedule", "zone", "paused", "fresh"}
        assert found["same"] == before["same"]
        assert found["task"] == replace(before["task"], task="tasks.other", args="[1]", changed_at=now)
        schedule = replace(before["schedule"], schedule="interval 60", base_at=None, changed_at=now)
        assert found["schedule"] == schedule
        assert found["zone"] == replace(before["zone"], timezone="UTC", base_at=None, changed_at=now)
        assert (found["paused"].enabled, found["paused"].base_at) == (False, None)
        assert found["fresh"] == new("fresh", CODE, created_at=now, changed_at=now)
        schedules.sync(term, [])
        assert schedules.entries(KEY) == []

    def test_sync_and_others(self, schedules: Schedules, leases: LeaseStore, term: Term) -> None:
        """An ADDED entry is left alone; a FOREIGN one becomes the code's and keeps its state; other keys' stay."""
        schedules.add(KEY, new(task="tasks.added", base_at=1))
        schedules.tick(term, Tick("foreign", 1), Progress(None, 1, source=FOREIGN))
        schedules.tick(term, Tick("away", 1), Progress(None, 1, source=FOREIGN))
        schedules.sync(lead(leases, key="other"), [new("code")])
        added, foreign, away = the(schedules), the(schedules, "foreign"), the(schedules, "away")
        schedules.sync(term, [new("one"), new("foreign", task="tasks.foreign")])
        assert (the(schedules), the(schedules, "away")) == (added, away)
        assert the(schedules, "foreign") == replace(
            foreign, source=CODE, task="tasks.foreign", schedule="interval 30", base_at=None
        )
        schedules.sync(term, [])
        assert [entry.name for entry in schedules.entries(KEY)] == ["away", "one"]
        assert the(schedules, "code", "other").source is CODE

    def test_sync_takes_long_texts(self, schedules: Schedules, term: Term) -> None:
        """What is only shown is made to fit; what can't be a name is refused, and nothing is stored."""
        schedules.sync(term, [new("long", schedule="x" * 300 + "\0", timezone="y" * 256), new("odd", schedule="a\0")])
        found = the(schedules, "long")
        assert (found.schedule, found.timezone) == ("x" * 255, "y" * 255)
        for wrong in (new(""), new("x" * 256), new(task="x" * 256)):
            with pytest.raises(ConfigError):
                schedules.sync(term, [new("other"), wrong])
        assert [entry.name for entry in schedules.entries(KEY)] == ["long", "odd"]

    def test_thousand_entries(self, schedules: Schedules, term: Term) -> None:
        """More than one statement holds: stored, changed and deleted at once."""
        many = [new(f"entry {number:04}") for number in range(1000)]
        schedules.sync(term, many)
        assert [entry.name for entry in schedules.entries(KEY)] == [entry.name for entry in many]
        schedules.sync(term, [replace(entry, schedule="interval 5") for entry in many[:500]])
        assert {entry.schedule for entry in schedules.entries(KEY)} == {"interval 5"}
        for entry in many[:500:100]:
            assert schedules.tick(term, Tick(entry.name, 1), Progress(None, 1))
        names = [entry.name for entry in many]
        assert [tick.name for tick in schedules.ticks(KEY, names)] == names[:500:100]
        schedules.sync(term, [])
        assert schedules.entries(KEY) == []

    # -- ticks ---------------------------------------------------------------------------------------

    def test_tick(self, schedules: Schedules, term: Term, clock: FakeClock) -> None:
        """A tick is stored with time and term, and its entry follows."""
        schedules.add(KEY, new(base_at=100))
        schedules.add(KEY, new("two", base_at=100))
        before, now = the(schedules), clock.advance(1)
        assert schedules.tick(term, Tick("one", 200, "id", SENT, sent_at=1, term=2), Progress(100, 200)) is True
        assert the(schedules) == replace(before, base_at=200, last_run_at=now, last_due_at=200, total_run_count=1)
        assert schedules.ticks(KEY) == [Tick("one", 200, "id", SENT, now, term.number)]
        assert the(schedules, "two").base_at == 100
        assert schedules.tick(term, Tick("one", 300, "next"), Progress(200, 350)) is True
        assert (the(schedules).base_at, the(schedules).last_due_at, the(schedules).total_run_count) == (350, 300, 2)

    def test_tick_of_another_base(self, schedules: Schedules, term: Term) -> None:
        """Whoever has seen another base sends nothing and changes nothing."""
        schedules.add(KEY, new(base_at=100))
        schedules.add(KEY, new("unknown"))
        before = picture(schedules)
        for name, seen in (("one", None), ("one", 99), ("unknown", 100)):
            assert schedules.tick(term, Tick(name, 200), Progress(seen, 200)) is False
        assert picture(schedules) == before
        assert schedules.tick(term, Tick("unknown", 200), Progress(None, 200)) is True
        assert the(schedules, "unknown").base_at == 200

    def test_repeated_tick(self, schedules: Schedules, term: Term, clock: FakeClock) -> None:
        """A due time is sent once; seen again it moves the base and answers the request, and nothing else."""
        schedules.add(KEY, new())
        schedules.tick(term, Tick("one", 200, "first"), Progress(None, 200))
        schedules.change(KEY, "one", schedule="interval 5")
        schedules.request(KEY, "one")
        before, ticks = the(schedules), schedules.ticks(KEY)
        clock.advance(1)
        again = Progress(None, 250, disable=True, requested_at=before.requested_at)
        assert schedules.tick(term, Tick("one", 200, "second", SENDING), again) is False
        assert the(schedules) == replace(before, base_at=250, requested_at=None)
        assert schedules.ticks(KEY) == ticks

    def test_tick_of_what_is_gone_or_disabled(self, schedules: Schedules, term: Term) -> None:
        """It is not sent, and the entry does not come back."""
        schedules.add(KEY, new(enabled=False))
        before = picture(schedules)
        for source in (ADDED, CODE, FOREIGN):
            assert schedules.tick(term, Tick("one", 200), Progress(None, 200, source=source)) is False
        for source in (ADDED, CODE):
            assert schedules.tick(term, Tick("gone", 200), Progress(None, 200, source=source)) is False
        assert picture(schedules) == before

    def test_foreign_tick(self, schedules: Schedules, term: Term, clock: FakeClock) -> None:
        """The entry of another scheduler is made by its first tick; the others need the base that was seen."""
        now = clock.now_ms()
        foreign = partial(Progress, source=FOREIGN)
        assert schedules.tick(term, Tick("one", 200), foreign(150, 200)) is True
        expected = Entry("one", FOREIGN, created_at=now, changed_at=now)
        assert the(schedules) == replace(expected, base_at=200, last_run_at=now, last_due_at=200, total_run_count=1)
        assert schedules.tick(term, Tick("one", 300), foreign(150, 300)) is False
        assert schedules.tick(term, Tick("one", 300), foreign(200, 300)) is True
        assert the(schedules).total_run_count == 2
        schedules.remove(KEY, "one")
        assert schedules.tick(term, Tick("one", 300), foreign(300, 310)) is False
        assert the(schedules) == replace(expected, base_at=310), "its ticks have stayed"

    def test_one_off(self, schedules: Schedules, term: Term) -> None:
        """An entry that has done its work is disabled by the tick, and sends no other."""
        schedules.add(KEY, new(one_off=True))
        assert schedules.tick(term, Tick("one", 200), Progress(None, 200, disable=True)) is True
        assert (the(schedules).enabled, the(schedules).base_at, the(schedules).total_run_count) == (False, 200, 1)
        assert schedules.tick(term, Tick("one", 300), Progress(200, 300)) is False

    def test_request_is_answered(self, schedules: Schedules, term: Term) -> None:
        """A tick answers the request that it names; a newer one stays."""
        schedules.add(KEY, new())
        schedules.request(KEY, "one")
        first = the(schedules).requested_at
        schedules.request(KEY, "one")
        second = the(schedules).requested_at
        assert schedules.tick(term, Tick("one", 1), Progress(None, 1))
        assert the(schedules).requested_at == second
        assert schedules.tick(term, Tick("one", 2), Progress(1, 2, requested_at=first))
        assert the(schedules).requested_at == second
        assert schedules.tick(term, Tick("one", 3), Progress(2, 2, requested_at=second))
        assert the(schedules).requested_at is None

    def test_request_of_a_disabled_entry(self, schedules: Schedules, term: Term) -> None:
        """It is sent on request, and stays disabled."""
        schedules.add(KEY, new(enabled=False))
        schedules.request(KEY, "one")
        asked = the(schedules).requested_at
        assert schedules.tick(term, Tick("one", 7), Progress(None, None)) is False
        assert schedules.tick(term, Tick("one", 7), Progress(None, None, requested_at=asked)) is True
        entry = the(schedules)
        assert (entry.enabled, entry.base_at, entry.last_due_at, entry.requested_at) == (False, None, 7, None)

    def test_skipped_tick(self, schedules: Schedules, term: Term, clock: FakeClock) -> None:
        """It is stored and moves the base, but counts as no run."""
        schedules.add(KEY, new(base_at=100, last_run_at=1, last_due_at=2, total_run_count=3))
        before = the(schedules)
        assert schedules.tick(term, Tick("one", 200, "", SKIPPED), Progress(100, 200)) is True
        assert the(schedules) == replace(before, base_at=200)
        assert schedules.ticks(KEY) == [Tick("one", 200, "", SKIPPED, clock.now_ms(), term.number)]

    def test_tick_refuses(self, schedules: Schedules, term: Term) -> None:
        """A name that can't be stored."""
        for tick in (Tick("", 1), Tick("x" * 256, 1), Tick("one", 1, "x" * 256)):
            with pytest.raises(ConfigError):
                schedules.tick(term, tick, Progress(None, 1, source=FOREIGN))
        assert picture(schedules) == ([], [])

    def test_rebase(self, schedules: Schedules, term: Term) -> None:
        """The base becomes another if it is what was seen, and nothing else does."""
        schedules.add(KEY, new(total_run_count=3))
        before = the(schedules)
        assert schedules.rebase(term, "gone", None, 5) is False
        assert schedules.rebase(term, "one", 1, 5) is False
        assert the(schedules) == before
        assert schedules.rebase(term, "one", None, 5) is True
        assert the(schedules) == replace(before, base_at=5)
        assert schedules.rebase(term, "one", None, 6) is False
        assert schedules.rebase(term, "one", 5, 6) is True
        assert the(schedules).base_at == 6
        assert schedules.rebase(term, "one", 5, None) is False
        assert schedules.rebase(term, "one", 6, None) is True
        assert the(schedules) == before

    def test_sending(self, schedules: Schedules, term: Term, clock: FakeClock) -> None:
        """What is about to be sent is told until somebody says that it was; in the order of the due times."""
        for name in ("b", "a", "c"):
            schedules.add(KEY, new(name))
        for name, due_at in (("b", 300), ("a", 300), ("c", 100)):
            assert schedules.tick(term, Tick(name, due_at, name, SENDING), Progress(None, due_at))
        schedules.tick(term, Tick("a", 50, "", SKIPPED), Progress(300, 300))
        schedules.tick(term, Tick("a", 60), Progress(300, 300))
        assert [(tick.name, tick.state) for tick in schedules.unsent(KEY)] == [(name, SENDING) for name in "cab"]
        assert schedules.unsent("other") == []
        now = clock.advance(5)
        for name, due_at in (("c", 100), ("c", 101), ("gone", 1), ("a", 50)):
            schedules.sent(KEY, name, due_at)
        schedules.sent("other", "a", 300)
        assert [tick.name for tick in schedules.unsent(KEY)] == ["a", "b"]
        assert schedules.ticks(KEY, ["c"]) == [Tick("c", 100, "c", SENT, now, term.number)]
        assert [tick.state for tick in schedules.ticks(KEY, ["a"])] == [SENDING, SENT, SKIPPED]
        clock.advance(5)
        schedules.sent(KEY, "c", 100)
        schedules.sent(KEY, "c", 100, SKIPPED)
        assert schedules.ticks(KEY, ["c"]) == [Tick("c", 100, "c", SENT, now, term.number)], "it has been sent already"
        schedules.sent(KEY, "a", 300, SKIPPED)
        assert [tick.name for tick in schedules.unsent(KEY)] == ["b"]
        assert [tick.state for tick in schedules.ticks(KEY, ["a"])] == [SKIPPED, SENT, SKIPPED]

    def test_newest_ticks(self, schedules: Schedules, leases: LeaseStore, term: Term) -> None:
        """Newest due time first, of all or of some; so many as are wanted."""
        for name in ("a", "b", "c"):
            schedules.add(KEY, new(name))
        for due_at, name in ((5, "a"), (9, "b"), (7, "a"), (6, "c"), (-3, "b")):
            base = the(schedules, name).base_at
            assert schedules.tick(term, Tick(name, due_at), Progress(base, due_at))
        other = lead(leases, key="other")
        schedules.tick(other, Tick("a", 8), Progress(None, 8, source=FOREIGN))

        def seen(names: Sequence[str] = (), **options: int) -> list[tuple[str, int]]:
            return [(tick.name, tick.due_at) for tick in schedules.ticks(KEY, names, **options)]

        assert seen() == [("b", 9), ("a", 7), ("c", 6), ("a", 5), ("b", -3)]
        assert seen(limit=2) == [("b", 9), ("a", 7)]
        assert seen(["c", "a", "a", "nobody"]) == [("a", 7), ("c", 6), ("a", 5)]
        assert seen([f"entry {number}" for number in range(1000)] + ["a", "b"], limit=3) == [
            ("b", 9), ("a", 7), ("a", 5),
        ]  # fmt: skip
        assert (seen(limit=0), seen(["a"], limit=0), seen(["nobody"])) == ([], [], [])
        assert [tick.due_at for tick in schedules.ticks("other")] == [8]

    def test_sweep_of_ticks(self, schedules: Schedules, leases: LeaseStore, term: Term, clock: FakeClock) -> None:
        """Ticks go when they were sent long enough ago, in batches; what is being sent stays."""
        schedules.add(KEY, new())
        for due_at in range(5):
            assert schedules.tick(term, Tick("one", due_at), Progress(due_at - 1 if due_at else None, due_at))
        schedules.tick(term, Tick("one", 5, "", SENDING), Progress(4, 5))
        schedules.tick(lead(leases, key="other"), Tick("x", 1, "", SKIPPED), Progress(None, 1, source=FOREIGN))
        clock.advance(5)
        schedules.tick(lead(leases), Tick("one", 6), Progress(5, 6))
        clock.advance(5)
        assert schedules.sweep(10) == 0
        clock.advance(0.001)
        assert schedules.sweep(10, limit=4) == 4
        assert [schedules.sweep(10), schedules.sweep(10)] == [2, 0]
        assert [(tick.due_at, tick.state) for tick in schedules.ticks(KEY)] == [(6, SENT), (5, SENDING)]
        assert schedules.ticks("other") == []
        schedules.sent(KEY, "one", 5)
        clock.advance(10.001)
        assert schedules.sweep(10) == 2
        assert the(schedules).base_at == 6
        assert schedules.tick(lead(leases), Tick("one", 5), Progress(6, 7)) is True, "nobody remembers it"

    # -- the fence -----------------------------------------------------------------------------------

    def _refused(self, schedules: Schedules, term: Term) -> None:
        """A term under which nothing can be written."""
        base = the(schedules).base_at
        before = picture(schedules)
        calls: list[Callable[[], object]] = [
            partial(schedules.tick, term, Tick("one", 999), Progress(base, 999)),
            partial(schedules.tick, term, Tick("foreign", 999), Progress(None, 999, source=FOREIGN)),
            partial(schedules.sync, term, [new("code")]),
            partial(schedules.rebase, term, "one", base, 999),
        ]
        for call in calls:
            with pytest.raises(NotLeader, match=f"{term.holder}.*{term.key}.*{term.number}"):
                call()
        assert picture(schedules) == before

    def test_only_the_leader_writes(self, schedules: Schedules, leases: LeaseStore, clock: FakeClock) -> None:
        """Another's name, another number, another key, a term that is over or another's by now: nothing is written."""
        schedules.add(KEY, new(base_at=1))
        never = Term(KEY, "a", 1, 0, 0, clock.now_ms() + 10**6, 0)
        self._refused(schedules, never)
        term = lead(leases)
        for wrong in (
            replace(term, holder="b"),
            replace(term, holder="A"),
            replace(term, number=term.number - 1),
            replace(term, number=term.number + 1),
        ):
            self._refused(schedules, wrong)
        schedules.add("other", new())
        with pytest.raises(NotLeader):
            schedules.rebase(replace(term, key="other"), "one", None, 1)
        assert the(schedules, key="other").base_at is None
        clock.advance(9.999)
        assert schedules.rebase(term, "one", 1, 2) is True
        clock.advance(0.001)
        self._refused(schedules, term)
        newer = lead(leases)
        self._refused(schedules, term)
        assert schedules.rebase(newer, "one", 2, 3) is True
        assert leases.release(KEY, "a")
        self._refused(schedules, newer)
        clock.advance(1)
        assert schedules.rebase(lead(leases, "b"), "one", 3, 4) is True
        self._refused(schedules, newer)

    def test_renewed_term_writes(self, schedules: Schedules, leases: LeaseStore, clock: FakeClock) -> None:
        """What counts is what is stored of the term, not what its holder was told at the time."""
        schedules.add(KEY, new())
        term = lead(leases)
        clock.advance(6)
        lead(leases)
        clock.advance(6)
        assert term.until < clock.now_ms()
        assert schedules.tick(term, Tick("one", 1), Progress(None, 1)) is True

    def test_writing_under_a_deleted_term(
        self, schedules: Schedules, leases: LeaseStore, term: Term, delete_term: Callable[[str], None]
    ) -> None:
        """Who is not in the table any more does not lead."""
        schedules.add(KEY, new())
        delete_term(KEY)
        self._refused(schedules, term)

    # -- races ---------------------------------------------------------------------------------------

    def test_one_tick_at_once(
        self, open_schedules: Callable[[], tuple[LeaseStore, Schedules]], clock: FakeClock
    ) -> None:
        """Of two that send the same tick one does, whether both believe to lead or one of them does."""
        (leases, schedules), (_, other) = open_schedules(), open_schedules()
        schedules.add(KEY, new())
        for number in range(ROUNDS):
            old = lead(leases, f"a{number}")
            new_one = old
            if number % 2:
                leases.release(KEY, old.holder)
                clock.advance(0.001)
                new_one = lead(leases, f"b{number}")
            base = the(schedules).base_at
            calls = [
                partial(store.tick, term, Tick("one", number, term.holder), Progress(base, number))
                for store, term in ((schedules, old), (other, new_one))
            ]
            outcomes = together(calls)
            assert [one for one in errors_of(outcomes) if not isinstance(one, NotLeader)] == []
            assert outcomes.count(True) == 1
            assert the(schedules).total_run_count == number + 1
            leases.release(KEY, new_one.holder)
            clock.advance(0.001)
        assert [tick.due_at for tick in schedules.ticks(KEY)] == [*reversed(range(ROUNDS))]

    def test_changes_at_once(
        self, open_schedules: Callable[[], tuple[LeaseStore, Schedules]], clock: FakeClock
    ) -> None:
        """Ticks, changes, additions and syncs at once hinder nobody, and none is lost."""
        opened = [open_schedules() for _ in range(4)]
        term = lead(opened[0][0])
        for number in range(5):
            opened[0][1].add(KEY, new(f"entry {number}"))

        def tick() -> None:
            for number in range(5):
                opened[0][1].tick(term, Tick(f"entry {number}", 1), Progress(None, 1))

        def change() -> None:
            for number in reversed(range(5)):
                opened[1][1].change(KEY, f"entry {number}", args="[1]")
                opened[1][1].request(KEY, f"entry {number}")

        def add() -> int:
            return sum(opened[2][1].add(KEY, new(f"both {number}")) for number in range(5))

        def sync() -> None:
            opened[3][1].sync(term, [new(f"code {number}") for number in range(5)])

        outcomes = together([tick, change, add, add, sync])
        assert errors_of(outcomes) == []
        assert outcomes[2] + outcomes[3] == 5
        entries = {entry.name: entry for entry in opened[0][1].entries(KEY)}
        assert len(entries) == 15
        for number in range(5):
            entry = entries[f"entry {number}"]
            assert (entry.base_at, entry.args, entry.requested_at) == (1, "[1]", clock.now_ms())


class ScheduleCases(ScheduleStoreCases, Cases):
    """schedules."""

    @pytest.fixture
    def open_schedules(self, store: Store, clock: FakeClock) -> Callable[[], tuple[LeaseStore, Schedules]]:
        def open_schedules() -> tuple[LeaseStore, Schedules]:
            broker = store.open(clock=clock)
            return broker.terms, broker.schedules

        return open_schedules

    @pytest.fixture
    def delete_term(self, store: Store, broker: Broker) -> Callable[[str], None]:
        require(store, SQL)
        database, table = broker.database, broker.tables.terms  # type: ignore[attr-defined]  # it is one of SQL

        def delete(key: str) -> None:
            database.write(lambda conn: conn.execute(table.delete().where(table.c.key_ == key)))

        return delete

    def test_tick_enqueues(self, store: Store, clock: FakeClock) -> None:
        """The executions of a tick are there with it, and told; one that is not stored has none."""
        told: list[StateChange] = []
        broker = store.open(clock=clock, notify=told.append)
        schedules, term = broker.schedules, lead(broker.terms)
        schedules.add(KEY, new())
        tasks = [NewTask(QUEUE, b"body", delay=5), NewTask(QUEUE, b"now", key="k")]
        assert schedules.tick(term, Tick("one", 1), Progress(None, 1), tasks) is True
        assert len(told) == 2
        assert (take(broker).payload, broker.dequeue([QUEUE])) == (b"now", [])
        more = [NewTask(QUEUE)]
        assert schedules.tick(term, Tick("one", 1), Progress(1, 1), more) is False
        assert schedules.tick(term, Tick("one", 2), Progress(None, 2), more) is False
        assert schedules.tick(term, Tick("gone", 2), Progress(None, 2), more) is False
        with pytest.raises(NotLeader):
            schedules.tick(replace(term, number=1), Tick("one", 2), Progress(1, 2), more)
        clock.advance(5)
        assert (take(broker).payload, broker.dequeue([QUEUE])) == (b"body", [])

    def test_tick_wakes_who_waits(self, store: Store) -> None:
        """A consumer in another thread does not have to look for it."""
        broker = store.open(poll_min=60.0, poll_max=60.0)
        schedules, term = broker.schedules, lead(broker.terms, ttl=60.0)
        schedules.add(KEY, new())
        tick = partial(schedules.tick, term, Tick("one", 1), Progress(None, 1), [NewTask(QUEUE)])
        outcomes = together([partial(broker.dequeue, [QUEUE], timeout=30.0), tick])
        assert errors_of(outcomes) == []
        assert len(outcomes[0]) == 1

    def test_tick_that_can_not_enqueue(self, store: Store, clock: FakeClock) -> None:
        """What can't be published takes the tick back, and what it would have changed in the entry."""
        broker = store.open(clock=clock, max_payload=100)
        schedules, term = broker.schedules, lead(broker.terms)
        put(broker, key="k", unique_key="u")
        schedules.add(KEY, new(one_off=True))
        before = picture(schedules)
        for error, task in (
            (TaskExists, NewTask(QUEUE, key="k")),
            (TaskExists, NewTask(QUEUE, unique_key="u")),
            (PayloadTooLarge, NewTask(QUEUE, b"x" * 101)),
            (ConfigError, NewTask("")),
        ):
            for name in ("one", "foreign"):
                progress = Progress(None, 1, disable=True, source=FOREIGN)
                with pytest.raises(error):
                    schedules.tick(term, Tick(name, 1), progress, [NewTask(QUEUE), task])
                assert picture(schedules) == before
        assert broker.queue_len(QUEUE) == 1
        assert schedules.tick(term, Tick("one", 1), Progress(None, 1), [NewTask(QUEUE)]) is True

    def test_one_message_of_one_tick(self, store: Store, clock: FakeClock) -> None:
        """Of two leaders that send the same tick at once, one sends a message."""
        brokers = [store.open(clock=clock) for _ in range(2)]
        term = lead(brokers[0].terms)
        brokers[0].schedules.add(KEY, new())
        for number in range(ROUNDS):
            base = the(brokers[0].schedules).base_at
            tick, progress = Tick("one", number), Progress(base, number)
            calls = [partial(one.schedules.tick, term, tick, progress, [NewTask(QUEUE)]) for one in brokers]
            outcomes = together(calls)
            assert sorted(outcomes) == [False, True], outcomes
        assert brokers[0].queue_len(QUEUE) == len(brokers[0].schedules.ticks(KEY)) == ROUNDS

    def test_prune_sweeps_ticks(self, broker: Broker, clock: FakeClock) -> None:
        """Ticks are kept for a week."""
        schedules = broker.schedules
        schedules.add(KEY, new())
        schedules.tick(lead(broker.terms), Tick("one", 1), Progress(None, 1))
        clock.advance(7 * 86400)
        assert KEEP_TICKS == 7 * 86400
        assert broker.prune() == 0
        clock.advance(0.001)
        assert broker.prune() == 1
        assert schedules.ticks(KEY) == []


class SqlScheduleCases(Cases):
    """Schedules, as they are in tables."""

    @pytest.fixture
    def sql_broker(self, store: Store, clock: FakeClock) -> SqlBroker:
        require(store, SQL)
        return cast("SqlBroker", store.open(clock=clock))

    def test_entries_by_hand(self, sql_broker: SqlBroker, clock: FakeClock) -> None:
        """A row needs a schedule's key, a name, a task and its times; it is an ADDED entry like all others."""
        import sqlalchemy as sa

        table = sql_broker.tables.entries
        row = {"key_": KEY, "name": "one", "task": "tasks.one", "schedule": "interval 30"}
        sql_broker.database.write(lambda conn: conn.execute(sa.insert(table), row))
        schedules = sql_broker.schedules
        assert schedules.entries(KEY) == [new()]
        assert schedules.tick(lead(sql_broker.terms), Tick("one", 1), Progress(None, 1)) is True
        assert schedules.change(KEY, "one", args="[1]")
        assert (the(schedules).total_run_count, the(schedules).changed_at) == (1, clock.now_ms())

    def test_nonsense_by_hand(self, sql_broker: SqlBroker) -> None:
        """What makes no sense in a row counts as not said; the other entries are there."""
        import sqlalchemy as sa

        table = sql_broker.tables.entries
        plain = {"key_": KEY, "task": "tasks.one", "schedule": "interval 30"}
        rows: list[dict[str, Any]] = [
            {"name": "empty", "args": None, "kwargs": None, "options": None, "starting_deadline": None},
            {"name": "flags", "enabled": 7, "no_overlap": -1, "one_off": 2},
            {"name": "negative", "starting_deadline": -5.0, "total_run_count": -1, "base_at": -(10**15)},
            {"name": "source", "source": "Nonsense"},
        ]
        for row in rows:
            sql_broker.database.write(lambda conn, row=row: conn.execute(sa.insert(table), {**plain, **row}))  # type: ignore[misc]  # mypy can't infer a lambda with a default
        assert sql_broker.schedules.entries(KEY) == [
            new("empty"),
            new("flags", no_overlap=True, one_off=True),
            new("negative", total_run_count=-1, base_at=-(10**15)),
            new("source"),
        ]

    def test_faults_of_schedules(self, sql_broker: SqlBroker, store: Store, clock: FakeClock) -> None:
        """A transaction that breaks before, in or after its commit is done once, or not at all and that is told."""
        from kombu_taskgate.core.database import InjectedDeadlock, InjectedDisconnect

        other = cast("SqlBroker", store.open(clock=clock))
        schedules, term = sql_broker.schedules, lead(sql_broker.terms)
        calls: dict[str, Callable[[], object]] = {
            "tick": lambda: schedules.tick(term, Tick("one", 1, "id"), Progress(None, 1), [NewTask(QUEUE)]),
            "skipped": lambda: schedules.tick(term, Tick("one", 1, "", SKIPPED), Progress(None, 1)),
            "foreign": lambda: schedules.tick(term, Tick("new", 1), Progress(None, 1, source=FOREIGN)),
            "rebase": lambda: schedules.rebase(term, "one", None, 1),
            "sync": lambda: schedules.sync(term, [new("code"), new("other")]),
            "add": lambda: schedules.add(KEY, new("new")),
            "replace": lambda: schedules.add(KEY, new("one", task="tasks.other"), replace=True),
            "change": lambda: schedules.change(KEY, "one", schedule="interval 5"),
            "remove": lambda: schedules.remove(KEY, "one"),
        }
        plans = [
            ("before_commit", InjectedDeadlock, 2),
            ("before_commit", InjectedDisconnect, 1),
            ("after_commit", InjectedDisconnect, 1),
            ("before_commit", InjectedDisconnect, 10**6),
        ]
        for name, call in calls.items():
            self._begin(sql_broker)
            expected = call()
            after = (picture(schedules), sql_broker.queue_len(QUEUE))
            assert expected in (True, None), name
            for point, error, times in plans:
                self._begin(sql_broker)
                before = (picture(schedules), sql_broker.queue_len(QUEUE))
                sql_broker.database.fault = fault = FailAt(point, error, times=times)
                try:
                    outcome = call()
                except StoreUnavailable:
                    outcome = StoreUnavailable
                finally:
                    sql_broker.database.fault = None
                gone = times == 10**6
                assert outcome == (StoreUnavailable if gone else expected), f"{name} {point} {error}"
                stored = (picture(schedules), sql_broker.queue_len(QUEUE))
                assert stored == (before if gone else after), f"{name} {point} {error}"
                assert fault.raised >= 1, name
            # Cut off in a commit that took no effect, which another process makes so here.
            self._begin(sql_broker)
            undone: list[str] = []

            def undo(point: str, undone: list[str] = undone) -> None:
                if point == "after_commit" and not undone:
                    undone.append(point)
                    self._begin(other)
                    raise InjectedDisconnect

            sql_broker.database.fault = undo
            try:
                assert call() == expected, name
            finally:
                sql_broker.database.fault = None
            assert undone, name
            assert (picture(schedules), sql_broker.queue_len(QUEUE)) == after, name

    def _begin(self, broker: SqlBroker) -> None:
        import sqlalchemy as sa

        for table in (broker.tables.entries, broker.tables.ticks, broker.tables.tasks):
            broker.database.write(lambda conn, table=table: conn.execute(sa.delete(table)))  # type: ignore[misc]  # mypy can't infer a lambda with a default
        broker.schedules.add(KEY, new())
        broker.schedules.sync(lead(broker.terms), [new("code", schedule="interval 5")])

    def test_term_is_kept_until_the_commit(self, store: Store, clock: FakeClock) -> None:
        """While somebody writes under a term, nobody begins another; what was begun before refuses the writer."""
        require(store, SQL)
        broker, other = (cast("SqlBroker", store.open(clock=clock, busy_timeout=0.5)) for _ in range(2))
        term = lead(broker.terms)
        broker.schedules.add(KEY, new())
        seen: list[object] = []

        def takes_over(point: str) -> None:
            if point == "before_commit" and not seen:
                clock.advance(11)
                try:
                    seen.append(other.terms.try_acquire(KEY, "b", 10.0))
                except StoreUnavailable as error:
                    seen.append(error)

        broker.database.fault = takes_over
        assert broker.schedules.tick(term, Tick("one", 1), Progress(None, 1)) is True
        broker.database.fault = None
        assert len(seen) == 1
        assert seen[0] is None or isinstance(seen[0], StoreUnavailable), seen
        lead(other.terms, "b")
        with pytest.raises(NotLeader):
            broker.schedules.tick(term, Tick("one", 2), Progress(1, 2))
