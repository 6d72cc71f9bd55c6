"""Workers that come back from the dead, and networks that do (reports B12, B14)."""

from __future__ import annotations

import pytest

from tests.workers.fixtures import MakeLab
from tests.workers.harness import freeze_between_writes, holds_for, proxy_for, wait_for

pytestmark = pytest.mark.crash
#: More than a busy machine may pause between two renewals: whoever lives loses nothing.
TTL = 5.0


def test_frozen_worker_cannot_settle_what_another_took_over(make_lab: MakeLab, main_url: str) -> None:
    """B12: SIGSTOP for longer than the lease, then SIGCONT: the late ack is refused and said once."""
    lab = make_lab(main_url, lease_ttl=TTL)
    frozen = lab.start_worker("-c1")
    gate = lab.folder / "gate"
    id = lab.send("hold_until", str(gate))
    wait_for(lambda: lab.journal.starts(id), 30, "start")
    freeze_between_writes(main_url, frozen.pid)
    lab.start_worker("-c1")
    wait_for(lambda: lab.journal.starts(id) == 2, 30, "taken over")
    frozen.thaw()
    wait_for(lambda: "lease" in frozen.text() and id in frozen.text().rpartition("lease")[2], 30, "the loss is said")
    gate.touch()
    wait_for(lambda: lab.journal.ends(id) == 2, 30, "both runs end")
    wait_for(lambda: not lab.rows(), 30, "settled once, by the second")
    holds_for(lambda: not lab.rows() and lab.journal.starts(id) == 2, 2 * TTL, "nothing comes back")
    warnings = [line for line in frozen.text().splitlines() if "WARNING" in line and "lease" in line and id in line]
    assert len(warnings) == 1, warnings
    assert frozen.alive


def test_short_cut_is_not_a_redelivery(make_lab: MakeLab, server_url: str, server_port: int) -> None:
    """B14: all connections gone for half a lease time: the task goes on and its ack arrives afterwards."""
    with proxy_for(server_url, server_port) as (proxy, url):
        lab = make_lab(server_url, lease_ttl=3 * TTL)
        worker = lab.start_worker("-c1", url=url)
        lab.start_worker("-c1")
        gate = lab.folder / "gate"
        ids = [lab.send("hold_until", str(gate)) for _ in range(2)]
        wait_for(lambda: lab.journal.starts() == 2, 30, "two running")
        proxy.down()
        gate.touch()  # they end while nothing can be acked
        wait_for(lambda: lab.journal.ends() == 2, 30, "both end")
        holds_for(lambda: lab.journal.starts() == 2, 1.5 * TTL, "no second start during the cut")
        proxy.up()
        wait_for(lambda: not lab.rows(), 30, "acked after the cut")
        assert lab.journal.starts() == 2
        other = [lab.send("work", 0.5) for _ in range(4)]
        wait_for(lambda: lab.journal.ended() == {*ids, *other}, 30, "work goes on")
        assert worker.alive


def test_long_cut_is_fenced(make_lab: MakeLab, server_url: str, server_port: int) -> None:
    """B14: cut for three lease times: another worker takes over, and the first one's ack is refused."""
    with proxy_for(server_url, server_port) as (proxy, url):
        lab = make_lab(server_url, lease_ttl=TTL)
        cut_off = lab.start_worker("-c1", url=url)
        gate = lab.folder / "gate"
        id = lab.send("hold_until", str(gate))
        wait_for(lambda: lab.journal.starts(id), 30, "start")
        lab.start_worker("-c1")
        proxy.down()
        wait_for(lambda: lab.journal.starts(id) == 2, 30, "taken over")
        proxy.up()
        gate.touch()
        wait_for(lambda: lab.journal.ends(id) == 2, 30, "both runs end")
        wait_for(lambda: not lab.rows(), 30, "settled once")
        assert lab.journal.starts(id) == 2
        wait_for(lambda: id in "".join(cut_off.text().partition("WARNING")[2]), 30, "the loss is said")
        later = lab.send("work", 0)
        wait_for(lambda: lab.journal.ends(later), 30, "work goes on")


@pytest.fixture
def server_port(server_url: str) -> int:
    return 5432 if server_url.startswith("postgresql") else 3306
