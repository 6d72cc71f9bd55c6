"""The Celery face of taskgate.

A broker needs nothing from here: with ``broker_url = "taskgate+…"`` kombu finds the transport by itself.
This package is the home of what needs to know Celery: so far, in which zone an app means a time without one.
"""

from __future__ import annotations

from importlib.metadata import version

__all__ = ["__version__"]

#: Version of the installed distribution celery-taskgate.
__version__: str = version("celery-taskgate")
