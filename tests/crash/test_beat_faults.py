"""Replicas of beat under random faults: each due time once, each tick with one message, nothing under an old term.

TASKGATE_BEAT_FAULTS: how many faults on each database. TASKGATE_BEAT_SEED: which ones.
"""

from __future__ import annotations

import os
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import sqlalchemy as sa

from kombu_taskgate.core.database import Database
from tests.workers.beats import KEY, Beats, Replica
from tests.workers.fixtures import drop_tables
from tests.workers.harness import wait_for

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(3600)]

FAULTS = int(os.environ.get("TASKGATE_BEAT_FAULTS", "10"))
#: Replicas that run, stopped ones included; each that is killed has a successor.
LIVING = 3
SEED = int(os.environ.get("TASKGATE_BEAT_SEED", "7"))


@pytest.fixture
def beats(database_url: str, tmp_path: Path) -> Iterator[Beats]:
    beats = Beats(database_url, tmp_path, f"f{uuid.uuid4().hex[:10]}_", {"often": 1, "cron": "* * * * *"}, ttl=2.0)
    yield beats
    beats.close()
    drop_tables(beats.url, beats.prefix)


class Chaos:
    """What may happen to the replicas."""

    def __init__(self, beats: Beats, random: random.Random) -> None:
        self.beats = beats
        self.random = random
        self.frozen: list[Replica] = []

    def faults(self) -> list[Callable[[], None]]:
        faults = [self.kill, self.freeze, self.end, self.delete, self.steal, self.wrong_clock]
        faults += [self.kill_in_publish, self.freeze_in_publish]
        if not self.beats.url.startswith("sqlite"):
            faults.append(self.cut)
        return faults

    def _leader(self) -> Replica:
        return self.beats.leader(30)

    def kill(self) -> None:
        self._leader().kill()
        self.beats.start()

    def end(self) -> None:
        assert self._leader().terminate() == 0
        self.beats.start()

    def freeze(self) -> None:
        """For longer than the lease; it goes on later."""
        self.frozen.append(self.beats.freeze_leader())

    def thaw(self) -> None:
        for replica in self.frozen:
            replica.signal(signal.SIGCONT)
        self.frozen.clear()

    def delete(self) -> None:
        self._sql("DELETE FROM TERMS WHERE key_ = :key")

    def steal(self) -> None:
        """By somebody who does not send, until its lease runs out."""
        self._sql("UPDATE TERMS SET holder = 'thief', number = number + 1, until_ = until_ + 1000 WHERE key_ = :key")

    def kill_in_publish(self) -> None:
        self.beats.blow.write_text("SIGKILL often", encoding="utf-8")
        wait_for(lambda: not self.beats.blow.exists(), 60, f"somebody is hit:\n{self.beats.logs()}")
        wait_for(lambda: self._living() < LIVING, 30, "it is dead")
        self.beats.start()

    def freeze_in_publish(self) -> None:
        self.frozen.append(self.beats.freeze_in_publish())

    def _living(self) -> int:
        return sum(one.alive for one in self.beats.replicas)

    def wrong_clock(self) -> None:
        """A replica comes back ten minutes ahead or behind."""
        self.random.choice([one for one in self.beats.replicas if one.alive]).kill()
        self.beats.start(TASKGATE_TEST_SKEW=self.random.choice(["600", "-600"]))

    def cut(self) -> None:
        """Every session that the database has is ended."""
        if self.beats.url.startswith("mysql"):
            found = "SELECT id FROM information_schema.processlist WHERE id <> connection_id() AND db = database()"
            end = "KILL {}"
        else:
            found = (
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
                f"AND query LIKE '%{self.beats.prefix}%'"
            )
            end = "SELECT pg_terminate_backend({})"

        def work(conn: sa.Connection) -> None:
            for session in conn.execute(sa.text(found)).scalars().all():
                with suppress(sa.exc.OperationalError):  # it has ended by itself
                    conn.execute(sa.text(end.format(session)))

        self._database.read(work)

    @property
    def _database(self) -> Database:
        return self.beats.broker.database  # type: ignore[attr-defined]  # an SqlBroker

    def _sql(self, text: str) -> None:
        statement = sa.text(text.replace("TERMS", f"{self.beats.prefix}terms"))
        self._database.write(lambda conn: conn.execute(statement, {"key": KEY}))


def test_random_faults(beats: Beats) -> None:
    chance = random.Random(SEED)
    chaos = Chaos(beats, chance)
    beats.start(LIVING)
    beats.wait_ticks(2, "often")
    faults: list[Callable[[], None]] = []
    done: list[str] = []
    for _ in range(FAULTS):
        if not faults:  # all of them, in another order each time
            faults = chaos.faults()
            chance.shuffle(faults)
        fault = faults.pop()
        print(f"{time.strftime('%H:%M:%S')} {fault.__name__}")  # noqa: T201  # pytest shows it with a failure
        done.append(fault.__name__)
        fault()
        known = len(beats.ticks("often"))
        # Somebody goes on, and the frozen ones come back into that.
        beats.wait_ticks(known + 1 + chance.randrange(3), "often", 60)
        if len(chaos.frozen) > 1 or chance.random() < 0.5:
            chaos.thaw()
    chaos.thaw()
    beats.wait_ticks(len(beats.ticks("often")) + 3, "often", 60)
    alive = [one for one in beats.replicas if one.alive]
    assert len(alive) == LIVING, f"a replica ended by itself:\n{beats.logs()}"
    check(beats)
    print(f"{len(done)} faults, {len(beats.ticks('often'))} ticks, {Counter(done)}")  # noqa: T201


def check(beats: Beats) -> None:
    for replica in beats.replicas:
        replica.kill()  # so that nothing comes in between
    beats.check()
    for name in ("often", "cron"):
        dues = [tick.due_at for tick in beats.ticks(name)]
        assert len(set(dues)) == len(dues)
    minutes = [tick.due_at // 60_000 for tick in beats.ticks("cron")]
    # One catch-up may stand for several minutes, if nobody led for so long; none is there twice.
    assert minutes == sorted(set(minutes))
