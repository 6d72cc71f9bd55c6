"""A file descriptor that is readable while there is something to deliver, for kombu's event loop."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Ready:
    """A flag that an event loop can wait for. Sockets, because ``select`` on some systems takes nothing else."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._set = False

    def fileno(self) -> int:
        """The descriptor to wait for; -1 once closed."""
        return self._reader.fileno()

    def set(self) -> None:
        """Make it readable."""
        with self._lock:
            if not self._set:
                self._set = True
                with suppress(OSError):  # closed already
                    self._writer.send(b"\0")

    def clear(self) -> None:
        """Make it unreadable, until it is set again."""
        with self._lock:
            self._set = False
            with suppress(OSError):
                self._reader.recv(64)

    def close(self) -> None:
        """Close it; it must be out of every event loop by now."""
        with suppress(OSError):
            self._reader.close()
        with suppress(OSError):
            self._writer.close()

    def after_fork(self) -> None:
        """In the child: close its copies. The lock may have been held by a thread that is not here."""
        self._lock = threading.Lock()
        self.close()
