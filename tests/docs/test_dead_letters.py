"""The snippet of docs/dead_letters.md does what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, states

from celery_ext.answers import dead_letter
from kombu_taskgate.core.model import Reason, State, Task

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "dead_letters.md").read_text()


def test_the_snippet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the sentence and the numbers of a dead letter."""
    app = Celery("reader", set_as_current=False, backend="cache+memory://")
    task = Task(
        1,
        "q",
        State.FAILED,
        type="shop.charge",
        task_id="id",
        lease_lost=3,
        deliveries=3,
        reason="lease_lost",
        owner="w",
    )
    app.backend.store_result("id", dead_letter(task, 3), states.FAILURE)
    charge = SimpleNamespace(delay=lambda *args: app.AsyncResult("id"))
    monkeypatch.setitem(sys.modules, "tasks", SimpleNamespace(charge=charge))  # type: ignore[arg-type]  # as a module
    (block,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "client.py", "exec"), names)
    app.close()
    sentence, numbers = capsys.readouterr().out.splitlines()
    assert sentence.startswith("task shop.charge[id] was given up because its worker was lost 3 times")
    assert numbers == "lease_lost 3 3"


def test_every_reason_is_in_the_table() -> None:
    """The page has a row for each reason of an end; a task of Celery's has no business failures in the broker."""
    rows = set(re.findall(r"^\|[^|]+\| `(\w+)` \|", TEXT, re.MULTILINE))
    assert rows - {"reason"} == {reason.value for reason in Reason} - {"business"}
