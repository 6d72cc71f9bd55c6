"""Finding the dialect that serves a URL. Every module in this folder that has a Dialect subclass counts."""

from __future__ import annotations

import importlib
import pkgutil

import sqlalchemy as sa

from ..errors import ConfigError
from .base import Dialect


def all_dialects() -> list[Dialect]:
    """One object of each dialect in this folder."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return [cls() for cls in Dialect.__subclasses__() if cls.__module__.startswith(__name__)]


def find_dialect(url: sa.URL) -> Dialect:
    """The dialect for a URL.

    Raises:
        ConfigError: no dialect serves it.
    """
    backend = url.drivername.partition("+")[0]
    dialects = all_dialects()
    for dialect in dialects:
        if backend in dialect.backends:
            return dialect
    known = sorted(name for dialect in dialects for name in dialect.backends)
    raise ConfigError(f"taskgate does not support {backend!r} databases: use one of {', '.join(known)} or memory")
