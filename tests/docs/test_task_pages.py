"""The tasks that docs/throttling.md and docs/unique.md show, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from celery_ext import Throttled

DOCS = Path(__file__).resolve().parents[2] / "docs"


def module(page: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Any:
    """What the page's first file defines."""
    monkeypatch.chdir(folder)  # its database is there
    block = re.findall(r"^```python\n(# tasks\.py\n.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)[0]
    found: dict[str, Any] = {"__name__": "tasks"}
    exec(compile(block, page, "exec"), found)
    return SimpleNamespace(**found)


def test_throttling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With no place left the task wants to run later."""
    tasks = module("throttling.md", monkeypatch, tmp_path)
    with pytest.raises(Throttled) as raised:
        tasks.fetch.run("somewhere")
    assert (raised.value.retry_after, raised.value.reason) == (30.0, "no place is free")


def test_unique(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second invoice is refused, the second rebuild merged."""
    tasks = module("unique.md", monkeypatch, tmp_path)
    assert tasks.publish()
    assert re.fullmatch(r"invoice 7 is pending, as task [0-9a-f-]{36}\n", capsys.readouterr().out)
    tasks.app.close()
