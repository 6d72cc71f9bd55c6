"""What a measurement ran on: nothing that names the machine or its owner."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: Distributions whose versions matter.
PACKAGES = ("celery-taskgate", "celery", "kombu", "billiard", "SQLAlchemy", "psycopg", "PyMySQL", "redis", "amqp")


def describe(servers: Sequence[str] = ()) -> dict[str, object]:
    """The machine and the versions of what was used.

    Args:
        servers: their names and versions.
    """
    return {
        "cpus": os.cpu_count(),
        "cpu_model": _model(),
        "system": platform.system(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "servers": sorted(set(servers)),
    }


def _model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
