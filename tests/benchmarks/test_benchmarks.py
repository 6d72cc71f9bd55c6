"""Each benchmark works, on little: it prints what it promises, and leaves nothing behind. How fast is not looked at."""

from __future__ import annotations

import importlib.util
import json
import math
import platform
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
#: Nothing listens there.
NOWHERE = "redis://127.0.0.1:1/0"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(script: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        cwd=folder, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def last_line(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout.splitlines()[-1])


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


def assert_empty(url: str) -> None:
    """An SQLite file is all one test's own, so that it can be seen that no table is left."""
    if url.startswith("sqlite:///"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as conn:
            kept = conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        assert [name for (name,) in kept if not name.startswith("sqlite_")] == []


def test_comparison(tmp_path, postgresql_url, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    done = run(
        "compare.py", "--quick", "--only", "taskgate+sqlite", "taskgate+postgresql", "redis",
        "--postgresql", postgresql_url, "--redis", NOWHERE, "--output", "out", folder=tmp_path,
    )  # fmt: skip
    text = (tmp_path / "out" / "compare.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert list(found["left_out"]) == ["redis"]
    assert "left out: redis: " in done.stderr
    assert set(found["medians"]) == {"taskgate+sqlite", "taskgate+postgresql"}
    for figures in found["medians"].values():
        # A kombu without batches leaves that one out.
        assert {name for name, value in figures.items() if is_number(value)} >= set(report.FIGURES) - {"batch"}
        assert set(figures) == set(report.FIGURES)
    assert all(is_number(rate) for rates in found["alone"].values() for rate in rates.values())
    assert len(found["alone"]) == 2
    assert {"celery", "kombu", "SQLAlchemy", "psycopg"} <= set(found["machine"]["packages"])
    assert [server.split()[0] for server in found["machine"]["servers"]] == ["PostgreSQL", "SQLite"]
    # Whose machine it was is nobody's business.
    assert platform.node() not in text
    assert str(tmp_path) not in text

    page = (tmp_path / "out" / "compare.md").read_text(encoding="utf-8")
    assert page.strip() in done.stdout
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [
        "Figures", "What the database does by itself", "Goals", "Left out",
    ]  # fmt: skip
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / "out" / "compare.svg").read_text(encoding="utf-8")
    else:
        assert "celery-taskgate[bench]" in done.stderr
    assert [path.name for path in temporary.glob("taskgate-bench-*")] == []


def test_parts_of_the_comparison_can_be_chosen(tmp_path):
    run("compare.py", "--quick", "--only", "taskgate+sqlite", "--parts", "publish", folder=tmp_path)
    found = json.loads((tmp_path / "benchmark-results" / "compare.json").read_text(encoding="utf-8"))
    assert set(found["medians"]["taskgate+sqlite"]) == {"published"}


def test_comparison_of_nothing_says_why(tmp_path):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "compare.py"), "--quick", "--only", "redis", "--redis", NOWHERE],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "left out: redis: " in done.stderr
    assert "no broker can be measured" in done.stderr


def test_micro_level(tmp_path, sql_store_url):
    done = run("micro.py", sql_store_url, "--tasks", "64", "--json", folder=tmp_path)
    found = json.loads(done.stdout)
    costs = {(one["what"], one["batch"]): one for one in found["costs"]}
    assert set(costs) >= {("published", 1), ("consumed", 1), ("consumed", 16), ("consumed", 64)}
    for one in costs.values():
        assert is_number(one["wall"]) and is_number(one["cpu"])  # noqa: PT018
    # To claim many takes no more questions than to claim one.
    assert 0 < costs["consumed", 64]["statements"] < costs["consumed", 1]["statements"]
    assert costs["published", 1]["statements"] >= 1
    assert {"celery", "kombu", "taskgate", "SQLAlchemy", "driver"} <= set(found["publisher"])
    for group in found["publisher"].values():
        assert is_number(group["microseconds"])
        assert group["top"]
    assert_empty(sql_store_url)


def test_depth(tmp_path, sql_store_url):
    done = run(
        "depth.py", sql_store_url, "--rows", "2100", "--rounds", "1", "--claims", "40", "--json", folder=tmp_path
    )
    found = last_line(done)
    assert found["rows"] == 2100
    sets = {"shallow", "ready", "waiting for an ETA"}
    assert set(found["claims_per_second"]) == sets == set(found["memory_bytes"])
    for late in found["late_ms"].values():
        # Both clocks are this machine's, and an ETA is stored in whole milliseconds.
        assert -1 <= late["p50"] <= late["max"]
    assert all(is_number(found[name]) for name in ("ready_rate_ratio", "eta_rate_ratio", "eta_memory_ratio"))
    assert_empty(sql_store_url)


def test_leases(tmp_path, sql_store_url):
    done = run("leases.py", sql_store_url, "--held", "60", "--few", "10", "--rounds", "2", "--json", folder=tmp_path)
    found = last_line(done)
    assert (found["few"]["held"], found["many"]["held"]) == (10, 60)
    assert found["few"]["rows"] == found["many"]["rows"] == 1
    assert all(is_number(one[name]) for one in found.values() for name in ("cpu", "most"))
    assert_empty(sql_store_url)


def test_readers(tmp_path, postgresql_url):
    done = run(
        "readers.py", postgresql_url, "--seconds", "0.3", "--rounds", "1", "--readers", "2", "--json", folder=tmp_path
    )
    found = last_line(done)
    assert found["readers"] == 2
    assert len(found["with"]) == len(found["without"]) == 1
    assert is_number(found["ratio"])


def test_readers_need_postgresql(tmp_path):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "readers.py"), "sqlite:///readers.db"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "give postgresql://" in done.stderr


def test_notifications(tmp_path, postgresql_url):
    done = run("notify.py", postgresql_url, "--seconds", "0.2", "--rounds", "1", folder=tmp_path)
    assert re.search(r"^32 publishers: median \d+\.\d\d of the rate", done.stdout, re.MULTILINE)


def test_held_snapshot(tmp_path, postgresql_url):
    done = run("held_snapshot.py", postgresql_url, "--seconds", "6", folder=tmp_path)
    assert re.search(r"95th percentile of the last tenth is \d+\.\d times", done.stdout)
