"""How a subcommand runs: for a limited time, with its errors as one line and its outcome as an exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from kombu_taskgate.core.errors import ConfigError, SchemaError, StoreUnavailable, TaskgateError
from kombu_taskgate.core.within import within

from ..beat.stores import Stores, open_stores

T = TypeVar("T")

#: Exit codes: what was asked for is not there or was refused; it can't be asked for.
REFUSED, UNUSABLE = 1, 2
#: Seconds for which an answer of the store is waited for.
PATIENCE = 15.0


def app_of(context: click.Context) -> Any:
    """The Celery app of ``celery -A``."""
    return context.obj.app


def ask(app: Any, work: Callable[[Stores], T], *, usage: bool = False, patience: float | None = None) -> T:
    """Do something with the app's stores; ends the program with one line when that is not possible.

    Args:
        app: the Celery app.
        work: what; it runs in a thread of its own, since a store may give no answer for long.
        usage: a ConfigError of it is about what was typed, and not about what was found.
        patience: seconds; ``None``: :data:`PATIENCE`.
    """
    try:
        stores = open_stores(app)
    except TaskgateError as error:
        fail(str(error), UNUSABLE)
    answers: list[T] = []

    def answer() -> None:
        try:
            answers.append(work(stores))
        finally:
            stores.close()

    seconds = PATIENCE if patience is None else patience
    try:
        if not within(seconds, answer, "taskgate-command"):
            fail(f"{stores.shown} has not answered within {seconds:g} s", UNUSABLE)
    except StoreUnavailable as error:
        fail(f"{stores.shown} can't be reached: {error}", UNUSABLE)
    except SchemaError as error:
        fail(str(error), UNUSABLE)
    except ConfigError as error:
        fail(str(error), UNUSABLE if usage else REFUSED)
    except TaskgateError as error:
        fail(str(error), REFUSED)
    return answers[0]


def fail(message: str, code: int) -> NoReturn:
    """Say why in one line, and end."""
    click.echo(f"Error: {' '.join(message.split())}", err=True)
    raise click.exceptions.Exit(code)
