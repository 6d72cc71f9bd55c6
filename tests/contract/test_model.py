"""The same random commands on the reference and on each SQL store: every answer and all that is visible must agree.

Ids and lease tokens differ between stores, so executions are compared by their number of creation and leases by
the number of their claim.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import TaskExists, TaskgateError
from kombu_taskgate.core.memory import MemoryBroker
from kombu_taskgate.core.model import (
    Claim,
    FailKind,
    Filter,
    Lease,
    NewTask,
    Reason,
    Reservation,
    Session,
    State,
    StateChange,
    Task,
)
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.stores import InDatabase

QUEUES = ("a", "b")
ALL = Filter(limit=10**6)
#: More than any example holds: a claim with this limit takes all that is ready.
EVERYTHING = 1000
#: Small numbers, so that every limit is met within an example.
LIMITS: dict[str, Any] = {
    "lease_ttl": 10,
    "queue_lease_ttl": {"b": 3},
    "lease_lost_max": 2,
    "throttled_max": 2,
    "max_deliveries": 4,
    "keep_failed": 60,
}
EXAMPLES = int(os.environ.get("TASKGATE_TEST_MODEL_EXAMPLES", "80"))
STEPS = 50


@dataclass
class Side:
    """One broker, and what its caller remembers in the order in which it came."""

    broker: Broker
    told: list[StateChange]
    ids: list[int] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)

    def number(self, id: int | None) -> int | None:
        """Number of creation of an id; what was never stored has none."""
        return self.ids.index(id) if id in self.ids else None

    def id(self, number: int) -> int:
        """The id that came as this number (in a circle); one that nobody has where there is none."""
        return self.ids[number % len(self.ids)] if self.ids else 10**12

    def lease(self, number: int) -> Lease:
        """The lease that came as this number (in a circle), which may be long lost."""
        return self.leases[number % len(self.leases)] if self.leases else Lease(10**12, 1)

    def session(self, number: int) -> Session | None:
        """A session, or none: one number in so many stands for none."""
        place = number % (len(self.sessions) + 1)
        return self.sessions[place] if place < len(self.sessions) else None


#: A command as both sides run it; what it returns must not depend on ids or tokens.
Command = Callable[[Side], Any]


def _claims(side: Side, claims: list[Claim]) -> list[Any]:
    side.leases.extend(claims)
    return [_without(side, claim, {"token"}) for claim in claims]


def _without(side: Side, shown: Any, hidden: set[str]) -> dict[str, Any]:
    values = {f.name: getattr(shown, f.name) for f in fields(shown) if f.name not in hidden}
    for name in ("id", "replay_of"):
        if name in values:
            values[name] = side.number(values[name])
    return values


def _difference(expected: Any, found: Any, place: str = "answer") -> str:
    """Where two answers differ, in a line or few."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        parts = [(f"{place}.{key}", expected[key], found[key]) for key in expected]
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple) and len(expected) == len(found):
        parts = [(f"{place}[{at}]", *pair) for at, pair in enumerate(zip(expected, found, strict=True))]
    else:
        return f"{place}: the reference says {expected!r}, the store {found!r}"
    return "\n".join(_difference(one, other, name) for name, one, other in parts if one != other)


def _task(side: Side, task: Task) -> dict[str, Any]:
    return _without(side, task, set())


class Commands(RuleBasedStateMachine):
    """One example: a fresh pair of brokers and up to STEPS commands."""

    store: ClassVar[InDatabase]

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.sides: list[Side] = []

    @initialize(keep=st.sampled_from([0, 20]), announce=st.booleans())
    def start(self, keep: int, announce: bool) -> None:
        # A store may take other ways when nobody listens, so both are tried.
        options = {**LIMITS, "keep_completed": keep}
        told: list[list[StateChange]] = [[], []]
        notify = [part.append if announce else None for part in told]
        self.store.clear()
        reference = MemoryBroker(BrokerSettings("memory://", **options), clock=self.clock, notify=notify[0])
        under_test = self.store.open(clock=self.clock, notify=notify[1], **options)
        self.sides = [Side(reference, told[0]), Side(under_test, told[1])]

    def teardown(self) -> None:
        for side in self.sides:
            side.broker.close()

    def both(self, command: Command) -> Any:
        """Run a command on both sides; the answers, or the classes of the errors, must be equal."""
        outcomes = []
        for side in self.sides:
            side.told.clear()
            try:
                outcome = command(side)
            except TaskExists as error:
                # Of an earlier task in the same refused call nothing but the key is worth comparing.
                number = side.number(error.id)
                outcome = (TaskExists, error.key, number, None if number is None else error.state)
            except TaskgateError as error:
                outcome = type(error)
            told = [(side.number(c.id), c.queue, str(c.before), str(c.after)) for c in side.told]
            outcomes.append((outcome, sorted(told, key=repr)))
        expected, found = outcomes
        assert found == expected, _difference(expected, found)
        return expected[0]

    # -- publishing --------------------------------------------------------------------------------

    new_task = st.fixed_dictionaries(
        {
            "queue": st.sampled_from(QUEUES),
            "type": st.sampled_from(["", "t"]),
            "priority": st.sampled_from([0, 0, 0, -1, 2]),
            "when": st.sampled_from([None, None, None, ("delay", 0.0), ("delay", 4.0), ("run_at", -5), ("run_at", 12)]),
            "expires": st.sampled_from([None, None, None, 2, 15, -1]),
            "key": st.sampled_from([None, None, None, "k1", "k2"]),
            "parents": st.lists(st.integers(0, 30), max_size=2),
            "fail_fast": st.booleans(),
            "max_retry": st.integers(0, 2),
        }
    )

    def _new(self, side: Side, wanted: dict[str, Any]) -> NewTask:
        now = self.clock.now_ms()
        task = NewTask(
            wanted["queue"],
            type=wanted["type"],
            priority=wanted["priority"],
            expires_at=None if wanted["expires"] is None else now + wanted["expires"] * 1000,
            key=wanted["key"],
            parents=[side.id(number) for number in wanted["parents"]],
            fail_fast=wanted["fail_fast"],
            max_retry=wanted["max_retry"],
        )
        if wanted["when"] is not None:
            kind, seconds = wanted["when"]
            if kind == "delay":
                task.delay = seconds
            else:
                task.run_at = now + seconds * 1000
        return task

    def _enqueue(self, wanted: list[dict[str, Any]]) -> None:
        def command(side: Side) -> list[int | None]:
            tasks = [self._new(side, one) for one in wanted]
            # A single one goes by its own method.
            ids = [side.broker.enqueue(tasks[0])] if len(tasks) == 1 else side.broker.enqueue_many(tasks)
            side.ids.extend(ids)
            assert ids == sorted(ids)
            return [side.number(id) for id in ids]

        self.both(command)

    @rule(wanted=new_task)
    def enqueue(self, wanted: dict[str, Any]) -> None:
        self._enqueue([wanted])

    @rule(queue=st.sampled_from(QUEUES), number=st.integers(1, 4))
    def enqueue_plain(self, queue: str, number: int) -> None:
        def command(side: Side) -> None:
            side.ids.extend(side.broker.enqueue_many([NewTask(queue)] * number))

        self.both(command)

    @rule(wanted=st.lists(new_task, min_size=2, max_size=4))
    def enqueue_many(self, wanted: list[dict[str, Any]]) -> None:
        self._enqueue(wanted)

    @rule(queue=st.sampled_from(QUEUES), parents=st.lists(st.integers(0, 30), min_size=1, max_size=3))
    def enqueue_child(self, queue: str, parents: list[int]) -> None:
        def command(side: Side) -> None:
            side.ids.append(side.broker.enqueue(NewTask(queue, parents=[side.id(-number) for number in parents])))

        self.both(command)

    # -- claiming ----------------------------------------------------------------------------------

    @rule(queue=st.sampled_from(QUEUES), limit=st.sampled_from([1, 1, 2, 5]), session=st.integers(0, 9))
    def dequeue(self, queue: str, limit: int, session: int) -> None:
        self.both(
            lambda side: _claims(
                side, side.broker.dequeue([queue], limit, owner=f"w{session}", session=side.session(session))
            )
        )

    @rule()
    def dequeue_all(self) -> None:
        def command(side: Side) -> list[Any]:
            # Which queue comes first is not the same everywhere; what they hold is. A claim may free more.
            claims: list[Claim] = []
            while more := side.broker.dequeue(QUEUES, EVERYTHING, owner="all"):
                claims += more
            return _claims(side, sorted(claims, key=lambda claim: claim.id))

        self.both(command)

    @rule(numbers=st.lists(st.integers(0, 40), max_size=3), queue=st.sampled_from(QUEUES), limit=st.integers(0, 3))
    def ack_and_dequeue(self, numbers: list[int], queue: str, limit: int) -> None:
        def command(side: Side) -> Any:
            leases = [side.lease(-number) for number in numbers]
            refused, claims = side.broker.ack_and_dequeue(leases, [queue], limit, owner="w")
            return [side.number(lease.id) for lease in refused], _claims(side, claims)

        self.both(command)

    # -- settling ----------------------------------------------------------------------------------

    @rule(number=st.integers(0, 40), result=st.sampled_from([None, b"result"]))
    def ack(self, number: int, result: bytes | None) -> None:
        self.both(lambda side: side.broker.ack(side.lease(-number), result))

    @rule(numbers=st.lists(st.integers(0, 40), max_size=5))
    def ack_many(self, numbers: list[int]) -> None:
        self._many(numbers, lambda broker, leases: broker.ack_many(leases))

    @rule(numbers=st.lists(st.integers(0, 40), max_size=5), delivered=st.booleans())
    def requeue_many(self, numbers: list[int], delivered: bool) -> None:
        self._many(numbers, lambda broker, leases: broker.requeue_many(leases, delivered=delivered))

    def _many(self, numbers: list[int], settle: Callable[[Broker, list[Lease]], list[Lease]]) -> None:
        self.both(
            lambda side: [
                side.number(lease.id) for lease in settle(side.broker, [side.lease(-number) for number in numbers])
            ]
        )

    @rule(
        number=st.integers(0, 40),
        kind=st.sampled_from(FailKind),
        when=st.sampled_from([{}, {"delay": 4.0}, {"retry_at": 9000}, {"delay": 1.0, "retry_at": 1}]),
        reason=st.sampled_from([None, None, Reason.UNDECODABLE]),
        detail=st.sampled_from([None, "because"]),
    )
    def fail(
        self, number: int, kind: FailKind, when: dict[str, Any], reason: Reason | None, detail: str | None
    ) -> None:
        if "retry_at" in when:
            when = {**when, "retry_at": when["retry_at"] + self.clock.now_ms()}
        self.both(lambda side: side.broker.fail(side.lease(-number), kind, reason=reason, detail=detail, **when))

    @rule(number=st.integers(0, 40), delivered=st.booleans())
    def requeue(self, number: int, delivered: bool) -> None:
        self.both(lambda side: side.broker.requeue(side.lease(-number), delivered=delivered))

    @rule(number=st.integers(0, 40))
    def finish_canceled(self, number: int) -> None:
        self.both(lambda side: side.broker.finish_canceled(side.lease(-number)))

    # -- leases ------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 40))
    def heartbeat(self, number: int) -> None:
        self.both(lambda side: side.broker.heartbeat(side.lease(-number)))

    @rule(numbers=st.lists(st.integers(0, 40), max_size=6))
    def heartbeat_many(self, numbers: list[int]) -> None:
        def command(side: Side) -> Any:
            found = side.broker.heartbeat_many([side.lease(-number) for number in numbers])
            return [sorted(str(side.number(lease.id)) for lease in part) for part in (found.lost, found.canceled)]

        self.both(command)

    @rule(ttl=st.sampled_from([2.0, 30.0]))
    def open_session(self, ttl: float) -> None:
        self.both(lambda side: side.sessions.append(side.broker.open_session("w", ttl)))

    @rule(number=st.integers(0, 9))
    def renew_session(self, number: int) -> None:
        def command(side: Side) -> Any:
            session = side.session(number)
            if session is None:
                return None
            renewal = side.broker.renew_session(session)
            for id, token in renewal.held.items():
                assert any(lease.id == id and lease.token == token for lease in side.leases)
            return {side.number(id) for id in renewal.held}, {side.number(id) for id in renewal.canceled}

        self.both(command)

    @rule(number=st.integers(0, 9))
    def close_session(self, number: int) -> None:
        def command(side: Side) -> int | None:
            session = side.session(number)
            return None if session is None else side.broker.close_session(session)

        self.both(command)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 3.001, 10.0, 10.001, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def reap(self) -> None:
        self.both(lambda side: side.broker.reap_expired())

    @rule()
    def time_passes_and_reap(self) -> None:
        self.clock.advance(11)
        self.both(lambda side: side.broker.reap_expired())

    @rule(seconds=st.sampled_from([0, 21, 61]))
    def prune(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.both(lambda side: side.broker.prune())

    # -- control -----------------------------------------------------------------------------------

    @rule(number=st.integers(0, 40))
    def cancel(self, number: int) -> None:
        self.both(lambda side: side.broker.cancel(side.id(-number)))

    @rule(number=st.integers(0, 40), payload=st.sampled_from([None, b"new"]), allow_completed=st.booleans())
    def replay(self, number: int, payload: bytes | None, allow_completed: bool) -> None:
        def command(side: Side) -> None:
            side.ids.append(side.broker.replay(side.id(-number), payload=payload, allow_completed=allow_completed))

        self.both(command)

    @rule(queue=st.sampled_from(QUEUES))
    def purge(self, queue: str) -> None:
        self.both(lambda side: side.broker.purge(queue))

    # -- quotas ------------------------------------------------------------------------------------

    @rule(limit=st.integers(0, 3), window=st.sampled_from([5.0, 30.0]), n=st.integers(1, 2))
    def reserve(self, limit: int, window: float, n: int) -> None:
        def command(side: Side) -> Reservation | None:
            reservation = side.broker.queue_quota("calls", limit, window, n)
            if reservation is not None:
                side.reservations.append(reservation)
            return reservation

        self.both(command)

    @rule(number=st.integers(0, 9))
    def release(self, number: int) -> None:
        def command(side: Side) -> bool | None:
            # Each at most once: giving back twice is a mistake of the caller.
            if not side.reservations:
                return None
            return side.broker.release_quota(side.reservations.pop(number % len(side.reservations)))

        self.both(command)

    # -- what is visible ---------------------------------------------------------------------------

    @invariant()
    def all_that_is_visible_agrees(self) -> None:
        if not self.sides:
            return
        self.both(lambda side: [_task(side, task) for task in side.broker.list(ALL)])
        self.both(lambda side: dict(side.broker.queue_lens(QUEUES)))

    @rule()
    def counts(self) -> None:
        self.both(lambda side: side.broker.counts())

    @rule(number=st.integers(0, 40))
    def get(self, number: int) -> None:
        self.both(lambda side: _task(side, side.broker.get(side.id(-number))))

    @rule(
        states=st.none() | st.lists(st.sampled_from(State), max_size=3),
        key=st.sampled_from([None, "k1"]),
        queue=st.sampled_from([None, "a"]),
        offset=st.integers(0, 3),
        limit=st.integers(0, 5),
    )
    def listing(self, states: list[State] | None, key: str | None, queue: str | None, offset: int, limit: int) -> None:
        wanted = Filter(queue=queue, states=states, key=key, offset=offset, limit=limit)
        self.both(lambda side: [_task(side, task) for task in side.broker.list(wanted)])


@pytest.mark.slow
@pytest.mark.timeout(900)  # to find the smallest example of a failure may take Hypothesis minutes
def test_store_agrees_with_the_reference(sql_store: InDatabase) -> None:
    run_state_machine_as_test(
        type("CommandsOnStore", (Commands,), {"store": sql_store}),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            # An example is many transactions; how long they take says nothing about the commands.
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
