"""Settlements on their way to the broker: collected by the engine, written here, never raised at a consumer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..core.broker import Broker
from ..core.errors import LeaseLost, TaskgateError, TaskNotFound
from ..core.model import WAS_BEGUN, Claim, FailKind, Lease, Reason, State
from .window import Delivery, Stage

logger = logging.getLogger("kombu_taskgate.transport")


class Action(Enum):
    """What a settlement asks for."""

    ACK = "ack"
    #: Its run has begun and is not to be repeated; it is settled when that has ended.
    BEGIN = "beginning"
    #: The consumer has seen it.
    REQUEUE = "requeue"
    #: Nobody has seen it.
    RETURN = "return"
    REJECT = "reject"
    #: What ran it died.
    LOST = "loss"
    #: Its run had begun and nobody will tell the end, whether or not the beginning has been written by now.
    INTERRUPTED = "loss after it had begun"
    #: Not now; it comes back later.
    THROTTLED = "throttling"
    UNDECODABLE = "undecodable"
    CANCELED = "finish as canceled"


@dataclass(slots=True, eq=False)
class Settlement:
    """One settlement that waits to be written; ``since`` is monotonic seconds."""

    delivery: Delivery
    action: Action
    since: float
    detail: str | None = None
    #: Seconds after which what is throttled comes back.
    delay: float = 0.0
    #: Whoever waits for the task has been told that it failed.
    told: bool = False
    #: An attempt to write it has failed; it may have taken effect.
    tried: bool = False

    @property
    def claim(self) -> Claim:
        """What it settles."""
        return self.delivery.claim


@dataclass(slots=True)
class Batch:
    """Settlements that are written together. What has been written is taken out."""

    acks: list[Settlement] = field(default_factory=list)
    others: list[Settlement] = field(default_factory=list)
    begins: list[Settlement] = field(default_factory=list)

    def add(self, settlement: Settlement) -> None:
        """Add one, in the order in which they came."""
        {Action.ACK: self.acks, Action.BEGIN: self.begins}.get(settlement.action, self.others).append(settlement)

    def put_back(self, older: Batch) -> None:
        """Put what could not be written before what has come since."""
        for settlement in (*older.acks, *older.others, *older.begins):
            settlement.tried = True
        self.acks[:0] = older.acks
        self.others[:0] = older.others
        self.begins[:0] = older.begins

    def oldest_begin(self) -> float | None:
        """Since when the oldest beginning waits that still is to be written (monotonic seconds).

        Of a run that has ended meanwhile the end alone is written, if anything: the runs of short tasks mostly begin
        and end between two turns.
        """
        self.begins = [one for one in self.begins if one.delivery.stage is Stage.BEGUN]
        return self.begins[0].since if self.begins else None

    def split(self, before: float) -> Batch:
        """Take out what is to be written now: all but the beginnings that are not older than ``before``."""
        self.oldest_begin()
        young = [one for one in self.begins if one.since > before]
        taken = Batch(self.acks, self.others, [one for one in self.begins if one.since <= before])
        self.acks, self.others, self.begins = [], [], young
        return taken

    def __bool__(self) -> bool:
        return bool(self.acks or self.others or self.begins)


class Settler:
    """Writes settlements and tells their outcome.

    Args:
        broker: where.
        settled: called with the deliveries whose settlement the database has taken, and those it has refused.
    """

    def __init__(self, broker: Broker, settled: Callable[[list[Delivery], list[Delivery]], None]) -> None:
        self._broker = broker
        self._settled = settled
        #: How many settlements were refused because the lease was not this process's any more.
        self.refused = 0

    def write_others(self, batch: Batch) -> None:
        """Write everything but acks: each rejection, then all that goes back to its queue.

        Raises:
            StoreUnavailable: what was not written is still in the batch.
        """
        for settlement in [s for s in batch.others if s.action not in (Action.REQUEUE, Action.RETURN)]:
            refused = self._write_one(settlement)
            batch.others.remove(settlement)
            self._outcome([settlement], [settlement.claim] if refused else [])
        for action in (Action.REQUEUE, Action.RETURN):
            same = [s for s in batch.others if s.action is action]
            if same:
                leases = [s.claim for s in same]
                lost = self._broker.requeue_many(leases, delivered=action is Action.REQUEUE)
                batch.others = [s for s in batch.others if s.action is not action]
                self._outcome(same, lost)

    def _write_one(self, settlement: Settlement) -> bool:
        """Write a rejection or a loss; returns whether it was refused."""
        claim, action = settlement.claim, settlement.action
        try:
            if action is Action.CANCELED:
                self._broker.finish_canceled(claim)
            elif action is Action.LOST:
                self._broker.fail(claim, FailKind.LOST, detail=settlement.detail, told=settlement.told)
            elif action is Action.THROTTLED:
                self._throttle(settlement)
            elif action is Action.INTERRUPTED:
                detail = f"{settlement.detail}: {WAS_BEGUN}"
                self._broker.fail(claim, FailKind.SKIP, reason=Reason.LOST, detail=detail, told=settlement.told)
            else:
                reason = Reason.UNDECODABLE if action is Action.UNDECODABLE else Reason.REJECTED
                self._broker.fail(claim, FailKind.SKIP, reason=reason, detail=settlement.detail, told=settlement.told)
        except LeaseLost:
            return True
        return False

    def _throttle(self, settlement: Settlement) -> None:
        claim, detail = settlement.claim, settlement.detail
        state = self._broker.fail(claim, FailKind.THROTTLED, delay=settlement.delay, detail=detail)
        if state is State.FAILED:
            logger.warning(
                "execution %d (queue %r, task_id %s) has been throttled too often and is a dead letter now "
                "(throttled_max): %s",
                claim.id,
                claim.queue,
                claim.task_id,
                detail,
            )

    def write_acks(self, batch: Batch) -> None:
        """Write the acks and the beginnings alone.

        Raises:
            StoreUnavailable: they are still in the batch.
        """
        if batch.begins:
            begins = [s.claim for s in batch.begins]
            refused, _ = self._broker.ack_and_dequeue([s.claim for s in batch.acks], (), 0, begin=begins)
            self.acked(batch, refused)
        elif batch.acks:
            self.acked(batch, self._broker.ack_many([s.claim for s in batch.acks]))

    def acked(self, batch: Batch, refused: Sequence[Lease]) -> None:
        """Note that the acks and the beginnings of the batch have been written, and which were refused."""
        acks, batch.acks = batch.acks, []
        begins, batch.begins = batch.begins, []
        self._outcome(acks, refused)
        # Of one that is settled meanwhile the answer to that will tell; one that is written has nothing to tell.
        lost = {(lease.id, lease.token) for lease in refused}
        begun = [s for s in begins if s.delivery.stage is Stage.BEGUN]
        self._outcome([s for s in begun if (s.claim.id, s.claim.token) in lost], refused)

    def _outcome(self, settlements: Sequence[Settlement], refused: Sequence[Lease]) -> None:
        lost = {(lease.id, lease.token) for lease in refused}
        taken: list[Delivery] = []
        gone: list[Delivery] = []
        for settlement in settlements:
            claim = settlement.claim
            settlement.delivery.stage = Stage.GONE
            if (claim.id, claim.token) not in lost or (settlement.tried and self._took_effect(settlement)):
                taken.append(settlement.delivery)
                continue
            gone.append(settlement.delivery)
            logger.warning(
                "refused: %s of execution %d (queue %r, task_id %s): its lease was lost, another worker has taken it "
                "over; this run does not count",
                settlement.action.value,
                claim.id,
                claim.queue,
                claim.task_id,
            )
            # Counted once it has been told: whoever sees the number can look for the line.
            self.refused += 1
        self._settled(taken, gone)

    def _took_effect(self, settlement: Settlement) -> bool:
        """Whether an earlier attempt, whose answer was lost, was the one that counts."""
        if settlement.action is Action.BEGIN:
            return False  # that leaves the lease current
        try:
            task = self._broker.get(settlement.claim.id)
        except TaskNotFound:
            return settlement.action is Action.ACK
        except TaskgateError:
            return False
        return task.state in {
            Action.ACK: {State.COMPLETED},
            Action.REJECT: {State.FAILED},
            Action.LOST: {State.PENDING, State.FAILED},
            Action.UNDECODABLE: {State.FAILED},
            Action.INTERRUPTED: {State.FAILED},
            Action.THROTTLED: {State.RETRYING, State.FAILED},
            Action.CANCELED: {State.CANCELED},
        }.get(settlement.action, {State.PENDING})
