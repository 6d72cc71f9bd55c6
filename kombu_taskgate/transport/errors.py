"""Core errors as kombu's callers expect them: each is both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from amqp.exceptions import NotAllowed as _NotAllowed
from amqp.exceptions import NotFound, PreconditionFailed, RecoverableConnectionError
from kombu.exceptions import ChannelError, ConnectionError, OperationalError

from ..core.errors import PayloadTooLarge, StoreUnavailable, TaskgateError

__all__ = [
    "CHANNEL_ERRORS",
    "CONNECTION_ERRORS",
    "RECOVERABLE_CONNECTION_ERRORS",
    "BrokerUnavailable",
    "MessageTooLarge",
    "NoRoute",
    "NotFound",
    "PreconditionFailed",
    "RecoverableConnectionError",
    "TagInUse",
    "Undecodable",
    "kombu_errors",
]

#: What kombu and Celery take as "the connection is lost". A timeout is not among them.
CONNECTION_ERRORS: tuple[type[Exception], ...] = (StoreUnavailable, ConnectionError)
#: Those after which connecting again may help; a wrong URL or schema is not among them.
RECOVERABLE_CONNECTION_ERRORS: tuple[type[Exception], ...] = (StoreUnavailable, RecoverableConnectionError)
CHANNEL_ERRORS: tuple[type[Exception], ...] = (ChannelError,)


class BrokerUnavailable(StoreUnavailable, OperationalError):
    """The broker's database can't be reached or refused to work just now."""


class MessageTooLarge(PayloadTooLarge, OperationalError):
    """The message is larger than max_payload allows; it was not published."""


class TagInUse(ChannelError):
    """A consumer tag is given to a second consumer of a channel."""

    code = _NotAllowed.code


class NoRoute(ChannelError):
    """No queue is bound for a message that was published as ``mandatory``."""

    code = 312


class Undecodable(TaskgateError):
    """The stored bytes are no message of this transport."""


@contextmanager
def kombu_errors() -> Iterator[None]:
    """Raise core errors of the block as those that are kombu's too."""
    try:
        yield
    except OperationalError:
        raise
    except StoreUnavailable as error:
        raise BrokerUnavailable(str(error)) from error
    except PayloadTooLarge as error:
        raise MessageTooLarge(str(error)) from error
