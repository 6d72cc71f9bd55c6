"""The broker over SQL: one implementation for every dialect, a file for each part of the contract."""

from .broker import SqlBroker

__all__ = ["SqlBroker"]
