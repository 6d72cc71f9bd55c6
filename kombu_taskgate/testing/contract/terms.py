"""Terms: who leads what, and until when."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.terms import Candidate, LeaseStore, Term
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import Cases
from .store import SQL, Store, require

KEY = "beat"
DAY = 86400


def elect(terms: LeaseStore, holder: str = "a", ttl: float = 10.0, *, key: str = KEY, above: int = 0) -> Term:
    """Acquire a term that must be free or the holder's own."""
    term = terms.try_acquire(key, holder, ttl, above=above)
    assert term is not None, f"{holder} was refused the term {key!r}"
    return term


class LeaseStoreCases:
    """Cases of any :class:`~kombu_taskgate.core.terms.LeaseStore`, under a clock that the test moves.

    The fixture ``terms`` is one, ``open_terms`` opens others on the same data as other processes would, ``clock`` is
    their clock, and ``delete_term`` deletes what is stored of a key.
    """

    def test_first_term(self, terms: LeaseStore, clock: FakeClock) -> None:
        """Nobody leads before somebody does; the first to ask does, with a number above the time."""
        assert terms.current(KEY) is None
        now = clock.now_ms()
        term = elect(terms, ttl=2.5)
        assert term == Term(KEY, "a", now + 1, now, now, now + 2500, now)
        assert term.left == 2.5
        assert terms.current(KEY) == term

    def test_valid_term_is_its_holders(self, terms: LeaseStore, clock: FakeClock) -> None:
        """Others are refused until it is over, at ``until`` exactly, and change nothing."""
        term = elect(terms)
        clock.advance(9.999)
        assert terms.try_acquire(KEY, "b", 10.0) is None
        seen = terms.current(KEY)
        assert seen is not None
        assert (seen.holder, seen.number, seen.until, seen.left) == ("a", term.number, term.until, 0.001)
        clock.advance(0.001)
        assert elect(terms, "b").number > term.number

    def test_renewal_keeps_the_number(self, terms: LeaseStore, clock: FakeClock) -> None:
        """A renewed term ends ttl after the renewal, also when the ttl is another, and is the same term."""
        first = elect(terms)
        clock.advance(6)
        now = clock.now_ms()
        assert elect(terms) == Term(KEY, "a", first.number, first.acquired_at, now, now + 10_000, now)
        assert elect(terms, ttl=2, above=first.number + 50).until == now + 2_000
        found = terms.current(KEY)
        assert found is not None
        assert (found.number, found.until) == (first.number, now + 2_000)
        clock.advance(2)
        assert elect(terms, "b").holder == "b"

    def test_own_term_that_is_over(self, terms: LeaseStore, clock: FakeClock) -> None:
        """Its last holder begins a new one: somebody may have trusted that it was over."""
        first = elect(terms)
        now = clock.advance(10)
        assert elect(terms) == Term(KEY, "a", now + 1, now, now, now + 10_000, now)
        assert now + 1 > first.number

    def test_release(self, terms: LeaseStore, clock: FakeClock) -> None:
        """A released term is over now; who held it is still told."""
        first = elect(terms)
        now = clock.advance(3)
        assert terms.release(KEY, "a") is True
        found = terms.current(KEY)
        assert found is not None
        assert (found.holder, found.number, found.until, found.left) == ("a", first.number, now, 0)
        assert terms.release(KEY, "a") is False
        second = elect(terms, "b")
        assert second.number > first.number
        assert second.acquired_at == now

    def test_release_of_what_is_not_held(self, terms: LeaseStore, clock: FakeClock) -> None:
        """Nobody ends another's term, and one that is over stays as it ended."""
        assert terms.release(KEY, "a") is False
        term = elect(terms)
        assert terms.release(KEY, "b") is False
        assert terms.release("other", "a") is False
        assert terms.current(KEY) == term
        clock.advance(11)
        assert terms.release(KEY, "a") is False
        found = terms.current(KEY)
        assert found is not None
        assert found.until == term.until

    def test_numbers_only_grow(self, terms: LeaseStore, clock: FakeClock) -> None:
        """Also when leaderships follow each other within one millisecond."""
        numbers = []
        for holder in "abab" * 5:
            numbers.append(elect(terms, holder).number)
            assert terms.release(KEY, holder)
        assert all(later > earlier for earlier, later in itertools.pairwise(numbers))
        assert clock.now_ms() < numbers[0]

    def test_number_is_above_what_was_seen(self, terms: LeaseStore, clock: FakeClock) -> None:
        """Whatever the caller has seen, a new number is higher."""
        now = clock.now_ms()
        assert elect(terms, above=now + 5_000).number == now + 5_001
        assert terms.release(KEY, "a")
        assert elect(terms, "b", above=now + 7_000).number == now + 7_001
        assert terms.release(KEY, "b")
        assert elect(terms, "c", above=5).number == now + 7_002

    def test_deleted_term(self, terms: LeaseStore, clock: FakeClock, delete_term: Callable[[str], None]) -> None:
        """Somebody else leads with a higher number; who led before finds that."""
        first = elect(terms)
        clock.advance(1)
        delete_term(KEY)
        assert terms.current(KEY) is None
        second = elect(terms, "b")
        assert second.number > first.number
        assert terms.try_acquire(KEY, "a", 10.0) is None
        delete_term(KEY)
        assert elect(terms, "a", above=second.number).number > second.number

    def test_clock_set_back_by_much(self, terms: LeaseStore, clock: FakeClock) -> None:
        """A term from the future is over, for its holder too; numbers grow all the same."""
        first = elect(terms)
        clock.advance(-600)
        second = elect(terms, "b")
        assert second.number == first.number + 1
        assert second.until == clock.now_ms() + 10_000
        clock.advance(-600)
        assert terms.release(KEY, "b") is False
        assert elect(terms, "b").number == first.number + 2
        assert terms.try_acquire(KEY, "a", 10.0) is None

    def test_clock_set_back_by_little(self, terms: LeaseStore, clock: FakeClock) -> None:
        """Whoever holds a term goes on trusting it for its ttl, so nobody else gets it before."""
        term = elect(terms)
        clock.advance(-10)
        assert terms.try_acquire(KEY, "b", 10.0) is None
        assert elect(terms).number == term.number
        clock.advance(-10.001)
        assert elect(terms, "b").number > term.number

    def test_clock_set_forward(self, terms: LeaseStore, clock: FakeClock) -> None:
        """Everything is over then, and what begins has a higher number."""
        first = elect(terms)
        now = clock.advance(3600)
        second = elect(terms, "b")
        assert (second.number, second.until) == (now + 1, now + 10_000)
        clock.advance(-3600)
        third = elect(terms, "c")
        assert first.number < second.number < third.number

    def test_keys_are_separate(self, terms: LeaseStore, clock: FakeClock) -> None:
        """Terms of different keys have nothing to do with each other; names are compared exactly."""
        keys = [KEY, "Beat", "beat ", "{beat}", "beat:x", "ü" * 255, "'; --"]
        held = {key: elect(terms, f"holder of {key[:9]}", key=key) for key in keys}
        assert {key: terms.current(key) for key in keys} == held
        assert terms.release("Beat", "holder of Beat")
        assert terms.current(KEY) == held[KEY]

    def test_holders_are_compared_exactly(self, terms: LeaseStore) -> None:
        """One that differs in case, accents or trailing blanks is another."""
        elect(terms, "Worker")
        for other in ("worker", "Worker ", "Wörker"):
            assert terms.try_acquire(KEY, other, 10.0) is None
            assert terms.release(KEY, other) is False

    def test_two_race(self, open_terms: Callable[[], LeaseStore], clock: FakeClock) -> None:
        """Of two that ask at once one wins: for a key that is new, for a term that is over, and for a released one."""
        stores = [open_terms() for _ in range(2)]
        numbers: list[int] = []
        for turn in range(15):
            outcomes = together(
                [partial(store.try_acquire, KEY, name, 10.0) for store, name in zip(stores, "ab", strict=True)]
            )
            assert errors_of(outcomes) == []
            (term,) = [outcome for outcome in outcomes if outcome is not None]
            assert stores[0].current(KEY) == stores[1].current(KEY) == term
            numbers.append(term.number)
            if turn % 2:
                clock.advance(10)
            else:
                assert stores[0].release(KEY, term.holder)
        assert numbers == sorted(set(numbers))

    def test_twenty_race(self, open_terms: Callable[[], LeaseStore]) -> None:
        """Exactly one of twenty wins each of several keys."""
        stores = [open_terms() for _ in range(5)]
        for key in ("one", "two", "three"):
            calls = [partial(stores[n % 5].try_acquire, key, f"holder {n}", 10.0) for n in range(20)]
            outcomes = together(calls)
            assert errors_of(outcomes) == []
            won = [outcome for outcome in outcomes if outcome is not None]
            assert len(won) == 1
            assert stores[0].current(key) == won[0]

    def test_holder_races_with_itself(self, open_terms: Callable[[], LeaseStore]) -> None:
        """Calls of one holder that overlap, as after a time-out, are of one term."""
        stores = [open_terms() for _ in range(2)]
        outcomes = together([partial(store.try_acquire, KEY, "a", 10.0) for store in stores * 5])
        assert errors_of(outcomes) == []
        assert len({term.number for term in outcomes}) == 1

    def test_candidates(self, terms: LeaseStore, clock: FakeClock) -> None:
        """The most recent first; since when each stands by is kept; nobody else's are told."""
        assert terms.candidates(KEY) == []
        start = clock.now_ms()
        terms.register(KEY, "a")
        terms.register("other", "c")
        clock.advance(5)
        terms.register(KEY, "b")
        terms.register(KEY, "a")
        now = clock.advance(1)
        terms.register(KEY, "b")
        found = terms.candidates(KEY)
        assert found == [Candidate(KEY, "b", now - 1000, now, now), Candidate(KEY, "a", start, now - 1000, now)]

    def test_withdrawn_candidate(self, terms: LeaseStore, clock: FakeClock) -> None:
        """One that withdraws is forgotten, however often it says so, and may come back."""
        for holder in "ab":
            terms.register(KEY, holder)
        terms.withdraw("other", "a")
        for _ in range(2):
            terms.withdraw(KEY, "a")
        assert [one.holder for one in terms.candidates(KEY)] == ["b"]
        now = clock.advance(5)
        terms.register(KEY, "a")
        assert terms.candidates(KEY)[0] == Candidate(KEY, "a", now, now, now)

    def test_old_candidates(self, terms: LeaseStore, clock: FakeClock) -> None:
        """One that has not been seen for a day is forgotten; coming back it begins anew."""
        terms.register(KEY, "a")
        terms.register(KEY, "b")
        clock.advance(DAY)
        assert [one.holder for one in terms.candidates(KEY)] == ["a", "b"]
        now = clock.advance(0.001)
        assert terms.candidates(KEY) == []
        terms.register(KEY, "b")
        assert terms.candidates(KEY) == [Candidate(KEY, "b", now, now, now)]

    def test_candidates_register_at_once(self, open_terms: Callable[[], LeaseStore]) -> None:
        """Ten that appear at once, each twice, are ten."""
        stores = [open_terms() for _ in range(2)]
        calls = [partial(store.register, KEY, f"holder {n}") for n in range(10) for store in stores]
        assert errors_of(together(calls)) == []
        assert sorted(one.holder for one in stores[0].candidates(KEY)) == [f"holder {n}" for n in range(10)]

    def test_wrong_names_and_times(self, terms: LeaseStore) -> None:
        """What no store can hold is refused by each method; nothing is stored."""
        for wrong in ("", "x" * 256, "a\0b", "\ud800"):
            for call in (
                partial(terms.try_acquire, wrong, "a", 10.0),
                partial(terms.try_acquire, KEY, wrong, 10.0),
                partial(terms.release, wrong, "a"),
                partial(terms.release, KEY, wrong),
                partial(terms.current, wrong),
                partial(terms.register, wrong, "a"),
                partial(terms.register, KEY, wrong),
                partial(terms.withdraw, wrong, "a"),
                partial(terms.withdraw, KEY, wrong),
                partial(terms.candidates, wrong),
            ):
                with pytest.raises(ConfigError):
                    call()
        for ttl in (0.0, -1.0, 0.0004, float("nan"), float("inf"), 1e11):
            with pytest.raises(ConfigError, match="ttl"):
                terms.try_acquire(KEY, "a", ttl)
        for above in (-1, 2**52, 2**63):
            with pytest.raises(ConfigError, match="above"):
                terms.try_acquire(KEY, "a", 10.0, above=above)
        assert terms.current(KEY) is None
        assert terms.candidates(KEY) == []

    def test_longest_names_of_terms(self, terms: LeaseStore) -> None:
        """Names of 255 characters, whatever they are written in, and the shortest and the longest ttl."""
        key, holder = "\N{GRINNING FACE}" * 255, "é" * 255
        assert elect(terms, holder, 0.001, key=key).left == 0.001
        terms.register(key, holder)
        assert [one.holder for one in terms.candidates(key)] == [holder]
        assert elect(terms, holder, 100 * 365 * 86400.0, key=key).holder == holder
        assert terms.release(key, holder) is True


class TermCases(LeaseStoreCases, Cases):
    """terms."""

    @pytest.fixture
    def terms(self, broker: Broker) -> LeaseStore:
        return broker.terms

    @pytest.fixture
    def open_terms(self, store: Store, clock: FakeClock) -> Callable[[], LeaseStore]:
        return lambda: store.open(clock=clock).terms

    @pytest.fixture
    def delete_term(self, store: Store, broker: Broker) -> Callable[[str], None]:
        require(store, SQL)
        database, table = broker.database, broker.tables.terms  # type: ignore[attr-defined]  # it is one of SQL

        def delete(key: str) -> None:
            database.write(lambda conn: conn.execute(table.delete().where(table.c.key_ == key)))

        return delete
