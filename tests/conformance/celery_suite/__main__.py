"""The command: runs Celery's suite, and compares what became of its tests with exceptions.toml."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from kombu_taskgate.transport.url import masked
from tests.conformance.celery_suite import setting
from tests.conformance.celery_suite.running import ROOT, Result, SuiteBroken
from tests.conformance.databases import STORES, store_of
from tests.conformance.exceptions import expected, surprises
from tests.conformance.sdists import installed_sdist
from tests.services import ServiceMissing

EXCEPTIONS = Path(__file__).parent / "exceptions.toml"
SDISTS = ROOT / ".pytest_cache" / "d" / "sdists"  # where pytest keeps those of tests/conformance


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  # a command's output


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="celery_suite",
        description="Run Celery's own integration suite on a broker and a result backend.",
        epilog="All other arguments are pytest's, a selection: -k test_chord, or t/integration/test_tasks.py",
    )
    parser.add_argument(
        "url", help="broker, taskgate+postgresql://user@host/database; the run makes a database beside it"
    )
    parser.add_argument("--backend", help="result backend; redis for a Redis of the run's own (default: as the broker)")
    parser.add_argument("--each", type=float, default=200, help="seconds that one test may take (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=5400, help="seconds that all may take (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=ROOT / ".celery-suite", help="folder for logs (default: %(default)s)"
    )
    return parser.parse_known_args()


def main() -> int:
    options, selection = arguments()
    prefix, _, url = options.url.partition("+")
    store = store_of(url) if prefix == "taskgate" else None
    if store not in STORES:
        say(f"{masked(options.url)} is no URL of a broker in a database: taskgate+ and one of {', '.join(STORES)}")
        return 2
    output = options.output / store
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    SDISTS.mkdir(parents=True, exist_ok=True)
    # Told to end, it takes down what it has set up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began = time.monotonic()
    try:
        results = setting.run(
            installed_sdist("celery", SDISTS),
            options.url,
            output,
            backend=options.backend,
            arguments=selection,
            each=options.each,
            limit=options.limit,
            tell=say,
        )
    except (ServiceMissing, SuiteBroken) as error:
        say(str(error))
        return 2
    (output / "outcomes.txt").write_text("".join(f"{line}\n" for line in outcome_lines(results)))
    for name, result in sorted(results.items()):
        if result.outcome == "failed":
            say(f"\n== {name}\n{result.text}")
    listed = expected(EXCEPTIONS, store=store, version=version("celery"))
    found = surprises({name: result.outcome for name, result in results.items()}, listed, whole=not selection)
    say(f"\n{counts(results)} in {time.monotonic() - began:.0f} s; outcomes and logs are in {output}")
    say("\n".join(found) or "All is as exceptions.toml says.")
    return 1 if found else 0


def outcome_lines(results: dict[str, Result]) -> list[str]:
    """Name, outcome, seconds and tries of each test, in an order that two runs can be compared by."""
    return [f"{name} {result.outcome} {result.seconds:.1f} {result.tries}" for name, result in sorted(results.items())]


def counts(results: dict[str, Result]) -> str:
    count = Counter(result.outcome for result in results.values())
    twice = sum(result.tries > 1 and result.outcome == "passed" for result in results.values())
    return ", ".join(f"{count[kind]} {kind}" for kind in ("passed", "failed", "skipped", "xfailed")) + (
        f" ({twice} passed at the second try)" if twice else ""
    )


sys.exit(main())
