"""Lists of tests of others that do not pass on taskgate, each with its reason, checked both ways.

A list is a TOML file of ``[[expected]]`` entries:

- ``tests``: names, or beginnings of names up to a ``::`` or a ``[``, so that one entry may stand for a whole module;
- ``reason``: why;
- ``outcome``: ``failed`` (if left out) or ``skipped``;
- ``stores``: on which databases: postgresql, mysql, sqlite (if left out: on all);
- ``versions``: of the package that the tests are of, as pip writes them (if left out: in all).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

KEYS = {"tests", "reason", "outcome", "stores", "versions"}


def expected(file: Path, *, store: str, version: str) -> dict[str, str]:
    """What is listed for a store and a version of the package: its outcome, by name."""
    found: dict[str, str] = {}
    for entry in tomllib.loads(file.read_text())["expected"]:
        assert entry.keys() <= KEYS, f"{file.name}: {entry['tests']} has unknown keys"
        assert entry["reason"].strip(), f"{file.name}: {entry['tests']} has no reason"
        outcome = entry.get("outcome", "failed")
        assert outcome in {"failed", "skipped"}, f"{file.name}: {entry['tests']}: {outcome} is no outcome"
        if store in entry.get("stores", [store]) and version in SpecifierSet(entry.get("versions", "")):
            found |= dict.fromkeys(entry["tests"], outcome)
    return found


def surprises(outcomes: Mapping[str, str], listed: Mapping[str, str], *, whole: bool = True) -> list[str]:
    """What differs from the list, either way, one line each.

    Args:
        outcomes: ``passed``, ``failed``, ``skipped`` or ``xfailed`` (its authors expect the test to fail), by name.
        listed: from :func:`expected`.
        whole: every test has run, not a selection: then what is listed has to be there.
    """
    found = []
    for name, outcome in sorted(outcomes.items()):
        due = next((listed[entry] for entry in listed if covers(entry, name)), None)
        if due is None and outcome in {"failed", "skipped"}:
            found.append(f"{name} {_past(outcome)} and is not listed")
        elif due is not None and outcome != due:
            found.append(f"{name} is listed as {due} and {_past(outcome)}")
    if whole:
        missing = [entry for entry in listed if not any(covers(entry, name) for name in outcomes)]
        found += [f"{entry} is listed and did not run" for entry in sorted(missing)]
    return found


def covers(entry: str, name: str) -> bool:
    """Whether an entry of a list stands for the test of this name."""
    return name == entry or name.startswith((f"{entry}::", f"{entry}["))


def _past(outcome: str) -> str:
    return {"skipped": "was skipped", "xfailed": "failed as its authors expect"}.get(outcome, outcome)
