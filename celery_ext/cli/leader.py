"""``celery taskgate leader``: who schedules, who stands by, and whether the replica of this host is alive."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timezone
from typing import NamedTuple

import click

from kombu_taskgate.core.terms import Candidate, Term

from ..beat.listing import aware
from ..beat.stores import Stores
from .output import cell, json_option, print_facts, print_json
from .running import REFUSED, app_of, ask, fail


class Found(NamedTuple):
    """What the store says."""

    key: str
    shown: str
    ttl: float
    term: Term | None
    candidates: Sequence[Candidate]

    @property
    def leader(self) -> Term | None:
        """The term that is valid."""
        return self.term if self.term is not None and self.term.left > 0 else None

    @property
    def standbys(self) -> Sequence[Candidate]:
        """Those who stand by and were heard of within the lease time."""
        return [
            each
            for each in self.candidates
            if each.now - each.seen_at <= self.ttl * 1000 and (self.leader is None or each.holder != self.leader.holder)
        ]


@click.command(name="leader")
@click.option(
    "--probe", is_flag=True, help="Only tell whether the replica of this host was heard of; for orchestrators."
)
@click.option("--host", help="The host that --probe asks about.  [default: this one]")
@click.option("--holder-prefix", help="What the replica's holder begins with, in place of HOST and a colon.")
@json_option
@click.pass_context
def leader(context: click.Context, probe: bool, host: str | None, holder_prefix: str | None, as_json: bool) -> None:
    """Show who leads beat, and who stands by.

    Ends with 0 when somebody leads, else with 1; with 2 when the store can't be reached. With --probe: with 0 when the
    replica of this host, leading or standing by, was heard of within its lease time, else with 1.
    """
    if not probe and (host is not None or holder_prefix is not None):
        raise click.UsageError("--host and --holder-prefix belong to --probe")
    found = ask(app_of(context), _look, usage=True)
    if probe:
        _probe(found, f"{host or socket.gethostname()[:200]}:" if holder_prefix is None else holder_prefix, as_json)
    elif as_json:
        print_json(_as_json(found))
    else:
        _print(found)
    if found.leader is None and not probe:
        raise click.exceptions.Exit(REFUSED)


def _look(stores: Stores) -> Found:
    key = stores.key
    return Found(key, stores.shown, stores.settings.ttl, stores.terms.current(key), stores.terms.candidates(key))


def _as_json(found: Found) -> dict[str, object]:
    term = found.leader
    return {
        "key": found.key,
        "store": found.shown,
        "leader": None
        if term is None
        else {
            "holder": term.holder,
            "term": term.number,
            "since": aware(term.acquired_at, timezone.utc),
            "renewed": aware(term.renewed_at, timezone.utc),
            "until": aware(term.until, timezone.utc),
        },
        "standbys": [
            {
                "holder": each.holder,
                "since": aware(each.since, timezone.utc),
                "seen": aware(each.seen_at, timezone.utc),
            }
            for each in found.standbys
        ],
    }


def _print(found: Found) -> None:
    term = found.leader
    facts: dict[str, object] = {"schedule": found.key, "store": found.shown, "leader": "nobody"}
    if term is not None:
        facts.update(
            leader=term.holder,
            term=term.number,
            since=aware(term.acquired_at, timezone.utc),
            until=aware(term.until, timezone.utc),
        )
    elif found.term is not None:
        facts["last leader"] = f"{found.term.holder}, until {cell(aware(found.term.until, timezone.utc))}"
    print_facts(facts)
    for each in found.standbys:
        seen = aware(each.seen_at, timezone.utc)
        click.echo(f"standby   {each.holder}, since {cell(aware(each.since, timezone.utc))}, seen {cell(seen)}")


def _probe(found: Found, prefix: str, as_json: bool) -> None:
    term = found.leader
    role, holder = None, None
    if term is not None and term.holder.startswith(prefix):
        role, holder = "leader", term.holder
    else:
        for each in found.standbys:
            if each.holder.startswith(prefix):
                role, holder = "standby", each.holder
                break
    if as_json:
        print_json({"alive": role is not None, "role": role, "holder": holder})
        if role is None:
            raise click.exceptions.Exit(REFUSED)
    elif role is None:
        fail(f"no replica {prefix}… of {found.key} was heard of within {found.ttl:g} s", REFUSED)
    else:
        click.echo(f"{role}: {holder}")
