"""Replicas of beat in processes of their own (reports B82 to B94).

On databases that not all of these tests run on, tests/crash/test_beat_faults.py does the same and more at random.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from kombu_taskgate.core.schedules import Entry, Tick
from tests.workers.beats import KEY, Beats
from tests.workers.fixtures import MakeBeats, MakeLab
from tests.workers.harness import Proxy, holds_for, proxy_for, wait_for
from tests.workers.servers import PrivatePgBouncer

pytestmark = pytest.mark.slow

#: Seconds that a machine with other things to do may add to what is promised.
BUSY = 6.0
#: After so many seconds without a tick an entry of one second has ended, however the last ones were spread.
SILENCE = 3.0
#: The schedule of tests.workers.app.
SHOP = "beat:taskgate-tests"
STEPPED_DOWN = "leads beat:beats no more"


def gaps(beats: Beats, name: str = "often") -> list[float]:
    """Seconds between one tick and the next, by the database's clock."""
    sent = [tick.sent_at for tick in beats.ticks(name)]
    return [(after - before) / 1000 for before, after in pairwise(sent)]


def terms_sql(beats: Beats, text: str) -> None:
    """Change the row of the lease behind everybody's back."""
    statement = sa.text(text.replace("TERMS", f"{beats.prefix}terms"))
    beats.broker.database.write(lambda conn: conn.execute(statement))  # type: ignore[attr-defined]  # an SqlBroker


def test_killed_leaders(make_beats: MakeBeats, database_url: str) -> None:
    """B82: two leaders are killed; no tick is sent twice, and the silence is at most the lease and two seconds."""
    beats = make_beats(database_url, ttl=3.0)
    beats.start(3)
    for _ in range(2):
        beats.wait_ticks(len(beats.ticks()) + 4)
        beats.leader().kill()
    beats.wait_ticks(len(beats.ticks()) + 4)
    beats.check()
    print(f"longest gap {max(gaps(beats)):.2f} s")  # noqa: T201  # a figure for people
    assert max(gaps(beats)) < 3.0 + 2.0 + BUSY


def test_ended_leaders(make_beats: MakeBeats, main_url: str) -> None:
    """B85: told to end, a leader gives its lease back: the next one sends in time. B92: no file is left."""
    beats = make_beats(main_url, ttl=30.0)
    beats.start(3)
    for _ in range(2):
        beats.wait_ticks(len(beats.ticks()) + 3)
        assert beats.leader().terminate() == 0
    beats.wait_ticks(len(beats.ticks()) + 3)
    beats.check()
    assert max(gaps(beats)) < 3.0 + BUSY, "far from the lease time"
    assert not list(beats.folder.glob("celerybeat*")), "B92: no file of its own"


def test_ended_after_its_lease_was_taken(make_beats: MakeBeats, main_url: str) -> None:
    """B85: a frozen leader that is told to end when it wakes leaves its successor's lease alone."""
    beats = make_beats(main_url, ttl=6.0)  # so that the successor's lease outlasts a pause of a busy machine
    beats.start(2)
    beats.wait_ticks(2)
    first = beats.freeze_leader()
    wait_for(
        lambda: (term := beats.term()) is not None and str(first.pid) not in term.holder.split(":"), 30, "the next"
    )
    second = beats.term()
    assert second is not None
    first.process.send_signal(signal.SIGTERM)
    first.signal(signal.SIGCONT)
    assert first.process.wait(60) == 0
    term = beats.term()
    assert term is not None
    assert (term.holder, term.number) == (second.holder, second.number)
    beats.wait_ticks(len(beats.ticks()) + 2)
    beats.check()


@pytest.mark.parametrize("how", ["deleted", "stolen"])
def test_a_lease_that_is_gone(make_beats: MakeBeats, main_url: str, how: str) -> None:
    """B83: its holder says so, stays up, sends nothing until somebody leads again, and may be that."""
    beats = make_beats(main_url)
    (replica,) = beats.start()
    beats.wait_ticks(2)
    before = wait_for(beats.term, 30, "it leads")
    assert before is not None
    if how == "deleted":
        terms_sql(beats, "DELETE FROM TERMS")
    else:
        terms_sql(beats, "UPDATE TERMS SET holder = 'thief', number = number + 1000000, until_ = until_ + 1000")
    wait_for(lambda: STEPPED_DOWN in replica.text(), 30, "it steps down")
    wait_for(lambda: (term := beats.term()) is not None and term.number > before.number, 30, "it leads again")
    beats.wait_ticks(len(beats.ticks()) + 3)
    assert replica.alive
    assert beats.leader() is replica
    assert max(tick.term for tick in beats.ticks()) > before.number
    beats.check()


def test_a_leader_frozen_in_a_publish(make_beats: MakeBeats, main_url: str) -> None:
    """What it was about to send is sent by its successor; it sends nothing when it wakes, and stays."""
    beats = make_beats(main_url)
    beats.start(2)
    beats.wait_ticks(2)
    leader = beats.freeze_in_publish()
    beats.wait_ticks(len(beats.ticks()) + 3)
    leader.signal(signal.SIGCONT)
    wait_for(lambda: STEPPED_DOWN in leader.text(), 30, "it notices")
    beats.wait_ticks(len(beats.ticks()) + 3)
    assert leader.alive
    beats.check()


def test_ended_in_a_publish(make_beats: MakeBeats, main_url: str) -> None:
    """Told to end between its decision and the sending, it sends nothing and ends well; its successor sends."""
    beats = make_beats(main_url, ttl=30.0)
    beats.start(2)
    beats.wait_ticks(2)
    leader = beats.leader()
    beats.blow.write_text("SIGTERM often", encoding="utf-8")
    assert leader.process.wait(60) == 0
    beats.wait_ticks(len(beats.ticks()) + 3)
    assert max(gaps(beats)) < 3.0 + BUSY, "far from the lease time"
    beats.check()


def test_a_database_that_is_away(make_beats: MakeBeats, postgresql_url: str) -> None:
    """B87: also at start; afterwards an entry is sent once, and not once for each time that it was due."""
    with proxy_for(postgresql_url, 5432) as (proxy, url):
        beats = make_beats(postgresql_url)
        proxy.down()
        replicas = beats.start(2, {"broker_url": f"taskgate+{url}"})
        wait_for(lambda: all("can't be" in one.text() for one in replicas), 30, f"they have noticed:\n{beats.logs()}")
        proxy.up()
        beats.wait_ticks(3)
        for end in (proxy.down, lambda: proxy.black_hole(True)):
            end()
            time.sleep(8)  # an outage has a length
            back = time.time()
            proxy.up()
            proxy.black_hole(False)
            # Some more may have been sent before the outage began.
            after = wait_for(lambda back=back: sent_after(beats, back, 3), 60, "it sends again")  # type: ignore[misc]
            assert after[0].sent_at / 1000 - back < 10 + BUSY
            assert after[1].due_at - after[0].due_at >= 900, "no second one right behind it"
        assert all(one.alive for one in replicas)
        beats.check()


def sent_after(beats: Beats, instant: float, number: int) -> list[Tick]:
    """What was sent after an instant (seconds), once it is so many."""
    found = [tick for tick in beats.ticks() if tick.sent_at / 1000 > instant]
    return found if len(found) >= number else []


def test_killed_at_random(make_beats: MakeBeats, main_url: str) -> None:
    """B92: whenever it is killed it starts again, and leaves nothing behind that could be corrupt."""
    beats = make_beats(main_url, {"often": 0.2}, ttl=1.0)
    chance = random.Random(1)
    for _ in range(int(os.environ.get("TASKGATE_BEAT_KILLS", "8"))):
        known = len(beats.ticks())
        (replica,) = beats.start()
        beats.wait_ticks(known + 1 + chance.randrange(4))
        replica.kill()
    beats.check()
    assert {path.suffix for path in beats.folder.iterdir() if "broker.db" not in path.name} == {".log"}


def test_no_overlap(make_beats: MakeBeats, make_lab: MakeLab, main_url: str) -> None:
    """B93: no second one while one waits or runs, also when its worker is killed; then the entry goes on."""
    beats = make_beats(main_url, {})
    lab = make_lab(main_url, lease_ttl=2.0, table_prefix=beats.prefix)
    beats.broker.schedules.add(
        KEY,
        Entry("long", task="tests.workers.app.work", schedule="interval 1", args="[2.5]", no_overlap=True),
    )
    beats.start(2)
    worker = lab.start_worker("-c4")
    wait_for(lambda: lab.journal.ends() >= 3, 30, "it has run")
    running = lab.journal.starts()
    wait_for(lambda: lab.journal.starts() > running, 30, "it runs")
    worker.kill()
    lab.start_worker("-c4")
    wait_for(lambda: lab.journal.ends() >= 5, 30, "it goes on")
    lines = sorted(
        (line for line in lab.journal.lines() if line["event"] in ("start", "end")), key=lambda line: line["time"]
    )
    going: set[str] = set()
    for line in lines:
        if line["event"] == "start":
            assert going <= {line["id"]}, "two at once"
            going.add(line["id"])
        else:
            going.discard(line["id"])


def test_entries_at_run_time(make_beats: MakeBeats, main_url: str) -> None:
    """B90: what is added, changed, paused or removed counts within five seconds."""
    beats = make_beats(main_url)
    beats.start(2)
    beats.wait_ticks(2)
    schedules = beats.broker.schedules
    schedules.add(KEY, Entry("new", task="tick", schedule="interval 1", args='["new"]'))
    beats.wait_ticks(2, "new", 5 + BUSY)
    schedules.change(KEY, "new", schedule="interval 3600")
    wait_for(lambda: _silent(beats, "new"), 5 + BUSY + SILENCE, "it is not due")
    schedules.request(KEY, "new")
    count = len(beats.ticks("new"))
    beats.wait_ticks(count + 1, "new", 5 + BUSY)
    schedules.change(KEY, "often", enabled=False)
    wait_for(lambda: _silent(beats, "often"), 5 + BUSY + SILENCE, "it is paused")
    schedules.change(KEY, "often", enabled=True)
    beats.wait_ticks(len(beats.ticks("often")) + 1, "often", 5 + BUSY)
    beats.check()


def _silent(beats: Beats, name: str) -> bool:
    count = len(beats.ticks(name))
    try:
        holds_for(lambda: len(beats.ticks(name)) == count, SILENCE, name)
    except AssertionError:
        return False
    return True


def test_behind_a_pooling_proxy(pgbouncer: PrivatePgBouncer, make_beats: MakeBeats) -> None:
    """B105: beat too needs nothing of a session."""
    beats = make_beats(pgbouncer.url)
    beats.start(2)
    beats.wait_ticks(3)
    beats.leader().kill()
    beats.wait_ticks(6)
    beats.check()


def test_embedded_in_workers(make_beats: MakeBeats, make_lab: MakeLab, main_url: str) -> None:
    """``worker -B`` on two workers: one of them schedules, and when it dies the other one does."""
    beats = make_beats(main_url, {})
    beats.broker.schedules.add(SHOP, Entry("often", task="tests.workers.app.work", schedule="interval 1"))
    conf = {"beat_scheduler": "taskgate", "beat_taskgate_lease_ttl": 2.0}
    # Tasks have longer leases than beat: what the living one pauses at must not run again.
    lab = make_lab(main_url, conf, lease_ttl=6.0, table_prefix=beats.prefix)
    first, second = (lab.start_worker("-c1", "-B") for _ in range(2))
    wait_for(lambda: lab.journal.ends() >= 3, 30, f"it runs:\n{lab.logs()}")
    first.kill()
    ends = lab.journal.ends()
    wait_for(lambda: lab.journal.ends() >= ends + 3, 30, "it goes on")
    assert second.alive
    # What the dead one was at runs again; nothing else does.
    twice = {id for id, number in lab.journal.starts_each().items() if number > 1}
    assert twice <= {line["id"] for line in lab.journal.of("start") if line["worker"] == first.name}
    assert set(lab.journal.starts_each()) <= {tick.task_id for tick in beats.broker.schedules.ticks(SHOP, (), 1000)}


# -- with another broker -----------------------------------------------------------------------------


@pytest.fixture
def redis_broker(redis_url: str) -> Any:
    """A database of Redis that is empty, and how to look into it."""
    client = redis.Redis.from_url(_database_of(redis_url, 11))
    client.flushdb()
    yield client
    client.flushdb()
    client.close()


def _database_of(url: str, number: int) -> str:
    return sa.make_url(url).set(database=str(number)).render_as_string(hide_password=False)


def messages(client: Any) -> int:
    return int(client.llen("celery"))


@pytest.mark.parametrize("lease", ["sqlite", "redis"])
def test_with_redis_as_broker(
    make_beats: MakeBeats, redis_broker: Any, redis_url: str, tmp_path: Path, lease: str
) -> None:
    """Leader killed, ended and cut off from the broker: somebody goes on, and every tick has its message."""
    url = f"sqlite:///{tmp_path}/leases.db"
    beats = make_beats(url, ttl=2.0)
    where = _database_of(redis_url, 11) if lease == "redis" else url
    conf = {"broker_transport_options": {}, "beat_taskgate_lease_url": where}
    beats.conf.update(conf)
    proxies = [Proxy("127.0.0.1", 6379) for _ in range(3)]
    for proxy in proxies:
        beats.start(1, {"broker_url": f"redis://127.0.0.1:{proxy.port}/11"})

    def goes_on() -> None:
        known = messages(redis_broker)
        _wait(beats, lambda: messages(redis_broker) >= known + 3, "somebody sends")

    goes_on()
    leader = _who_leads(beats)
    proxies[beats.replicas.index(leader)].black_hole(True)
    _wait(beats, lambda: _who_leads(beats) is not leader, "another one leads")
    goes_on()
    proxies[beats.replicas.index(leader)].black_hole(False)
    second = _who_leads(beats)
    proxies[beats.replicas.index(second)].down()
    _wait(beats, lambda: _who_leads(beats) is not second, "another one leads")
    goes_on()
    proxies[beats.replicas.index(second)].up()
    third = _who_leads(beats)
    third.kill()
    goes_on()
    assert _who_leads(beats).terminate() == 0
    goes_on()
    assert sum(one.alive for one in beats.replicas) == 1
    for proxy in proxies:
        proxy.close()


def _wait(beats: Beats, condition: Callable[[], bool], what: str) -> None:
    try:
        wait_for(condition, 30, what)
    except AssertionError as error:
        raise AssertionError(f"{error}:\n{beats.logs()}") from None


def _who_leads(beats: Beats) -> Any:
    """By what the replicas say: the last to say that it leads."""

    def last() -> Any:
        said = [
            (line[1:24], one)
            for one in beats.replicas
            for line in one.text().splitlines()
            if " leads beat:beats, term" in line and one.alive
        ]
        return max(said, key=lambda pair: pair[0])[1] if said else None

    return wait_for(last, 30, "somebody leads")


def test_bad_settings_end_at_once(make_beats: MakeBeats, tmp_path: Path) -> None:
    """One clear error, nothing stored."""
    beats = make_beats(f"sqlite:///{tmp_path}/b.db")
    for conf, said in (
        ({"beat_taskgate_lease_tll": 3}, "beat_taskgate_lease_ttl"),
        ({"beat_taskgate_lease_ttl": "soon"}, "must be a number of seconds, not 'soon'"),
        ({"beat_taskgate_lease_interval": 5}, "beat_taskgate_lease_interval 5 s is too long"),
        ({"beat_taskgate_scheduler": "no.such:Scheduler"}, "can't be imported"),
        ({"beat_scheduler": "celery:Celery"}, "is no subclass of celery.beat.Scheduler"),
        ({"broker_url": "redis://:s3cret@127.0.0.1/11"}, "beat_taskgate_lease_url"),
        ({"beat_taskgate_lease_url": "oracle://a:s3cret@b/c"}, "oracle"),
    ):
        (replica,) = beats.start(1, conf)
        assert replica.process.wait(60) != 0
        assert said in replica.text(), replica.text()
        assert "s3cret" not in replica.text().replace("redis://:s3cret@127.0.0.1/11", "")
    assert beats.ticks() == []


def test_the_banner_hides_passwords() -> None:
    code = (
        "from celery import Celery\n"
        "from celery_ext.beat.scheduler import TaskgateScheduler\n"
        "app = Celery('a', broker='taskgate+postgresql://u:s3cret@nowhere/d')\n"
        "print(TaskgateScheduler(app, lazy=True).info)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "postgresql://u:**@nowhere/d" in done.stdout
    assert "s3cret" not in done.stdout
