"""Bound parameters of statements, by type. Their names begin with ``p_``, so that they can't be taken for columns."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa


def among(column: sa.ColumnElement[Any], name: str) -> sa.ColumnElement[bool]:
    """A column whose value is one of a list."""
    return column.in_(sa.bindparam(name, expanding=True))


def number(name: str) -> sa.BindParameter[int]:
    """A whole number of 64 bits."""
    return sa.bindparam(name, type_=sa.BigInteger)


def text(name: str) -> sa.BindParameter[str]:
    """A text."""
    return sa.bindparam(name, type_=sa.String)


def data(name: str) -> sa.BindParameter[bytes]:
    """Bytes."""
    return sa.bindparam(name, type_=sa.LargeBinary)
