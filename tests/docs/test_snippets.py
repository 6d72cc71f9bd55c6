"""What the documents tell people to type exists, with these options; the README's files are in test_readme.py."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.defaults import NAMESPACES, flatten
from celery.bin.celery import celery as celery_command
from celery.contrib.migrate import migrate_tasks

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = {path.name: path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
SETTINGS = {name for name, _ in flatten(NAMESPACES)}
#: Not settings, but with names like them.
OTHERS = {"task_id", "task_failure", "task_revoked", "worker_init"}
BLOCKS = [
    pytest.param(language, block, id=f"{name}-{number}")
    for name, text in DOCUMENTS.items()
    for number, (language, block) in enumerate(re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
]


def check_python(block: str) -> None:
    """A file of the README, or settings that an app can connect with."""
    if not block.startswith("# "):
        settings: dict[str, Any] = {"broker_url": "taskgate+memory://"}
        exec(compile(block, "settings", "exec"), {}, settings)
        app = Celery("reader", set_as_current=False)
        app.conf.update(settings)
        assert set(settings) <= SETTINGS
        assert app.connection().transport.driver_type == "taskgate"
        app.close()


def check_command(line: str) -> None:
    program, *words = shlex.split(line)
    if program == "pip":
        extras = re.findall(r"\[(\w+)\]", words[1])
        assert words[0] == "install"
        assert all(re.search(rf"^{extra} = ", (ROOT / "pyproject.toml").read_text(), re.MULTILINE) for extra in extras)
    elif program == "celery":
        assert words[:2] == ["-A", "proj"]
        app = SimpleNamespace(app=Celery("proj", set_as_current=False))  # some options have the app's defaults
        celery_command.commands[words[2]].make_context(words[2], words[3:], obj=app)
    elif program == "python":
        assert words[0] == "-c"
        (call,) = [
            node
            for node in ast.walk(ast.parse(words[1]))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "migrate_tasks"
        ]
        inspect.signature(migrate_tasks).bind(*call.args, **{str(word.arg): word.value for word in call.keywords})
    else:
        # test_makefile.py looks whether there is such a target
        assert program == "make"


@pytest.mark.parametrize(("language", "block"), BLOCKS)
def test_blocks(language: str, block: str) -> None:
    if language == "python":
        check_python(block)
    elif language == "" and "celery_ext " not in block:  # the one block that is a drawing
        for line in [block] if block.startswith("python -c") else block.splitlines():
            check_command(line)
    else:
        # SQL is run by test_schedule_page.py.
        assert language in {"", "mermaid", "sql"}, "a kind of block that nothing checks"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_settings_of_celery(name: str) -> None:
    """They exist; two came after the oldest version of Celery that is supported."""
    named = re.findall(r"`((?:broker|control|event|result|task|worker)_[a-z_]+)\b", DOCUMENTS[name])
    assert set(named) - OTHERS - {"worker_disable_prefetch", "worker_soft_shutdown_timeout"} <= SETTINGS


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_inside_the_text(name: str) -> None:
    known = set(celery_command.commands)
    named = re.findall(r"`celery (?:-A proj )?(\w[\w-]*)", DOCUMENTS[name])
    assert set(named) <= known
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([\w-]+)", DOCUMENTS[name])) <= set(targets)
