"""``make help`` is complete, and the make targets that documents name exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def make(*arguments: str) -> str:
    if shutil.which("make") is None:
        pytest.fail("make is not installed") if os.environ.get("CI") else pytest.skip("make is not installed")
    # Run by make itself, this test inherits the outer make's flags and would print its directory lines.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


def test_help_lists_every_target():
    assert set(re.findall(r"^  make ([a-z-]+) +\S", make("help"), re.MULTILINE)) == targets()


def test_help_is_what_make_alone_does():
    assert make() == make("help")


def test_every_target_is_phony():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert set(phony.group(1).split()) == targets()


@pytest.mark.parametrize(
    "document", ["README.md", "docs/architecture.md", "docs/settings.md", "docs/conformance.md", ".ci/run"]
)
def test_named_targets_exist(document):
    named = set(re.findall(r"^\s*make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE))
    assert named <= targets()
