"""Instants as messages write them, in milliseconds since the epoch."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any

_ISO = re.compile(
    r"(\d{4})-(\d\d?)-(\d\d?)"
    r"(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?"
    r"\s?(?:(Z)|([+-])(\d\d):?(\d\d)(?::?(\d\d))?)?)?\Z",
    re.IGNORECASE | re.ASCII,
)
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  # instants are counted without a zone
_MS = timedelta(milliseconds=1)
#: The last instant that Python's calendar knows; what is later is taken as garbage.
_LAST_MS = 253_402_300_800_000 + 86_400_000


def parse_instant(value: Any, naive: tzinfo = timezone.utc) -> int | None:
    """Read an instant; ``None`` when the value is none.

    Args:
        value: ISO 8601 text, a datetime, or a number of seconds since the epoch (0 is none).
        naive: zone of a text or datetime that names none. Celery's workers read it as UTC.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        milliseconds = value * 1000 if math.isfinite(value) else 0
        return round(milliseconds) if 0 < milliseconds <= _LAST_MS else None
    if isinstance(value, datetime):
        offset = value.utcoffset()
        return _to_ms(value.replace(tzinfo=None), offset, naive)
    if isinstance(value, str):
        return _parse_text(value.strip(), naive)
    return None


def with_zone(value: Any, naive: tzinfo) -> Any:
    """A text or datetime without a zone as text in the zone ``naive``; anything else as it is."""
    if isinstance(value, datetime):
        value = value.isoformat()
    if not isinstance(value, str):
        return value
    match = _ISO.match(value.strip())
    if match is None or match[8] or match[9]:
        return value
    instant = _parse_text(value.strip(), naive)
    if instant is None:
        return value
    try:
        return datetime.fromtimestamp(instant / 1000, timezone.utc).astimezone(naive).isoformat()
    except (OverflowError, ValueError, OSError):
        return value


def _parse_text(text: str, naive: tzinfo) -> int | None:
    match = _ISO.match(text)
    if match is None:
        return None
    year, month, day, hour, minute, second, fraction, utc, sign, off_h, off_m, off_s = match.groups()
    try:
        local = datetime(  # noqa: DTZ001  # the zone is added as an offset: it may lead out of the calendar
            int(year),
            int(month),
            int(day),
            int(hour or 0),
            int(minute or 0),
            int(second or 0),
            int((fraction or "0").ljust(6, "0")[:6]),
        )
    except ValueError:
        return None
    offset = None
    if utc:
        offset = timedelta(0)
    elif sign:
        offset = timedelta(hours=int(off_h), minutes=int(off_m), seconds=int(off_s or 0))
        offset = -offset if sign == "-" else offset
    return _to_ms(local, offset, naive)


def _to_ms(local: datetime, offset: timedelta | None, naive: tzinfo) -> int | None:
    if offset is None:
        try:
            offset = local.replace(tzinfo=naive).utcoffset() or timedelta(0)
        except (OverflowError, ValueError):
            offset = timedelta(0)
    milliseconds = (local - _EPOCH - offset) // _MS
    return max(milliseconds, 0)
