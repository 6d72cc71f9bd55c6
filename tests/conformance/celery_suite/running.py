"""Runs a suite in as many processes as it takes, and says what became of each test.

One process would do if all went well. Another is started for what is left when a process has ended in the middle (a
test killed it, or the worker that all tests share is gone), and one for a second try of what has failed: a fresh
process, with a fresh worker, so that it shows nothing of what earlier tests have left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
#: What pytest-timeout writes where a test has used up its time.
TIMED_OUT = "Timeout (>"
#: Exit codes of pytest when its tests have run: all is well, failures, stopped by the plugin, none selected.
PYTEST_ENDS = {0, 1, 2, 5}
#: Seconds between two looks at the record.
LOOK = 0.2
#: Seconds that a process may take to begin, to end, and to end a test that has used up its time.
GRACE = 30


@dataclass
class Result:
    """What became of one test."""

    outcome: str  # passed, failed, skipped, xfailed
    text: str
    seconds: float
    tries: int = 1


@dataclass
class Suite:
    """A suite that is about to be run.

    Attributes:
        folder: where its tests are, and pytest's settings for them.
        arguments: for pytest, with what to run.
        environment: more variables for its processes.
        output: a folder for the record, and for what the processes print.
        each: seconds that one test may take.
        limit: seconds that all of it may take.
        tell: is given a line for each test as it ends.
    """

    folder: Path
    arguments: list[str]
    environment: Mapping[str, str]
    output: Path
    each: float = 200
    limit: float = 5400
    tell: Callable[[str], None] = lambda _line: None
    results: dict[str, Result] = field(default_factory=dict)
    _processes: int = 0
    _deadline: float = 0.0

    def run(self) -> dict[str, Result]:
        """Run it, with one more try of what has failed for another reason than its time.

        Raises:
            SuiteBroken: it can't be run, or took longer than its limit.
        """
        self._deadline = time.monotonic() + self.limit
        self._all(None)
        again = [
            name for name, result in self.results.items() if result.outcome == "failed" and TIMED_OUT not in result.text
        ]
        if again:
            self.tell(f"once more: {len(again)} that failed")
            self._all(again)
        return self.results

    def _all(self, left: list[str] | None) -> None:
        # As many processes as it takes; each has to get further.
        while left is None or left:
            ended = set()
            process = self._process(left)
            for name, result in process:
                before = self.results.get(name)
                result.tries += before.tries if before else 0
                self.results[name] = result
                ended.add(name)
                self.tell(f"{result.outcome.upper():8} {name} ({result.seconds:.1f} s)")
            if left is None:
                left = self._collected
            remaining = [name for name in left if name not in ended]
            if remaining and not ended:
                raise SuiteBroken(f"none of {len(remaining)} tests left has run; see {self.output}")
            left = remaining

    def _process(self, only: list[str] | None) -> Iterator[tuple[str, Result]]:
        """One process; yields what became of its tests as it is known."""
        self._processes += 1
        record = self.output / f"record-{self._processes}.jsonl"
        log = self.output / f"pytest-{self._processes}.log"
        record.touch()
        environment = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CELERY", "TEST_"))
            },
            **self.environment,
            # Some tests run the command celery.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SUITE_RECORD": str(record),
            "SUITE_EACH": str(self.each),
        }
        if only is not None:
            names = self.output / f"only-{self._processes}.txt"
            names.write_text("\n".join(only))
            environment["SUITE_ONLY"] = str(names)
        command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", "-v", "-rfE", "--tb=short"]
        command += ["-p", "tests.conformance.celery_suite.plugin", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += [
            "-p",
            "no:hypothesispytest",
            "-p",
            "no:rerunfailures",
            "--continue-on-collection-errors",
            "--timeout",
            str(self.each),
        ]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *self.arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield from self._follow(process, record, log)
        finally:
            _end(process)

    def _follow(self, process: subprocess.Popen[bytes], record: Path, log: Path) -> Iterator[tuple[str, Result]]:
        self._collected: list[str] = []
        running: str | None = None
        seen = time.monotonic()
        with record.open(encoding="utf-8") as lines:
            alive, part = True, ""
            while alive:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
                alive = process.poll() is None
                part += lines.read()
                *whole, part = part.split("\n")
                for line in whole:
                    facts, seen = json.loads(line), time.monotonic()
                    if "collected" in facts:
                        self._collected = facts["collected"]
                    elif "begin" in facts:
                        running = facts["begin"]
                    else:
                        running = None
                        yield facts["end"], Result(facts["outcome"], facts["text"], facts["seconds"])
                now = time.monotonic()
                if alive and now > self._deadline:
                    raise SuiteBroken(f"not done after {self.limit:.0f} s, at {running}; see {log}")
                if alive and now - seen > GRACE + (self.each if running else 0):
                    _end(process)
        if running is not None:
            yield running, Result("failed", f"Its process ended with {process.returncode}; see {log}", 0.0)
        elif process.returncode > 0 and process.returncode not in PYTEST_ENDS:
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise SuiteBroken(f"pytest ended with {process.returncode}: {tail}")


class SuiteBroken(Exception):
    """The suite itself can't be run, which says nothing about what it tests."""


def _end(process: subprocess.Popen[bytes]) -> None:
    # With its pool processes, which a process that was killed leaves behind.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
