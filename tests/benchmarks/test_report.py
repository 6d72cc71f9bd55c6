"""What the comparison of brokers says of its figures."""

from __future__ import annotations

from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_goals_are_judged_by_ratios(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report

    figures = {
        "taskgate+postgresql": {"published": 900.0, "executed": 1500.0, "trip_p50": 4.0, "trip_p99": 20.0, "idle": 0.1},
        "redis": {"published": 1000.0, "executed": 1000.0},
    }
    judged = {(one["figure"], one["goal"]): (one["value"], one["met"]) for one in report.judged(figures)}
    assert judged["published", "≥ 0.8 × redis"] == (0.9, True)
    assert judged["executed", "≥ 2 × redis"] == (1.5, False)
    assert judged["executed", "≥ 1 × rabbitmq"] == (None, None)
    assert judged["trip_p99", "≤ 4 × round trip p50, ms"] == (5.0, False)
    assert judged["idle", "≤ 0.3"] == (0.1, True)
    assert {one["broker"] for one in report.judged(figures)} == {"taskgate+postgresql"}
