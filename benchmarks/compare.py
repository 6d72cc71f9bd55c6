"""Celery's brokers side by side: taskgate on each database, Redis, RabbitMQ, and kombu's own transport for databases.

In each round every broker has its turn, in an order that changes, so that a machine that is not the same all the time
is the same for all; what counts are ratios of medians. A broker that can't be reached is left out, and named.

    python benchmarks/compare.py --output build/benchmarks
    python benchmarks/compare.py --only taskgate+sqlite redis --parts publish prefork --rounds 5

Writes ``compare.json``, ``compare.md``, and with matplotlib (the extra ``bench``) ``compare.png`` and ``compare.svg``.
The servers are left as they were: each run has a database of its own (the user must be allowed to create some), or a
Redis database that was empty. Three rounds of everything take about half an hour, mostly for the last of the brokers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import alone
from candidates import NAMES, Candidate, Missing, Urls, candidates
from client import PARTS, Plan
from machine import describe
from plot import plot
from report import judged, markdown
from throwaway import bare

#: So small that only the machinery is tried out, not the brokers.
QUICK: dict[str, Any] = {
    "tasks": 40,
    "trips": 5,
    "warm_ups": 1,
    "chords": 1,
    "chord_size": 5,
    "etas": 5,
    "idle": 0.5,
    "limit": 60.0,
}
#: Rows that the database inserts one by one, alone.
ROWS, QUICK_ROWS = 3000, 50
#: Longest time in seconds for all parts of one broker in one round.
LONGEST = 1800.0


def measure(candidate: Candidate, plan: Plan, folder: Path) -> dict[str, float | None]:
    """One broker, once, in a process of its own.

    Raises:
        Missing: something went wrong; says what was printed last.
    """
    with candidate.run(folder) as conf:
        marks = folder / "marks"
        environment = {
            **os.environ,
            "TASKGATE_BENCH_CONF": json.dumps(conf),
            "TASKGATE_BENCH_MARKS": str(marks),
            "PYTHONPATH": str(Path(__file__).resolve().parent),
        }
        command = [sys.executable, str(Path(__file__).with_name("client.py")), json.dumps(asdict(plan))]
        code, said, complaints = run_group(command, environment, folder)
        if code:
            raise Missing((complaints.strip().splitlines() or [f"it ended with code {code}"])[-1])
        return dict(json.loads(said.splitlines()[-1]))


def run_group(command: Sequence[str], environment: dict[str, str], folder: Path) -> tuple[int, str, str]:
    """Run a command to its end; its exit code, and what it printed to standard output and standard error.

    Whatever happens, an interrupt from the keyboard too, none of the processes that it starts is left.

    Raises:
        Missing: it takes longer than :data:`LONGEST`.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            said, complaints = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            raise Missing(f"it took longer than {LONGEST:g} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, said, complaints


def medians(rounds: Sequence[dict[str, dict[str, float | None]]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The median of each figure over all rounds."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        mine = [one[name] for one in rounds if name in one]
        for figure in dict.fromkeys(figure for one in mine for figure in one):
            values = [value for one in mine if (value := one.get(figure)) is not None]
            found.setdefault(name, {})[figure] = statistics.median(values) if values else None
    return found


def by_itself(names: Sequence[str], urls: Urls, rows: int, folder: Path) -> dict[str, dict[str, float]]:
    """What the databases do without any broker, where they are there."""
    found = {}
    if "taskgate+postgresql" in names:
        found["PostgreSQL (psycopg)"] = alone.on_postgresql(bare(urls.postgresql), rows)
    if "taskgate+sqlite" in names:
        found["SQLite (sqlite3)"] = alone.on_sqlite(folder, rows)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="measure Celery's brokers side by side")
    for field in fields(Urls):
        parser.add_argument(f"--{field.name}", default=field.default, help="URL (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=Plan.tasks, help="in the backlog (default: %(default)s)")
    for option, known in (("--only", NAMES), ("--parts", PARTS)):
        parser.add_argument(
            option, nargs="+", choices=known, default=list(known), metavar="NAME", help=", ".join(known)
        )
    parser.add_argument("--output", type=Path, default=Path("benchmark-results"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="one small round, to see that it works: says nothing")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    urls = Urls(**{field.name: getattr(given, field.name) for field in fields(Urls)})
    left_out: dict[str, str] = {}
    present: list[Candidate] = []
    rounds: list[dict[str, dict[str, float | None]]] = []
    with tempfile.TemporaryDirectory(prefix="taskgate-bench-") as name:
        folder = Path(name)
        plan = Plan(str(folder), tuple(part for part in PARTS if part in given.parts), tasks=given.tasks)
        if given.quick:
            plan = Plan(str(folder), plan.parts, **QUICK)
            given.rounds = 1
        for candidate in candidates(urls):
            if candidate.name in given.only:
                try:
                    candidate.check(folder)
                    present.append(candidate)
                except Missing as missing:
                    left_out[candidate.name] = str(missing)
                    print(f"left out: {candidate.name}: {missing}", file=sys.stderr)
        if not present:
            sys.exit("no broker can be measured")
        versions = [candidate.version() for candidate in present]
        databases = by_itself([one.name for one in present], urls, QUICK_ROWS if given.quick else ROWS, folder)
        for number in range(given.rounds):
            first = number % len(present)
            rounds.append({})
            for candidate in present[first:] + present[:first]:
                print(f"round {number + 1} of {given.rounds}: {candidate.name}", file=sys.stderr)
                try:
                    rounds[-1][candidate.name] = measure(candidate, plan, folder)
                except Exception as error:  # noqa: BLE001  # one that fails must not lose what the others have done
                    left_out[f"{candidate.name}, round {number + 1}"] = f"{type(error).__name__}: {error}"
                    print(f"failed: {candidate.name}: {error}", file=sys.stderr)
    found: dict[str, Any] = {
        "machine": describe(versions),
        "plan": {**{key: value for key, value in asdict(plan).items() if key != "folder"}, "rounds": given.rounds},
        "medians": medians(rounds, [candidate.name for candidate in present]),
        "alone": databases,
        "rounds": rounds,
        "left_out": left_out,
    }
    found["goals"] = judged(found["medians"])
    write(found, given.output)
    if not found["medians"]:
        sys.exit("nothing was measured")


def write(found: dict[str, Any], folder: Path) -> None:
    """The files, and the tables to the terminal."""
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(found)
    (folder / "compare.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (folder / "compare.md").write_text(text, encoding="utf-8")
    print(text)
    try:
        plot(found["medians"], folder)
    except ImportError:
        print("no plot: matplotlib is not installed (pip install 'celery-taskgate[bench]')", file=sys.stderr)


if __name__ == "__main__":
    main()
