"""Noting what is sent to databases, whichever way it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from kombu_taskgate.core import quick


@contextmanager
def noted(engine: sa.Engine | None = None) -> Iterator[list[str]]:
    """Note the texts of all statements that are sent during the block.

    Args:
        engine: note only those of this one; ``None``: those of all engines of the process.
    """
    texts: list[str] = []

    def usual(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        texts.append(statement)

    def quickly(of: sa.Engine, text: str) -> None:
        if engine is None or of is engine:
            texts.append(text)

    target: Any = sa.Engine if engine is None else engine
    sa.event.listen(target, "before_cursor_execute", usual)
    quick.observers.append(quickly)
    try:
        yield texts
    finally:
        quick.observers.remove(quickly)
        sa.event.remove(target, "before_cursor_execute", usual)
