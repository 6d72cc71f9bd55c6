"""Chords: a header of tasks whose results come together before a body begins.

There is no counter. Each task of the header leaves a part, which is there once however often the task is run, and the
header is complete when as many parts are there as it has tasks. One of those who see that ends the chord: by a change
of its state that only one can make, in the transaction that stores the messages of the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from .model import NewTask

#: A chord that has ended is remembered for so many seconds, for parts that come late.
REMEMBER = 14 * 86400.0


class ChordState(str, Enum):
    """State of a chord; it goes from open to one of the others."""

    OPEN = "open"
    #: The body was published.
    DONE = "done"
    #: A part failed, and whoever had to be told was told.
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value


@dataclass(slots=True)
class ChordPart:
    """What one task of the header has come to.

    Args:
        task_id: of the task; 1 to 255 characters.
        place: its place in the header; -1: none.
        status: as its reader calls it.
        payload: opaque bytes.
        execution, token: the lease under which it was found; 0: not known.
        fenced: the lease is one of this broker's, so whether it is still current can be, and is, looked up.
    """

    task_id: str
    place: int
    status: str
    payload: bytes
    execution: int = 0
    token: int = 0
    fenced: bool = False


@dataclass(slots=True)
class Chord:
    """A chord as it is stored. ``size`` is ``None`` until the header has been published to its end."""

    group_id: str
    state: ChordState
    size: int | None = None
    #: Parts that are there.
    parts: int = 0
    #: Tasks that were added to the header beyond its size.
    added: int = 0
    #: Whether its body is noted.
    has_body: bool = False

    @property
    def complete(self) -> bool:
        """Whether it can be ended now."""
        return self.state is ChordState.OPEN and self.size is not None and self.parts >= self.size + self.added


class Chords(Protocol):
    """The stored chords. Every method may be called from any thread, and may raise ``StoreUnavailable``."""

    def begin(self, group_id: str, *, header: bytes | None, body: bytes | None, expires_in: float | None) -> None:
        """Note what a chord consists of; what is noted already stays where nothing new is given."""

    def set_size(self, group_id: str, size: int, *, by: int = 0, expires_in: float | None = None) -> None:
        """Say how many parts the chord needs: its header is being published.

        A chord that has ended and is published once more begins anew, with the parts of later executions, unless
        that is done by the same execution as before (``by``, an execution's id): that is a repeated run of it.
        """

    def add(self, group_id: str, task_id: str) -> None:
        """A task was added to the header: one more part is needed. Done twice it is one."""

    def put(self, group_id: str, part: ChordPart, *, expires_in: float | None = None) -> Chord:
        """Store a part; returns the chord as it is after that.

        It is not stored when it is there already, when the chord has ended, or when its lease is not current (see
        :meth:`.results.Results.store`, which also says what this raises).
        """

    def get(self, group_id: str) -> Chord | None:
        """The chord, if it is stored."""

    def contents(self, group_id: str) -> tuple[bytes | None, bytes | None]:
        """Header and body as they are noted."""

    def parts(self, group_id: str) -> list[ChordPart]:
        """The parts that are there, by place, then in the order in which they came."""

    def claim(self, group_id: str, ttl: float) -> int | None:
        """Take it upon oneself to end an open chord, for ``ttl`` seconds; ``None``: somebody else has, or it has ended.

        Only one at a time has it, so that what can't be in one transaction with its end is mostly done once.
        """

    def end(self, group_id: str, state: ChordState, *, claim: int | None = None, tasks: Sequence[NewTask] = ()) -> bool:
        """End an open chord and store executions, in one transaction; returns whether it was open (and still claimed).

        Its parts are deleted, now or later; the chord is remembered, so that what comes late is known for it.
        """

    def stuck(self, older: float, limit: int = 100, *, since: float | None = None) -> list[Chord]:
        """Open chords that are complete, and whose last part came at least ``older`` seconds ago: nobody ends them.

        ``since``: only those to which a part has come in so many seconds.
        """

    def sweep(self, limit: int = 1000) -> int:
        """Delete at most ``limit`` parts of chords that have ended, and chords whose time is over; returns how many.

        An open chord lives on as long as parts come to it: its time runs from the newest.
        """
