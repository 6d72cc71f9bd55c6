"""What one channel has buffered, has delivered, and has room for.

Nothing here locks: all of it is used under the lock of the channel's delivery engine.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..core.model import Claim
from .codec import Envelope

logger = logging.getLogger("kombu_taskgate.transport")

#: Most messages that are claimed ahead where no prefetch window is set.
UNLIMITED = 100
#: Most messages that a consumer may put aside without their taking up places.
MOST_ASIDE = 1000


class Stage(Enum):
    """How far a delivery has come."""

    BUFFERED = "buffered"
    DELIVERED = "delivered"
    #: Acknowledged because its run has begun; it is settled when that has ended.
    BEGUN = "begun"
    #: Its settlement is on its way; the database's answer decides what has become of it.
    SETTLING = "settling"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Consumer:
    """One consumer of a queue."""

    tag: str
    queue: str
    no_ack: bool
    callback: Callable[[Any], Any]


@dataclass(slots=True, eq=False)
class Delivery:
    """One claim on its way through a channel."""

    claim: Claim
    envelope: Envelope
    window: Window
    #: ``None``: fetched with ``basic_get``.
    consumer: Consumer | None
    no_ack: bool
    stage: Stage = Stage.BUFFERED
    tag: int = 0
    #: The message object, as long as somebody has it.
    message: weakref.ref[Any] | None = None


class Window:
    """Prefetch window, buffer and unsettled deliveries of one channel.

    Args:
        receive: called with each delivery, in the thread that drains.
    """

    def __init__(self, receive: Callable[[Delivery], None]) -> None:
        self.receive = receive
        #: Most unsettled deliveries; 0 is no limit.
        self.prefetch_count = 0
        #: Whether the consumer wants messages (``channel.flow``).
        self.flow = True
        #: How many more messages the consumer could work on now, if somebody knows; see :meth:`free`.
        self.can_start: Callable[[], int] | None = None
        #: How many of the unsettled messages the consumer has put aside for later, if it ever does: they take up no
        #: places, so that others get past them.
        self.put_aside: Callable[[], int] | None = None
        #: Deliveries whose callback has not returned: the consumer may not have counted them yet. Only the thread
        #: that drains writes it.
        self.in_hand = 0
        #: Whether it has been told that ``can_start`` raises.
        self._failing = False
        self.consumers: dict[str, Consumer] = {}
        #: When room came up that nobody has filled yet (monotonic seconds).
        self.room_since = 0.0
        self._tags = itertools.count(1)
        self._buffer: deque[Delivery] = deque()
        self._unsettled: dict[int, Delivery] = {}
        #: What has been acknowledged when its run began. It takes up no place.
        self._begun: dict[int, Delivery] = {}
        self._buffered_no_ack = 0
        #: Unsettled deliveries that take up a place; what was fetched with ``basic_get`` does not.
        self._counted = 0

    # -- room --------------------------------------------------------------------------------------

    def size(self, *, no_ack: bool) -> int:
        """How many places there are. Consumers that do not settle have no window, but a buffer all the same."""
        if no_ack or not self.prefetch_count:
            return UNLIMITED
        return self.prefetch_count + self.aside

    @property
    def aside(self) -> int:
        """How many messages the consumer has put aside."""
        return 0 if self.put_aside is None else min(MOST_ASIDE, self.put_aside())

    def free(self, *, no_ack: bool) -> int:
        """How many places are free; negative when the window has been made smaller."""
        if no_ack:
            return UNLIMITED - self._buffered_no_ack
        buffered = len(self._buffer) - self._buffered_no_ack
        taken = buffered + (self._counted if self.prefetch_count else 0)
        free = self.size(no_ack=False) - taken
        if self.can_start is not None and free > 0:
            free = min(free, self._could_start() - buffered - self.in_hand)
        return free

    def _could_start(self) -> int:
        """What the consumer says; nothing when it fails, for who asks are the pump, the keeper and who settles."""
        try:
            return 0 if self.can_start is None else self.can_start()
        except Exception:
            if not self._failing:
                logger.exception("a consumer can't tell how much it could start, so it gets nothing until it can")
            self._failing = True
            return 0

    @property
    def curbed(self) -> bool:
        """Whether room may come up without a settlement: nobody tells when a consumer could start more."""
        return self.can_start is not None

    @property
    def outstanding(self) -> int:
        """How many deliveries somebody here still has to deal with."""
        return len(self._buffer) + len(self._unsettled)

    @property
    def holds(self) -> int:
        """How many leases are held for this window: what is outstanding, and what runs although acknowledged."""
        return self.outstanding + len(self._begun)

    @property
    def begun(self) -> list[Delivery]:
        """What has been acknowledged when its run began, and runs."""
        return list(self._begun.values())

    @property
    def unsettled(self) -> list[Delivery]:
        """What has been delivered and not been settled."""
        return list(self._unsettled.values())

    def can_consume(self) -> bool:
        """Whether one more message may be delivered (kombu's and Celery's name for it)."""
        return self.flow and (not self.prefetch_count or self._counted < self.size(no_ack=False))

    def can_consume_max_estimate(self) -> int | None:
        """How many more messages may be delivered; ``None`` is any number."""
        return max(0, self.size(no_ack=False) - self._counted) if self.prefetch_count else None

    # -- coming and going --------------------------------------------------------------------------

    def put(self, delivery: Delivery) -> None:
        """Buffer a delivery for its consumer."""
        self._buffer.append(delivery)
        self._buffered_no_ack += delivery.no_ack

    def first_ready(self) -> Delivery | None:
        """The next delivery that may go out now; it stays where it is."""
        if self.flow:
            for delivery in self._buffer:
                if delivery.no_ack or self.can_consume():
                    return delivery
        return None

    def has_ready(self) -> bool:
        """Whether :meth:`first_ready` would find something."""
        return self.flow and (self._buffered_no_ack > 0 or (bool(self._buffer) and self.can_consume()))

    def deliver(self, delivery: Delivery) -> None:
        """Hand out what :meth:`first_ready` has found."""
        self._remove(delivery)
        self.hand_out(delivery)
        self.in_hand += 1

    def hand_out(self, delivery: Delivery) -> None:
        """Give a delivery its tag; unless ``no_ack`` it is unsettled from now on."""
        delivery.tag = next(self._tags)
        delivery.stage = Stage.DELIVERED
        if not delivery.no_ack:
            self._unsettled[delivery.tag] = delivery
            self._counted += delivery.consumer is not None

    def take(self, tag: int, *, multiple: bool = False) -> list[Delivery]:
        """Take out what a settlement names: one delivery, or all up to it (0: all)."""
        if multiple:
            tags = [known for known in self._unsettled if tag == 0 or known <= tag]
        else:
            tags = [tag] if tag in self._unsettled else []
        taken = [self._unsettled.pop(known) for known in tags]
        self._counted -= sum(delivery.consumer is not None for delivery in taken)
        return taken

    def begin(self, tag: int) -> Delivery | None:
        """Take a delivery for acknowledged, though it is not settled yet; ``None`` where there is none to take."""
        taken = self.take(tag) if tag in self._unsettled else []
        for delivery in taken:
            delivery.stage = Stage.BEGUN
            self._begun[tag] = delivery
        return taken[0] if taken else None

    def take_begun(self, tag: int | None = None) -> list[Delivery]:
        """Take out what runs although acknowledged: that one, or all."""
        tags = list(self._begun) if tag is None else [tag]
        return [self._begun.pop(known) for known in tags if known in self._begun]

    def take_all(self) -> list[Delivery]:
        """Take out every unsettled delivery."""
        return self.take(0, multiple=True)

    def take_buffered(self, consumer: Consumer | None = None) -> list[Delivery]:
        """Take out what nobody has seen yet: of one consumer, or all."""
        taken = [d for d in self._buffer if consumer is None or d.consumer is consumer]
        if taken:
            self._buffer = deque(d for d in self._buffer if consumer is not None and d.consumer is not consumer)
            self._buffered_no_ack -= sum(delivery.no_ack for delivery in taken)
        return taken

    def take_one_of(self, queue: str) -> Delivery | None:
        """Take the first buffered delivery of a queue out of the buffer."""
        for delivery in self._buffer:
            if delivery.claim.queue == queue:
                self._remove(delivery)
                return delivery
        return None

    def discard(self, delivery: Delivery) -> None:
        """Forget a delivery, wherever it is."""
        if delivery.stage is Stage.BUFFERED:
            self._remove(delivery)
        elif delivery.tag in self._begun:
            self.take_begun(delivery.tag)
        else:
            self.take(delivery.tag)

    def _remove(self, delivery: Delivery) -> None:
        if delivery in self._buffer:
            self._buffer.remove(delivery)
            self._buffered_no_ack -= delivery.no_ack

    def queues(self, *, no_ack: bool) -> list[str]:
        """Queues of the consumers of one kind."""
        return list(dict.fromkeys(c.queue for c in self.consumers.values() if c.no_ack == no_ack))

    def consumers_of(self, queue: str) -> list[Consumer]:
        """Consumers of a queue."""
        return [consumer for consumer in self.consumers.values() if consumer.queue == queue]
