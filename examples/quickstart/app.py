"""A minimal Celery app on taskgate.

In one terminal::

    celery -A app worker

and in another, in the same folder::

    python publish.py
"""

import os

from celery import Celery

# One file, no server; a PostgreSQL, MySQL or MariaDB URL goes here in production.
app = Celery("quickstart", broker=os.environ.get("BROKER_URL", "taskgate+sqlite:///quickstart.db"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
)


@app.task
def greet(name):
    """Say hello in the worker's output."""
    print(f"hello, {name}", flush=True)


@app.task(bind=True, max_retries=3)
def flaky(self):
    """Fail once, then work."""
    if self.request.retries == 0:
        raise self.retry(countdown=0.5)
    print("flaky worked on its second try", flush=True)
