"""Electors on every store, with real clocks and real processes: never two leaders, and numbers that only grow."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from typing_extensions import Self

from kombu_taskgate.core.election import LeaderElector
from kombu_taskgate.core.errors import StoreUnavailable
from kombu_taskgate.core.redis_terms import RedisTerms
from kombu_taskgate.core.terms import LeaseStore
from kombu_taskgate.testing.stores import InDatabase, InMemory
from kombu_taskgate.testing.threads import DEADLINE, wait_until
from tests import services
from tests.workers.harness import freeze_between_writes

KEY = "beat"
#: Long enough that a busy machine renews in time, since whoever does not has lost nothing but the test: trust ends
#: after 0.8 of it, and from one renewal to the next it is a third.
TTL = 5.0
STORES = [*services.STORES, pytest.param("redis", marks=pytest.mark.redis)]


class Place:
    """Where terms are, and what a person could do to them."""

    def __init__(self, url: str, prefix: str, open_terms: Callable[[], LeaseStore]) -> None:
        self.url = url
        self.prefix = prefix
        self.open = open_terms
        self.change: Callable[..., object] = lambda **values: None
        #: Of the test's own, on a database.
        self.engine: Callable[[], sa.Engine]


def in_redis(url: str) -> Iterator[Place]:
    prefix = f"t{uuid.uuid4().hex[:12]}:"
    opened: list[RedisTerms] = []

    def open_terms() -> RedisTerms:
        opened.append(RedisTerms(url, prefix))
        return opened[-1]

    with redis.Redis.from_url(url) as client:
        name = f"{prefix}{{{KEY}}}:term"
        place = Place(url, prefix, open_terms)
        place.change = lambda **values: client.hset(name, mapping=values) if values else client.delete(name)
        yield place
        for terms in opened:
            terms.close()
        for key in list(client.scan_iter(f"{prefix}*")):
            client.delete(key)


def in_store(store: InMemory | InDatabase, url: str) -> Iterator[Place]:
    # With a lease_ttl as one would have it for terms of a few seconds: renewals are given up in time to try again.
    settings = {"lease_ttl": 6.0}
    if isinstance(store, InMemory):
        place = Place(url, "", lambda: store.open(**settings).terms)
        terms = store._store.terms

        def change(**values: Any) -> None:
            for name, value in values.items():
                setattr(terms[KEY], name, value)
            if not values:
                del terms[KEY]

        place.change = change
    else:
        place = Place(url, store.settings["table_prefix"], lambda: store.open(**settings).terms)
        place.engine = store.engine
        table = store._own().tables.terms

        def change(**values: Any) -> None:
            statement: Any = sa.delete(table) if not values else sa.update(table).values(values)
            with store.engine().begin() as conn:
                conn.execute(statement.where(table.c.key_ == KEY))

        place.change = change
    yield place
    store.close()


@pytest.fixture
def place(kind: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    if kind == "redis":
        yield from in_redis(request.getfixturevalue("redis_url"))
    else:
        url = services.url_of_store(kind, request)
        yield from in_store(services.store_at(url), url)


class Referee:
    """Looks all the time how many lead."""

    def __init__(self, electors: Sequence[LeaderElector]) -> None:
        self._electors = electors
        self._stop = threading.Event()
        self.looks = 0
        self.most = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            # Of one that leads and then another a moment later both may be seen, so whoever was first is asked again.
            leading = [elector for elector in self._electors if elector.is_leader]
            if len(leading) > 1:
                leading = [elector for elector in leading if elector.is_leader]
            self.most = max(self.most, len(leading))
            self.looks += 1
            self._stop.wait(0.0005)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(DEADLINE)


class Field:
    """Electors, each with a way of its own to the terms."""

    def __init__(self, place: Place, number: int = 2, **options: Any) -> None:
        self.gained: list[int] = []
        self.lost: list[int] = []
        self.electors = [
            LeaderElector(
                place.open(),
                KEY,
                f"holder {number}",
                **{
                    "ttl": TTL,
                    "poll": 0.01,
                    "on_gained": lambda term: self.gained.append(term.number),
                    "on_lost": lambda term: self.lost.append(term.number),
                    **options,
                },
            )
            for number in range(number)
        ]

    def __enter__(self) -> Self:
        for elector in self.electors:
            elector.start()
        return self

    def __exit__(self, *_: object) -> None:
        for elector in self.electors:
            elector.stop()

    def leader(self, unlike: LeaderElector | None = None) -> LeaderElector:
        def found() -> list[LeaderElector]:
            return [elector for elector in self.electors if elector.is_leader and elector is not unlike]

        wait_until(lambda: bool(found()), "somebody leads")
        return found()[0]


@pytest.mark.parametrize("kind", STORES)
def test_two_hundred_hand_overs(place: Place) -> None:
    field = Field(place)
    with field, Referee(field.electors) as referee:
        for turn in range(200):
            leader = field.leader()
            wait_until(lambda turn=turn: len(field.gained) > turn, "it is told")  # type: ignore[misc]
            if turn % 2:
                leader.resign(0.05)
            else:
                leader.stop()
                leader.start()
            wait_until(lambda turn=turn: len(field.gained) > turn + 1, "another term begins")  # type: ignore[misc]
    assert referee.most == 1
    assert referee.looks > 200
    assert field.gained == sorted(set(field.gained))


@pytest.mark.parametrize("kind", STORES)
def test_row_that_is_stolen_or_deleted(place: Place) -> None:
    """Whoever led is told, and somebody leads again with a higher number."""
    with Field(place, ttl=TTL) as field:
        field.leader()
        wait_until(lambda: len(field.gained) == 1, "it is told")
        stolen = field.gained[0] + 1
        place.change(holder="a thief", number=stolen)
        wait_until(lambda: len(field.gained) == 2, "another term begins")
        wait_until(lambda: bool(field.lost), "whoever led is told")
        assert field.lost == field.gained[:1]
        assert field.gained[1] > stolen
        place.change()
        wait_until(lambda: len(field.gained) == 3, "another term begins")
        assert field.gained[2] > field.gained[1]
        # Whoever led learns of a deleted row by the next renewal.
        wait_until(lambda: [one.is_leader for one in field.electors].count(True) == 1, "one of them leads")


class Cable(LeaseStore):
    """The way to a store, which can be cut."""

    def __init__(self, terms: LeaseStore) -> None:
        self._terms = terms
        self.cut = False

    def __getattribute__(self, name: str) -> Any:
        if name in {"cut", "_terms", "__class__"}:
            return super().__getattribute__(name)
        if self.cut:
            raise StoreUnavailable("the cable is cut")
        return getattr(self._terms, name)


@pytest.mark.parametrize("kind", STORES)
def test_store_that_is_away_and_back(place: Place) -> None:
    """From one of them: the other leads. From both: nobody does, and then one."""
    cables: list[Cable] = []

    def connect() -> LeaseStore:
        cables.append(Cable(place_open()))
        return cables[-1]

    place_open, place.open = place.open, connect
    field = Field(place, ttl=TTL)
    with field, Referee(field.electors) as referee:
        first = field.leader()
        first.store.cut = True
        second = field.leader(unlike=first)
        for cable in cables:
            cable.cut = True
        wait_until(lambda: not second.is_leader and len(field.lost) == 2, "nobody leads")
        for cable in cables:
            cable.cut = False
        field.leader()
    assert referee.most == 1
    assert field.gained == sorted(set(field.gained))
    assert field.lost[:2] == field.gained[:2]


class Process:
    """An elector in a process of its own."""

    def __init__(self, place: Place, ttl: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.electors", place.url, place.prefix, KEY, f"{ttl}"],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._out = self._process.stdout
        self._text = b""

    def said(self) -> list[tuple[str, int]]:
        """What it has written so far."""
        while select.select([self._out], [], [], 0)[0]:
            if not (part := os.read(self._out.fileno(), 4096)):
                break
            self._text += part
        words = [line.split() for line in self._text.decode().splitlines(keepends=True) if line.endswith("\n")]
        return [(word, int(number)) for word, number in words]

    def wait_for(self, word: str, times: int = 1) -> int:
        def count() -> int:
            assert self._process.poll() is None, "the process has ended"
            return [one for one, _ in self.said()].count(word)

        wait_until(lambda: count() >= times, f"the process says {word}")
        return [number for one, number in self.said() if one == word][times - 1]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE)
        self._out.close()


@pytest.fixture
def process(place: Place) -> Iterator[Callable[[], Process]]:
    started: list[Process] = []

    def start() -> Process:
        started.append(Process(place, TTL))
        return started[-1]

    yield start
    for one in started:
        one.close()


ELSEWHERE = [kind for kind in STORES if kind != "memory"]


@pytest.mark.crash
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_killed_leader(place: Place, process: Callable[[], Process]) -> None:
    """Another leads, not before the term is over by the store's clock."""
    terms = place.open()
    victim = process()
    number = victim.wait_for("gained")
    with Field(place, 1) as field:
        wait_until(lambda: bool(terms.candidates(KEY)), "it stands by")
        victim.signal(signal.SIGKILL)
        # By the record that nobody renews any more.
        last = terms.current(KEY)
        assert last is not None
        wait_until(lambda: bool(field.gained), "the standby leads")
        new = terms.current(KEY)
        assert new is not None
        assert new.acquired_at >= last.until
        assert (last.number, field.gained[0] > number) == (number, True)


@pytest.mark.crash
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_frozen_leader(place: Place, process: Callable[[], Process]) -> None:
    """Frozen past its term it finds, as soon as it goes on, that it leads no more; and stands by."""
    terms = place.open()
    victim = process()
    number = victim.wait_for("gained")
    freeze_between_writes(place.url, victim.pid)
    with Field(place, 1) as field:
        wait_until(lambda: bool(field.gained), "the standby leads")
        victim.signal(signal.SIGCONT)
        assert victim.wait_for("lost") == number
        wait_until(lambda: len(terms.candidates(KEY)) == 1, "it stands by")
        assert victim.said() == [("gained", number), ("lost", number)]
        assert field.electors[0].is_leader
    assert victim.wait_for("gained", 2) > field.gained[0] > number


@pytest.mark.parametrize("kind", [kind for kind in services.SQL_STORES if kind != "sqlite"])
def test_row_in_use_keeps_no_standby_waiting(place: Place) -> None:
    """A leader that hangs in a transaction which holds its row: a standby is told so at once, and may ask again."""
    terms = place.open()
    assert terms.try_acquire(KEY, "a", 0.05) is not None
    wait_until(lambda: terms.current(KEY).left <= 0, "it is over")
    with place.engine().begin() as conn:
        conn.execute(sa.text(f"SELECT number FROM {place.prefix}terms FOR UPDATE"))
        # A wait for the lock would end with an error: nobody gives it back.
        assert terms.try_acquire(KEY, "b", 10.0) is None
    assert terms.try_acquire(KEY, "b", 10.0) is not None
