"""An ordinary Celery app; only its broker's URL and lease time tell that taskgate is behind it."""

import os
import time

from celery import Celery

app = Celery("demo")
app.conf.update(
    broker_url=os.environ.get("DEMO_BROKER_URL", "taskgate+sqlite:///demo.db"),
    broker_transport_options={"lease_ttl": 2},  # seconds; 60 unless set, short here so that the show is short
    broker_connection_retry_on_startup=True,
    # With these two a task that was running when its worker died runs again.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    # The demo needs no results: each task writes what it did into a journal.
    task_ignore_result=True,
)


def note(event, request):
    """Append one line to the journal; O_APPEND keeps the lines of concurrent writers whole."""
    redelivered = int(bool((request.delivery_info or {}).get("redelivered")))
    line = f"{event} {request.id} {os.getpid()} {redelivered}\n"
    journal = os.open(os.environ.get("DEMO_JOURNAL", "journal.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(journal, line.encode())
    finally:
        os.close(journal)


@app.task(bind=True, max_retries=1)
def work(self, fail_first=False):
    """Take a tenth of a second; on the first try fail and ask for another one, if told so."""
    note("started", self.request)
    if fail_first and self.request.retries == 0:
        note("retried", self.request)
        raise self.retry(countdown=0.5)
    time.sleep(0.1)
    note("executed", self.request)
