"""A copy of Celery's integration tests for one run, with the one thing changed that would leave a fifth of them out."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conformance.sdists import unpack

#: Celery's tests of its Redis backend. They read Redis' own keys and channels, so the check is right there.
ABOUT_REDIS = "test_redis_backend.py"

# The condition, whose 'redis' becomes ('redis', 'taskgate'), and the skip on the next line that tells what it is for.
_CHECK = re.compile(
    r"""(if \s+ not \s+ [\w.]*result_backend\.startswith\() \(? (['"]redis['"] (?:,\ ['"]rpc['"])?) \)?
        (\):\s+ (?:raise\ )?pytest\.skip\( ['"]Requires\ [Rr]edis\ (?:or\ rpc\ )?result\ backend)""",
    re.VERBOSE,
)


def make(archive: Path, folder: Path) -> Path:
    """Put Celery's tests, and the settings of pytest that they need, into a folder; the folder to run them in.

    Nothing else of Celery is put there: what is tested is the Celery that is installed.
    """
    top = unpack(archive, "t", folder).parent
    unpack(archive, "pyproject.toml", folder)
    # Celery 5.4 imports the plugin that pytest 9 has taken in, for nothing but its fixture.
    (top / "pytest_subtests.py").touch()
    changed = 0
    for file in (top / "t" / "integration").glob("test_*.py"):
        if file.name != ABOUT_REDIS:
            text, number = let_past(file.read_text(encoding="utf-8"))
            file.write_text(text, encoding="utf-8")
            changed += number
    if changed == 0:
        raise RuntimeError(f"{archive.name} has no checks for a Redis result backend where they are looked for")
    return top


def let_past(text: str) -> tuple[str, int]:
    """The text of a test file with taskgate let past the checks for a Redis result backend, and how many there were.

    Nearly all of the tests that have one only let their tasks record things in Redis, through a connection of their
    own, whatever the result backend is.
    """
    return _CHECK.subn(r"\1(\2, 'taskgate')\3", text)
