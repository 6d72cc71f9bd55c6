"""The message object that consumers get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kombu.transport import base

from .times import parse_instant
from .window import Delivery

if TYPE_CHECKING:
    from .channel import Channel

#: Where the ETA of a delivered task is still to be seen.
ETA_HEADER = "taskgate_eta"
#: Under which lease a task was delivered: id of the execution, token.
LEASE_HEADER = "taskgate_lease"


def published_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Headers without what only says something of one delivery: a task that is retried is published with all it had."""
    return {name: value for name, value in headers.items() if name not in (ETA_HEADER, LEASE_HEADER)}


class Message(base.Message):
    """A delivered message.

    A message is delivered when its ``eta`` has passed. Celery's worker would put it on its own timer all the
    same, and raise the prefetch count for it, as long as the header is there. So its value moves to the
    header ``taskgate_eta``. A value that is no instant stays: the worker knows how to reject it.
    """

    def __init__(self, delivery: Delivery, channel: Channel) -> None:
        envelope, claim = delivery.envelope, delivery.claim
        headers = envelope.headers
        eta = headers.get("eta")
        if eta is not None and headers.get("task") is not None and parse_instant(eta) is not None:
            headers["eta"] = None
            headers[ETA_HEADER] = eta
        if headers.get("task") is not None:
            headers[LEASE_HEADER] = [claim.id, claim.token]
        delivery_info: dict[str, Any] = {
            "exchange": envelope.exchange,
            "routing_key": envelope.routing_key,
            "redelivered": claim.deliveries > 1,
        }
        if delivery.consumer is not None:
            delivery_info["consumer_tag"] = delivery.consumer.tag
        properties = envelope.properties
        properties["delivery_info"] = delivery_info
        properties["delivery_tag"] = delivery.tag
        super().__init__(
            body=envelope.body,
            channel=channel,
            delivery_tag=delivery.tag,
            content_type=envelope.content_type,
            content_encoding=envelope.content_encoding,
            headers=headers,
            properties=properties,
            delivery_info=delivery_info,
            postencode="utf-8",
        )
        #: How what worked on it died. A rejection that requeues is then a loss, and is counted as one.
        self.lost: str | None = None
        self._begun = False
        #: Whoever waits for the task has been told that it failed: as a dead letter it leaves nothing to answer for.
        self.told = False
        #: Why the body of a task could not be decoded.
        self._undecodable: str | None = None

    def _decode(self) -> Any:
        try:
            return super()._decode()
        except Exception as error:
            if self.headers.get("task") is not None:
                self._undecodable = f"{type(error).__name__}: {error}"
            raise

    def ack(self, multiple: bool = False) -> None:
        """Acknowledge it; a task whose body could not be decoded becomes a dead letter, so that its caller hears of it.

        Celery acknowledges what it can't decode, to be rid of it.

        Raises:
            MessageStateError: it was settled before.
        """
        if multiple or self._undecodable is None or self.acknowledged:
            super().ack(multiple=multiple)
        else:
            self.channel.basic_undecodable(self.delivery_tag, self._undecodable)
            self._state = "ACK"

    def reject(self, requeue: bool = False) -> None:
        """Make it a dead letter, or give it back.

        Raises:
            MessageStateError: it was settled before.
        """
        if not self.acknowledged:
            if requeue and self.lost is not None:
                self.channel.basic_lost(self.delivery_tag, self.lost, told=self.told)
                self._state = "REQUEUED"
                return
            if not requeue and (self.told or self._undecodable is not None):
                if self._undecodable is not None:
                    self.channel.basic_undecodable(self.delivery_tag, self._undecodable)
                else:
                    self.channel.basic_reject_told(self.delivery_tag)
                self._state = "REJECTED"
                return
        super().reject(requeue=requeue)

    def begin(self) -> None:
        """Acknowledge it because its run begins; :meth:`done` tells the end.

        To kombu it is acknowledged from now on. Its execution stays, so that it is known that it runs, and that it was
        lost should its end never be told. It is delivered no more whatever happens. From any thread.

        Raises:
            MessageStateError: it was settled before.
        """
        if self.acknowledged:
            raise self.MessageStateError(f"Message already acknowledged with state: {self._state}")
        self.channel.basic_begin(self.delivery_tag)
        self._state = "ACK"
        self._begun = True

    def done(self) -> None:
        """Tell that the run that has begun is over. From any thread; only the first of several ends counts."""
        if self._begun:
            self._begun = False
            self.channel.basic_ack(self.delivery_tag)

    def interrupted(self, detail: str) -> None:
        """Tell that the run that has begun was ended from outside, so that it becomes a dead letter. As :meth:`done`.

        Args:
            detail: how, for whoever finds the dead letter.
        """
        if self._begun:
            self._begun = False
            self.channel.basic_lost(self.delivery_tag, detail)

    def throttle(self, delay: float, detail: str | None = None) -> None:
        """Have it delivered again later, as ``throttled``; also when its run has begun. From any thread.

        Args:
            delay: seconds from now.
            detail: why, for whoever finds the dead letter that it becomes after ``throttled_max`` times.

        Raises:
            MessageStateError: it was settled before.
        """
        if self.acknowledged and not self._begun:
            raise self.MessageStateError(f"Message already acknowledged with state: {self._state}")
        self._begun = False
        self.channel.basic_throttle(self.delivery_tag, delay, detail)
        self._state = "REQUEUED"

    def give_back(self) -> None:
        """Give it back as if it had never been delivered: nobody has begun to work on it, and nobody will.

        From any thread. Nothing happens when it was settled before.
        """
        if not self.acknowledged:
            self.channel.basic_return_unseen(self.delivery_tag)
            self._state = "REQUEUED"
