"""Who is told of remote control commands.

A command such as ``revoke`` travels over kombu's mailbox to the processes that run, and is lost when none does. The
transport knows the mailbox but not the commands, so it tells those who are registered in the entry point group
``kombu_taskgate.control_observer``: objects as :class:`ControlObserver` describes them.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol

from ..core.errors import TaskgateError
from .codec import Envelope

if TYPE_CHECKING:
    from .connection import Connection

logger = logging.getLogger("kombu_taskgate.transport")

GROUP = "kombu_taskgate.control_observer"
#: How the exchanges of kombu's mailboxes end (kombu.pidbox, Mailbox.exchange_fmt).
SUFFIX = ".pidbox"


class ControlObserver(Protocol):
    """Somebody who knows the commands."""

    def published(self, connection: Connection, message: Envelope) -> Envelope:
        """A message is about to be published to the exchange of a mailbox; returns what to publish in its place.

        Raises:
            TaskgateError: what the command asks for could not be stored. The publish fails with it.
        """


@cache
def observers() -> tuple[ControlObserver, ...]:
    """Those who are registered; asked for when a connection is opened, so that no import is left for later.

    At the first publish it would be too late: a child forked while another thread is in the middle of an import
    waits for the import's lock for ever.
    """
    return tuple(point.load() for point in entry_points(group=GROUP))


def is_mailbox(exchange: str) -> bool:
    """Whether an exchange belongs to a mailbox of kombu's."""
    return exchange.endswith(SUFFIX)


def tell_published(connection: Connection, message: Envelope) -> Envelope:
    """Tell the observers, before the message is routed; returns what they make of it.

    Raises:
        TaskgateError: an observer could not store what the command asks for; the publisher must know. Whatever else
            goes wrong with an observer is logged, and the broadcast goes on.
    """
    for observer in observers():
        try:
            message = observer.published(connection, message)
        except TaskgateError:
            raise
        except Exception:
            logger.exception("%r failed on a message to %r, which goes on", observer, message.exchange)
    return message
