"""Quotas: never more starts in a window than the limit, whoever asks."""

from __future__ import annotations

from functools import partial

from kombu_taskgate.core.broker import Broker
from kombu_taskgate.testing.clock import FakeClock
from kombu_taskgate.testing.threads import errors_of, together

from .base import Cases
from .store import Store


class QuotaCases(Cases):
    """queue_quota and release_quota."""

    def test_quota_hard_limit(self, broker: Broker, clock: FakeClock) -> None:
        """QuotaHardLimit: reservations add up to the limit and not beyond, also several at once."""
        window_start = clock.now_ms() - clock.now_ms() % 60_000
        first = broker.queue_quota("k", 5, 60.0)
        assert first is not None
        assert (first.key, first.window, first.window_start, first.n) == ("k", 60.0, window_start, 1)
        assert broker.queue_quota("k", 5, 60.0, 3) is not None
        assert broker.queue_quota("k", 5, 60.0, 2) is None
        assert broker.queue_quota("k", 5, 60.0) is not None
        assert broker.queue_quota("k", 5, 60.0) is None
        assert broker.queue_quota("k", 6, 60.0) is not None
        assert broker.queue_quota("k", 3, 60.0) is None

    def test_quota_of_nothing(self, broker: Broker) -> None:
        """A limit of 0 admits nothing, and so does one that is smaller than the number asked for."""
        assert broker.queue_quota("k", 0, 60.0) is None
        assert broker.queue_quota("k", 2, 60.0, 3) is None
        assert broker.queue_quota("k", 2, 60.0, 2) is not None

    def test_quota_window_rotate(self, broker: Broker, clock: FakeClock) -> None:
        """QuotaWindowRotate: windows begin at multiples of their length, and each begins empty."""
        clock.advance((60_000 - clock.now_ms() % 60_000) / 1000)
        start = clock.now_ms()
        assert broker.queue_quota("k", 1, 60.0) is not None
        clock.advance(59.999)
        assert broker.queue_quota("k", 1, 60.0) is None
        clock.advance(0.001)
        later = broker.queue_quota("k", 1, 60.0)
        assert later is not None
        assert later.window_start == start + 60_000
        assert broker.queue_quota("k", 1, 60.0) is None
        clock.advance(600)
        assert broker.queue_quota("k", 1, 60.0) is not None

    def test_quota_stale_release(self, broker: Broker, clock: FakeClock) -> None:
        """QuotaStaleRelease: a reservation of a window that has passed gives nothing to the new one."""
        old = broker.queue_quota("k", 1, 60.0)
        assert old is not None
        clock.advance(60)
        assert broker.queue_quota("k", 1, 60.0) is not None
        assert broker.release_quota(old) is False
        assert broker.queue_quota("k", 1, 60.0) is None

    def test_quota_release(self, broker: Broker) -> None:
        """A release gives back what was reserved, to its own window."""
        reservation = broker.queue_quota("k", 3, 60.0, 3)
        assert reservation is not None
        assert broker.queue_quota("k", 3, 60.0) is None
        assert broker.release_quota(reservation) is True
        assert broker.queue_quota("k", 3, 60.0, 3) is not None
        assert broker.queue_quota("k", 3, 60.0) is None

    def test_quota_key_isolation(self, broker: Broker) -> None:
        """QuotaKeyIsolation: keys do not share, nor do windows of different lengths."""
        for key in ("a", "A", "a ", "b" * 255, "🐘"):
            assert broker.queue_quota(key, 1, 60.0) is not None, key
            assert broker.queue_quota(key, 1, 60.0) is None, key
        assert broker.queue_quota("a", 1, 3600.0) is not None
        assert broker.queue_quota("a", 1, 0.5) is not None

    def test_quota_concurrent_race(self, store: Store, clock: FakeClock) -> None:
        """QuotaConcurrentRace: callers that race get the limit together, in each window."""
        brokers = [store.open(clock=clock) for _ in range(4)]
        for window in range(3):
            outcomes = together([partial(brokers[n % 4].queue_quota, "k", 7, 60.0) for n in range(24)])
            assert errors_of(outcomes) == []
            reserved = [outcome for outcome in outcomes if outcome is not None]
            assert len(reserved) == 7, window
            clock.advance(60)

    def test_quota_clock_going_back(self, broker: Broker, clock: FakeClock) -> None:
        """A server's clock that was set back admits less, never more."""
        assert broker.queue_quota("k", 1, 60.0) is not None
        clock.advance(-60)
        broker.queue_quota("k", 1, 60.0)
        clock.advance(60)
        assert broker.queue_quota("k", 1, 60.0) is None
