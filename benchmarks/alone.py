"""What a database does by itself: rows that one connection of the bare driver inserts and commits in a second."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from throwaway import database

#: Rows in a batch, and bytes in a row: about what Celery makes of a small task.
BATCH, SIZE = 200, 500
_TABLE = "CREATE TABLE alone (id INTEGER PRIMARY KEY, payload {blob} NOT NULL)"


def on_postgresql(url: str, rows: int) -> dict[str, float]:
    """With psycopg, in a database that is created and dropped.

    Args:
        url: of a database on the server.
        rows: that are inserted one by one; in batches ten times as many.
    """
    import psycopg

    with database(url) as made:
        plain = made.set(drivername="postgresql").render_as_string(hide_password=False)
        with closing(psycopg.connect(plain)) as conn:
            conn.execute(_TABLE.format(blob="BYTEA"))
            conn.commit()
            return _rates(conn.cursor(), conn.commit, "INSERT INTO alone VALUES (%s, %s)", rows)


def on_sqlite(folder: Path, rows: int) -> dict[str, float]:
    """With sqlite3 and the settings that taskgate uses, in a file of its own.

    Args:
        folder: for the file.
        rows: see above.
    """
    with closing(sqlite3.connect(folder / "alone.db")) as conn:
        conn.execute("PRAGMA journal_mode = WAL")
        conn.execute("PRAGMA synchronous = FULL")
        conn.execute(_TABLE.format(blob="BLOB"))
        return _rates(conn.cursor(), conn.commit, "INSERT INTO alone VALUES (?, ?)", rows)


def _rates(cursor: Any, commit: Callable[[], None], insert: str, rows: int) -> dict[str, float]:
    payload = b"x" * SIZE
    began = time.perf_counter()
    for number in range(rows):
        cursor.execute(insert, (number, payload))
        commit()
    one = rows / (time.perf_counter() - began)
    batches = max(1, rows * 10 // BATCH)
    began = time.perf_counter()
    for batch in range(batches):
        first = rows + batch * BATCH
        cursor.executemany(insert, [(first + number, payload) for number in range(BATCH)])
        commit()
    return {"one_by_one": one, "in_batches": batches * BATCH / (time.perf_counter() - began)}
