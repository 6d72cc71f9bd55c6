"""Signals of beat's leadership and of its ticks, for metrics and alarms.

They are sent in the process that leads, or has led. A receiver that raises is logged and harms nothing; one that takes
long delays the next tick. ``sender`` is the name of the schedule (``beat_taskgate_key``).
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

#: This replica leads now. ``term``: the number of its term, which only grows.
leadership_gained = Signal(name="leadership_gained", providing_args={"term"})
#: It does no longer. ``term``: the number of the term that is over; not sent when the process ends.
leadership_lost = Signal(name="leadership_lost", providing_args={"term"})
#: An entry was sent. ``entry``: its name; ``due``: the due time, in seconds since the epoch; ``lateness``: how many
#: seconds later it was sent, by the store's clock; ``task_id``: what was sent.
tick_sent = Signal(name="tick_sent", providing_args={"entry", "due", "lateness", "task_id"})
#: A due entry was not sent. ``entry``, ``due`` as above; ``reason``: ``overlap``, ``deadline`` or ``error``.
tick_skipped = Signal(name="tick_skipped", providing_args={"entry", "due", "reason"})
