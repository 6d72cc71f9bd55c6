"""The elector's decisions, with a store that does what a test says, and clocks that a test moves."""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kombu_taskgate.core import clock as core_clock
from kombu_taskgate.core import election
from kombu_taskgate.core.election import LeaderElector, new_holder
from kombu_taskgate.core.errors import ConfigError, StoreUnavailable
from kombu_taskgate.core.memory import MemoryBroker, MemoryStore
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.terms import Candidate, LeaseStore, Term
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import DEADLINE, wait_until

#: Of these tests alone: threads are told by it.
KEY = "elected"
TTL = 10.0
#: Trusted for this long after a renewal, as long as nobody says otherwise.
TRUSTED = 8.0
INTERVAL = TTL / 3


class Wire(LeaseStore):
    """One elector's way to the store, on which calls can fail or hang."""

    def __init__(self, terms: LeaseStore) -> None:
        self._terms = terms
        self.down = False
        self.calls: Counter[str] = Counter()
        #: Calls of these names wait until the event is set, before or after they reach the store.
        self.before: dict[str, threading.Event] = {}
        self.after: dict[str, threading.Event] = {}
        #: How many calls hang now.
        self.hanging = 0
        #: Called after a call of the name.
        self.then: dict[str, Callable[[], object]] = {}
        self.error: Callable[[], BaseException] = lambda: StoreUnavailable("the cable is cut")

    def __getattribute__(self, name: str) -> Any:
        if name not in {"try_acquire", "release", "current", "register", "withdraw", "candidates"}:
            return super().__getattribute__(name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            self._wait(self.before.get(name))
            if self.down:
                raise self.error()
            answer = getattr(self._terms, name)(*arguments, **options)
            self._wait(self.after.get(name))
            self.then.get(name, lambda: None)()
            return answer

        return call

    def _wait(self, event: threading.Event | None) -> None:
        if event is not None:
            self.hanging += 1
            event.wait(DEADLINE)
            self.hanging -= 1


class Watched(election._Run):
    """The elector's thread, which tells what it is at."""

    rounds = 0
    of: dict[LeaderElector, Watched]

    def __init__(self, elector: LeaderElector, life: Any, name: str) -> None:
        super().__init__(elector, life, name)
        self.of[elector] = self

    def _round(self) -> float:
        wait = super()._round()
        self.rounds += 1
        return wait


class Lab:
    """Electors on one store in memory; its clock and theirs move together, unless a test moves one alone."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clock = FakeClock()
        self.local = 1000.0
        self.terms = MemoryBroker(BrokerSettings("memory://"), store=self.store, clock=self.clock).terms
        self.electors: list[LeaderElector] = []
        self.told: list[tuple[str, str, int]] = []

    def wire(self) -> Wire:
        return Wire(self.terms)

    def elector(self, holder: str | None = "a", wire: Wire | None = None, **options: Any) -> LeaderElector:
        """One that is not started, and notes what it tells."""

        def note(word: str) -> Callable[[Term], None]:
            return lambda term: self.told.append((holder or "", word, term.number))

        options = {"on_gained": note("gained"), "on_lost": note("lost"), "clock": lambda: self.local, **options}
        elector = LeaderElector(self.wire() if wire is None else wire, KEY, holder, **{"ttl": TTL, **options})
        self.electors.append(elector)
        return elector

    def leader(self, holder: str = "a", **options: Any) -> LeaderElector:
        """One that leads."""
        elector = self.elector(holder, **options)
        elector.start()
        wait_until(lambda: elector.is_leader, f"{holder} leads")
        self.settle(elector)
        return elector

    def standby(self, holder: str = "b", **options: Any) -> LeaderElector:
        """One that stands by."""
        elector = self.elector(holder, **options)
        elector.start()
        wait_until(lambda: holder in {one.holder for one in self.terms.candidates(KEY)}, f"{holder} stands by")
        self.settle(elector)
        return elector

    def wake(self) -> None:
        for elector in self.electors:
            elector._life.wake.set()

    def pass_time(self, seconds: float) -> None:
        """Let so much time pass at once, and wake all electors."""
        self.clock.advance(seconds)
        self.local += seconds
        self.wake()

    def pass_until(self, condition: Callable[[], object], what: str, step: float = 0.25) -> float:
        """Let time pass in steps until the condition holds; how many seconds that was."""
        began = self.local
        give_up = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < give_up, f"{what}: not after {self.local - began:g} s of the test's time"
            self.pass_time(step)
            self.settle()
        return self.local - began

    def settle(self, *electors: LeaderElector) -> None:
        """Wait until every elector (or those) has done what the clock asks for, but for calls that hang."""

        def settled(elector: LeaderElector) -> bool:
            run = Watched.of[elector]
            for _ in range(2):  # one may have looked at the clock before
                seen = run.rounds
                elector._life.wake.set()
                wait_until(lambda seen=seen: run.rounds > seen or elector._thread is None, "a round")  # type: ignore[misc]
            return run._call is None or elector.store.hanging > 0

        for elector in electors or self.electors:
            if elector._thread is not None:
                wait_until(lambda elector=elector: settled(elector), "the elector has nothing to do")  # type: ignore[misc]

    def words(self, holder: str = "a") -> list[str]:
        """What one of them told, in order."""
        return [word for name, word, _ in self.told if name == holder]

    def numbers(self) -> list[int]:
        """Of the terms that were gained, in order."""
        return [number for _, word, number in self.told if word == "gained"]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(election, "_Run", Watched)
    Watched.of = {}
    lab = Lab()
    yield lab
    for elector in lab.electors:
        for event in [*elector.store.before.values(), *elector.store.after.values()]:
            event.set()
        elector.store.down = False
        elector.stop()
    assert lab.numbers() == sorted(set(lab.numbers())), "numbers of leaderships have to grow"


def threads_of(key: str = KEY) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(f"taskgate-elector-{key}")]


# -- leading ---------------------------------------------------------------------------------------


def test_leads_at_once_and_tells(lab: Lab) -> None:
    elector = lab.elector()
    assert (elector.is_leader, elector.term, elector.now_ms()) == (False, None, None)
    elector.start()
    elector.start()
    wait_until(lambda: lab.told, "it leads")
    term = lab.terms.current(KEY)
    assert term is not None
    assert lab.told == [("a", "gained", term.number)]
    assert elector.is_leader
    assert elector.term == term
    assert elector.now_ms() == lab.clock.now_ms()
    assert len(threads_of()) == 2


def test_renews_every_interval(lab: Lab) -> None:
    elector = lab.leader()
    first = elector.term
    assert first is not None
    for _ in range(30):
        lab.pass_time(INTERVAL)
        lab.settle()
        term = lab.terms.current(KEY)
        assert term is not None
        assert (term.number, term.left) == (first.number, TTL)
    # One attempt that began the term, and one each interval: not more.
    assert elector.store.calls["try_acquire"] == 31
    assert elector.is_leader
    assert lab.words() == ["gained"]


def test_time_of_the_store_goes_on_between_renewals(lab: Lab) -> None:
    elector = lab.leader()
    lab.clock.advance(3600)
    began = lab.clock.now_ms() - 3_600_000
    lab.local += 1.5
    assert elector.now_ms() == began + 1500
    lab.local += INTERVAL
    lab.settle()
    assert elector.now_ms() == lab.clock.now_ms()


def test_only_one_of_three(lab: Lab) -> None:
    leader = lab.leader()
    others = [lab.standby(name) for name in "bc"]
    for _ in range(40):
        lab.pass_time(INTERVAL / 2)
        lab.settle()
        assert [elector.is_leader for elector in (leader, *others)] == [True, False, False]
    assert lab.told == [("a", "gained", leader.term.number)]


def test_standby_leads_when_the_term_is_over(lab: Lab) -> None:
    """To the moment: with a leader that has vanished without a word."""
    leader = lab.leader()
    leader.store.down = True
    standby = lab.standby()
    lab.pass_time(TTL - 0.1)
    lab.settle()
    assert not standby.is_leader
    assert not leader.is_leader
    lab.pass_time(0.11)
    wait_until(lambda: standby.is_leader, "the standby leads")


def test_standby_reads_until_then(lab: Lab) -> None:
    """Looks are cheap reads, one each ``poll``; nothing is written but that it stands by."""
    lab.leader()
    standby = lab.standby(poll=0.5)
    lab.settle()
    before = Counter(standby.store.calls)
    for _ in range(20):
        lab.pass_time(0.5)
        lab.settle()
    calls = standby.store.calls - before
    assert calls["current"] == 20
    assert calls["try_acquire"] == 0
    assert calls["register"] == 2


def test_released_term_is_taken_at_the_next_look(lab: Lab) -> None:
    leader, standby = lab.leader(), lab.standby()
    leader.stop()
    lab.pass_time(standby.poll)
    wait_until(lambda: standby.is_leader, "the standby leads")
    assert lab.told[0][2] < lab.told[1][2]


# -- trust -----------------------------------------------------------------------------------------


def test_trust_ends_by_the_start_of_the_last_renewal(lab: Lab) -> None:
    elector = lab.leader()
    elector.store.down = True
    lab.local += TRUSTED - 0.001
    assert elector.is_leader
    lab.settle()
    assert lab.words() == ["gained"]
    lab.local += 0.001
    assert not elector.is_leader
    assert elector.term is None
    lab.wake()
    wait_until(lambda: lab.words() == ["gained", "lost"], "it is told")


def test_trust_counts_from_before_the_answer(lab: Lab) -> None:
    """A renewal that takes two seconds is worth two seconds less."""
    elector = lab.leader()

    def take_long() -> None:
        elector.store.then.clear()
        lab.local += 2

    elector.store.then["try_acquire"] = take_long
    started = lab.local + INTERVAL
    lab.pass_time(INTERVAL)
    lab.settle()
    elector.store.down = True
    lab.local = started + TRUSTED - 0.001
    assert elector.is_leader
    lab.local += 0.001
    assert not elector.is_leader


def test_answer_that_is_too_late_to_be_trusted(lab: Lab) -> None:
    """The term is the store's word, but nobody may act on it; the next attempt finds it again."""
    elector = lab.elector()
    elector.store.then["try_acquire"] = lambda: lab.pass_time(TRUSTED)
    elector.start()
    wait_until(lambda: elector.store.calls["try_acquire"] >= 2, "it tries again")
    assert lab.told == []
    assert not elector.is_leader
    elector.store.then.clear()
    lab.pass_until(lambda: elector.is_leader, "it leads")


def test_not_leader_although_its_thread_hangs(lab: Lab) -> None:
    release = threading.Event()
    elector = lab.elector(on_gained=lambda term: release.wait(DEADLINE))
    elector.start()
    wait_until(lambda: elector.is_leader, "it leads")
    lab.local += TRUSTED
    assert not elector.is_leader
    release.set()


@pytest.mark.parametrize("when", ["before", "after"])
def test_told_although_the_store_hangs(lab: Lab, when: str) -> None:
    elector = lab.leader()
    answer = getattr(elector.store, when)["try_acquire"] = threading.Event()
    lab.pass_time(INTERVAL)
    wait_until(lambda: elector.store.hanging, "the renewal hangs")
    lab.pass_time(TRUSTED - INTERVAL)
    wait_until(lambda: lab.words() == ["gained", "lost"], "it is told")
    # The answer that comes late is none: the store is told so, and another need not wait.
    standby = lab.standby()
    answer.set()
    lab.settle()
    term = lab.terms.current(KEY)
    assert term is not None
    assert term.left <= 0
    lab.pass_until(lambda: lab.numbers()[1:], "somebody leads")
    assert [elector.is_leader, standby.is_leader].count(True) == 1


def test_call_that_hangs_is_left_behind(lab: Lab) -> None:
    """It may hang for ever: another thread asks. What it does when it goes on harms nothing."""
    elector = lab.leader()
    answer = elector.store.before["try_acquire"] = threading.Event()
    lab.pass_time(INTERVAL)
    wait_until(lambda: elector.store.hanging, "the renewal hangs")
    del elector.store.before["try_acquire"]
    lab.pass_until(lambda: elector.is_leader and len(lab.numbers()) == 2, "it leads again")
    term = elector.term
    answer.set()
    wait_until(lambda: len(threads_of()) == 2, "the thread that hung has ended")
    lab.settle()
    assert elector.term == term
    assert lab.words() == ["gained", "lost", "gained"]


def test_look_that_hangs_and_goes_on_after_the_end(lab: Lab) -> None:
    """It acquires nothing, which nobody would give back, and for which others would have to wait."""
    elector = lab.elector()
    look = elector.store.before["current"] = threading.Event()
    elector.start()
    wait_until(lambda: elector.store.hanging, "the look hangs")
    del elector.store.before["current"]
    lab.pass_time(TTL + 1)
    lab.pass_until(lambda: elector.is_leader, "a later look has an answer")
    elector.stop()
    look.set()
    wait_until(lambda: not threads_of(), "all threads have ended")
    assert lab.terms.current(KEY).left <= 0


def test_no_more_than_a_few_calls_hang(lab: Lab) -> None:
    """However long the store gives no answer; and when it gives one again, all of them end."""
    elector = lab.leader()
    held_up = elector.store.before = dict.fromkeys(("try_acquire", "current", "register"), threading.Event())
    lab.pass_until(lambda: elector.store.hanging >= election.MOST_HANGING + 1, "calls hang", step=TTL / 2)
    for _ in range(20):
        lab.pass_time(TTL / 2)
        lab.settle()
    assert elector.store.hanging == election.MOST_HANGING + 1
    elector.store.before = {}
    held_up["current"].set()
    lab.pass_until(lambda: elector.is_leader, "it leads again")
    wait_until(lambda: len(threads_of()) == 2, "what hung has ended")
    lab.settle()
    assert lab.words() == ["gained", "lost", "gained"]


def test_store_that_fails_is_asked_quickly_until_the_deadline(lab: Lab) -> None:
    elector = lab.leader()
    elector.store.down = True
    lab.pass_time(INTERVAL)
    lab.settle()
    failed = elector.store.calls["try_acquire"]
    for _ in range(15):
        lab.pass_time(0.2)
        lab.settle()
    assert elector.store.calls["try_acquire"] - failed >= 5
    assert elector.is_leader
    elector.store.down = False
    lab.pass_until(lambda: lab.terms.current(KEY).left > TTL - 1, "it is renewed")
    assert lab.words() == ["gained"]


def test_term_that_was_told_to_be_lost_is_not_taken_up_again(lab: Lab) -> None:
    """The store answers again while it still takes the term for valid: a new one has to begin, with a new number."""
    elector = lab.leader()
    elector.store.down = True
    lab.pass_until(lambda: lab.words() == ["gained", "lost"], "it gives up")
    elector.store.down = False
    term = lab.terms.current(KEY)
    assert term.left > 1
    lab.pass_time(term.left - 0.5)
    lab.settle()
    assert not elector.is_leader
    assert lab.terms.current(KEY).number == term.number
    lab.pass_until(lambda: elector.is_leader, "it leads again")
    assert elector.term.number > term.number


def test_told_once_when_the_store_is_away_for_long(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kombu_taskgate.election")
    elector = lab.leader()
    elector.store.down = True
    for _ in range(50):
        lab.pass_time(1)
        lab.settle()
    elector.store.down = False
    lab.pass_until(lambda: elector.is_leader, "it leads again")
    lab.settle()
    messages = [record.getMessage() for record in caplog.records]
    assert len([text for text in messages if "the cable is cut" in text]) == 1
    assert len([text for text in messages if "answers again" in text]) == 1
    assert lab.words() == ["gained", "lost", "gained"]


def test_start_does_not_mind_a_store_that_is_away(lab: Lab) -> None:
    wire = lab.wire()
    wire.down = True
    elector = lab.elector(wire=wire)
    elector.start()
    wait_until(lambda: wire.calls, "it tries")
    lab.settle()
    wire.down = False
    lab.pass_until(lambda: elector.is_leader, "it leads")


def test_store_that_raises_something_else(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """A mistake in a store does not end the thread."""
    wire = lab.wire()
    wire.down, wire.error = True, lambda: ZeroDivisionError("a mistake")
    elector = lab.elector(wire=wire)
    elector.start()
    wait_until(lambda: "a mistake" in caplog.text, "it is logged")
    wire.down = False
    lab.pass_until(lambda: elector.is_leader, "it leads")


# -- what becomes of rows --------------------------------------------------------------------------


def test_stolen_term(lab: Lab) -> None:
    elector = lab.leader()
    lab.store.terms[KEY].holder = "thief"
    lab.store.terms[KEY].number += 7
    lab.pass_time(INTERVAL)
    wait_until(lambda: lab.words() == ["gained", "lost"], "it is told")
    lab.settle()
    assert [one.holder for one in lab.terms.candidates(KEY)] == ["a"]
    lab.pass_until(lambda: elector.is_leader, "it leads again")
    assert lab.words() == ["gained", "lost", "gained"]
    assert lab.numbers()[1] > lab.numbers()[0] + 7


def test_deleted_term(lab: Lab) -> None:
    """Whoever led finds it at the next renewal, and leads under a new number: it was told what it lost first."""
    elector = lab.leader()
    del lab.store.terms[KEY]
    # So that the store would give a lower one by itself.
    lab.clock.advance(-5)
    lab.pass_time(INTERVAL)
    wait_until(lambda: len(lab.told) == 3, "it is told")
    assert lab.words() == ["gained", "lost", "gained"]
    assert elector.is_leader


def test_clock_of_the_store_set_back(lab: Lab) -> None:
    """A leader that has vanished leaves a term that seems to last; after 1.5 ttl without a change it is tried."""
    leader = lab.leader()
    leader.store.down = True
    standby = lab.standby()
    lab.settle()
    lab.clock.advance(-TTL * 0.9)
    tried = standby.store.calls["try_acquire"]
    waited = lab.pass_until(lambda: standby.store.calls["try_acquire"] > tried, "it is tried")
    # By the store it seems to last for 1.9 of its ttl.
    assert TTL * 1.5 < waited < TTL * 1.7
    lab.pass_until(lambda: standby.is_leader, "the standby leads")


def test_leader_goes_on_when_the_clock_is_set_back(lab: Lab) -> None:
    leader, standby = lab.leader(), lab.standby()
    lab.clock.advance(-TTL * 0.9)
    for _ in range(40):
        lab.pass_time(0.5)
        lab.settle()
        assert leader.is_leader
        assert not standby.is_leader
    assert len(lab.told) == 1


# -- resigning -------------------------------------------------------------------------------------


def test_stop(lab: Lab) -> None:
    elector = lab.leader()
    elector.stop()
    assert not elector.is_leader
    term = lab.terms.current(KEY)
    assert term.left <= 0
    assert threads_of() == []
    calls = Counter(elector.store.calls)
    elector.stop()
    assert elector.store.calls == calls
    assert lab.words() == ["gained"]


def test_stop_of_a_standby(lab: Lab) -> None:
    leader, standby = lab.leader(), lab.standby()
    standby.stop()
    assert lab.terms.candidates(KEY) == []
    assert lab.terms.current(KEY) == leader.term
    assert leader.is_leader


def test_stop_of_one_that_was_not_started(lab: Lab) -> None:
    elector = lab.elector()
    elector.stop()
    elector.start()
    wait_until(lambda: elector.is_leader, "it leads")


def test_start_after_stop(lab: Lab) -> None:
    elector = lab.leader()
    elector.stop()
    elector.start()
    wait_until(lambda: elector.is_leader, "it leads again")
    lab.settle()
    assert lab.words() == ["gained", "gained"]


def test_stop_while_the_store_is_away(lab: Lab) -> None:
    """The term runs out by itself. One that starts again has another name: the last word may yet arrive."""
    elector = lab.leader()
    elector.store.down = True
    elector.stop()
    assert not elector.is_leader
    assert lab.terms.current(KEY).left > 0
    elector.store.down = False
    assert elector.holder == "a/1"
    elector.start()
    lab.settle()
    assert not elector.is_leader
    lab.pass_until(lambda: elector.is_leader, "it leads again")


def test_stop_while_the_store_hangs(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election, "STOP_WITHIN", 0.05)
    elector = lab.leader()
    answer = elector.store.before["release"] = threading.Event()
    elector.stop()
    assert not elector.is_leader
    elector.start()
    lab.pass_until(lambda: elector.is_leader, "it leads again")
    term = elector.term
    answer.set()
    wait_until(lambda: not elector.store.hanging and len(threads_of()) == 2, "the last word has arrived")
    # It has not ended the term that has begun since.
    assert lab.terms.current(KEY).until == term.until
    assert elector.term == term


def test_stop_while_it_acquires(lab: Lab) -> None:
    """A term that nobody learned of is given back as well."""
    elector = lab.elector()
    answer = elector.store.after["try_acquire"] = threading.Event()
    elector.start()
    wait_until(lambda: elector.store.hanging, "it has acquired")
    assert lab.terms.current(KEY).left > 0
    stopping = threading.Thread(target=elector.stop)
    stopping.start()
    wait_until(lambda: elector._life.stopping, "it is being stopped")
    answer.set()
    stopping.join(DEADLINE)
    assert lab.terms.current(KEY).left <= 0
    assert not elector.is_leader


def test_stop_in_a_callback(lab: Lab) -> None:
    elector = lab.elector(on_gained=lambda term: elector.stop())
    elector.start()
    wait_until(lambda: threads_of() == [] and lab.terms.current(KEY) is not None, "it has stopped itself")
    assert lab.terms.current(KEY).left <= 0
    assert not elector.is_leader


def test_resign(lab: Lab) -> None:
    leader, standby = lab.leader(), lab.standby()
    leader.resign(30)
    assert not leader.is_leader
    wait_until(lambda: lab.words() == ["gained", "lost"], "it is told")
    lab.pass_time(standby.poll)
    wait_until(lambda: standby.is_leader, "the standby leads")
    lab.settle()
    assert [one.holder for one in lab.terms.candidates(KEY)] == ["a"]
    standby.stop()
    for _ in range(28):
        lab.pass_time(1)
        lab.settle()
        assert not leader.is_leader
    assert lab.pass_until(lambda: leader.is_leader, "it leads again") < 3


def test_resign_without_holding_off(lab: Lab) -> None:
    leader = lab.leader()
    leader.resign()
    lab.pass_until(lambda: lab.words() == ["gained", "lost", "gained"], "it leads again")
    assert leader.is_leader


def test_resign_while_it_acquires(lab: Lab) -> None:
    elector = lab.elector()
    answer = elector.store.after["try_acquire"] = threading.Event()
    elector.start()
    wait_until(lambda: elector.store.hanging, "it has acquired")
    elector.resign(5)
    answer.set()
    wait_until(lambda: elector.store.calls["release"] == 1, "it is given back")
    lab.settle()
    assert lab.told == []
    assert lab.pass_until(lambda: elector.is_leader, "it leads") >= 5


def test_word_of_resigning_that_may_be_under_way(lab: Lab) -> None:
    """What comes of it can't be known, so it must not end the next term: that is of another name."""
    elector = lab.leader()
    elector.store.down = True
    elector.resign()
    wait_until(lambda: lab.words() == ["gained", "lost"], "it is told")
    lab.settle()
    assert elector.holder == "a/1"
    elector.store.down = False
    lab.pass_until(lambda: elector.is_leader, "it leads again")
    assert lab.terms.release(KEY, "a") is False
    assert elector.term.holder == "a/1"


def test_standby_that_resigns_stays_one(lab: Lab) -> None:
    leader, standby = lab.leader(), lab.standby()
    standby.resign(5)
    lab.settle()
    assert leader.is_leader
    leader.stop()
    assert lab.pass_until(lambda: standby.is_leader, "it leads") >= 5


def test_not_fit(lab: Lab) -> None:
    """It resigns, and does not compete until it is fit again; one that can't tell is not fit."""
    fit = {"divisor": 1}
    leader = lab.leader(fit=lambda: 1 // fit["divisor"] > 0)
    fit["divisor"] = 0
    lab.wake()
    wait_until(lambda: lab.words() == ["gained", "lost"], "it is told")
    fit["divisor"] = 2
    for _ in range(20):
        lab.pass_time(1)
        lab.settle()
    assert not leader.is_leader
    assert lab.terms.current(KEY).left <= 0
    fit["divisor"] = 1
    lab.pass_until(lambda: leader.is_leader, "it leads again")


# -- the rest --------------------------------------------------------------------------------------


def test_candidates(lab: Lab) -> None:
    """Who stands by says so each interval; who leads, or has stopped, is none."""
    leader, standby = lab.leader(), lab.standby()
    began = lab.clock.now_ms()
    lab.pass_time(INTERVAL + 0.1)
    lab.settle()
    now = lab.clock.now_ms()
    assert lab.terms.candidates(KEY) == [Candidate(KEY, "b", began, now, now)]
    leader.stop()
    lab.pass_until(lambda: standby.is_leader, "the standby leads")
    lab.settle()
    assert lab.terms.candidates(KEY) == []


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_callbacks_that_raise(lab: Lab, caplog: pytest.LogCaptureFixture, error: type[BaseException]) -> None:
    """Whatever it is: raised in that thread it would end nothing but the candidate."""

    def refuse(term: Term) -> None:
        raise error(f"no {term.key} please")

    elector = lab.leader(on_gained=refuse, on_lost=refuse)
    wait_until(lambda: f"{error.__name__}: no elected please" in caplog.text, "it is logged")
    elector.resign()
    lab.pass_until(lambda: elector.is_leader, "it leads again")
    wait_until(lambda: caplog.text.count(f"{error.__name__}: no elected please") >= 3, "it is logged again")
    assert caplog.text.count(f"{error.__name__}: no elected please") == 3


def test_fit_and_store_that_exit(lab: Lab) -> None:
    """One that can't be told to be fit is not; a store that raises anything is asked again."""
    ill = True

    def fit() -> bool:
        if ill:
            raise SystemExit(1)
        return True

    elector = lab.standby(fit=fit)
    elector.store.error = lambda: SystemExit(1)
    elector.store.down = True
    ill = False
    asked = elector.store.calls["current"]
    lab.pass_until(lambda: elector.store.calls["current"] > asked, "it has asked")
    elector.store.down = False
    lab.pass_until(lambda: elector.is_leader, "it leads")


def test_check(lab: Lab) -> None:
    elector = lab.elector()
    with pytest.raises(StoreUnavailable, match="not running"):
        elector.check()
    elector.start()
    wait_until(lambda: elector.is_leader, "it leads")
    elector.check()
    elector.store.down = True
    lab.pass_time(TTL + 2)
    elector.check(2)
    with pytest.raises(StoreUnavailable, match=r"no answer of its store for 12\.0 s"):
        elector.check(1.9)
    elector.store.down = False
    lab.pass_until(lambda: elector.is_leader, "it leads again")
    elector.check()
    elector.stop()
    with pytest.raises(StoreUnavailable, match="not running"):
        elector.check(1e9)


@pytest.mark.parametrize(
    ("times", "named"),
    [
        ({"ttl": 10, "renew_deadline": 10}, "ttl 10 s must be more than renew_deadline 10 s"),
        ({"ttl": 10, "interval": 7}, "1.2 times interval 7 s"),
        ({"ttl": 10, "interval": 5, "renew_deadline": 6}, "renew_deadline 6 s"),
        ({"ttl": 0}, "ttl 0"),
        ({"ttl": -1}, "ttl -1"),
        ({"ttl": float("nan")}, "ttl nan"),
        ({"ttl": "15"}, "not '15'"),
        ({"ttl": True}, "not True"),
        ({"interval": "5"}, "not '5'"),
        ({"renew_deadline": "5"}, "renew_deadline '5'"),
        ({"ttl": 0.0001}, "0.001 seconds"),
        ({"ttl": 10, "interval": 0}, "interval 0"),
        ({"ttl": 10, "poll": -1}, "poll -1"),
        ({"ttl": 10, "holder": ""}, "holder name"),
        ({"ttl": 10, "holder": "x" * 256}, "holder name"),
        ({"ttl": 10, "key": ""}, "term name"),
    ],
)
def test_what_does_not_fit_is_named(times: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as told:
        LeaderElector(MemoryBroker(BrokerSettings("memory://")).terms, **{"key": KEY, **times})
    assert named in str(told.value)


def test_what_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = MemoryBroker(BrokerSettings("memory://")).terms
    elector = LeaderElector(terms, KEY, ttl=0.3)
    assert (elector.ttl, elector.interval, elector.renew_deadline) == (0.3, 0.3 / 3, 0.3 * 0.8)
    assert elector.poll == elector.interval
    assert LeaderElector(terms, KEY).poll == 0.2
    assert f":{os.getpid()}:" in elector.holder
    assert elector.holder != LeaderElector(terms, KEY).holder
    monkeypatch.setattr("socket.gethostname", lambda: "h" * 300)
    assert len(new_holder()) <= 255


def test_long_names_keep_their_end_when_they_change(lab: Lab) -> None:
    elector = lab.elector("n" * 255)
    assert elector._rename() == "n" * 253 + "/1"
    assert elector._rename() == "n" * 253 + "/2"


@pytest.mark.parametrize("given", [None, "named"])
@pytest.mark.parametrize("running", [True, False])
def test_fork(given: str | None, running: bool) -> None:
    """A child is nobody's leader, has no threads, and another name: parent and child compete with each other."""
    terms = MemoryBroker(BrokerSettings("memory://")).terms
    elector = LeaderElector(terms, KEY, given)
    if running:
        elector.start()
        wait_until(lambda: elector.is_leader, "it leads")
    name = elector.holder
    with warnings.catch_warnings():
        # Newer Pythons warn of forks with threads: that is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert not elector.is_leader
            assert elector._thread is None
            assert elector.holder != name
            assert given is None or elector.holder == f"named:{os.getpid()}"
            elector.stop()
            elector.start()
            if running:
                # The child's memory has the parent's term in it.
                wait_until(lambda: terms.candidates(KEY), "it stands by")
                assert not elector.is_leader
            else:
                wait_until(lambda: elector.is_leader, "it leads")
            elector.stop()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert elector.is_leader is running
    assert elector.holder == name
    elector.stop()


def test_local_clock_counts_suspended_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is such a clock. Nowhere does it follow the time of day."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        before = time.clock_gettime(time.CLOCK_BOOTTIME)
        assert before <= core_clock.local_time() <= time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(core_clock, "_SUSPENDED_TOO", None)
    before = time.monotonic()
    assert before <= core_clock.local_time() <= time.monotonic()
