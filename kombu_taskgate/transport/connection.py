"""The connection behind a :class:`kombu.Connection`: the broker, the channels, and the engine of those that consume."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import TaskgateError
from ..core.factory import open_broker
from ..core.model import NewTask
from ..core.ready import Ready
from ..core.settings import BrokerSettings
from ..core.within import within
from . import control, declared, depends, process
from .engine import DeliveryEngine
from .errors import RecoverableConnectionError, kombu_errors
from .options import EngineOptions
from .publish import Trimmer
from .routing import Router

if TYPE_CHECKING:
    from .channel import Channel

logger = logging.getLogger("kombu_taskgate.transport")

#: How long in seconds whoever closes a connection waits for the database, the last settlements included.
CLOSE_WITHIN = 15.0
#: Most deliveries of one call from the event loop, and seconds it may take: other descriptors want their turn.
MOST_AT_ONCE, LONGEST_AT_ONCE = 64, 0.02


class Connection:
    """An open connection.

    Args:
        client: the :class:`kombu.Connection` that it belongs to.
        settings: of the broker.
        options: of the delivery engine.

    Raises:
        StoreUnavailable: the database does not answer.
        ConfigError, SchemaError: it will not work this way.
    """

    def __init__(self, client: Any, settings: BrokerSettings, options: EngineOptions) -> None:
        self.client = client
        self.settings = settings
        self.options = options
        # Whoever knows the zone or the control commands is imported now, not by the first publish: a child that is
        # forked while another thread imports something can wait for that import for ever.
        options.naive  # noqa: B018
        control.observers()
        depends.checkers()
        with kombu_errors():
            self.broker = open_broker(settings)
        self.router = Router(self.broker.topology)
        self.trimmer = Trimmer(self.broker, self.router)
        self.declared = declared.Declared(self.broker)
        self.channels: list[Channel] = []
        self._ready: Ready | None = None
        self._loop: Any = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._engine: DeliveryEngine | None = None
        self._closed = False
        process.watch(self)

    @property
    def connected(self) -> bool:
        """Whether it can be used here: it is not closed, and this is the process that opened it."""
        return not self._closed and self._pid == os.getpid()

    # -- channels and deliveries ---------------------------------------------------------------------

    def add_channel(self, channel: Channel) -> int:
        """Note a new channel and return its number."""
        with self._lock:
            if not self.connected:
                raise RecoverableConnectionError("the connection to the broker is closed")
            taken = {other.channel_id for other in self.channels}
            self.channels.append(channel)
            return next(number for number in range(1, len(taken) + 2) if number not in taken)

    def remove_channel(self, channel: Channel) -> None:
        """Note that a channel was closed."""
        with self._lock:
            if channel in self.channels:
                self.channels.remove(channel)

    @property
    def engine(self) -> DeliveryEngine | None:
        """The delivery engine, once something has been consumed."""
        return self._engine

    def consuming(self) -> DeliveryEngine:
        """The delivery engine, started if need be.

        Raises:
            BrokerUnavailable: the database does not answer.
        """
        with self._lock:
            if not self.connected:
                raise RecoverableConnectionError("the connection to the broker is closed")
            if self._engine is not None:
                with kombu_errors():
                    self._engine.start()
            else:
                engine = DeliveryEngine(
                    self.broker,
                    self.settings,
                    self.options,
                    f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}",
                    self._readiness(),
                    upkeep=self._keep_queues,
                    sweep=declared.Sweeper(self.broker).sweep,
                )
                with kombu_errors():
                    engine.start()
                self._engine = engine
            return self._engine

    def _readiness(self) -> Ready:
        if self._ready is None:
            self._ready = Ready()
        return self._ready

    def _keep_queues(self) -> float:
        engine = self._engine
        session = None if engine is None else engine.session
        if engine is None or session is None:
            return declared.LONGEST
        return self.declared.keep(session, engine.consumed())

    def drain_events(self, timeout: float | None = None) -> None:
        """Deliver one message.

        Raises:
            TimeoutError: there was none within ``timeout`` seconds (``None``: wait for ever).
            RecoverableConnectionError: the connection is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        engine = self._engine
        while engine is None:
            # Nothing is consumed here yet; another thread may begin to.
            if not self.connected:
                raise RecoverableConnectionError("the connection to the broker is closed")
            left = 0.05 if deadline is None else min(0.05, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError
            time.sleep(left)
            engine = self._engine
        delivery = engine.next_delivery(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if delivery is None:
            raise TimeoutError
        delivery.window.receive(delivery)

    def add_to_loop(self, loop: Any, callback: Any, *args: Any) -> None:
        """Let an event loop call back while there is something to deliver."""
        self._loop = loop
        loop.add_reader(self._readiness().fileno(), callback, *args)

    def remove_from_loop(self, loop: Any) -> None:
        """Undo :meth:`add_to_loop`."""
        # A closed descriptor that a forked child still has would stay in the poller and fire for ever.
        descriptor = -1 if self._ready is None else self._ready.fileno()
        if descriptor in loop.readers:
            loop.remove_reader(descriptor)

    def deliver_ready(self) -> None:
        """Deliver what there is, for an event loop; calls back soon when there is more.

        Raises:
            RecoverableConnectionError: the connection is closed.
        """
        if not self.connected:
            raise RecoverableConnectionError("the connection to the broker is closed")
        if self._engine is not None:
            self._engine.dispatch(MOST_AT_ONCE, LONGEST_AT_ONCE)

    def published(self, queues: Sequence[str]) -> None:
        """Wake the consumers of these queues in this process, and see that those of short-lived messages stay short."""
        for engine in self._engines_here():
            engine.wake(queues)
        self.trimmer.published(queues)

    def revoked(self) -> None:
        """Tell the consumers of this process that something has been revoked."""
        for engine in self._engines_here():
            engine.revoked.noticed()

    def consumers_of(self, queue: str) -> int:
        """How many consumers a queue has; of those in other processes one that has just begun may be missing."""
        sessions = [session.id for engine in self._engines_here() if (session := engine.session) is not None]
        return self.consumers_here(queue) + self.broker.topology.consumers(queue, sessions)

    def consumers_here(self, queue: str) -> int:
        """How many consumers of a queue this process has."""
        return sum(engine.consumers_of(queue) for engine in self._engines_here())

    def _engines_here(self) -> Iterator[DeliveryEngine]:
        """The engines of this process that work with the same tables."""
        for connection in process.watched():
            if isinstance(connection, Connection) and connection.settings == self.settings:
                engine = connection._engine
                if engine is not None:
                    yield engine

    # -- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Settle what waits, give back what is unsettled, and release everything. Idempotent; does not raise."""
        if self._closed:
            return
        if not self.connected:
            self._closed = True
            return
        for channel in list(self.channels):
            channel.close()
        self._closed = True
        self._leave_loop()
        if self._engine is None and not self.declared.exclusive():
            self._release()
        elif not within(CLOSE_WITHIN, self._finish, "taskgate-closing"):
            logger.warning(
                "the broker has not answered for %g s: closing the connection without it; what was not acknowledged "
                "will run again when its leases have ended",
                CLOSE_WITHIN,
            )

    def _finish(self) -> None:
        self._delete_exclusive()
        self._release()

    def abandon(self) -> None:
        """Give the connection up, quickly and without the database.

        What its consumers are working on stays leased and can still be settled, see
        :meth:`.engine.DeliveryEngine.retire`.
        """
        if not self.connected:
            return
        self._closed = True
        for channel in list(self.channels):
            for callback in channel.events["abandoned"]:
                callback()
            channel.abandoned()
        self.channels.clear()
        if self._engine is None:
            self._release()
        else:
            self._leave_loop()
            self._engine.retire(self._release)

    def _delete_exclusive(self) -> None:
        if self._engine is not None and self._engine.out:
            return  # they expire
        try:
            for name in self.declared.exclusive():
                declared.delete_queue(self.broker, name)
        except TaskgateError as error:
            logger.debug("exclusive queues could not be deleted and will expire: %s", error)

    def _leave_loop(self) -> None:
        if self._loop is not None:
            self.remove_from_loop(self._loop)
            self._loop = None

    def _release(self) -> None:
        self._leave_loop()
        if self._engine is not None:
            self._engine.stop()
        if self._ready is not None:
            self._ready.close()
        self.broker.close()

    def at_exit(self) -> None:
        """Close it with its process, also when it has been abandoned."""
        if self._closed:
            if self._engine is not None:
                self._engine.stop()
        else:
            self.close()

    def after_fork(self) -> None:
        """In the child: everything here is the parent's."""
        self._closed = True  # the process number alone could come again in a child's child
        self._lock = threading.Lock()
        self.declared.after_fork()
        if self._engine is not None:
            self._engine.after_fork()
        if self._ready is not None:
            self._ready.after_fork()
        for channel in self.channels:
            channel.abandoned()
        self.channels = []


def tell_stored(settings: BrokerSettings, tasks: Sequence[NewTask]) -> None:
    """Wake the consumers of this process: executions were stored in a transaction that no connection of it has made."""
    queues = list(dict.fromkeys(task.queue for task in tasks))
    for connection in process.watched() if queues else ():
        if isinstance(connection, Connection) and connection.settings == settings:
            connection.published(queues)
            return
