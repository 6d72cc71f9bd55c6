"""Publish a hundred tasks, kill their worker with SIGKILL in the middle, start another, and count what is lost.

Needs nothing but Python and the package: the broker is a SQLite file in a temporary folder. Exit code 0 says that
every published task was executed, 1 that it was not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

HERE = Path(__file__).resolve().parent
TASKS = 100
KILL_AT = 40  # executed tasks after which the first worker is killed
PATIENCE = 60.0  # seconds without any progress after which the demo gives up


class DemoError(Exception):
    """The demo could not be shown to its end."""


class Stalled(DemoError):
    """Nothing moves any more."""


class Bar:
    """A progress bar: one line that grows on a terminal, one line per quarter elsewhere."""

    def __init__(self, label: str, total: int) -> None:
        self.label = label
        self.total = total
        self.live = sys.stdout.isatty()
        self.shown = -1 if self.live else 0

    def show(self, done: int) -> None:
        step = done if self.live else done * 4 // self.total
        if step == self.shown:
            return
        self.shown = step
        filled = done * 30 // self.total
        text = f"  {self.label:<10} [{'#' * filled}{'.' * (30 - filled)}] {done:>3}/{self.total}"
        print(f"\r{text}" if self.live else text, end="" if self.live else "\n", flush=True)

    def end(self) -> None:
        """Leave the bar's line."""
        if self.live:
            print(flush=True)


@dataclass
class Journal:
    """What the tasks wrote: lines of event, task id, process id, and 1 when the delivery was not the first."""

    started: int = 0
    ended: int = 0
    executed: set[str] = field(default_factory=set)
    redelivered: set[str] = field(default_factory=set)

    @property
    def running(self) -> int:
        return self.started - self.ended

    @classmethod
    def read(cls, path: Path) -> Journal:
        found = cls()
        for line in path.read_text().splitlines() if path.exists() else []:
            event, task_id, _pid, redelivered = line.split()
            if event == "started":
                found.started += 1
                if redelivered == "1":
                    found.redelivered.add(task_id)
            else:
                found.ended += 1
            if event == "executed":
                found.executed.add(task_id)
        return found


class Worker:
    """A real ``celery worker`` with four processes, in a process group of its own."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        command = [sys.executable, "-m", "celery", "-A", "tasks", "worker"]
        command += ["--hostname", f"{name}@%h", "--pool", "prefork", "--concurrency", "4", "--loglevel", "INFO"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=HERE,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        print(f"  {name} worker: process {self.process.pid} and four children", flush=True)

    def wait_until(self, condition: Callable[[], bool], progress: Callable[[], object], what: str) -> None:
        """Return when the condition holds; raise when the worker ends or nothing moves any more."""
        last, deadline = None, time.monotonic() + PATIENCE
        while not condition():
            if self.process.poll() is not None:
                raise DemoError(
                    f"the {self.name} worker ended by itself, code {self.process.returncode}\n{self.tail()}"
                )
            now = progress()
            if now != last:
                last, deadline = now, time.monotonic() + PATIENCE
            if time.monotonic() > deadline:
                raise Stalled(f"nothing moved for {PATIENCE:.0f} s while waiting for {what}\n{self.tail()}")
            time.sleep(0.02)

    def wait_ready(self) -> None:
        self.wait_until(lambda: b" ready." in self.log.read_bytes(), self.log.read_bytes, "the worker to be ready")

    def kill(self) -> None:
        """End the worker and its children at once, as a power cut does."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()

    def stop(self) -> None:
        """Ask the worker to end, as an operator does."""
        self.process.terminate()
        self.process.wait(timeout=PATIENCE)

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-40:]
        return "\n".join(f"    {line}" for line in lines)


def publish() -> set[str]:
    """Publish the tasks: every tenth with a countdown, another tenth with an ETA, every eighth fails once."""
    from tasks import work

    published: set[str] = set()
    waiting = retrying = 0
    bar = Bar("published", TASKS)
    for number in range(TASKS):
        options: dict[str, object] = {}
        if number % 10 == 3:
            options["countdown"] = 1
        elif number % 10 == 7:
            options["eta"] = datetime.now(timezone.utc) + timedelta(seconds=2)
        fail_first = number % 8 == 5
        waiting += bool(options)
        retrying += fail_first
        published.add(work.apply_async(kwargs={"fail_first": fail_first}, **options).id)
        bar.show(number + 1)
    bar.end()
    print(f"  {waiting} of them have to wait for their time, {retrying} fail at first and retry", flush=True)
    return published


def show(folder: Path) -> tuple[set[str], Journal]:
    """Run the show in a folder; returns the published ids and what was done about them."""
    path = folder / "journal.txt"
    os.environ["DEMO_BROKER_URL"] = f"taskgate+sqlite:///{folder / 'demo.db'}"
    os.environ["DEMO_JOURNAL"] = str(path)

    with ExitStack() as cleanup:
        first = Worker("first", folder / "first.log")
        cleanup.callback(first.kill)
        first.wait_ready()
        published = publish()

        bar = Bar("executed", TASKS)
        journal = Journal()

        def look() -> Journal:
            nonlocal journal
            journal = Journal.read(path)
            bar.show(len(journal.executed))
            return journal

        def halfway() -> bool:
            look()
            return len(journal.executed) >= KILL_AT and journal.running > 0

        first.wait_until(halfway, lambda: journal, f"{KILL_AT} tasks")
        first.kill()
        bar.end()
        print(f"  SIGKILL to the first worker; at least {look().running} tasks were running", flush=True)

        second = Worker("second", folder / "second.log")
        cleanup.callback(second.kill)
        try:
            second.wait_until(lambda: published <= look().executed, lambda: journal, "the remaining tasks")
        except Stalled as problem:
            print(f"\n  {problem}", file=sys.stderr)  # the table then tells how many are lost
        bar.end()
        second.stop()
        return published, look()


def report(published: Iterable[str], journal: Journal) -> int:
    """Print the table; returns how many tasks were lost."""
    ids = set(published)
    lost = len(ids - journal.executed)
    rows = {
        "published": len(ids),
        "executed": len(ids & journal.executed),
        "redelivered": len(ids & journal.redelivered),
        "lost": lost,
    }
    print()
    for word, number in rows.items():
        print(f"  {word:<12} {number:>4}")
    return lost


def main() -> int:
    """Run the demo; returns the exit code."""
    # A demo that is told to stop still ends its workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="taskgate-demo-") as folder:
        try:
            published, journal = show(Path(folder))
        except DemoError as problem:
            print(f"\n  {problem}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 1 if report(published, journal) else 0


if __name__ == "__main__":
    sys.exit(main())
