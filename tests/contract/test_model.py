"""The same random commands on the reference and on each SQL store: every answer and all that is visible must agree.

Ids and lease tokens differ between stores, so executions are compared by their number of creation and leases by
the number of their claim.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
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
from kombu_taskgate.core.results import Finality, NewResult
from kombu_taskgate.core.revocations import Revocation
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.stores import InDatabase

QUEUES = ("a", "b")
ALL = Filter(limit=10**6)
#: More than any example holds: a claim with this limit takes all that is ready.
EVERYTHING = 1000
REVOKED = (Revocation("t1"), Revocation("t2"), Revocation("t1", "header"))
#: Small numbers, so that every limit is met within an example.
LIMITS: dict[str, Any] = {
    "lease_ttl": 10,
    "queue_lease_ttl": {"b": 3},
    "lease_lost_max": 2,
    "throttled_max": 2,
    "max_deliveries": 3,
    "keep_failed": 60,
}
EXAMPLES = int(os.environ.get("TASKGATE_TEST_MODEL_EXAMPLES", "60"))
STEPS = 50
#: How many before the newest: mostly few, so that commands meet, and sometimes many.
AGO = st.integers(0, 5) | st.integers(0, 40)


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
        """The id that came so many before the newest (in a circle); one that nobody has where there is none."""
        return self.ids[-1 - number % len(self.ids)] if self.ids else 10**12

    def lease(self, number: int) -> Lease:
        """The lease that came so many before the newest (in a circle), which may be long lost."""
        return self.leases[-1 - number % len(self.leases)] if self.leases else Lease(10**12, 1)

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


#: What a holder may do with its lease, and what others do to it meanwhile; (broker, lease, now in ms).
WAYS: dict[str, Callable[[Broker, Lease, int], Any]] = {
    "ack": lambda broker, lease, now: broker.ack(lease),
    "ack result": lambda broker, lease, now: broker.ack(lease, b"result"),
    "cancel": lambda broker, lease, now: broker.cancel(lease.id),
    "fail": lambda broker, lease, now: broker.fail(lease),
    "fail, retry soon": lambda broker, lease, now: broker.fail(lease, delay=2.0, detail="why"),
    "fail, retry at": lambda broker, lease, now: broker.fail(lease, retry_at=now + 5000),
    "fail, unclear": lambda broker, lease, now: broker.fail(lease, delay=1.0, retry_at=now),
    "finish canceled": lambda broker, lease, now: broker.finish_canceled(lease),
    "heartbeat": lambda broker, lease, now: broker.heartbeat(lease),
    "requeue": lambda broker, lease, now: broker.requeue(lease),
    "requeue unseen": lambda broker, lease, now: broker.requeue(lease, delivered=False),
    "skip": lambda broker, lease, now: broker.fail(lease, FailKind.SKIP, reason=Reason.UNDECODABLE, detail="why"),
    "throttle": lambda broker, lease, now: broker.fail(lease, FailKind.THROTTLED, delay=2.0),
    "begin": lambda broker, lease, now: len(broker.begin_many([lease])),
    "lose": lambda broker, lease, now: broker.fail(lease, FailKind.LOST, detail="killed"),
}


#: Often a cancel, because what follows from one takes a second way.
SOME_WAY = st.sampled_from(["cancel"] * 5 + ["begin"] * 3 + sorted(WAYS))


def _outcome(side: Side, call: Callable[[], Any]) -> Any:
    """What a call answers, or the class of its error."""
    try:
        return call()
    except TaskExists as error:
        # Of an earlier task in the same refused call nothing but the key is worth comparing.
        number = side.number(error.id)
        return TaskExists, error.unique, error.key, number, None if number is None else (error.state, error.task_id)
    except TaskgateError as error:
        return type(error)


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
            outcome = _outcome(side, partial(command, side))
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
            "task_id": st.sampled_from([None, "t1", "t2"]),
            "priority": st.sampled_from([0, 0, 0, -1, 2]),
            "when": st.sampled_from([None, None, None, ("delay", 0.0), ("delay", 4.0), ("run_at", -5), ("run_at", 12)]),
            "expires": st.sampled_from([None, None, None, 2, 15, -1]),
            "expires_in": st.sampled_from([None, None, None, 3.0]),
            "key": st.sampled_from([None, None, None, "k1", "k2"]),
            "unique_key": st.sampled_from([None, None, None, "u1", "u2"]),
            "take_over": st.booleans(),
            "parents": st.lists(AGO, max_size=2),
            "root_id": st.sampled_from([None, "t1", "r"]),
            "depends_on": st.sampled_from([[], [], [], ["t1"], ["t2"], ["t2", "t1"]]),
            "fail_fast": st.booleans(),
            "max_retry": st.integers(0, 2),
        }
    )

    def _new(self, side: Side, wanted: dict[str, Any]) -> NewTask:
        now = self.clock.now_ms()
        task = NewTask(
            wanted["queue"],
            type=wanted["type"],
            task_id=wanted["task_id"],
            root_id=wanted["root_id"],
            depends_on=wanted["depends_on"],
            priority=wanted["priority"],
            expires_at=None if wanted["expires"] is None else now + wanted["expires"] * 1000,
            expires_in=wanted["expires_in"],
            key=wanted["key"],
            unique_key=wanted["unique_key"],
            take_over=wanted["take_over"],
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

    @rule(queue=st.sampled_from(QUEUES), parents=st.lists(AGO, min_size=1, max_size=3))
    def enqueue_child(self, queue: str, parents: list[int]) -> None:
        def command(side: Side) -> None:
            side.ids.append(side.broker.enqueue(NewTask(queue, parents=[side.id(number) for number in parents])))

        self.both(command)

    # -- claiming and settling ---------------------------------------------------------------------

    @rule(
        queue=st.sampled_from(QUEUES),
        limit=st.sampled_from([1, 1, 2, 5]),
        session=AGO,
        ways=st.lists(SOME_WAY, max_size=3),
    )
    def dequeue(self, queue: str, limit: int, session: int, ways: list[str]) -> None:
        def command(side: Side) -> Any:
            claims = side.broker.dequeue([queue], limit, owner=f"w{session}", session=side.session(session))
            return _claims(side, claims), [self._use(side, lease, way) for way in ways for lease in claims]

        self.both(command)

    def _use(self, side: Side, lease: Lease, way: str) -> Any:
        return _outcome(side, lambda: WAYS[way](side.broker, lease, self.clock.now_ms()))

    @rule(queue=st.sampled_from(QUEUES), times=st.integers(1, 5), way=SOME_WAY)
    def dequeue_again_and_again(self, queue: str, times: int, way: str) -> None:
        def command(side: Side) -> Any:
            seen = []
            for _ in range(times):
                claims = side.broker.dequeue([queue])
                seen.append((_claims(side, claims), [self._use(side, lease, way) for lease in claims]))
            return seen

        self.both(command)

    @rule(session=AGO)
    def dequeue_all(self, session: int) -> None:
        def command(side: Side) -> list[Any]:
            # Which queue comes first is not the same everywhere; what they hold is. A claim may free more.
            claims: list[Claim] = []
            while more := side.broker.dequeue(QUEUES, EVERYTHING, owner="all", session=side.session(session)):
                claims += more
            return _claims(side, sorted(claims, key=lambda claim: claim.id))

        self.both(command)

    @rule(
        numbers=st.lists(AGO, max_size=3),
        queue=st.sampled_from(QUEUES),
        limit=st.integers(0, 3),
        begin=st.lists(AGO, max_size=2, unique=True),
    )
    def ack_and_dequeue(self, numbers: list[int], queue: str, limit: int, begin: list[int]) -> None:
        def command(side: Side) -> Any:
            leases = [side.lease(number) for number in numbers]
            begun = sorted((side.lease(number) for number in begin), key=lambda lease: lease.id)
            refused, claims = side.broker.ack_and_dequeue(leases, [queue], limit, owner="w", begin=begun)
            return [side.number(lease.id) for lease in refused], _claims(side, claims)

        self.both(command)

    @rule(number=AGO, way=SOME_WAY)
    def use_a_lease(self, number: int, way: str) -> None:
        self.both(lambda side: self._use(side, side.lease(number), way))

    @rule(numbers=st.lists(AGO, max_size=5), way=st.sampled_from(["ack", "requeue", "requeue unseen", "heartbeat"]))
    def use_leases(self, numbers: list[int], way: str) -> None:
        def command(side: Side) -> Any:
            leases = [side.lease(number) for number in numbers]
            if way == "heartbeat":
                found = side.broker.heartbeat_many(leases)
                return [sorted(str(side.number(lease.id)) for lease in part) for part in (found.lost, found.canceled)]
            if way == "ack":
                refused = side.broker.ack_many(leases)
            else:
                refused = side.broker.requeue_many(leases, delivered=way == "requeue")
            return [side.number(lease.id) for lease in refused]

        self.both(command)

    @rule(step=st.sampled_from(["open", "renew", "renew", "close"]), number=AGO, ttl=st.sampled_from([2.0, 30.0]))
    def session(self, step: str, number: int, ttl: float) -> None:
        def command(side: Side) -> Any:
            session = side.session(number)
            if step == "open" or session is None:
                side.sessions.append(side.broker.open_session("w", ttl))
                return None
            if step == "close":
                return side.broker.close_session(session)
            renewal = side.broker.renew_session(session)
            for id, token in renewal.held.items():
                assert any(lease.id == id and lease.token == token for lease in side.leases)
            return {side.number(id) for id in renewal.held}, {side.number(id) for id in renewal.canceled}

        self.both(command)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 3.001, 10.0, 10.001, 31.0]), reap=st.booleans())
    def time_passes(self, seconds: float, reap: bool) -> None:
        self.clock.advance(seconds)
        if reap:
            self.both(lambda side: side.broker.reap_expired())

    # -- results -----------------------------------------------------------------------------------

    @rule(
        task_id=st.sampled_from(["t1", "t2"]),
        finality=st.sampled_from(Finality),
        number=st.none() | AGO,
        fenced=st.booleans(),
        expires_in=st.sampled_from([None, 5.0]),
    )
    def store_result(
        self, task_id: str, finality: Finality, number: int | None, fenced: bool, expires_in: float | None
    ) -> None:
        def command(side: Side) -> bool:
            lease = Lease(0, 0) if number is None else side.lease(number)
            new = NewResult(task_id, f"status {finality}", finality, b"1", expires_in=expires_in)
            new.execution, new.token, new.fenced = lease.id, lease.token, fenced
            return side.broker.results.store(new)

        self.both(command)

    @rule(task_ids=st.lists(st.sampled_from(["t1", "t2"]), max_size=2), sweep=st.booleans())
    def forget_results(self, task_ids: list[str], sweep: bool) -> None:
        self.both(lambda side: side.broker.results.forget(task_ids))
        if sweep:
            self.both(lambda side: side.broker.results.sweep() and None)

    def _results(self, side: Side) -> list[Any]:
        found = side.broker.results.get(["t1", "t2"])
        return [(id, one.status, one.finality, one.version, one.expires_at) for id, one in sorted(found.items())]

    def _inspection(self, side: Side, task_id: str) -> Any:
        found = side.broker.inspect(task_id)
        return None if found is None else {**_without(side, found, {"task"}), "task": _task(side, found.task)}

    # -- control -----------------------------------------------------------------------------------

    @rule(number=AGO)
    def cancel(self, number: int) -> None:
        self.both(lambda side: side.broker.cancel(side.id(number)))

    @rule(numbers=st.lists(AGO, max_size=3), task_ids=st.lists(st.sampled_from(["t1", "t2"]), max_size=1))
    def cancel_waiting(self, numbers: list[int], task_ids: list[str]) -> None:
        def command(side: Side) -> Any:
            found = side.broker.cancel_waiting([side.id(number) for number in numbers], task_ids=task_ids)
            return [_task(side, task) for task in found], side.broker.cancel_waiting(task_ids=task_ids)

        self.both(command)

    @rule(limit=st.integers(1, 3), queues=st.sampled_from([None, [], QUEUES[:1]]), done=st.booleans())
    def answer(self, limit: int, queues: list[str] | None, done: bool) -> None:
        def command(side: Side) -> Any:
            # In any order among those that became due in one instant, so all of it is claimed.
            tasks = [task for _ in range(50) for task in side.broker.claim_answers(limit, queues, older=3.0)]
            if done:
                side.broker.answered([task.id for task in tasks])
            return sorted((_task(side, task) for task in tasks), key=repr)

        self.both(command)

    @rule(revoked=st.lists(st.sampled_from(REVOKED), max_size=2), keep=st.sampled_from([5.0, 40.0]))
    def revoke(self, revoked: list[Revocation], keep: float) -> None:
        self.both(lambda side: side.broker.revocations.add(revoked, keep))

    @rule(number=AGO, payload=st.sampled_from([None, b"new"]), allow_completed=st.booleans(), cancel=st.booleans())
    def replay(self, number: int, payload: bytes | None, allow_completed: bool, cancel: bool) -> None:
        id_of = self.sides[0].id(number)
        place = self.sides[0].number(id_of)

        def command(side: Side) -> Any:
            id = side.ids[place] if place is not None else 10**12
            canceled = _outcome(side, lambda: side.broker.cancel(id)) if cancel else None

            def replay() -> None:
                side.ids.append(side.broker.replay(id, payload=payload, allow_completed=allow_completed))

            # The second time it must be refused.
            return canceled, _outcome(side, replay), _outcome(side, replay)

        self.both(command)

    @rule(what=st.sampled_from(["purge a", "purge b", "prune", "prune", "prune"]), seconds=st.sampled_from([0, 21, 61]))
    def tidy_up(self, what: str, seconds: int) -> None:
        if what == "prune":
            self.clock.advance(seconds)
            self.both(lambda side: side.broker.prune())
        else:
            self.both(lambda side: side.broker.purge(what[-1]))

    # -- quotas ------------------------------------------------------------------------------------

    @rule(
        reserve=st.booleans(),
        limit=st.integers(0, 3),
        window=st.sampled_from([5.0, 30.0]),
        n=st.integers(1, 2),
        ago=AGO,
    )
    def quota(self, reserve: bool, limit: int, window: float, n: int, ago: int) -> None:
        def command(side: Side) -> Any:
            if reserve:
                reservation = side.broker.queue_quota("calls", limit, window, n)
                if reservation is not None:
                    side.reservations.append(reservation)
                return reservation
            # Each at most once: giving back twice is a mistake of the caller.
            held = side.reservations
            return side.broker.release_quota(held.pop(ago % len(held))) if held else None

        self.both(command)

    # -- what is visible ---------------------------------------------------------------------------

    @invariant()
    def all_that_is_visible_agrees(self) -> None:
        if not self.sides:
            return
        self.both(lambda side: [_task(side, task) for task in side.broker.list(ALL)])
        self.both(lambda side: dict(side.broker.queue_lens(QUEUES)))
        self.both(self._results)

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
        self.both(lambda side: side.broker.counts())
        self.both(lambda side: [_task(side, task) for task in side.broker.waiting(limit=limit + 1)])
        self.both(lambda side: (side.broker.revocations.find(REVOKED), side.broker.revocations.any()))
        self.both(lambda side: side.broker.running(["t1", "t2"]))
        self.both(lambda side: [self._inspection(side, task_id) for task_id in ("t1", "t2")])
        self.both(lambda side: _task(side, side.broker.get(side.id(offset))))


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
