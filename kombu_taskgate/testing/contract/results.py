"""Results of tasks and groups."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import ConfigError, PayloadTooLarge
from kombu_taskgate.core.model import Claim, FailKind
from kombu_taskgate.core.results import Finality, NewResult, Result
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import Cases, put, take
from .store import Store

OPEN, ENDED, SUCCEEDED = Finality.OPEN, Finality.ENDED, Finality.SUCCEEDED


def new(status: str = "SUCCESS", finality: Finality = SUCCEEDED, payload: bytes = b"1", **values: Any) -> NewResult:
    """A result of the task "one"."""
    return NewResult(**{"task_id": "one", **values}, status=status, finality=finality, payload=payload)


def under(claim: Claim) -> dict[str, Any]:
    """That a result is stored under this lease."""
    return {"execution": claim.id, "token": claim.token, "fenced": True}


def stored(broker: Broker, task_id: str = "one") -> Result:
    """The result that is stored."""
    return broker.results.get([task_id])[task_id]


class ResultCases(Cases):
    """results."""

    def test_result_round_trip(self, broker: Broker, clock: FakeClock) -> None:
        """Everything that is said of a result is there again; what is not stored is not."""
        payload = bytes(range(256)) * 40
        names: dict[str, Any] = {"content_type": "application/json", "content_encoding": "utf-8", "type": "näme 🐘"}
        one = NewResult("id 🐘", "PROGRESS", OPEN, payload, execution=7, token=9, expires_in=60, **names)
        assert broker.results.store(one)
        now = clock.now_ms()
        lease: dict[str, Any] = {"execution": 7, "token": 9}
        expected = Result("id 🐘", "PROGRESS", OPEN, payload, **names, **lease, stored_at=now, expires_at=now + 60_000)
        assert broker.results.get(["id 🐘", "ID 🐘", "other"]) == {"id 🐘": expected}
        assert broker.results.get([]) == {}
        assert broker.results.forget(["id 🐘", "other"]) == 1
        assert broker.results.get(["id 🐘"]) == {}

    def test_results_of_many_tasks(self, broker: Broker) -> None:
        """Any number is found at once; on demand only those after which nothing follows."""
        ids = [f"task {number}" for number in range(1000)]
        for id in ids[::10]:
            broker.results.store(new(task_id=id))
        for id, finality in ((ids[1], OPEN), (ids[2], ENDED)):
            broker.results.store(new("STATE", finality, task_id=id))
        assert set(broker.results.get(ids)) == {*ids[::10], ids[1], ids[2]}
        assert set(broker.results.get(ids, ended=True)) == {*ids[::10], ids[2]}
        assert broker.results.forget(ids) == 102

    def test_told_or_not(self, store: Store, clock: FakeClock) -> None:
        """Whether a result was stored is known also where others are not told of it."""
        broker = store.open(clock=clock, listen=False)
        assert broker.results.store(new("STARTED", OPEN))
        assert broker.results.store(new())
        assert not broker.results.store(new())

    def test_open_result_gives_way(self, broker: Broker) -> None:
        """What is not final is replaced by what comes later, whoever says it."""
        for number, (status, finality) in enumerate(
            [("STARTED", OPEN), ("RETRY", OPEN), ("STARTED", OPEN), ("X", ENDED)]
        ):
            assert broker.results.store(new(status, finality))
            assert (stored(broker).status, stored(broker).version) == (status, number + 1)

    def test_success_stays(self, broker: Broker) -> None:
        """Nothing replaces a success: no state, no failure, no later execution (B69)."""
        broker.results.store(new(payload=b"value", execution=5, token=5))
        leases: tuple[dict[str, Any], ...] = (
            {},
            {"execution": 4, "token": 9},
            {"execution": 5, "token": 9},
            {"execution": 6, "token": 1},
        )
        for lease in leases:
            for finality in Finality:
                assert not broker.results.store(new("LATER", finality, b"other", **lease))
        assert (stored(broker).status, stored(broker).payload, stored(broker).version) == ("SUCCESS", b"value", 1)

    @pytest.mark.parametrize("finality", list(Finality))
    def test_failure_gives_way_to_a_later_execution_only(self, broker: Broker, finality: Finality) -> None:
        """A failure stays under the same or an older execution, whatever the token; a later one replaces it."""
        broker.results.store(new("FAILURE", ENDED, execution=5, token=5))
        leases: tuple[dict[str, Any], ...]
        leases = ({"execution": 4, "token": 9}, {"execution": 5, "token": 5}, {"execution": 5, "token": 9})
        for lease in leases:
            assert not broker.results.store(new("LATER", finality, **lease))
        assert stored(broker).status == "FAILURE"
        assert broker.results.store(new("LATER", finality, execution=6, token=1))
        assert (stored(broker).status, stored(broker).execution, stored(broker).token) == ("LATER", 6, 1)

    def test_failure_gives_way_to_what_is_said_under_no_lease(self, broker: Broker) -> None:
        """A broker that has no leases redelivers; its word counts, and the lease is remembered all the same."""
        broker.results.store(new("FAILURE", ENDED, execution=5, token=5))
        assert broker.results.store(new("STARTED", OPEN))
        assert (stored(broker).status, stored(broker).execution, stored(broker).token) == ("STARTED", 5, 5)
        assert not broker.results.store(new("FAILURE", ENDED, execution=5, token=4))
        assert broker.results.store(new("FAILURE", ENDED, execution=5, token=5))

    def test_older_lease_changes_nothing(self, broker: Broker) -> None:
        """Who was overtaken is refused, also while the newer run has not ended."""
        broker.results.store(new("RETRY", OPEN, execution=5, token=5))
        leases: tuple[dict[str, Any], ...] = ({"execution": 4, "token": 9}, {"execution": 5, "token": 4})
        for lease in leases:
            assert not broker.results.store(new(**lease))
        assert stored(broker).status == "RETRY"
        assert broker.results.store(new("STARTED", OPEN, execution=5, token=5))
        assert broker.results.store(new("STARTED", OPEN, execution=5, token=6))
        assert broker.results.store(new(execution=6, token=1))

    def test_fenced_result_needs_the_current_lease(self, broker: Broker, clock: FakeClock) -> None:
        """A result of a lease that was reaped is refused, before and after somebody else has the execution."""
        put(broker)
        old = take(broker)
        assert broker.results.store(new("STARTED", OPEN, **under(old)))
        clock.advance(11)
        assert broker.reap_expired() == 1
        assert not broker.results.store(new(**under(old)))
        young = take(broker)
        assert not broker.results.store(new("FAILURE", ENDED, task_id="never seen", **under(old)))
        assert broker.results.get(["never seen"]) == {}
        # Of other tables, whose execution merely has the same number: nothing to look up.
        assert broker.results.store(new(task_id="foreign", execution=old.id, token=old.token))
        assert broker.results.store(new(**under(young)))
        broker.ack(young)
        assert not broker.results.store(new(**under(old)))

    def test_fenced_result_after_its_own_settlement(self, broker: Broker) -> None:
        """Who acknowledges before it stores, or is rejected for what it has failed with, is heard."""
        for settle in (broker.ack, lambda lease: broker.fail(lease, FailKind.SKIP)):
            id = put(broker)
            claim = take(broker)
            settle(claim)
            assert broker.results.store(new("FAILURE", ENDED, task_id=f"of {id}", **under(claim)))

    def test_result_bounds(self, store: Store, clock: FakeClock) -> None:
        """What can't be stored is refused with a clear error, and nothing is stored."""
        broker = store.open(clock=clock, max_payload=1000)
        assert broker.results.store(new(task_id="x" * 255, status="s" * 64, payload=b"x" * 1000))
        for bad in (new(task_id=""), new(task_id="x" * 256), new(status=""), new(status="s" * 65), new(task_id="a\0")):
            with pytest.raises(ConfigError):
                broker.results.store(bad)
        with pytest.raises(PayloadTooLarge, match="1001 bytes"):
            broker.results.store(new(payload=b"x" * 1001))
        with pytest.raises(PayloadTooLarge):
            broker.results.save_group("group", b"x" * 1001, None)
        assert broker.results.get(["one"]) == {}
        assert broker.results.group("group") is None

    def test_groups(self, broker: Broker) -> None:
        """What a group consists of is stored, replaced and forgotten."""
        assert broker.results.group("group") is None
        broker.results.save_group("group", b"one", None)
        broker.results.save_group("group", b"other", 60)
        broker.results.save_group("Group", b"another", None)
        assert broker.results.group("group") == b"other"
        broker.results.delete_group("group")
        broker.results.delete_group("group")
        assert (broker.results.group("group"), broker.results.group("Group")) == (None, b"another")

    def test_sweep(self, broker: Broker, clock: FakeClock) -> None:
        """Exactly those are deleted whose time is over, in batches; those without a time stay (B72)."""
        for number in range(5):
            broker.results.store(new(task_id=f"short {number}", expires_in=10))
        broker.results.store(new(task_id="long", expires_in=20))
        broker.results.store(new(task_id="kept"))
        broker.results.save_group("short", b"", 10)
        broker.results.save_group("kept", b"", None)
        clock.advance(9.999)
        assert broker.results.sweep() == 0
        clock.advance(0.001)
        assert [broker.results.sweep(3), broker.results.sweep(3), broker.results.sweep(3)] == [3, 2, 0]
        assert set(broker.results.get(["short 0", "short 4", "long", "kept"])) == {"long", "kept"}
        assert (broker.results.group("short"), broker.results.group("kept")) == (None, b"")
        clock.advance(10**9)
        assert broker.results.sweep() == 1
        assert set(broker.results.get(["long", "kept"])) == {"kept"}

    def test_later_write_lasts_longer(self, broker: Broker, clock: FakeClock) -> None:
        """The time runs from the newest write."""
        broker.results.store(new("STARTED", OPEN, expires_in=10))
        clock.advance(8)
        broker.results.store(new(expires_in=10))
        clock.advance(8)
        assert broker.results.sweep() == 0
        clock.advance(2)
        assert broker.results.sweep() == 1

    def test_one_of_many_successes_counts(self, store: Store) -> None:
        """Of several who store a success at once exactly one is taken, and its value is what everybody reads."""
        broker = store.open()
        taken: list[int] = []

        def write(number: int) -> None:
            if broker.results.store(new(payload=str(number).encode())):
                taken.append(number)

        assert errors_of(together([partial(write, number) for number in range(8)])) == []
        assert [str(number).encode() for number in taken] == [stored(broker).payload]

    def test_watchers_are_told(self, store: Store) -> None:
        """Who watches is told of results that are stored through the same broker, and no more once it has closed."""
        broker = store.open()
        told: list[Any] = []
        came = threading.Event()

        def wake(names: Any) -> None:
            told.append(names)
            came.set()

        watch = broker.results.watch(wake)
        try:
            broker.results.store(new(task_id="watched"))
            assert came.wait(10)
            assert any(names is None or "watched" in names for names in told)
            assert watch.longest_pause > 0
        finally:
            watch.close()
            watch.close()
        told.clear()
        broker.results.store(new(task_id="unwatched"))
        assert not any(names and "unwatched" in names for names in told)
