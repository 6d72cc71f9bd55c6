"""What may be said to who asks for an entry."""

from __future__ import annotations

from kombu_taskgate.core.errors import TaskgateError


class EntryNotFound(TaskgateError):
    """The schedule has no entry of this name."""


class EntryExists(TaskgateError):
    """The schedule has an entry of this name already."""
