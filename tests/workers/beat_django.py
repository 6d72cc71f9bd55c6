"""A Django project in one file, for tests of django-celery-beat: run as a script it does what its argument says.

TASKGATE_TEST_DJANGO: the file of Django's own database. TASKGATE_TEST_BEAT: JSON of Celery's settings.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import django
from celery import Celery
from django.conf import settings

settings.configure(
    SECRET_KEY="none",
    INSTALLED_APPS=["django.contrib.contenttypes", "django_celery_beat"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["TASKGATE_TEST_DJANGO"]}},
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    USE_TZ=True,
    TIME_ZONE="UTC",
)
django.setup()

app = Celery("beats")
app.conf.update(task_ignore_result=True, timezone="UTC", **json.loads(os.environ["TASKGATE_TEST_BEAT"]))
app.conf.beat_schedule = {
    name: {"task": "tick", "schedule": float(seconds), "args": [name]}
    for name, seconds in json.loads(os.environ.get("TASKGATE_TEST_ENTRIES", "{}")).items()
}


@app.task(name="tick")
def tick(entry: str) -> str:
    """What the entries send."""
    return entry


def migrate() -> None:
    """Create Django's tables."""
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def add(name: str, seconds: str, one_off: str = "") -> None:
    """A row as the admin site makes it."""
    from django_celery_beat.models import IntervalSchedule, PeriodicTask

    every, _ = IntervalSchedule.objects.get_or_create(every=int(seconds), period="seconds")
    PeriodicTask.objects.create(name=name, task="tick", interval=every, args=json.dumps([name]), one_off=bool(one_off))


def enable(name: str, enabled: str) -> None:
    """Switch a row on or off, as the admin site does."""
    from django_celery_beat.models import PeriodicTask

    row = PeriodicTask.objects.get(name=name)
    row.enabled = enabled == "yes"
    row.save()


def show() -> None:
    """Print which rows are enabled."""
    from django_celery_beat.models import PeriodicTask

    print(json.dumps({row.name: row.enabled for row in PeriodicTask.objects.all()}))  # noqa: T201  # for the test


if __name__ == "__main__":
    commands: dict[str, Any] = {"migrate": migrate, "add": add, "enable": enable, "show": show}
    commands[sys.argv[1]](*sys.argv[2:])
