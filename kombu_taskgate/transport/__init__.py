"""The kombu transport: AMQP's words on the broker's. Knows no Celery."""

from __future__ import annotations

from .transport import Transport

__all__ = ["Transport"]
