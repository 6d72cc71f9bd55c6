"""Which messages are revoked: by the id of their task, or by a stamp in their headers.

A stamp is a header that Celery's ``stamp()`` puts on tasks: the message's header ``stamped_headers`` lists the names,
``stamps`` has their values, each one or several.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from ..core.broker import Broker
from ..core.model import MAX_NAME, Claim
from ..core.revocations import Revocation
from .codec import Envelope
from .control import is_mailbox
from .errors import Undecodable
from .texts import id_text, short_text

logger = logging.getLogger("kombu_taskgate.transport")

#: Seconds for which "nothing is revoked" is believed. Only a process that no broadcast reaches needs that long.
BELIEVED = 5.0


def of_task(task_id: Any) -> Revocation | None:
    """The revocation of a task id; ``None`` for what is no id."""
    text = id_text(task_id)
    return None if text is None else Revocation(text)


def of_stamp(header: Any, stamp: Any) -> Revocation | None:
    """The revocation of one value of a stamped header; ``None`` for what is no name of a header."""
    name = short_text(header)
    if name is None:
        return None
    try:
        text = json.dumps(stamp, sort_keys=True, default=str)
    except (TypeError, ValueError, RecursionError):  # its keys have no order, or it has no end
        return None
    if len(text) > MAX_NAME:
        text = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    return Revocation(text, name)


def several(value: Any) -> list[Any]:
    """One value or several, as a list."""
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else [value]


def revocable_by(message: Envelope) -> list[Revocation]:
    """What would revoke a message; nothing revokes one that is no task."""
    headers = message.headers
    if headers.get("task") is None:
        return []
    found = [of_task(headers.get("id"))]
    names, stamps = headers.get("stamped_headers"), headers.get("stamps")
    if isinstance(names, (list, tuple)) and isinstance(stamps, dict):
        for name in names:
            if isinstance(name, str) and stamps.get(name) is not None:
                found.extend(of_stamp(name, stamp) for stamp in several(stamps[name]))
    return [one for one in found if one is not None]


Decoded = tuple[Claim, "Envelope | Undecodable"]


class RevokedClaims:
    """Finds what is revoked among claims: one small statement now and then, and one per batch while anything is.

    Args:
        broker: where.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._any = False
        self._until = 0.0
        #: Counted, because a notice may come while the database is being asked.
        self._notices = self._heard = 0

    def noticed(self) -> None:
        """Something has just been revoked. From any thread."""
        self._notices += 1

    def among(self, claims: Sequence[Decoded]) -> set[int]:
        """Ids of the executions that are revoked.

        Raises:
            StoreUnavailable: that can't be known now.
        """
        if any(isinstance(message, Envelope) and is_mailbox(message.exchange) for _, message in claims):
            # It may be a revocation, and what comes with it must not wait until this process has looked.
            self.noticed()
        notices = self._notices
        if notices != self._heard or time.monotonic() >= self._until:
            self._any = notices != self._heard or self._broker.revocations.any()
            self._heard = notices
            self._until = time.monotonic() + BELIEVED
        if not self._any:
            return set()
        by = {claim.id: revocable_by(message) for claim, message in claims if isinstance(message, Envelope)}
        found = self._broker.revocations.find([one for keys in by.values() for one in keys])
        revoked = {id for id, keys in by.items() if not found.isdisjoint(keys)}
        for claim, _ in claims:
            if claim.id in revoked:
                logger.info(
                    "task %s[%s] is revoked and will not run (execution %d)", claim.type, claim.task_id, claim.id
                )
        return revoked
