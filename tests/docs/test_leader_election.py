"""The files that docs/leader_election.md shows do what is said there."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kombu_taskgate.testing.threads import wait_until

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "leader_election.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs one of the files in a folder of its own; what it defines."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, **changes: str) -> Any:
        text = FILES[name]
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        found: dict[str, Any] = {"__name__": name}
        exec(compile(text, f"{name}.py", "exec"), found)
        return SimpleNamespace(**found)

    return run


def test_leader(run: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    leader = run("leader")
    wait_until(lambda: leader.elector.is_leader, "it leads")
    leader.work()
    leader.end()
    leader.work()
    said = capsys.readouterr().out
    assert re.fullmatch(r"(leads, term \d+\n|doing what one does\n)+", said), said
    assert said.count("doing") == 1


def test_redis_terms(run: Callable[..., Any], redis_url: str) -> None:
    elector = run("redis_terms", **{"redis://127.0.0.1:6379/0": redis_url}).elector
    elector.start()
    wait_until(lambda: elector.is_leader, "it leads")
    elector.stop()
    elector.store._link._client.delete("taskgate:{reports}:term")
    elector.store.close()


def test_nightly(run: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    nightly = run("nightly")
    said: list[str] = []
    wait_until(lambda: bool(said.append(capsys.readouterr().out)) or "page 99" in "".join(said), "it has run")
    assert nightly.pod.stop()
    nightly.pod._lock.close()
    text = "".join(said) + capsys.readouterr().out
    assert text == "".join(f"page {page}\n" for page in range(100)) + "closed\n"


def test_pool(run: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    pool = run("pool")
    wait_until(lambda: pool.broker.list() == [], "it has run")
    pool.end()
    assert capsys.readouterr().out == "hello\n"
    # A thread lets go of its run a little before it ends itself.
    wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("taskgate-pool")], "all end")


def test_no_file_is_left_out() -> None:
    assert set(re.findall(r"^```python\n# (\w+)\.py$", TEXT, re.MULTILINE)) == {
        "leader",
        "redis_terms",
        "nightly",
        "pool",
    }
