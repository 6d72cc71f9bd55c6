"""The public API as a typed program uses it. Checked by mypy --strict (make types), never run."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import assert_type

import celery_ext
from celery_ext.schedule import Schedule, ScheduleEntry, ScheduleTick
from kombu_taskgate.core.broker import Broker, Notify
from kombu_taskgate.core.clock import Clock, to_ms
from kombu_taskgate.core.election import LeaderElector
from kombu_taskgate.core.errors import LeaseLost, TaskCanceled, TaskExists, TaskgateError
from kombu_taskgate.core.factory import open_broker
from kombu_taskgate.core.lease import LeaseKeeper
from kombu_taskgate.core.memory import MemoryBroker
from kombu_taskgate.core.model import (
    Claim,
    FailKind,
    Filter,
    HeartbeatResult,
    Lease,
    NewTask,
    Reason,
    Renewal,
    Reservation,
    Session,
    State,
    StateChange,
    Task,
)
from kombu_taskgate.core.pool import Pool
from kombu_taskgate.core.reaper import Reaper
from kombu_taskgate.core.redis_terms import RedisTerms
from kombu_taskgate.core.settings import BrokerSettings
from kombu_taskgate.core.singlepod import Lock, RedisLock, SinglePod, SinglePodConfig, SqlLock
from kombu_taskgate.core.sql.broker import SqlBroker
from kombu_taskgate.core.terms import Candidate, LeaseStore, Term
from kombu_taskgate.core.topology import Binding, Exchange, Queue, Topology

assert_type(celery_ext.__version__, str)
assert_type(celery_ext.inspect_task("id"), celery_ext.TaskInfo | None)


def the_schedule(app: Any) -> None:
    """Periodic entries at run time."""
    with Schedule(app) as schedule:
        assert_type(schedule.list(), list[ScheduleEntry])
        assert_type(schedule.get("report"), ScheduleEntry | None)
        assert_type(schedule.add("report", "shop.report", crontab="0 9 * * *", args=[1]), ScheduleEntry)
        assert_type(schedule.ticks("report"), Sequence[ScheduleTick])


class FixedClock:
    """What a test passes as a clock."""

    def now_ms(self) -> int:
        return to_ms(1.5)


clock: Clock = FixedClock()


def on_change(change: StateChange) -> None:
    assert_type(change.before, State | None)
    assert_type(change.after, State)


notify: Notify = on_change

settings = BrokerSettings(url="sqlite:///taskgate.db", lease_ttl=2, queue_lease_ttl={"urgent": 1})
assert_type(settings.ttl_of("urgent"), float)

assert_type(open_broker(settings, clock=clock, notify=notify), Broker)
stores: list[Broker] = [
    MemoryBroker(settings, clock=clock),
    SqlBroker(settings, notify=notify),
]  # both keep the contract


def on_lost(leases: list[Lease]) -> None:
    assert_type(leases[0].token, int)


def consume(broker: Broker) -> None:
    keeper = LeaseKeeper(broker, "worker-1", 60.0, {"urgent": 10.0}, on_lost=on_lost)
    reaper = Reaper(broker, 20.0)
    keeper.start()
    reaper.start()
    assert_type(keeper.session_for("urgent"), Session)
    assert_type(keeper.may_claim, bool)
    reaper.stop()
    keeper.stop()


def publish(broker: Broker) -> None:
    first = broker.enqueue(NewTask(queue="mail", payload=b"{}", priority=5, key="order-1"))
    assert_type(first, int)
    assert_type(broker.enqueue_many([NewTask("mail", parents=[first], fail_fast=False, delay=1.5)]), list[int])
    try:
        broker.enqueue(NewTask(queue="mail", key="order-1"))
    except TaskExists as error:
        assert_type(error.state, State)
        assert_type(error.id, int)


def work(broker: Broker) -> None:
    session = broker.open_session("worker-1", ttl=60.0)
    assert_type(session, Session)
    claims = broker.dequeue(["mail"], limit=10, timeout=None, owner="worker-1", session=session)
    assert_type(claims, list[Claim])
    leases: Sequence[Lease] = claims  # a claim is a lease
    assert_type(broker.heartbeat_many(leases), HeartbeatResult)
    assert_type(broker.renew_session(session), Renewal)
    refused, more = broker.ack_and_dequeue(leases, ["mail"], 10, session=session)
    assert_type(refused, list[Lease])
    for claim in more:
        try:
            assert_type(broker.heartbeat(claim), int)
            assert_type(broker.fail(claim, FailKind.SKIP, reason=Reason.UNDECODABLE), State)
        except TaskCanceled:
            broker.finish_canceled(claim)
        except LeaseLost as lost:
            problem: TaskgateError = lost
            assert_type(problem.args, tuple[Any, ...])
    assert_type(broker.close_session(session), int)
    assert_type(broker.reap_expired(), int)


def lead(broker: Broker) -> None:
    terms: list[LeaseStore] = [broker.terms, RedisTerms("redis://127.0.0.1", prefix="app:")]
    assert_type(terms[0].try_acquire("reports", "me", 15.0), Term | None)
    assert_type(terms[0].candidates("reports"), list[Candidate])

    def gained(term: Term) -> None:
        assert_type(term.number, int)

    elector = LeaderElector(broker.terms, "reports", ttl=15.0, on_gained=gained, fit=lambda: True)
    elector.start()
    assert_type(elector.is_leader, bool)
    assert_type(elector.term, Term | None)
    assert_type(elector.now_ms(), int | None)
    elector.resign(hold_off=60.0)
    elector.stop()


def work_alone(broker: Broker) -> None:
    locks: list[Lock] = [SqlLock("sqlite:///taskgate.db"), SqlLock(settings), RedisLock("redis://127.0.0.1")]

    def job(stop: threading.Event) -> None:
        stop.wait(1.0)

    pod = SinglePod("nightly", locks[0], job, config=SinglePodConfig(ttl=15, max_run=60.0), on_error=print)
    pod.start()
    assert_type(pod.stop(), bool)

    def run(claim: Claim, stop: threading.Event) -> bytes | None:
        return None if stop.is_set() else claim.payload

    pool = Pool(broker, ["mail", "reports"], run, 8, retry_delay=lambda claim: 2.0 * claim.attempts)
    pool.start()
    assert_type(pool.stop(within=10.0), bool)


def operate(broker: Broker) -> None:
    task = broker.get(1)
    assert_type(task, Task)
    assert_type(task.lease_until, int | None)
    assert_type(broker.list(Filter(queue="mail", states=[State.FAILED])), list[Task])
    assert_type(broker.counts(), dict[tuple[str, State], int])
    assert_type(broker.queue_lens(["mail"]), Mapping[str, int])
    assert_type(broker.cancel(1), State)
    assert_type(broker.replay(1, payload=b"{}", allow_completed=True), int)
    reservation = broker.queue_quota("mail", limit=10, window=60.0)
    assert_type(reservation, Reservation | None)
    if reservation is not None:
        assert_type(broker.release_quota(reservation), bool)
    topology: Topology = broker.topology
    topology.declare_exchange(Exchange("events", type="topic"))
    topology.declare_queue(Queue("mail", expires=60.0))
    topology.bind(Binding("events", "mail", "task.#"))
    assert_type(topology.exchange("events"), Exchange | None)
    broker.close()
