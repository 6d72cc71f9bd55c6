"""Chords: parts, their number, and who ends them."""

from __future__ import annotations

from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.chords import Chord, ChordPart, ChordState
from kombu_taskgate.core.errors import ConfigError, PayloadTooLarge
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import QUEUE, Cases, put, take
from .store import Store

GROUP = "group"
OPEN, DONE, FAILED = ChordState.OPEN, ChordState.DONE, ChordState.FAILED


def part(number: int, *, execution: int = 0, payload: bytes = b"", place: int | None = None) -> ChordPart:
    """The part of the task at a place."""
    return ChordPart(f"task {number}", number if place is None else place, "SUCCESS", payload, execution)


def known(broker: Broker) -> Chord:
    """The chord, which must be there."""
    chord = broker.chords.get(GROUP)
    assert chord is not None
    return chord


class ChordCases(Cases):
    """chords."""

    def test_chord_round_trip(self, broker: Broker) -> None:
        """A chord is complete when as many parts are there as its header has; they come back in its order."""
        chords = broker.chords
        assert chords.get(GROUP) is None
        chords.begin(GROUP, header=b"header", body=None, expires_in=None)
        chords.set_size(GROUP, 3)
        assert known(broker) == Chord(GROUP, OPEN, 3, 0, 0, has_body=False)
        for number in (2, 0):
            assert not chords.put(GROUP, part(number, payload=bytes([number]))).complete
        chords.begin(GROUP, header=None, body=b"body", expires_in=None)
        assert chords.put(GROUP, part(1, payload=b"\1")).complete
        assert [(one.place, one.payload) for one in chords.parts(GROUP)] == [(n, bytes([n])) for n in range(3)]
        assert known(broker) == Chord(GROUP, OPEN, 3, 3, 0, has_body=True)
        assert chords.contents(GROUP) == (b"header", b"body")
        assert (chords.parts("other"), chords.contents("other")) == ([], (None, None))

    def test_part_counts_once(self, broker: Broker) -> None:
        """A task that is run again leaves no second part, and the first stays."""
        broker.chords.set_size(GROUP, 2)
        broker.chords.put(GROUP, part(0, payload=b"first", execution=1))
        assert not broker.chords.put(GROUP, part(0, payload=b"second", execution=2)).complete
        assert [one.payload for one in broker.chords.parts(GROUP)] == [b"first"]

    def test_part_of_a_lost_lease(self, broker: Broker, clock: FakeClock) -> None:
        """Who was overtaken leaves no part; who has overtaken it does."""
        broker.chords.set_size(GROUP, 1)
        put(broker)
        old = take(broker)
        clock.advance(11)
        broker.reap_expired()
        late = ChordPart("task 0", 0, "FAILURE", b"", old.id, old.token, fenced=True)
        assert not broker.chords.put(GROUP, late).complete
        young = take(broker)
        assert not broker.chords.put(GROUP, late).complete
        assert broker.chords.put(GROUP, ChordPart("task 0", 0, "SUCCESS", b"", young.id, young.token, True)).complete

    def test_one_task_at_two_places(self, broker: Broker) -> None:
        """A signature that was used twice has one task id at two places: two parts."""
        broker.chords.set_size(GROUP, 2)
        broker.chords.put(GROUP, ChordPart("same", 0, "SUCCESS", b""))
        assert broker.chords.put(GROUP, ChordPart("same", 1, "SUCCESS", b"")).complete

    def test_parts_before_the_size(self, broker: Broker) -> None:
        """Parts may come while the header is still being published; nothing is complete before its end."""
        for number in range(2):
            assert not broker.chords.put(GROUP, part(number)).complete
        broker.chords.set_size(GROUP, 2)
        assert known(broker).complete

    def test_empty_header(self, broker: Broker) -> None:
        """A header without tasks is complete at once."""
        broker.chords.set_size(GROUP, 0)
        assert known(broker).complete

    def test_added_tasks(self, broker: Broker) -> None:
        """A task that joins the header is waited for as well; joining twice is once."""
        broker.chords.set_size(GROUP, 1)
        broker.chords.add(GROUP, "joined")
        broker.chords.add(GROUP, "joined")
        assert not broker.chords.put(GROUP, part(0)).complete
        assert broker.chords.parts(GROUP)[0].task_id == "task 0"
        chord = broker.chords.put(GROUP, ChordPart("joined", -1, "SUCCESS", b"", 3))
        assert chord.complete
        assert [one.task_id for one in broker.chords.parts(GROUP)] == ["task 0", "joined"]
        assert broker.chords.put(GROUP, ChordPart("joined", -1, "FAILURE", b"", 4)).parts == 2

    def test_end_publishes_once(self, broker: Broker) -> None:
        """Who ends the chord publishes its body in the same transaction; whoever is later publishes nothing."""
        broker.chords.set_size(GROUP, 1)
        broker.chords.put(GROUP, part(0, execution=7))
        body = NewTask(QUEUE, b"body")
        assert broker.chords.end(GROUP, DONE, tasks=[body, body])
        assert not broker.chords.end(GROUP, DONE, tasks=[body])
        assert not broker.chords.end(GROUP, FAILED)
        assert not broker.chords.end("other", DONE, tasks=[body])
        assert broker.queue_len(QUEUE) == 2
        assert known(broker).state is DONE
        assert broker.chords.parts(GROUP) == []
        assert take(broker).payload == b"body"

    def test_end_that_can_not_publish(self, store: Store, clock: FakeClock) -> None:
        """When the body can't be stored the chord stays open."""
        broker = store.open(clock=clock, max_payload=100)
        broker.chords.set_size(GROUP, 0)
        with pytest.raises(PayloadTooLarge):
            broker.chords.end(GROUP, DONE, tasks=[NewTask(QUEUE, b"x" * 101)])
        with pytest.raises(ConfigError):
            broker.chords.end(GROUP, DONE, tasks=[NewTask(QUEUE), NewTask("")])
        assert known(broker).complete
        assert broker.queue_len(QUEUE) == 0

    def test_late_part(self, broker: Broker) -> None:
        """A part of a run that is over changes nothing, and does not make the chord complete once more."""
        broker.chords.set_size(GROUP, 1)
        broker.chords.put(GROUP, part(0, execution=7))
        broker.chords.end(GROUP, DONE)
        for execution in (0, 6, 7):
            chord = broker.chords.put(GROUP, part(0, execution=execution))
            assert (chord.state, chord.complete, broker.chords.parts(GROUP)) == (DONE, False, [])

    def test_chord_that_is_published_again(self, broker: Broker) -> None:
        """It begins anew, with the parts of later executions, also of those that were quicker than their publisher."""
        broker.chords.set_size(GROUP, 2, by=3)
        broker.chords.put(GROUP, part(0, execution=7))
        broker.chords.put(GROUP, part(1, execution=8))
        broker.chords.end(GROUP, FAILED)
        assert not broker.chords.put(GROUP, part(0, execution=9, payload=b"new")).complete
        broker.chords.set_size(GROUP, 2, by=4)
        assert (known(broker).state, known(broker).parts) == (OPEN, 1)
        broker.chords.put(GROUP, part(1, execution=8))
        assert broker.chords.put(GROUP, part(1, execution=10)).complete
        assert broker.chords.parts(GROUP)[0].payload == b"new"

    def test_chord_that_a_repeated_run_publishes_again(self, broker: Broker) -> None:
        """A task that is run again publishes its chord again; a body that has begun does not begin a second time."""
        broker.chords.set_size(GROUP, 1, by=3)
        broker.chords.put(GROUP, part(0, execution=7))
        broker.chords.end(GROUP, DONE)
        broker.chords.set_size(GROUP, 1, by=3)
        assert not broker.chords.put(GROUP, part(0, execution=9)).complete
        assert known(broker).state is DONE

    def test_claim(self, broker: Broker, clock: FakeClock) -> None:
        """One at a time may end a chord that is claimed; when that takes too long, another."""
        assert broker.chords.claim(GROUP, 10) is None
        broker.chords.set_size(GROUP, 0)
        first = broker.chords.claim(GROUP, 10)
        assert first
        assert broker.chords.claim(GROUP, 10) is None
        clock.advance(10)
        second = broker.chords.claim(GROUP, 10)
        assert second
        assert second != first
        assert not broker.chords.end(GROUP, DONE, claim=first)
        assert broker.chords.end(GROUP, DONE, claim=second)
        assert broker.chords.claim(GROUP, 10) is None

    def test_stuck(self, broker: Broker, clock: FakeClock) -> None:
        """A complete chord that nobody ends is found after a while, unless it is claimed; others are not."""
        for name, size in ((GROUP, 1), ("incomplete", 2), ("ended", 1)):
            broker.chords.set_size(name, size)
            broker.chords.put(name, part(0))
        broker.chords.put("without a size", part(0))
        broker.chords.end("ended", DONE)
        assert broker.chords.stuck(5) == []
        clock.advance(5)
        for since in (None, 5.0, 60.0):
            assert [chord.group_id for chord in broker.chords.stuck(5, since=since)] == [GROUP]
        assert broker.chords.stuck(5, since=4.999) == []
        assert broker.chords.stuck(5.001) == []
        broker.chords.claim(GROUP, 10)
        assert broker.chords.stuck(5) == []
        clock.advance(10)
        assert [chord.group_id for chord in broker.chords.stuck(5)] == [GROUP]

    def test_sweep_of_chords(self, broker: Broker, clock: FakeClock) -> None:
        """A chord goes when its time is over, with its parts; one that has ended is remembered for a while."""
        broker.chords.set_size("short", 2, expires_in=10)
        broker.chords.put("short", part(0))
        broker.chords.put("sizeless", part(0), expires_in=10)
        broker.chords.set_size("kept", 2)
        broker.chords.set_size("ended", 0)
        broker.chords.end("ended", DONE)
        clock.advance(9.999)
        assert broker.chords.sweep() == 0
        clock.advance(0.001)
        assert broker.chords.sweep() == 2
        assert (broker.chords.get("short"), broker.chords.parts("short"), broker.chords.get("sizeless")) == (
            None,
            [],
            None,
        )
        clock.advance(14 * 86400)
        assert broker.chords.sweep() == 1
        assert broker.chords.get("ended") is None
        assert broker.chords.get("kept") is not None

    def test_chord_that_parts_still_come_to(self, broker: Broker, clock: FakeClock) -> None:
        """The time of an open chord runs from its newest part: a header may take longer than that."""
        broker.chords.set_size(GROUP, 2, expires_in=10)
        clock.advance(9)
        broker.chords.put(GROUP, part(0))
        clock.advance(9)
        assert broker.chords.sweep() == 0
        assert not broker.chords.get(GROUP).complete  # type: ignore[union-attr]
        clock.advance(1)
        assert broker.chords.sweep() == 1
        assert broker.chords.get(GROUP) is None

    def test_added_task_of_a_lost_lease(self, broker: Broker, clock: FakeClock) -> None:
        """The part of a task that was added to the header is fenced as every other one."""
        broker.chords.set_size(GROUP, 0)
        broker.chords.add(GROUP, "added")
        put(broker)
        old = take(broker)
        clock.advance(11)
        broker.reap_expired()
        late = ChordPart("added", -1, "FAILURE", b"", old.id, old.token, fenced=True)
        assert not broker.chords.put(GROUP, late).complete
        young = take(broker)
        assert not broker.chords.put(GROUP, late).complete
        assert broker.chords.put(GROUP, ChordPart("added", -1, "SUCCESS", b"", young.id, young.token, True)).complete

    def test_parts_at_once(self, store: Store) -> None:
        """However many tasks end in the same moment, somebody sees that they were the last, and one ends the chord."""
        broker = store.open()
        broker.chords.set_size(GROUP, 16)
        ended: list[int] = []

        def finish(number: int) -> None:
            if broker.chords.put(GROUP, part(number)).complete and broker.chords.end(
                GROUP, DONE, tasks=[NewTask(QUEUE, b"body")]
            ):
                ended.append(number)

        assert errors_of(together([partial(finish, number) for number in range(16)])) == []
        assert len(ended) == 1
        assert broker.queue_len(QUEUE) == 1
