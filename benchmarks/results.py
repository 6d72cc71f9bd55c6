"""How long results and chords take, beside Redis as broker and backend, in one run.

    python benchmarks/results.py [--rounds 200] [--postgresql URL] [--redis URL]

Three things are timed, with one worker of four threads: a round trip (publish to get()), the time from the end of a
task to the return of its get() (p50 and p95), and a chord of 100 tasks. What counts is the ratio: one machine, one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid

from celery import Celery, chord

app = Celery("bench")
app.conf.update(
    broker_url=os.environ.get("BENCH_BROKER", "memory://"),
    result_backend=os.environ.get("BENCH_BACKEND", "cache+memory://"),
    task_default_queue=os.environ.get("BENCH_QUEUE", "bench"),
    task_acks_late=True,
    worker_prefetch_multiplier=8,
)


@app.task
def ended_at(value: object = None) -> float:
    return time.time()


@app.task
def same(value: object) -> object:
    return value


def measure(rounds: int) -> dict[str, float]:
    ended_at.delay().get(timeout=60)
    trips, waits = [], []
    for _ in range(rounds):
        began = time.time()
        ended = ended_at.delay().get(timeout=60)
        now = time.time()
        trips.append(now - began)
        waits.append(now - ended)
    chords = []
    for _ in range(max(3, rounds // 40)):
        began = time.time()
        assert chord((same.s(number) for number in range(100)), same.s())().get(timeout=60) == list(range(100))
        chords.append(time.time() - began)
    return {
        "round trip, median ms": statistics.median(trips) * 1000,
        "end to get(), median ms": statistics.median(waits) * 1000,
        "end to get(), p95 ms": statistics.quantiles(waits, n=20)[-1] * 1000,
        "chord of 100, median ms": statistics.median(chords) * 1000,
    }


def run(name: str, url: str, rounds: int) -> dict[str, float]:
    """One store in a process of its own, with a worker."""
    environment = {
        **os.environ,
        "BENCH_BROKER": url,
        "BENCH_BACKEND": url,
        "BENCH_QUEUE": f"bench-{uuid.uuid4().hex[:8]}",
    }
    environment["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # a script
    command = [sys.executable, "-m", "celery", "-A", "results", "worker", "-c4", "-Pthreads", "-l", "ERROR"]
    worker = subprocess.Popen(
        [*command, "--without-gossip", "--without-mingle", "--without-heartbeat"], env=environment
    )
    try:
        code = f"import json, results; print(json.dumps(results.measure({rounds})))"
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    finally:
        worker.terminate()
        worker.wait(30)
    import json

    print(f"{name}: done", file=sys.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--postgresql", default="postgresql://postgres@127.0.0.1:5432/test")
    parser.add_argument("--redis", default="redis://127.0.0.1:6379/9")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        urls = {
            "redis": given.redis,
            "postgresql": f"taskgate+{given.postgresql}",
            "sqlite": f"taskgate+sqlite:///{folder}/bench.db",
        }
        found = {name: run(name, url, given.rounds) for name, url in urls.items()}
    base = found["redis"]
    print(f"{'':26}" + "".join(f"{name:>22}" for name in found))
    for what in base:
        cells = (f"{values[what]:.1f} ({values[what] / base[what]:.1f}x)" for values in found.values())
        print(f"{what:26}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
