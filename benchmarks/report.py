"""Figures become tables: what was measured, ratios to other brokers, and which goals are met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Figures of brokers, by name of the broker and of the figure; ``None``: the broker can't do it.
Figures = Mapping[str, Mapping[str, "float | None"]]
POSTGRESQL, SQLITE, MYSQL = "taskgate+postgresql", "taskgate+sqlite", "taskgate+mysql"
OTHERS = ("redis", "rabbitmq", "sqlalchemy+postgresql")


@dataclass(frozen=True)
class Figure:
    """Something that is measured.

    Args:
        title: for people, with the unit.
        digits: after the point.
        more: whether more is better.
    """

    title: str
    digits: int
    more: bool


FIGURES: Mapping[str, Figure] = {
    "published": Figure("published/s", 0, True),
    "batch": Figure("published/s in batch()", 0, True),
    "executed": Figure("executed/s, prefork", 0, True),
    "executed_solo": Figure("executed/s, solo", 0, True),
    "cpu": Figure("CPU ms per task, prefork", 2, False),
    "cpu_solo": Figure("CPU ms per task, solo", 2, False),
    "trip_p50": Figure("round trip p50, ms", 1, False),
    "trip_p99": Figure("round trip p99, ms", 1, False),
    "chord": Figure("chord, s", 2, False),
    "eta_p50": Figure("ETA lateness p50, ms", 1, False),
    "eta_max": Figure("ETA lateness max, ms", 1, False),
    "idle": Figure("idle, CPU s/min", 2, False),
}


@dataclass(frozen=True)
class Goal:
    """A bound that a figure of a broker, or its ratio to another figure, must keep.

    Args:
        broker, figure: what is judged.
        bound: at least this where more is better, else at most this.
        beside: broker and figure to which the ratio is taken; ``None``: none is.
        more: whether the bound is a lower one.
    """

    broker: str
    figure: str
    bound: float
    beside: tuple[str, str] | None
    more: bool

    @property
    def text(self) -> str:
        """The goal in words."""
        sign = "≥" if self.more else "≤"
        if self.beside is None:
            return f"{sign} {self.bound:g}"
        broker, figure = self.beside
        of = broker if figure == self.figure else FIGURES[figure].title
        return f"{sign} {self.bound:.3g} × {of}"

    def value(self, figures: Figures) -> float | None:
        """What is compared with the bound; ``None`` when something for it was not measured."""
        mine = figures.get(self.broker, {}).get(self.figure)
        if self.beside is None or mine is None:
            return mine
        other = figures.get(self.beside[0], {}).get(self.beside[1])
        return mine / other if other else None

    def met(self, figures: Figures) -> bool | None:
        """Whether the bound is kept; ``None`` when that was not measured."""
        value = self.value(figures)
        if value is None:
            return None
        return value >= self.bound if self.more else value <= self.bound


def goals() -> Iterator[Goal]:
    """All goals that a comparison of brokers can judge."""
    for broker, publish in ((POSTGRESQL, 0.8), (SQLITE, 1.0)):
        yield _goal(broker, "published", publish, "redis")
        yield Goal(broker, "batch", 10, (broker, "published"), more=True)
        for figure in ("executed", "executed_solo"):
            for other, times in (("rabbitmq", 1), ("redis", 2), ("sqlalchemy+postgresql", 7)):
                yield _goal(broker, figure, times, other)
        yield _goal(broker, "trip_p50", 1.5, "redis") if broker == POSTGRESQL else _goal(broker, "trip_p50", 5)
        yield Goal(broker, "trip_p99", 4, (broker, "trip_p50"), more=False)
        yield _goal(broker, "chord", 1, "redis")
        yield _goal(broker, "eta_p50", 20)
        yield _goal(broker, "eta_max", 250)
        yield _goal(broker, "idle", 0.3)
    for figure in ("published", "batch", "executed", "executed_solo", "cpu", "trip_p50", "trip_p99", "chord"):
        yield _goal(MYSQL, figure, 0.6 if FIGURES[figure].more else 1 / 0.6, POSTGRESQL)


def _goal(broker: str, figure: str, bound: float, beside: str | None = None) -> Goal:
    return Goal(broker, figure, bound, None if beside is None else (beside, figure), FIGURES[figure].more)


def judged(figures: Figures) -> list[dict[str, Any]]:
    """The goals of all brokers that were measured, each with its value and whether it is met."""
    return [
        {
            "broker": goal.broker,
            "figure": goal.figure,
            "goal": goal.text,
            "value": goal.value(figures),
            "met": goal.met(figures),
        }
        for goal in goals()
        if goal.broker in figures
    ]


def markdown(found: Mapping[str, Any]) -> str:
    """A page of tables.

    Args:
        found: what ``compare.py`` writes as JSON.
    """
    figures: Figures = found["medians"]
    shown = [name for name in FIGURES if any(values.get(name) is not None for values in figures.values())]
    lines = ["# Brokers side by side", "", *_machine(found), "", "## Figures", ""]
    lines += [f"Medians; every broker had its turn in each round (rounds: {found['plan']['rounds']}).", ""]
    lines += _table(
        ["", *(FIGURES[name].title for name in shown)],
        [
            [broker, *(_number(values.get(name), FIGURES[name].digits) for name in shown)]
            for broker, values in figures.items()
        ],
    )
    if found["alone"]:
        lines += ["", "## What the database does by itself", "", "INSERT and COMMIT from one connection, rows/s.", ""]
        rows = [
            [name, _number(rates["one_by_one"], 0), _number(rates["in_batches"], 0)]
            for name, rates in found["alone"].items()
        ]
        lines += _table(["", "one by one", "in batches of 200"], rows)
    lines += [*_ratios(figures, shown), *_goals(found["goals"]), *_left_out(found["left_out"])]
    return "\n".join(lines) + "\n"


def _machine(found: Mapping[str, Any]) -> list[str]:
    machine = found["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    text = (
        f"{machine['cpus']} CPUs ({machine['cpu_model']}), {machine['system']}, {machine['python']}; {packages}; "
        f"{', '.join(machine['servers'])}. {found['plan']['tasks']} tasks in the backlog, acknowledged late, prefetch "
        f"multiplier 16, two processes with prefork; chords of {found['plan']['chord_size']}, "
        f"{found['plan']['etas']} tasks due at once."
    )
    return [text]


def _ratios(figures: Figures, shown: Sequence[str]) -> list[str]:
    others = [name for name in OTHERS if name in figures]
    rows = []
    for broker in (name for name in figures if name.startswith("taskgate+")):
        for name in shown:
            mine = figures[broker].get(name)
            cells = [_ratio(mine, figures[other].get(name)) for other in others]
            if any(cell != "–" for cell in cells):
                better = "more" if FIGURES[name].more else "less"
                rows.append([broker, FIGURES[name].title, *cells, better])
    if not rows:
        return []
    head = ["", "", *(f"× {name}" for name in others), "better is"]
    return ["", "## Ratios", "", *_table(head, rows)]


def _goals(judged: Sequence[Mapping[str, Any]]) -> list[str]:
    if not judged:
        return []
    words = {True: "yes", False: "**no**", None: "not measured"}
    rows = [
        [one["broker"], FIGURES[one["figure"]].title, one["goal"], _number(one["value"], 2), words[one["met"]]]
        for one in judged
    ]
    elsewhere = (
        "Other goals have measurements of their own: `depth.py`, `leases.py`, `readers.py`, `notify.py` and "
        "`held_snapshot.py`."
    )
    return ["", "## Goals", "", *_table(["", "", "goal", "measured", "met"], rows), "", elsewhere]


def _left_out(left_out: Mapping[str, str]) -> list[str]:
    if not left_out:
        return []
    return ["", "## Left out", "", *(f"- {name}: {why}" for name, why in left_out.items())]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _ratio(mine: float | None, other: float | None) -> str:
    return "–" if mine is None or not other else f"{mine / other:.2f}"
