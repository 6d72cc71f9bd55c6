"""What is revoked: values that no execution may run under any more, kept for a while in the shared tables.

The broker only stores and finds them. What a value stands for, and that a claim which meets one is ended, is the
business of whoever claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .errors import ConfigError
from .settings import LONGEST, check_name


@dataclass(slots=True, frozen=True)
class Revocation:
    """One revoked value.

    Args:
        value: a task id, or what stands for the value of a header; 1 to 255 characters.
        header: name of the header whose value it is; empty: a task id.
    """

    value: str
    header: str = ""


class Revocations(Protocol):
    """The stored revocations. Every method may raise ``StoreUnavailable``; nothing was changed then."""

    def add(self, revoked: Sequence[Revocation], keep: float) -> None:
        """Store each for at least ``keep`` seconds from the database's now; what is stored already lives longer.

        Many are stored in several transactions; after an error some may be stored, and doing it again is harmless.

        Raises:
            ConfigError: a name, a value or the time is out of bounds. Nothing is stored.
        """

    def any(self) -> bool:
        """Whether anything is stored: the one question that whoever claims has to ask now and then."""

    def find(self, asked: Sequence[Revocation]) -> set[Revocation]:
        """Those of ``asked`` that are stored. One counts until it is swept."""

    def count(self) -> int:
        """How many are stored."""

    def sweep(self, limit: int = 1000) -> int:
        """Delete at most ``limit`` whose time is over; returns how many.

        A revoked task id stays as long as an execution with this task_id has not ended: a long task whose worker
        dies after that time must not run again.
        """


def check(revoked: Sequence[Revocation], keep: float) -> None:
    """Raise ConfigError for what can't be stored."""
    if not 0 <= keep <= LONGEST:
        raise ConfigError(f"revocations must be kept for 0 seconds to 100 years, not {keep!r}")
    for one in revoked:
        check_name(one.value, "revoked value")
        if one.header:
            check_name(one.header, "header")
