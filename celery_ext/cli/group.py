"""``celery taskgate``, which gathers the subcommands."""

from __future__ import annotations

from typing import Any

import click

from .leader import leader
from .schedule import schedule


@click.group(name="taskgate")
def command(**_: Any) -> None:
    """Look at taskgate, and change what it does."""


command.add_command(leader)
command.add_command(schedule)
