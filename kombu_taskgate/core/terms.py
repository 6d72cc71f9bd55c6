"""Terms: who leads what, and until when. The store decides, by its own clock and in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .errors import ConfigError
from .settings import LONGEST, check_name, is_number

#: A term that ends later than so many of its own ttl from now was given before the clock was set back. More than one,
#: so that a clock that is corrected by a little takes no term away from a holder that trusts it.
TOO_LONG = 2
#: Candidates are remembered for so many seconds after they were last seen.
REMEMBERED = 86400.0
#: A number is less than this: every store holds it exactly.
HIGHEST = 2**52


@dataclass(slots=True, frozen=True)
class Term:
    """One leadership, as the store saw it. Instants are milliseconds by the store's clock.

    Args:
        key: what is led.
        holder: who leads, or was the last to lead.
        number: grows with each leadership of the key, never falls, and fences what the leader writes.
        acquired_at: when it began.
        renewed_at: when its holder last said that it goes on.
        until: when it ends unless it is renewed.
        seen_at: the store's time when this was read.
    """

    key: str
    holder: str
    number: int
    acquired_at: int
    renewed_at: int
    until: int
    seen_at: int

    @property
    def left(self) -> float:
        """Seconds that it had left when it was read; 0 or less: it is over."""
        return (self.until - self.seen_at) / 1000


@dataclass(slots=True, frozen=True)
class Candidate:
    """Somebody who stands by to lead. Instants are milliseconds by the store's clock."""

    key: str
    holder: str
    since: int
    seen_at: int
    #: The store's time when this was read.
    now: int


class LeaseStore(Protocol):
    """Where terms are kept. Every method is atomic and may be called from any thread; may raise ``StoreUnavailable``.

    The guarantee: by the store's clock no two terms of a key overlap, and their numbers only grow; also after the row
    was deleted, or when the clock was set back (after both, above what callers say that they have seen). The guarantee
    it does not give: a holder that is frozen does not notice that its term is over. What it writes must be fenced with
    the number where that matters, in the transaction that writes.
    """

    def try_acquire(self, key: str, holder: str, ttl: float, *, above: int = 0) -> Term | None:
        """Begin or renew a term; ``None`` when somebody else's is still valid.

        A holder whose own term is valid keeps its number; ``until`` becomes now + ``ttl``. One whose term is over
        begins a new one, as anybody else would. A term that ends later than twice its own ttl from now was given before
        the clock was set back, and is over. A new number is ``max(the last number, above, now in ms) + 1``.
        Where somebody is just writing under a term that is over, that may count as valid until it is written.

        Args:
            key: what is to be led, 1 to 255 characters.
            holder: unique to the process (and to its start), 1 to 255 characters.
            ttl: seconds.
            above: highest number that the caller has seen.

        Raises:
            ConfigError: a name or the ttl is out of bounds.
        """

    def release(self, key: str, holder: str) -> bool:
        """End the holder's term now, so that others need not wait; returns whether it was its own and valid."""

    def current(self, key: str) -> Term | None:
        """The newest term, over or not (see :attr:`Term.left`); ``None``: there was none. A cheap read."""

    def register(self, key: str, holder: str) -> None:
        """Say that a candidate is alive."""

    def withdraw(self, key: str, holder: str) -> None:
        """Forget a candidate. Idempotent."""

    def candidates(self, key: str) -> list[Candidate]:
        """Who has said so within the last day, the most recent first."""


def check(key: str, holder: str, ttl: float = 1.0, above: int = 0) -> None:
    """Raise ConfigError for what no store can hold."""
    check_name(key, "term")
    check_name(holder, "holder")
    if not (is_number(ttl) and 0.001 <= ttl <= LONGEST):
        raise ConfigError(f"the ttl of term {key!r} must be 0.001 seconds to 100 years, not {ttl!r}")
    if not 0 <= above < HIGHEST:
        raise ConfigError(f"no number of a term is {above!r}: above must be at least 0 and less than {HIGHEST}")
