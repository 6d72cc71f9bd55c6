"""``celery taskgate-flower``: Flower, whose broker page also knows taskgate's queues.

Flower chooses what its broker page asks by the scheme of the broker's URL, from a fixed list
(``flower.utils.broker.Broker``), and has no place where another could be added; all its other pages ask workers and
events, and work as they are. So this is Flower's own application with two addresses answered by taskgate. Flower is
imported when the command runs: it need not be installed.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import signal
import sys
from collections.abc import Iterable
from typing import Any

import click
from celery.bin.base import CeleryCommand

from kombu_taskgate.transport.errors import NotFound
from kombu_taskgate.transport.transport import Transport

logger = logging.getLogger("celery_ext.flower")


def queue_lengths(app: Any, names: Iterable[str]) -> list[dict[str, Any]]:
    """What the broker page shows of queues; those that are not declared are left out.

    Args:
        app: the Celery app.
        names: of the queues.

    Returns:
        For each queue its name, ``messages`` and ``messages_ready`` (waiting, delayed ones included) and ``consumers``.

    Raises:
        BrokerUnavailable: the database does not answer.
    """
    found = []
    with app.connection_for_read() as connection:
        for name in names:
            try:
                queue, size, consumers = connection.default_channel.queue_declare(queue=name, passive=True)
            except NotFound:
                continue
            found.append({"name": queue, "messages": size, "messages_ready": size, "consumers": consumers})
    return found


def application_class() -> type[Any]:
    """Flower's application, whose addresses of queues are answered by taskgate where that is the broker."""
    from flower.api.tasks import GetQueueLengths
    from flower.app import Flower, rewrite_handler
    from flower.views.broker import BrokerView
    from tornado.web import url

    class Queues:
        """What Flower's handlers ask for queues; see ``flower.utils.broker.BrokerBase``."""

        def __init__(self, app: Any) -> None:
            self._app = app

        async def queues(self, names: Iterable[str]) -> list[dict[str, Any]]:
            # In a thread: Flower's event loop must not wait for the database.
            return await asyncio.get_running_loop().run_in_executor(None, queue_lengths, self._app, names)

    class Asking:
        """Mixin of handlers that ask for queues."""

        capp: Any

        def get_broker(self) -> Any:
            with self.capp.connection_for_read() as connection:
                if isinstance(connection.transport, Transport):
                    return Queues(self.capp)
            return super().get_broker()  # type: ignore[misc]  # it is mixed into handlers that have it

    class TaskgateBrokerView(Asking, BrokerView):
        pass

    class TaskgateQueueLengths(Asking, GetQueueLengths):
        pass

    class TaskgateFlower(Flower):
        def __init__(self, options: Any = None, **settings: Any) -> None:
            super().__init__(options=options, **settings)
            handlers = [url(r"/broker", TaskgateBrokerView), url(r"/api/queues/length", TaskgateQueueLengths)]
            if self.options.url_prefix:
                handlers = [rewrite_handler(handler, self.options.url_prefix) for handler in handlers]
            # Asked before those that Flower has begun with.
            self.add_handlers(r".*", handlers)

    return TaskgateFlower


@click.command(
    cls=CeleryCommand,
    name="taskgate-flower",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("options_of_flower", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, options_of_flower: tuple[str, ...]) -> None:
    """Start Flower with taskgate's queues on its broker page.

    Takes the options of "celery flower".
    """
    try:
        from flower import command as start
        from flower.urls import settings
        from tornado.options import options
    except ImportError as error:
        raise click.UsageError(f"Flower is not installed ({error}): pip install 'celery-taskgate[flower]'") from None
    start.warn_about_celery_args_used_in_flower_command(ctx, options_of_flower)
    start.apply_env_options()
    start.apply_options(sys.argv[0], options_of_flower)
    start.extract_settings()
    start.setup_logging()
    app = ctx.obj.app
    flower = application_class()(options=options, capp=app, **settings)
    atexit.register(flower.stop)
    signal.signal(signal.SIGTERM, start.sigterm_handler)
    port = flower.start_http_server()
    if not ctx.obj.quiet:
        start.print_banner(app, "ssl_options" in settings, port)
    try:
        flower.start()
    except (KeyboardInterrupt, SystemExit):
        logger.debug("asked to end")
