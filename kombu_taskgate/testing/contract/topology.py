"""Queues, exchanges and bindings: what one process declares all see."""

from __future__ import annotations

from functools import partial

import pytest

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.core.errors import ConfigError
from kombu_taskgate.core.topology import Binding, Exchange, Queue
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import Cases
from .store import Store


def _key(binding: Binding) -> tuple[str, str, str, str]:
    return binding.exchange, binding.queue, binding.routing_key, repr(sorted(binding.arguments.items()))


class TopologyCases(Cases):
    """The shared tables behind ``broker.topology``."""

    def test_declared_is_seen_by_others(self, store: Store, clock: FakeClock) -> None:
        """What one broker declares another finds, with every property."""
        one, two = (store.open(clock=clock).topology for _ in range(2))
        queue = Queue("q 🐘", durable=False, auto_delete=True, exclusive=True, expires=1.5, message_ttl=0.25)
        exchange = Exchange("x 🐘", "topic", durable=False, auto_delete=True)
        assert (one.declare_queue(queue), one.declare_exchange(exchange)) == (queue, exchange)
        assert (two.queue("q 🐘"), two.exchange("x 🐘")) == (queue, exchange)
        assert (two.queues(), two.exchanges()) == ([queue], [exchange])
        assert two.declare_queue(Queue("plain")) == Queue("plain")
        assert two.declare_exchange(Exchange("plain")) == Exchange("plain")
        assert [one.queue("plain"), one.exchange("plain")] == [Queue("plain"), Exchange("plain")]

    def test_unknown_names(self, broker: Broker) -> None:
        """What nobody declared is not there, and removing it does no harm."""
        topology = broker.topology
        assert (topology.queue("no"), topology.exchange("no")) == (None, None)
        topology.delete_queue("no")
        topology.delete_exchange("no")
        topology.unbind(Binding("no", "no"))
        topology.touch(["no"])
        topology.touch([])
        assert (topology.queues(), topology.exchanges(), topology.bindings()) == ([], [], [])

    def test_bad_queue_name(self, broker: Broker) -> None:
        """A queue that could not be published to can't be declared."""
        with pytest.raises(ConfigError):
            broker.topology.declare_queue(Queue(""))
        with pytest.raises(ConfigError):
            broker.topology.declare_queue(Queue("x" * 256))

    def test_first_declaration_stays(self, broker: Broker) -> None:
        """Declaring again changes nothing and answers what is stored."""
        topology = broker.topology
        topology.declare_queue(Queue("q", expires=10))
        topology.declare_exchange(Exchange("x", "topic"))
        assert topology.declare_queue(Queue("q", durable=False)) == Queue("q", expires=10)
        assert topology.declare_exchange(Exchange("x", "fanout")) == Exchange("x", "topic")
        assert topology.queue("q") == Queue("q", expires=10)

    def test_lists_are_sorted(self, broker: Broker) -> None:
        """Queues and exchanges come by name, which is exact."""
        for name in ("b", "a", "c", "aa"):
            broker.topology.declare_queue(Queue(name))
            broker.topology.declare_exchange(Exchange(name))
        broker.topology.declare_queue(Queue("A"))
        broker.topology.declare_queue(Queue("a "))
        assert [exchange.name for exchange in broker.topology.exchanges()] == ["a", "aa", "b", "c"]
        assert sorted(queue.name for queue in broker.topology.queues()) == ["A", "a", "a ", "aa", "b", "c"]

    def test_concurrent_declarations(self, store: Store, clock: FakeClock) -> None:
        """Many that declare the same at once: no error, one row, one answer."""
        topologies = [store.open(clock=clock).topology for _ in range(4)]
        kinds = ["direct", "topic"]
        for turn in range(5):
            queues = [partial(t.declare_queue, Queue(f"q{turn}", expires=place)) for place, t in enumerate(topologies)]
            exchanges = [
                partial(t.declare_exchange, Exchange(f"x{turn}", kinds[place % 2]))
                for place, t in enumerate(topologies)
            ]
            binds = [partial(t.bind, Binding(f"x{turn}", f"q{turn}", "key")) for t in topologies]
            outcomes = together([*queues, *exchanges, *binds])
            assert errors_of(outcomes) == []
            assert set(outcomes[:4]) == {topologies[0].queue(f"q{turn}")}
            assert set(outcomes[4:8]) == {topologies[0].exchange(f"x{turn}")}
        assert len(topologies[0].queues()) == len(topologies[0].exchanges()) == len(topologies[0].bindings()) == 5

    def test_bind_is_idempotent(self, broker: Broker) -> None:
        """A binding is told by all of its parts, and is stored once."""
        topology = broker.topology
        bindings = [
            Binding("x", "q", "key"),
            Binding("x", "q", "Key"),
            Binding("x", "q", "key", {"x-match": "any", "n": 1}),
            Binding("x", "q", ""),
            Binding("x", "r", "key"),
            Binding("y", "q", "key"),
        ]
        for binding in bindings * 2:
            topology.bind(binding)
        topology.bind(Binding("x", "q", "key", {"n": 1, "x-match": "any"}))
        assert sorted(map(_key, topology.bindings())) == sorted(map(_key, bindings))
        assert sorted(map(_key, topology.bindings("x"))) == sorted(map(_key, bindings[:5]))
        assert topology.bindings("z") == []
        for _ in range(2):
            topology.unbind(Binding("x", "q", "key"))
        assert sorted(map(_key, topology.bindings())) == sorted(map(_key, bindings[1:]))

    def test_long_routing_keys(self, broker: Broker) -> None:
        """Names and keys at their bound are told apart by the last character."""
        ends = [Binding("x" * 254 + end, "q" * 254 + end, "k" * 254 + end) for end in "ab"]
        for binding in ends:
            broker.topology.bind(binding)
        assert sorted(map(_key, broker.topology.bindings())) == sorted(map(_key, ends))
        assert broker.topology.bindings("x" * 254 + "b") == [ends[1]]

    def test_deleting_removes_bindings(self, broker: Broker) -> None:
        """A queue or exchange takes its bindings along, and nothing else."""
        topology = broker.topology
        for name in ("a", "b"):
            topology.declare_queue(Queue(name))
            topology.declare_exchange(Exchange(name))
        for exchange in ("a", "b"):
            for queue in ("a", "b"):
                topology.bind(Binding(exchange, queue))
        topology.delete_queue("a")
        assert sorted(map(_key, topology.bindings())) == [("a", "b", "", "[]"), ("b", "b", "", "[]")]
        topology.delete_exchange("b")
        assert topology.bindings() == [Binding("a", "b")]
        assert (topology.queues(), topology.exchanges()) == ([Queue("b")], [Exchange("a")])

    def test_unused(self, broker: Broker, clock: FakeClock) -> None:
        """A queue is unused when its time since the last touch has passed; declaring touches too."""
        topology = broker.topology
        topology.declare_queue(Queue("short", expires=10))
        topology.declare_queue(Queue("long", expires=30))
        topology.declare_queue(Queue("for ever"))
        clock.advance(9)
        assert topology.unused() == []
        topology.touch(["long"])
        clock.advance(2)
        assert topology.unused() == ["short"]
        topology.touch(["short", "for ever"])
        assert topology.unused() == []
        clock.advance(9)
        topology.declare_queue(Queue("short", expires=10))
        clock.advance(9)
        assert topology.unused() == []
        clock.advance(3000)
        assert sorted(topology.unused()) == ["long", "short"]
        topology.delete_queue("short")
        assert topology.unused() == ["long"]

    def test_consumers_keep_a_queue_in_use(self, broker: Broker, clock: FakeClock) -> None:
        """A queue with consumers is unused only when their session has been over for its time."""
        topology = broker.topology
        topology.declare_queue(Queue("q", expires=10))
        one, two = broker.open_session("one", 60), broker.open_session("two", 30)
        topology.set_consumers(one, {"q": 2, "other": 1})
        topology.set_consumers(two, {"q": 1})
        assert [topology.consumers("q"), topology.consumers("other"), topology.consumers("no")] == [3, 1, 0]
        assert topology.consumers("q", [one.id]) == 1
        topology.set_consumers(two, {"q": 4})
        assert topology.consumers("q") == 6
        clock.advance(31)
        assert (topology.consumers("q"), topology.unused()) == (2, [])
        clock.advance(38)
        assert (topology.consumers("q"), topology.unused()) == (0, [])
        clock.advance(2)
        assert topology.unused() == ["q"]
        broker.renew_session(one)
        assert (topology.consumers("q"), topology.unused()) == (2, [])

    def test_the_end_of_a_consumer_is_the_last_use(self, broker: Broker, clock: FakeClock) -> None:
        """The time of a queue runs from when its consumers were canceled, or their session was closed."""
        topology = broker.topology
        for name in ("canceled", "closed"):
            topology.declare_queue(Queue(name, expires=10))
        session = broker.open_session("one", 60)
        topology.set_consumers(session, {"canceled": 1, "closed": 1})
        clock.advance(50)
        topology.set_consumers(session, {"canceled": 0})
        broker.close_session(session)
        assert topology.consumers("closed") == 0
        clock.advance(9)
        assert topology.unused() == []
        clock.advance(2)
        assert topology.unused() == ["canceled", "closed"]

    def test_consumers_of_forgotten_sessions_are_forgotten(self, broker: Broker, clock: FakeClock) -> None:
        """Pruning leaves no trace of holders that died long ago, and a queue's last use does not move."""
        topology = broker.topology
        topology.declare_queue(Queue("q", expires=10 * 86400.0))
        topology.set_consumers(broker.open_session("one", 60), {"q": 1})
        clock.advance(2 * 86400)
        broker.prune()
        assert (topology.consumers("q"), topology.unused()) == (0, [])
        clock.advance(9 * 86400)
        assert topology.unused() == ["q"]
