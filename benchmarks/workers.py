"""A Celery worker of the benchmarks, what its tasks note, and the CPU time that it and its children use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

#: Longest time in seconds that a worker takes to end.
END_WITHIN = 30.0


class Marks:
    """What tasks note in a file (see ``app.mark``).

    Args:
        path: the file; it need not exist.
    """

    WIDTH = 8

    def __init__(self, path: Path) -> None:
        self.path = path

    def clear(self) -> None:
        """Forget all notes; the processes that have the file open go on."""
        self.path.touch()
        os.truncate(self.path, 0)

    def __len__(self) -> int:
        return self.path.stat().st_size // self.WIDTH if self.path.exists() else 0

    def all(self) -> list[int]:
        """The notes, in ascending order."""
        return sorted(memoryview(self.path.read_bytes()).cast("q"))


class Worker:
    """A running ``celery worker``.

    Args:
        process: it.
        log: what it has printed.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self._known: dict[int, psutil.Process] = {process.pid: psutil.Process(process.pid)}

    def cpu(self, *, look: bool = False) -> float:
        """Seconds of CPU, of user and system, that its processes have used. ``look``: for new children first."""
        if look:
            for child in self._known[self.process.pid].children(recursive=True):
                self._known.setdefault(child.pid, child)
        used = 0.0
        for process in self._known.values():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used += times.user + times.system
        return used

    def wait(self, condition: Callable[[], object], seconds: float, every: float = 0.005) -> bool:
        """Wait until something is so; whether it was in time.

        Raises:
            RuntimeError: the worker has ended meanwhile; says what it printed last.
        """
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"the worker has ended: {self.last_words()}")
            if time.monotonic() > end:
                return False
            time.sleep(every)
        return True

    def kill(self) -> None:
        """Kill it and its children."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()

    def last_words(self) -> str:
        """The end of its log."""
        return " | ".join(self.log.read_text(errors="replace").split("\n")[-8:]).strip()


@contextmanager
def worker(name: str, pool: str, concurrency: int, folder: Path) -> Iterator[Worker]:
    """Run a worker during the block; its app is ``app``, with this process's environment.

    Args:
        name: of the node; no other worker may have it.
        pool: of Celery.
        concurrency: of it.
        folder: for its log.
    """
    log = folder / f"{name}.{pool}.log"
    command = [sys.executable, "-m", "celery", "-A", "app", "worker", "-l", "WARNING"]
    command += ["-P", pool, "-c", str(concurrency), "-n", f"{name}@bench", "--without-gossip", "--without-mingle"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent)}
    with log.open("ab") as file:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=file, stderr=file)
    running = Worker(process, log)
    try:
        yield running
    finally:
        process.terminate()
        try:
            process.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            running.kill()
