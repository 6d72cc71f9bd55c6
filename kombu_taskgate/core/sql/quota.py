"""Window quotas: a counter per key and window length, changed by one conditional UPDATE."""

from __future__ import annotations

from ..clock import to_ms
from ..model import Reservation
from .work import Work


def reserve(work: Work, key: str, limit: int, window: float, n: int) -> Reservation | None:
    """Take ``n`` of the current window, if they are left."""
    length = to_ms(window)
    start = int(work.run_timed(work.sql.current_time).scalar_one()) // length * length
    work.run(work.sql.new_quota, key_=key, window_ms=length, window_start=start, used=0)
    # A window that is newer than "now" changes no row: a clock that went back admits less, not more.
    taken = work.run(work.sql.reserve, p_key=key, p_window=length, p_start=start, p_limit=limit, p_n=n).rowcount
    return Reservation(key, window, start, n) if taken else None


def release(work: Work, reservation: Reservation) -> bool:
    """Give back to the window it was taken from, if that is still the current one."""
    length = to_ms(reservation.window)
    now = int(work.run_timed(work.sql.current_time).scalar_one())
    if now // length * length != reservation.window_start:
        return False
    return bool(
        work.run(
            work.sql.release,
            p_key=reservation.key,
            p_window=length,
            p_start=reservation.window_start,
            p_n=reservation.n,
        ).rowcount
    )
