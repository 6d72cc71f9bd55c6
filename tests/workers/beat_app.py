"""The app that tests of beat run; everything comes from the environment.

TASKGATE_TEST_BEAT: JSON of settings. TASKGATE_TEST_ENTRIES: JSON, name -> seconds, or the five fields of a crontab.
TASKGATE_TEST_BLOW: a file whose first word is a signal, and whose second one is an entry: when it is there, and that
entry is about to be published, whoever removes it sends the signal to its own process group.
TASKGATE_TEST_SKEW: seconds by which the clock of this machine is wrong.
"""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from celery import Celery
from celery.schedules import crontab
from celery.signals import before_task_publish

_SKEW = float(os.environ.get("TASKGATE_TEST_SKEW", "0"))
if _SKEW:
    _true_time = time.time
    time.time = lambda: _true_time() + _SKEW


class Skewed(Celery):
    """Celery's own idea of the time, on a machine whose clock is wrong."""

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=_SKEW)


app = Skewed("beats")
app.conf.update(task_ignore_result=True, timezone="UTC", **json.loads(os.environ["TASKGATE_TEST_BEAT"]))


@app.task(name="tick")
def tick(entry: str) -> str:
    """What the entries send."""
    return entry


def _times(text: float | str) -> Any:
    if isinstance(text, str):
        minute, hour, day, month, weekday = text.split()
        return crontab(minute, hour, weekday, day, month)
    return float(text)


app.conf.beat_schedule = {
    name: {"task": "tick", "schedule": _times(times), "args": [name]}
    for name, times in json.loads(os.environ.get("TASKGATE_TEST_ENTRIES", "{}")).items()
}

_BLOW = Path(os.environ.get("TASKGATE_TEST_BLOW", "none"))


@before_task_publish.connect
def blow(body: Any = None, headers: dict[str, Any] | None = None, **_: Any) -> None:
    """Be hit between the decision to send and the sending; stamp the message with who has published it, and when."""
    try:
        number, _, entry = _BLOW.read_text(encoding="utf-8").partition(" ")
        if body[0][0] == entry:
            _BLOW.unlink()
            os.killpg(0, getattr(signal, number))
    except (FileNotFoundError, IndexError, TypeError):
        pass
    if headers is not None:
        headers["published"] = {"pid": os.getpid(), "time": time.time()}
