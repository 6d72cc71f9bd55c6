"""Which channels want claims, and the calls that get them: as few as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..core.model import Claim, Session
from .window import Window

#: Most claims of one call: their payloads come in one answer.
MOST_CLAIMS = 500


@dataclass(slots=True)
class Intake:
    """One channel's wish for claims: from these queues, so many."""

    window: Window
    no_ack: bool
    queues: list[str]
    free: int

    @property
    def key(self) -> tuple[Window, bool]:
        return self.window, self.no_ack


@dataclass(slots=True)
class Request:
    """One dequeue call; several intakes can share it."""

    session: Session | None
    intakes: list[Intake] = field(default_factory=list)
    #: How many claims it got, and whether a channel with more room could have got more.
    found: int = 0
    curbed: bool = False

    @property
    def queues(self) -> list[str]:
        return list(dict.fromkeys(queue for intake in self.intakes for queue in intake.queues))

    @property
    def limit(self) -> int:
        """Whichever channel the claims are for, there is room for all of them."""
        return min(MOST_CLAIMS, *(intake.free for intake in self.intakes))

    @property
    def full(self) -> bool:
        return self.found >= self.limit

    def would_take_more(self, claims: Sequence[Claim]) -> bool:
        """Whether a channel got some, and was held back by another with less room."""
        if not self.full:
            return False
        got = {claim.queue for claim in claims}
        return any(intake.free > self.limit and not got.isdisjoint(intake.queues) for intake in self.intakes)


def requests_for(intakes: Sequence[Intake], session_for: Callable[[str], Session], *, split: bool) -> list[Request]:
    """Bundle the wishes into as few calls as possible; each call is under one session.

    Args:
        intakes: who wants claims.
        session_for: the session to claim under, by queue.
        split: give each channel a call of its own.
    """
    requests: dict[tuple[int, int], Request] = {}
    acking = any(not intake.no_ack for intake in intakes)
    for place, intake in enumerate(intakes):
        by_session: dict[int, Intake] = {}
        sessions: dict[int, Session | None] = {}
        for queue in intake.queues:
            session = session_for(queue) if acking else None
            number = 0 if session is None else session.id
            sessions[number] = session
            part = by_session.setdefault(number, Intake(intake.window, intake.no_ack, [], intake.free))
            part.queues.append(queue)
        for number, part in by_session.items():
            # One channel's room is not given out twice, so its sessions share it.
            part.free = max(1, intake.free // len(by_session))
            key = (number, place if split else 0)
            requests.setdefault(key, Request(sessions[number])).intakes.append(part)
    return list(requests.values())
