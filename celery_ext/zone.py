"""The time zone in which an app's naive times are meant.

Celery leaves an ``eta`` or ``expires`` without a zone to the worker, which takes it for UTC whatever the app's
``timezone`` setting says (celery/celery#1885). The transport asks here, so that a naive time means what the
app's settings say: its ``timezone``, else UTC with ``enable_utc`` and the machine's local zone without it.
"""

from __future__ import annotations

import sys
from datetime import tzinfo


def current_app_zone() -> tzinfo | None:
    """Zone of the current Celery app; ``None`` in a program without Celery."""
    celery = sys.modules.get("celery")
    if celery is None:
        return None
    zone: tzinfo = celery.current_app.timezone
    return zone
