"""A thread that waits for the worker to be told to stop.

Celery's main thread learns of a shutdown up to 2 s later, or when the running task of a solo pool has ended. What
can be done at once is done here; a signal handler itself may not take a lock that what it interrupted may hold.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery import signals

logger = logging.getLogger("celery_ext.worker")


class ShutdownWatch:
    """Calls back in a thread of its own once the worker has been told to stop.

    Args:
        hostname: the worker's name.
        told: called once for each time that the worker is told.
    """

    def __init__(self, hostname: str, told: Callable[[], object]) -> None:
        self._hostname = hostname
        self._told = told
        # A socket, because writing to one is all that a signal handler can do anywhere, greenlets included.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._wait, name="taskgate-shutdown", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        signals.worker_shutting_down.connect(self._on_shutting_down)
        self._thread.start()

    def stop(self) -> None:
        """End it, without waiting for what is being called."""
        signals.worker_shutting_down.disconnect(self._on_shutting_down)
        self._send(b"0")

    def _on_shutting_down(self, sender: Any, **_: Any) -> None:
        if sender == self._hostname:
            self._send(b"1")

    def _send(self, word: bytes) -> None:
        with suppress(OSError):  # closed already, or full of the same
            self._writer.send(word)

    def _wait(self) -> None:
        with self._reader, self._writer:
            while self._reader.recv(1) == b"1":
                try:
                    self._told()
                except Exception:
                    logger.exception("what had not begun could not be given back before the worker's end")
