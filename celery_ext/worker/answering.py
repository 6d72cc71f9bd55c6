"""The keeper of one worker, and its work for the broker."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kombu_taskgate.core.factory import open_broker

from ..dead_letters import DeadLetterAnswers
from ..keeper import Keeper
from .results import look_after


class AnswerKeeper:
    """Runs a keeper that answers for what the broker ends, from the first connection of a worker to its end.

    Args:
        c: Celery's consumer of the worker, connected.
    """

    def __init__(self, c: Any) -> None:
        settings = c.task_consumer.channel.connection.settings
        # A hold of its own: it outlives the connections.
        self._broker = open_broker(settings)
        self._consumer = c
        self._queues: Collection[str] = ()
        self.keeper = Keeper()
        answers = DeadLetterAnswers(c.app, self._broker, self._consumed, lease_lost_max=settings.lease_lost_max)
        self._work = self.keeper.add("answering for dead letters", answers)
        look_after(c.app.backend, self.keeper)

    def start(self) -> None:
        """Begin."""
        self._broker.to_answer.add(self._work.wake)
        self.keeper.start()

    def stop(self) -> None:
        """End; an answer that hangs is not waited for longer than some seconds."""
        self._broker.to_answer.remove(self._work.wake)
        self.keeper.stop()
        self._broker.close()

    def _consumed(self) -> Collection[str]:
        consumer = self._consumer.task_consumer
        if consumer is not None:  # there is none while the worker connects again
            self._queues = {queue.name for queue in consumer.queues}
        return self._queues
