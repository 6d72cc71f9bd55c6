"""kombu's channel: each of AMQP's methods in the broker's words."""

from __future__ import annotations

import logging
import uuid
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from amqp.protocol import queue_declare_ok_t
from kombu.transport.base import StdChannel, to_rabbitmq_queue_arguments

from ..core.errors import TaskExists, TaskgateError
from ..core.settings import check_name
from ..core.topology import Binding, Exchange, Queue
from ..core.within import within
from . import depends
from .capture import capture
from .codec import Envelope
from .control import is_mailbox, tell_published
from .declared import AUTO_DELETE_EXPIRES, delete_queue
from .errors import NoRoute, NotFound, PreconditionFailed, RecoverableConnectionError, TagInUse, kombu_errors
from .message import Message, published_headers
from .publish import PublishBatch, prepare, route
from .routing import BUILT_IN, BUILT_IN_TYPES
from .settle import Action
from .unique import is_there_already
from .window import Consumer, Delivery, Window

if TYPE_CHECKING:
    from .connection import Connection
    from .engine import DeliveryEngine

logger = logging.getLogger("kombu_taskgate.transport")

#: How long in seconds whoever closes a channel waits for the database.
CLOSE_WITHIN = 10.0
#: Argument of a queue -> field of the declaration it becomes, in seconds.
_DURATIONS = {"x-expires": "expires", "x-message-ttl": "message_ttl"}


class Channel(StdChannel):
    """A channel of a connection.

    What a channel settles may come from any thread, and never waits for the database; what asks or changes
    something in the database (declaring, publishing, ``basic_get``, purging) waits for it and raises
    :class:`~.errors.BrokerUnavailable` when it does not answer.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        #: ``None`` once it is closed, as kombu expects.
        self.connection: Connection | None = connection
        self.closed = False
        self.no_ack_consumers: set[str] = set()  # type: ignore[assignment]  # kombu says: None
        #: Callbacks by name; ``basic_return`` tells of messages that no queue wanted, ``abandoned`` that the connection
        #: is being given up while what came over it is still worked on.
        self.events: defaultdict[str, set[Callable[..., Any]]] = defaultdict(set)
        self._window = Window(self._receive)
        self._engine: DeliveryEngine | None = None
        self.channel_id = connection.add_channel(self)

    @property
    def qos(self) -> Window:
        """The prefetch window, under the name that kombu's virtual channels have for it."""
        return self._window

    def _open(self) -> Connection:
        if self.connection is None:
            raise RecoverableConnectionError("the channel is closed")
        return self.connection

    def _consuming(self) -> DeliveryEngine:
        engine = self._open().consuming()
        if self._engine is None:
            engine.add_window(self._window)
            self._engine = engine
        return engine

    def _settle_first(self) -> None:
        """Write what the connection has settled before asking for something that it changes."""
        engine = self._open().engine
        if engine is not None:
            engine.flush()

    # -- exchanges ---------------------------------------------------------------------------------

    def exchange_declare(
        self,
        exchange: str | None = None,
        type: str | None = "direct",
        durable: bool = False,
        auto_delete: bool = False,
        arguments: Mapping[str, Any] | None = None,
        nowait: bool = False,
        passive: bool = False,
    ) -> None:
        """Declare an exchange.

        Raises:
            NotFound: ``passive``, and it does not exist.
            PreconditionFailed: it exists with another type.
        """
        connection = self._open()
        type = type or "direct"
        name = exchange or f"amq.{type}"
        with kombu_errors():
            if passive:
                connection.router.exchange_changed(name)
                if connection.router.exchange(name) is None:
                    raise NotFound(f"NOT_FOUND - no exchange {name!r}")
                return
            if type not in BUILT_IN_TYPES:
                raise PreconditionFailed(
                    f"PRECONDITION_FAILED - exchange {name!r} has unknown type {type!r}: "
                    f"use one of {', '.join(sorted(BUILT_IN_TYPES))}"
                )
            stored = BUILT_IN.get(name) or connection.broker.topology.declare_exchange(
                Exchange(check_name(name, "exchange"), type, durable, auto_delete)
            )
        if stored.type != type:
            raise PreconditionFailed(
                f"PRECONDITION_FAILED - exchange {name!r} exists with type {stored.type!r} and can't become {type!r}: "
                "delete it first, or choose another name"
            )
        connection.router.exchange_changed(name, stored)

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Delete an exchange and its bindings; its queues stay.

        Raises:
            PreconditionFailed: ``if_unused``, and it has bindings.
        """
        connection = self._open()
        with kombu_errors():
            if if_unused and connection.broker.topology.bindings(exchange):
                raise PreconditionFailed(f"PRECONDITION_FAILED - exchange {exchange!r} is in use")
            connection.broker.topology.delete_exchange(exchange)
        connection.router.exchange_changed(exchange)

    def exchange_bind(self, destination: str, source: str = "", routing_key: str = "", **kwargs: Any) -> None:
        """Not supported: bind queues instead."""
        raise NotImplementedError("taskgate has no bindings from exchange to exchange: bind the queues to the source")

    def exchange_unbind(self, destination: str, source: str = "", routing_key: str = "", **kwargs: Any) -> None:
        """Not supported, as :meth:`exchange_bind`."""
        raise NotImplementedError("taskgate has no bindings from exchange to exchange")

    # -- queues ------------------------------------------------------------------------------------

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        nowait: bool = False,
        arguments: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> queue_declare_ok_t:
        """Declare a queue; one without a name gets one. What exists stays as it is.

        Returns:
            name, messages that wait, consumers.

        Raises:
            NotFound: ``passive``, and it does not exist.
            PreconditionFailed: an argument can't be right.
        """
        connection = self._open()
        topology = connection.broker.topology
        name = queue or f"amq.gen-{uuid.uuid4().hex}"
        with kombu_errors():
            if passive:
                size = self._size(name)
                if not size and topology.queue(name) is None:
                    raise NotFound(f"NOT_FOUND - no queue {name!r}")
                return queue_declare_ok_t(name, size, connection.consumers_of(name))
            durations = _durations(name, arguments or {})
            if durations["expires"] is None and (auto_delete or exclusive):
                durations["expires"] = AUTO_DELETE_EXPIRES
            stored = topology.declare_queue(
                Queue(check_name(name, "queue"), durable, auto_delete or exclusive, exclusive, **durations)
            )
            if stored.expires is not None:
                # It may have been about to expire.
                topology.touch([name])
            connection.router.queue_changed(name, stored)
            connection.declared.queue(stored)
            return queue_declare_ok_t(name, self._size(name), connection.consumers_of(name))

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str | None = "",
        arguments: Mapping[str, Any] | None = None,
        nowait: bool = False,
        **kwargs: Any,
    ) -> None:
        """Bind a queue to an exchange.

        Raises:
            NotFound: there is no such exchange.
        """
        connection = self._open()
        binding = Binding(exchange or "amq.direct", queue, routing_key or "", dict(arguments or {}))
        with kombu_errors():
            if connection.router.exchange(binding.exchange) is None:
                connection.router.exchange_changed(binding.exchange)
                raise NotFound(f"NOT_FOUND - no exchange {binding.exchange!r} to bind queue {queue!r} to")
            connection.broker.topology.bind(binding)
        connection.declared.bound(binding)

    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str | None = "",
        arguments: Mapping[str, Any] | None = None,
        nowait: bool = False,
        **kwargs: Any,
    ) -> None:
        """Remove a binding, if it exists."""
        connection = self._open()
        binding = Binding(exchange or "amq.direct", queue, routing_key or "", dict(arguments or {}))
        with kombu_errors():
            connection.broker.topology.unbind(binding)
        connection.declared.unbound(binding)

    def queue_purge(self, queue: str, nowait: bool = False, **kwargs: Any) -> int:
        """Remove everything that waits in the queue, delayed messages too; returns how many."""
        with kombu_errors():
            self._settle_first()
            return self._open().broker.purge(queue)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, nowait: bool = False, **kwargs: Any
    ) -> int:
        """Delete a queue, its bindings and what waits in it; returns how many messages that were.

        What is running is settled as usual.

        Raises:
            PreconditionFailed: ``if_unused`` or ``if_empty``, and it is not.
        """
        connection = self._open()
        with kombu_errors():
            self._settle_first()
            if if_unused and connection.consumers_of(queue):
                raise PreconditionFailed(f"PRECONDITION_FAILED - queue {queue!r} has consumers")
            if if_empty and self._size(queue):
                raise PreconditionFailed(f"PRECONDITION_FAILED - queue {queue!r} is not empty")
            connection.declared.forget(queue)
            connection.router.queue_changed(queue)
            return delete_queue(connection.broker, queue)

    def _size(self, queue: str) -> int:
        """How many messages wait in the queue."""
        self._settle_first()
        return self._open().broker.queue_len(queue)

    def after_reply_message_received(self, queue: str) -> None:
        """The replies have been received: their queue has done its work."""
        connection = self._open()
        if not connection.consumers_here(queue):
            self.queue_delete(queue)

    def prepare_queue_arguments(self, arguments: Mapping[str, Any], **kwargs: Any) -> Any:
        """kombu's options of a queue as AMQP arguments."""
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def list_bindings(self) -> Iterator[tuple[str, str, str]]:
        """All bindings, as (queue, exchange, routing key)."""
        with kombu_errors():
            bindings = self._open().broker.topology.bindings()
        return ((binding.queue, binding.exchange, binding.routing_key) for binding in bindings)

    def get_bindings(self) -> list[dict[str, str]]:
        """All bindings, as the management interface shows them."""
        return [
            {"destination": queue, "source": exchange, "routing_key": key}
            for queue, exchange, key in self.list_bindings()
        ]

    # -- publishing --------------------------------------------------------------------------------

    def prepare_message(
        self,
        body: Any,
        priority: int | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: Mapping[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A message as :meth:`basic_publish` takes it."""
        properties = {} if properties is None else properties
        properties.setdefault("delivery_info", {})
        properties.setdefault("priority", priority or 0)
        return {
            "body": body,
            "content-encoding": content_encoding,
            "content-type": content_type,
            "headers": headers or {},
            "properties": properties,
        }

    def basic_publish(
        self,
        message: Mapping[str, Any] | str | bytes,
        exchange: str | None = "",
        routing_key: str | None = "",
        mandatory: bool = False,
        immediate: bool = False,
        **kwargs: Any,
    ) -> None:
        """Publish: when this returns, the message is stored in every queue that wants it.

        Raises:
            BrokerUnavailable: it may not be stored.
            MessageTooLarge, ConfigError: it can't be stored.
            TaskExists: another that has not ended has its ``unique_key`` (a property of the message).
            TaskNotFound: it depends on a task that nobody knows.
            NotFound: there is no such exchange.
        """
        connection = self._open()
        envelope = self._envelope(message, exchange, routing_key)
        with kombu_errors():
            if is_mailbox(envelope.exchange):
                envelope = tell_published(connection, envelope)
            queues = route(connection.router, envelope)
            if not queues:
                self._unroutable(message, envelope, tell=mandatory)
                return
            tasks = prepare(connection.router, envelope, queues, connection.options.naive)
            depends.check(connection, tasks)
            if capture(connection.settings, tasks):
                return
            if len(tasks) == 1:
                try:
                    connection.broker.enqueue(tasks[0])
                except TaskExists as error:
                    if not is_there_already(tasks[0], error):
                        raise
            else:
                connection.broker.enqueue_many(tasks)
        connection.published(queues)

    def _envelope(
        self, message: Mapping[str, Any] | str | bytes, exchange: str | None, routing_key: str | None
    ) -> Envelope:
        if isinstance(message, (str, bytes)):
            # "celery amqp" publishes bare texts.
            message = self.prepare_message(message, content_type="text/plain", content_encoding="utf-8")
        return Envelope(
            body=message["body"],
            content_type=message.get("content-type"),
            content_encoding=message.get("content-encoding"),
            headers=published_headers(message.get("headers") or {}),
            properties=dict(message.get("properties") or {}),
            exchange=exchange or "",
            routing_key=routing_key or "",
        )

    def _unroutable(self, message: Any, envelope: Envelope, *, tell: bool) -> None:
        if not tell:
            return
        error = NoRoute(f"NO_ROUTE - no queue is bound to {envelope.exchange!r} for key {envelope.routing_key!r}")
        for callback in self.events["basic_return"]:
            callback(error, envelope.exchange, envelope.routing_key, message)

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """A batch for ``Producer.batch()`` of kombu 5.7: everything in it in one transaction."""
        return PublishBatch(self, max_size)

    # -- consuming ---------------------------------------------------------------------------------

    def basic_consume(
        self,
        queue: str,
        no_ack: bool = False,
        callback: Callable[[Message], Any] | None = None,
        consumer_tag: str | None = None,
        nowait: bool = False,
        on_cancel: Callable[[str], Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Start a consumer; returns its tag.

        Raises:
            TagInUse: another consumer of the channel has this tag.
        """
        tag = consumer_tag or f"ctag-{uuid.uuid4().hex}"
        if tag in self._window.consumers:
            raise TagInUse(f"NOT_ALLOWED - consumer tag {tag!r} is in use on this channel")
        consumer = Consumer(tag, check_name(queue, "queue"), bool(no_ack), callback or (lambda message: None))
        engine = self._consuming()
        if no_ack:
            self.no_ack_consumers.add(tag)
        engine.add_consumer(self._window, consumer)
        return tag

    def basic_cancel(self, consumer_tag: str, nowait: bool = False, **kwargs: Any) -> None:
        """End a consumer; what it has not seen goes back, what it has seen it may still settle."""
        if self._engine is None:
            return
        consumer = self._engine.cancel_consumer(self._window, consumer_tag)
        self.no_ack_consumers.discard(consumer_tag)
        if consumer is not None:
            self._last_of_exclusive(consumer.queue)

    def _last_of_exclusive(self, queue: str) -> None:
        """A queue that is this connection's alone goes with its last consumer."""
        connection = self.connection
        if connection is None or not connection.declared.is_exclusive(queue) or connection.consumers_here(queue):
            return
        if connection.engine is not None and connection.engine.out:
            return  # it expires
        try:
            self.queue_delete(queue)
        except TaskgateError as error:
            logger.debug("queue %r could not be deleted and will expire: %s", queue, error)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Message | None:
        """Fetch one message, if there is one."""
        with kombu_errors():
            delivery = self._consuming().get(self._window, queue, no_ack=no_ack)
        return None if delivery is None else self._message(delivery)

    def _receive(self, delivery: Delivery) -> None:
        try:
            message = self._message(delivery)
            if delivery.consumer is not None:
                delivery.consumer.callback(message)
        finally:
            self._window.in_hand -= 1
        if self._window.put_aside is not None and self._engine is not None and self._window.aside:
            # Perhaps this one: then there is room for another.
            self._engine.look_for_room()

    def _message(self, delivery: Delivery) -> Message:
        message = Message(delivery, self)
        delivery.message = weakref.ref(message)
        return message

    def message_to_python(self, raw_message: Any) -> Any:
        """Consumers are given messages already."""
        return raw_message

    # -- settling ----------------------------------------------------------------------------------

    def basic_ack(self, delivery_tag: int, multiple: bool = False) -> None:
        """Acknowledge a message, or with ``multiple`` all up to it (0: all)."""
        self._settle(delivery_tag, Action.ACK, multiple=multiple)

    def basic_reject(self, delivery_tag: int, requeue: bool = False) -> None:
        """Give a message back, or make it a dead letter."""
        self._settle(delivery_tag, Action.REQUEUE if requeue else Action.REJECT)

    def basic_nack(self, delivery_tag: int, multiple: bool = False, requeue: bool = True) -> None:
        """As :meth:`basic_reject`, for several at once."""
        self._settle(delivery_tag, Action.REQUEUE if requeue else Action.REJECT, multiple=multiple)

    def basic_lost(self, delivery_tag: int, detail: str | None = None, *, told: bool = False) -> None:
        """Give a message back because what worked on it died: as a lost lease, only at once (not in AMQP).

        Args:
            delivery_tag: of the message.
            detail: what is known of the death, for whoever finds the dead letter.
            told: whoever waits for the task has been told that it failed: nobody needs to answer, if this was the last.
        """
        self._settle(delivery_tag, Action.LOST, detail=detail, told=told)

    def basic_reject_told(self, delivery_tag: int) -> None:
        """Make a message a dead letter that nobody needs to answer for: its caller knows already (not in AMQP)."""
        self._settle(delivery_tag, Action.REJECT, told=True)

    def basic_undecodable(self, delivery_tag: int, detail: str) -> None:
        """Make a message a dead letter because its body can't be decoded (not in AMQP)."""
        self._settle(delivery_tag, Action.UNDECODABLE, detail=detail)

    def basic_throttle(self, delivery_tag: int, delay: float, detail: str | None = None) -> None:
        """Have a message delivered again later, since something is at its limit now (not in AMQP).

        Also one that has been acknowledged when its run began.

        Args:
            delivery_tag: of the message.
            delay: seconds from now.
            detail: why, for whoever finds the dead letter that it becomes after ``throttled_max`` times.
        """
        self._settle(delivery_tag, Action.THROTTLED, detail=detail, delay=delay)

    def basic_return_unseen(self, delivery_tag: int) -> None:
        """Give back a message that nobody has begun to work on: as if it had not been delivered (not in AMQP)."""
        self._settle(delivery_tag, Action.RETURN)

    def basic_begin(self, delivery_tag: int) -> None:
        """Acknowledge a message because its run begins: it is delivered no more (not in AMQP).

        It takes up no place in the prefetch window any more. Its lease is kept until :meth:`basic_ack` tells that the
        run has ended; should that never be told, the message becomes a dead letter instead of being lost.
        """
        if self._may_settle(delivery_tag, Action.BEGIN) and self._engine is not None:
            self._engine.begin(self._window, delivery_tag)

    def _settle(
        self,
        delivery_tag: int,
        action: Action,
        *,
        multiple: bool = False,
        detail: str | None = None,
        delay: float = 0.0,
        told: bool = False,
    ) -> None:
        if self._may_settle(delivery_tag, action) and self._engine is not None:
            self._engine.settle(
                self._window, delivery_tag, action, multiple=multiple, detail=detail, delay=delay, told=told
            )

    def _may_settle(self, delivery_tag: int, action: Action) -> bool:
        if self._engine is None:
            return False
        if self.closed and not self._engine.settles_after_close:
            logger.info(
                "%s of delivery %s came after its channel was closed and does nothing: the message has been given back",
                action.value,
                delivery_tag,
            )
            return False
        return True

    def basic_recover(self, requeue: bool = False) -> None:
        """Requeue everything that is unsettled on the channel; another consumer may get it."""
        if self._engine is not None:
            self._engine.recover(self._window)

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Set the prefetch window of the channel; 0 is no limit. It takes effect for running consumers too."""
        count = max(0, int(prefetch_count or 0))
        if self._engine is None:
            self._window.prefetch_count = count
        else:
            self._engine.set_prefetch(self._window, count)

    def limit_claims(self, can_start: Callable[[], int] | None) -> None:
        """Claim no more than can be worked on now, in addition to the prefetch window (not in AMQP).

        Args:
            can_start: how many more messages the consumer could work on at this moment, those in the callback
                not counted; called from the engine's thread, often: it must be quick, and must not wait for
                anything. ``None``: no limit but the window.
        """
        self._consuming().set_limit(self._window, can_start)

    def put_aside(self, put_aside: Callable[[], int] | None) -> None:
        """Let messages that the consumer has put aside take up no places in the prefetch window (not in AMQP).

        Args:
            put_aside: how many of the unsettled messages wait for something else than the consumer, at most 1000 of
                them count; called from the engine's thread and others: it must be quick. ``None``: none do.
        """
        self._consuming().set_put_aside(self._window, put_aside)

    def flow(self, active: bool = True) -> None:
        """Stop or go on delivering."""
        self._consuming().set_flow(self._window, active)

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel the consumers and give back everything unsettled. Idempotent; does not raise."""
        if self.closed:
            return
        self.closed = True
        connection = self.connection
        if self._engine is not None:
            exclusive = [c.queue for c in self._window.consumers.values()]
            number = self._engine.remove_window(self._window)
            if number:
                logger.info("Restoring %d unacknowledged message(s)", number)
            self._give_up(self._engine, list(dict.fromkeys(exclusive)))
        self.connection = None
        if connection is not None:
            connection.remove_channel(self)

    def _give_up(self, engine: DeliveryEngine, exclusive: list[str]) -> None:
        """Write what this channel gives back. Whoever closes is not kept waiting by a database that is not there."""

        def finish() -> None:
            engine.flush_last()
            for queue in exclusive:
                self._last_of_exclusive(queue)

        if not engine.out and not within(CLOSE_WITHIN, finish, "taskgate-closing"):
            engine.unanswered()

    def abandoned(self) -> None:
        """The connection was given up: nothing more can be asked for, only settled."""
        self.closed = True
        self.connection = None


def _durations(queue: str, arguments: Mapping[str, Any]) -> dict[str, float | None]:
    """``x-expires`` and ``x-message-ttl`` (milliseconds) in seconds; other arguments have no meaning here."""
    durations: dict[str, float | None] = dict.fromkeys(_DURATIONS.values())
    for name, meaning in _DURATIONS.items():
        value = arguments.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) / 1000
        except (TypeError, ValueError):
            seconds = -1.0
        if not seconds >= 0 or (name == "x-expires" and seconds == 0):
            raise PreconditionFailed(
                f"PRECONDITION_FAILED - invalid argument {name!r} of queue {queue!r}: {value!r} is no duration in "
                "milliseconds"
            )
        durations[meaning] = seconds
    return durations
