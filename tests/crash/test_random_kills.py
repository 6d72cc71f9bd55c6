"""Ten thousand tasks through three workers that are killed and restarted twenty times."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import pytest
import sqlalchemy as sa

from kombu_taskgate.core.sql import SqlBroker
from tests.workers.fixtures import MakeLab
from tests.workers.harness import Lab, Worker, wait_for

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(600)]

TASKS = 10_000
KILLS = 20

#: Every end of a lease leaves a line: (id, token, how). Written by the database itself, so nothing escapes.
TRIGGERS = {
    "sqlite": [
        "CREATE TABLE {p}ends (id INTEGER, token INTEGER, how TEXT)",
        """CREATE TRIGGER {p}ended AFTER UPDATE OF state ON {p}tasks
        WHEN OLD.state = 'running' AND NEW.state <> 'running'
        BEGIN INSERT INTO {p}ends VALUES (OLD.id, OLD.token, NEW.state); END""",
        """CREATE TRIGGER {p}removed AFTER DELETE ON {p}tasks
        BEGIN INSERT INTO {p}ends VALUES (OLD.id, OLD.token, 'removed as ' || OLD.state); END""",
    ],
    "postgresql": [
        "CREATE TABLE {p}ends (id BIGINT, token BIGINT, how TEXT)",
        """CREATE FUNCTION {p}note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF TG_OP = 'DELETE' THEN INSERT INTO {p}ends VALUES (OLD.id, OLD.token, 'removed as ' || OLD.state);
        ELSIF OLD.state = 'running' AND NEW.state <> 'running' THEN
        INSERT INTO {p}ends VALUES (OLD.id, OLD.token, NEW.state); END IF; RETURN NULL; END $$""",
        "CREATE TRIGGER {p}ended AFTER UPDATE OR DELETE ON {p}tasks FOR EACH ROW EXECUTE FUNCTION {p}note()",
    ],
}
CLEANUP = {
    "sqlite": ["DROP TABLE {p}ends"],
    "postgresql": ["DROP TABLE {p}ends", "DROP FUNCTION {p}note() CASCADE"],
}


def run_all(broker: SqlBroker, statements: dict[str, list[str]]) -> None:
    with broker.database.engine.connect() as conn:
        for statement in statements[broker.database.url.get_backend_name()]:
            conn.exec_driver_sql(statement.format(p=broker.tables.prefix))


def test_nothing_is_lost_and_nothing_settled_twice(make_lab: MakeLab, main_url: str) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # noqa: T201  # shown with a failure
    dice = random.Random(seed)
    lab = make_lab(
        main_url,
        conf={"worker_prefetch_multiplier": 16},
        lease_ttl=2.0,
        lease_lost_max=1000,
        max_deliveries=1000,
    )
    broker = SqlBroker(lab.settings())
    run_all(broker, TRIGGERS)
    ids: list[str] = []
    publisher = threading.Thread(target=lambda: ids.extend(lab.send("work", 0) for _ in range(TASKS)))
    publisher.start()
    workers = [lab.start_worker("-c2") for _ in range(3)]
    kill_and_restart(lab, workers, dice)
    publisher.join()
    wait_for(lambda: not lab.unfinished(), 240, "everything settled", every=0.5)
    executed = lab.journal.ended()
    assert set(ids) - executed == set(), "lost"
    assert lab.rows() == [], "left over"
    ends = broker.database.read(
        lambda conn: conn.execute(sa.text(f"SELECT id, token, how FROM {broker.tables.prefix}ends")).all()
    )
    run_all(broker, CLEANUP)
    broker.close()
    twice = {key: count for key, count in Counter((id, token) for id, token, _ in ends).items() if count > 1}
    assert not twice, "one lease settled twice"
    removed = Counter(id for id, _, how in ends if how == "removed as running")
    assert len(removed) == TASKS
    assert set(removed.values()) == {1}


def kill_and_restart(lab: Lab, workers: list[Worker], dice: random.Random) -> None:
    for number in range(KILLS):
        progress = lab.journal.ends()
        place = dice.randrange(len(workers))
        # Kill in the middle of work, wherever that is: after some more tasks have ended.
        target = min(progress + dice.randint(20, 300), TASKS - 1)
        deadline = time.monotonic() + 10
        while lab.journal.ends() < target and time.monotonic() < deadline:
            time.sleep(dice.uniform(0.01, 0.1))
        workers[place].kill()
        workers[place] = lab.start_worker("-c2", ready=False)
        if number % 5 == 4:
            workers[place].wait_ready()
