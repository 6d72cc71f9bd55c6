"""The delivery engine: one per consuming connection.

A pump thread does all the database's work of consuming. In one turn it writes the settlements that wait and
claims what there is room for, both in one transaction where that is possible. Claims go to the buffers of
the channels, and the consumer is woken: through :class:`~..core.ready.Ready` where an event loop waits, through a
condition where ``drain_events`` does. Consumers never wait for the database, and what goes wrong with it is
never raised at them: the pump keeps what it has, tries again, and claims nothing while leases could not be
renewed.

A turn is due when half the window can be filled or half of it has been acknowledged, or when an acknowledgement
or a free place is ``ack_delay`` old, but not before the database has had as much rest as the last turn took; at
once when the consumer has nothing left to do. So a fast consumer is served in batches, and a slow one does not
wait for a batch to come together.

An engine that is not used any more rests: a web process that has asked its workers for a sign of life once keeps no
threads, no connections and no session for it.
"""

from __future__ import annotations

import gc
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from ..core.broker import Broker
from ..core.errors import LeaseLost, StoreUnavailable, TaskgateError
from ..core.lease import LeaseKeeper
from ..core.model import Claim, FailKind, Lease, Reason, Session
from ..core.ready import Ready
from ..core.reaper import Reaper
from ..core.settings import BrokerSettings
from .codec import Envelope, decode
from .errors import RecoverableConnectionError, Undecodable
from .intake import Intake, Request, requests_for
from .looking import LOOK, Looking
from .options import EngineOptions
from .revocations import RevokedClaims
from .settle import Action, Batch, Settlement, Settler
from .window import Consumer, Delivery, Stage, Window

logger = logging.getLogger("kombu_taskgate.transport")

#: Acks that are always enough for a turn.
ENOUGH_ACKS = 32
#: Longest rest in seconds between two turns, however long the first took: it may have waited for a lock.
LONGEST_REST = 0.05
#: Shortest and longest pause while the database is not available.
MIN_PAUSE, MAX_PAUSE = 0.1, 2.0
#: How long a stopping engine goes on trying to write the last settlements.
LAST_TRY = 5.0
#: Seconds after which a retired engine has the garbage collector look once for messages that nobody has.
COLLECT_AFTER = 2.0
#: Seconds without a consumer and without anything to settle after which an engine rests, until it is used again.
REST_AFTER = 30.0
#: Seconds between two looks for runs that nobody will end; a turn for something else has to come along.
FORGOTTEN_EVERY = 5.0
#: What is said of an execution whose run had begun, and can't be ended any more.
_CLOSED = "the channel that it came through was closed before the end of its run was told"
_FORGOTTEN = "its worker has forgotten it"
#: LOOK of a consumer that can't start anything at the moment; it costs the database nothing.
LOOK_FOR_ROOM = 0.05


class DeliveryEngine:
    """Claims, delivers and settles for the channels of one connection.

    Args:
        broker: where.
        settings: of the broker.
        options: of the engine.
        owner: shown to operators as the holder of the leases.
        ready: set while there is something to deliver.
        upkeep: called in the pump's thread every few seconds; returns after how many seconds again.
        sweep: called by the reaper after each round.
    """

    def __init__(
        self,
        broker: Broker,
        settings: BrokerSettings,
        options: EngineOptions,
        owner: str,
        ready: Ready,
        *,
        upkeep: Callable[[], float],
        sweep: Callable[[], None],
    ) -> None:
        self.broker = broker
        self.settings = settings
        self._options = options
        self._owner = owner
        self._ready = ready
        self._upkeep = upkeep
        self._keeper = LeaseKeeper(
            broker,
            owner,
            settings.lease_ttl,
            settings.queue_lease_ttl,
            on_lost=self._on_lost,
            on_canceled=self._on_canceled,
        )
        shortest = min([settings.lease_ttl, *settings.queue_lease_ttl.values()])
        self._reaper = Reaper(broker, options.reap_interval or max(0.5, shortest / 3), also=sweep)
        self._settler = Settler(broker, self._settled)
        self.revoked = RevokedClaims(broker)
        self._reset()

    def _reset(self) -> None:
        # The lock guards everything below. Neither the broker nor the keeper is ever called under it.
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._arrived = threading.Condition(self._lock)
        # Held during a turn, and by whoever does the pump's work in its place.
        self._turn_lock = threading.Lock()
        # Held while the threads are started, and while they end because nobody uses the engine.
        self._life_lock = threading.Lock()
        self._unused_since: float | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._retired: Callable[[], None] | None = None
        self._retired_at = 0.0
        self._look_at = 0.0
        self._windows: list[Window] = []
        self._pending = Batch()
        self._live: dict[tuple[int, int], Delivery] = {}
        self._wakes = 0
        self._looking = Looking(self.settings, self.broker.due_in)
        self._rested_at = 0.0
        self._upkeep_at = 0.0
        self._forgotten_at = 0.0
        self._retry_at = 0.0
        self._retry_pause = MIN_PAUSE
        self._out_since: float | None = None

    # -- life --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads, unless they run.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        with self._life_lock:
            self._unused_since = None
            if self._thread is not None or self._stopping:
                return
            self._keeper.start()
            self._reaper.start()
            self._looking.watch = self.broker.watch(self._told)
            self._thread = threading.Thread(target=self._pump, name="taskgate-pump", daemon=True)
            self._thread.start()

    def _rest(self) -> bool:
        """In the pump: end the threads if the engine has not been used for long; returns whether that was so."""
        with self._life_lock:
            with self._lock:
                now = time.monotonic()
                if self._in_use():
                    self._unused_since = None
                elif self._unused_since is None:
                    self._unused_since = now
                if self._unused_since is None or now < self._unused_since + REST_AFTER:
                    return False
                self._thread = None
            self._looking.watch.close()
            self._keeper.stop()
            self._reaper.stop()
            return True

    def _in_use(self) -> bool:
        consumed = any(window.consumers for window in self._windows)
        holds = any(window.holds for window in self._windows)
        return consumed or holds or bool(self._pending) or self._retired is not None or self._stopping

    def stop(self) -> None:
        """Stop claiming, write the settlements that wait, give everything else back, stop the threads. Idempotent."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            for window in self._windows:
                self._put_back(window)
            self._windows.clear()
            self._work.notify_all()
            self._arrived.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            # A call that hangs in a dead network must not keep the process from ending.
            self._thread.join(LAST_TRY)
        self._last_settlements()
        self._looking.watch.close()
        self._keeper.stop()
        self._reaper.stop()

    def retire(self, done: Callable[[], None]) -> None:
        """End consuming, but go on renewing and settling what consumers still have; no database work here.

        For a connection that was given up while its process lives on: tasks that are running will be
        acknowledged. A message that nobody has any more goes back. ``done`` is called at the end, from the
        pump's thread; at once when the engine rests.
        """
        with self._lock:
            if self._stopping or self._retired is not None:
                return
            self._retired = done
            self._retired_at = time.monotonic()
            for window in self._windows:
                window.consumers.clear()
                self._add(window.take_buffered(), Action.RETURN)
            resting = self._thread is None
            self._work.notify_all()
            self._arrived.notify_all()
        if resting:
            done()

    def after_fork(self) -> None:
        """In the child: everything here is the parent's; forget it without settling anything."""
        self._reset()
        self._stopping = True

    def _last_settlements(self) -> None:
        give_up = time.monotonic() + LAST_TRY
        pause = MIN_PAUSE
        why: object = "the last call to the broker has not come back"
        while (left := give_up - time.monotonic()) > 0 and self._turn_lock.acquire(timeout=left):
            try:
                self._write_pending()
            except TaskgateError as error:
                why = error
            else:
                return
            finally:
                self._turn_lock.release()
            time.sleep(pause)
            pause = min(MAX_PAUSE, pause * 2)
        logger.warning(
            "stopping with %d acknowledgements and %d other settlements unwritten, those executions will run again: %s",
            len(self._pending.acks),
            len(self._pending.others),
            why,
        )

    # -- what channels call ------------------------------------------------------------------------

    @property
    def settles_after_close(self) -> bool:
        """Whether what consumers still have can be settled although the connection is gone, see :meth:`retire`."""
        return self._retired is not None and not self._stopping

    @property
    def refused(self) -> int:
        """How many settlements were refused because the lease was lost."""
        return self._settler.refused

    @property
    def out(self) -> bool:
        """Whether the broker could not be used when it was last tried; what need not be done is then left."""
        return self._out_since is not None

    def add_window(self, window: Window) -> None:
        """Take part in the deliveries of a channel."""
        with self._lock:
            self._check_open()
            if window not in self._windows:
                self._windows.append(window)

    def remove_window(self, window: Window) -> int:
        """Give back everything of a channel that closes; returns how many messages its consumers had."""
        with self._lock:
            if window not in self._windows:
                return 0
            self._windows.remove(window)
            self._looking.forget([(window, False), (window, True)])
            window.consumers.clear()
            return self._put_back(window)

    def add_consumer(self, window: Window, consumer: Consumer) -> None:
        """Start consuming."""
        with self._lock:
            self._check_open()
            window.consumers[consumer.tag] = consumer
            self._upkeep_at = 0.0
            self._wake()

    def cancel_consumer(self, window: Window, tag: str) -> Consumer | None:
        """Stop consuming; what this consumer has not seen goes back."""
        with self._lock:
            consumer = window.consumers.pop(tag, None)
            if consumer is not None:
                self._add(window.take_buffered(consumer), Action.RETURN)
                self._upkeep_at = 0.0
                self._work.notify()
            return consumer

    def set_prefetch(self, window: Window, count: int) -> None:
        """Change the prefetch window."""
        with self._lock:
            window.prefetch_count = count
            self._work.notify()
            self._announce()

    def set_limit(self, window: Window, can_start: Callable[[], int] | None) -> None:
        """Claim no more than the consumer can start now."""
        with self._lock:
            window.can_start = can_start
            self._work.notify()

    def set_put_aside(self, window: Window, put_aside: Callable[[], int] | None) -> None:
        """Let what the consumer puts aside take up no places."""
        with self._lock:
            window.put_aside = put_aside
            self._work.notify()

    def look_for_room(self) -> None:
        """Room may have come up that nobody has told of."""
        with self._lock:
            self._work.notify()

    def set_flow(self, window: Window, active: bool) -> None:
        """Stop or go on delivering."""
        with self._lock:
            window.flow = active
            self._work.notify()
            self._announce()

    def settle(
        self,
        window: Window,
        tag: int,
        action: Action,
        *,
        multiple: bool = False,
        detail: str | None = None,
        delay: float = 0.0,
        told: bool = False,
    ) -> None:
        """Settle deliveries by tag. From any thread; does not wait for the database. Unknown tags are ignored."""
        with self._lock:
            room = window.free(no_ack=False)
            taken = window.take(tag, multiple=multiple)
            # Settling all up to a tag is no word about what has been acknowledged before.
            self._add(taken, action, detail, delay, told=told)
            if not (taken or multiple):
                begun = Action.INTERRUPTED if action is Action.LOST else action
                self._add(window.take_begun(tag), begun, detail, delay, told=told)
            self._room_changed(window, room)

    def begin(self, window: Window, tag: int) -> None:
        """Take a delivery for acknowledged because its run begins; :meth:`settle` it when that has ended.

        It is written like an acknowledgement, unless it is settled by then. From any thread; does not wait for the
        database. Unknown tags are ignored.
        """
        with self._lock:
            room = window.free(no_ack=False)
            delivery = window.begin(tag)
            if delivery is not None:
                self._pending.add(Settlement(delivery, Action.BEGIN, time.monotonic()))
                if len(self._pending.begins) == 1:
                    self._work.notify()
                self._room_changed(window, room)

    def recover(self, window: Window) -> None:
        """Requeue everything that a channel has delivered and not settled."""
        with self._lock:
            room = window.free(no_ack=False)
            self._add(window.take_all(), Action.REQUEUE)
            self._room_changed(window, room)

    def consumers_of(self, queue: str) -> int:
        """How many consumers of this connection a queue has."""
        with self._lock:
            return sum(len(window.consumers_of(queue)) for window in self._windows)

    def consumed(self) -> dict[str, int]:
        """Queues that this connection consumes, and with how many consumers."""
        with self._lock:
            return Counter(c.queue for window in self._windows for c in window.consumers.values())

    @property
    def session(self) -> Session | None:
        """The session of this engine's leases, while it runs."""
        return self._keeper.session

    def wake(self, queues: Iterable[str]) -> None:
        """Look for work now if one of the queues is consumed here."""
        with self._lock:
            concerned = [
                (window, consumer.no_ack)
                for queue in queues
                for window in self._windows
                for consumer in window.consumers_of(queue)
            ]
            if concerned:
                self._looking.heard(concerned)
            # Who has no room looks when it has some.
            if not self._stopping and any(
                window.flow and window.free(no_ack=no_ack) > 0 for window, no_ack in concerned
            ):
                self._wake()

    def _told(self, queues: Collection[str] | None) -> None:
        """The store has told of work, or that it can't tell any more."""
        if queues is not None:
            self.wake(queues)
            return
        with self._lock:
            if not self._stopping:
                self._wake()

    def flush(self) -> None:
        """Write the settlements that wait, now and in this thread.

        Raises:
            StoreUnavailable: they will be written later.
        """
        with self._turn_lock:
            self._write_pending()

    def flush_last(self) -> None:
        """As :meth:`flush`, for somebody who closes and can't do anything about it: tries once, and does not raise.

        What could not be written is written later, or the leases end by themselves.
        """
        if self.out:
            return
        try:
            self.flush()
        except TaskgateError as error:
            self._went_wrong(error)

    def unanswered(self) -> None:
        """Note that the broker has not answered somebody who closes, for a long time."""
        self._went_wrong(StoreUnavailable("it does not answer"))

    def get(self, window: Window, queue: str, *, no_ack: bool) -> Delivery | None:
        """Fetch one message, after writing the settlements that wait.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        with self._lock:
            self._check_open()
            delivery = window.take_one_of(queue)
            if delivery is not None:
                # What a consumer of the channel has not seen yet. If it does not acknowledge, that is done already.
                delivery.consumer = None
                window.hand_out(delivery)
        if delivery is not None:
            if no_ack and not delivery.no_ack:
                self.settle(window, delivery.tag, Action.ACK)
            return delivery
        with self._turn_lock:
            self._write_pending()
            return self._fetch(window, queue, no_ack=no_ack)

    def next_delivery(self, timeout: float | None) -> Delivery | None:
        """Wait for the next delivery; ``None`` when ``timeout`` seconds (``None``: for ever) have passed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while True:
                self._check_open()
                delivery = self._next()
                if delivery is not None:
                    return delivery
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._arrived.wait(left)

    def dispatch(self, most: int, seconds: float) -> None:
        """Deliver what is there, for an event loop: at most so many, and no longer than that."""
        self._ready.clear()
        stop = time.monotonic() + seconds
        try:
            for _ in range(most):
                delivery = self.next_delivery(0)
                if delivery is None:
                    return
                delivery.window.receive(delivery)
                if time.monotonic() >= stop:
                    return
        finally:
            with self._lock:
                self._announce()

    # -- under the lock ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._stopping or self._retired is not None:
            raise RecoverableConnectionError("the connection to the broker is closed")

    def _wake(self) -> None:
        self._wakes += 1
        self._looking.woken()
        self._work.notify()

    def _next(self) -> Delivery | None:
        ready = [delivery for window in self._windows if (delivery := window.first_ready()) is not None]
        if not ready:
            return None
        # The windows take turns, but no message overtakes a broadcast that was published before it.
        first = min((one for one in ready if one.no_ack), key=lambda one: one.claim.id, default=ready[0])
        delivery = first if first.claim.id < ready[0].claim.id else ready[0]
        window = delivery.window
        room = window.free(no_ack=delivery.no_ack)
        window.deliver(delivery)
        # The others come first next time.
        self._windows.remove(window)
        self._windows.append(window)
        if delivery.no_ack or not window.prefetch_count:
            self._room_changed(window, room, no_ack=delivery.no_ack)
        return delivery

    def _announce(self) -> None:
        if any(window.has_ready() for window in self._windows):
            self._arrived.notify_all()
            self._ready.set()

    def _put_back(self, window: Window) -> int:
        self._add(window.take_buffered(), Action.RETURN)
        seen = window.take_all()
        self._add(seen, Action.REQUEUE)
        # Nobody will be able to tell its end.
        self._add(window.take_begun(), Action.INTERRUPTED, _CLOSED)
        return len(seen)

    def _add(
        self,
        deliveries: Sequence[Delivery],
        action: Action,
        detail: str | None = None,
        delay: float = 0.0,
        *,
        told: bool = False,
    ) -> None:
        """Let settlements wait to be written, and start a turn if that makes it due."""
        if not deliveries:
            return
        now = time.monotonic()
        before = len(self._pending.acks)
        for delivery in deliveries:
            delivery.stage = Stage.SETTLING
            self._pending.add(Settlement(delivery, action, now, detail, delay, told))
        reached = before < self._enough_acks() <= len(self._pending.acks)
        if action is not Action.ACK or not before or reached or self._idle():
            self._work.notify()

    def _enough_acks(self) -> int:
        """How many acks make a turn due: half of the smallest window."""
        size = min((window.size(no_ack=False) for window in self._windows if window.consumers), default=1)
        return min(ENOUGH_ACKS, -(-size // 2))

    def _idle(self) -> bool:
        """Whether the consumers have nothing left to do."""
        return not any(window.outstanding for window in self._windows)

    def _room_changed(self, window: Window, before: int, *, no_ack: bool = False) -> None:
        """Start a turn when a window has just become half free, or has its first free place."""
        after = window.free(no_ack=no_ack)
        if before <= 0 < after:
            window.room_since = time.monotonic()
            self._work.notify()
        elif before * 2 < window.size(no_ack=no_ack) <= after * 2:
            self._work.notify()

    def _due(self, now: float) -> float:
        """When the next turn is due."""
        # While the consumer has something to do, the database rests as long as the last turn took: in that time a
        # fast consumer deals with all it has, and is served with a whole window at once.
        idle = self._idle()
        rested = now if idle else max(now, self._rested_at)
        due = math.inf
        if self._pending.others:
            due = now
        elif self._pending.acks:
            enough = idle or len(self._pending.acks) >= self._enough_acks()
            due = max(rested, now if enough else self._pending.acks[0].since + self._options.ack_delay)
        begun = self._pending.oldest_begin()
        if begun is not None:
            due = min(due, max(rested, begun + self._options.ack_delay))
        if self._retired is not None:
            due = min(due, self._look_at)
        else:
            due = min(due, self._upkeep_at)
            if self._unused_since is not None:
                due = min(due, self._unused_since + REST_AFTER)
            if any(window.consumers for window in self._windows):
                due = min(due, max(rested, self._room_due(now)))
        return max(due, self._retry_at)

    def _room_due(self, now: float) -> float:
        due = math.inf
        for window in self._windows:
            for no_ack in {consumer.no_ack for consumer in window.consumers.values()}:
                free = window.free(no_ack=no_ack)
                if free > 0 and window.flow:
                    # Where the consumer could start something now, it waits for nothing else.
                    enough = window.curbed or free * 2 >= window.size(no_ack=no_ack)
                    room_due = now if enough else window.room_since + self._options.ack_delay
                    due = min(due, self._looking.due((window, no_ack), room_due))
                elif window.curbed:
                    due = min(due, now + LOOK_FOR_ROOM)
        return due

    def _intakes(self, *, anyway: bool) -> list[Intake]:
        """Who has room for claims; nobody if none of them has a reason to look now, unless ``anyway``."""
        if self._stopping or self._retired is not None:
            return []
        intakes = []
        for window in self._windows:
            for no_ack in (False, True):
                queues = window.queues(no_ack=no_ack)
                free = window.free(no_ack=no_ack)
                if queues and free > 0 and window.flow:
                    intakes.append(Intake(window, no_ack, queues, free))
                else:
                    # What comes until it has room again, nobody here has looked for.
                    self._looking.forget([(window, no_ack)])
        return intakes if anyway or self._looking.any_due(intake.key for intake in intakes) else []

    # -- the pump ----------------------------------------------------------------------------------

    def _pump(self) -> None:
        while True:
            with self._lock:
                while not self._stopping:
                    now = time.monotonic()
                    due = self._due(now)
                    if due <= now:
                        break
                    self._work.wait(None if due == math.inf else due - now)
                if self._stopping:
                    return
            try:
                with self._turn_lock:
                    asked = self._turn()
            except TaskgateError as error:
                self._went_wrong(error)
            except Exception:
                # The pump must not die silently: its consumer would wait for ever.
                logger.exception("a turn of the delivery engine failed")
                self._went_wrong(None)
            else:
                if asked:
                    self._went_well()
            if self._retired is not None and self._let_go():
                self._retired()
                return
            if self._rest():
                return

    def _turn(self) -> bool:
        """One turn; returns whether something was written or claims were asked for: then the broker has answered."""
        if self._retired is not None:
            self._give_back_abandoned()
        began = time.monotonic()
        if began >= self._forgotten_at:
            self._forgotten_at = began + FORGOTTEN_EVERY
            self._end_forgotten()
        with self._lock:
            batch = self._pending.split(began - self._options.ack_delay)
            # Where something is acknowledged, a look costs no transaction of its own.
            intakes = self._intakes(anyway=bool(batch.acks or batch.begins))
            wakes = self._wakes
        asked = bool(batch)
        requests: list[Request] = []
        failed = True
        try:
            self._settler.write_others(batch)
            if intakes and self._keeper.may_claim:
                requests = requests_for(intakes, self._keeper.session_for, split=self._looking.split)
                for request in requests:
                    refused, claims = self.broker.ack_and_dequeue(
                        [settlement.claim for settlement in batch.acks],
                        request.queues,
                        request.limit,
                        owner=self._owner,
                        session=request.session,
                        begin=[settlement.claim for settlement in batch.begins],
                    )
                    self._settler.acked(batch, refused)
                    request.found = len(claims)
                    request.curbed = request.would_take_more(claims)
                    self._admit(claims)
            self._settler.write_acks(batch)
            failed = False
        finally:
            with self._lock:
                self._pending.put_back(batch)
                # A look that failed has not found that there is nothing.
                self._plan_next_look(requests, began=began, woken=failed or wakes != self._wakes)
        if self._retired is None and time.monotonic() >= self._upkeep_at:
            self._keep_up()
        return asked or bool(requests)

    def _keep_up(self) -> None:
        with self._lock:
            self._upkeep_at = math.inf
        pause = 0.0
        try:
            pause = self._upkeep()
        finally:
            with self._lock:
                # At once, if it failed or something has changed meanwhile.
                self._upkeep_at = min(self._upkeep_at, time.monotonic() + pause)

    def _plan_next_look(self, requests: Sequence[Request], *, began: float, woken: bool) -> None:
        now = time.monotonic()
        self._rested_at = now + min(now - began, LONGEST_REST)
        for window in self._windows:
            window.room_since = now
        if requests:
            self._looking.looked(requests, self._windows, began=began, woken=woken)
        elif not self._keeper.may_claim:
            self._looking.hold(self._windows)

    def _admit(self, claims: Sequence[Claim]) -> None:
        """Take claims in: hold their leases, decode them, and put them into the buffers."""
        if not claims:
            return
        decoded = [(claim, self._decode(claim)) for claim in claims]
        # Before anybody can see them: a lease that is not held is not renewed.
        self._keeper.hold(claims)
        unknown: Exception | None = None
        revoked: set[int] = set()
        try:
            revoked = self.revoked.among(decoded)
        except Exception as error:  # noqa: BLE001  # raised again below: what is held must go somewhere first
            unknown = error
        with self._lock:
            broadcast = {queue for window in self._windows for queue in window.queues(no_ack=True)}
        # What needs no acknowledgement is acknowledged before it is delivered, and that takes time. So it goes first: a
        # task must not overtake the revocation that was published before it.
        first = [pair for pair in decoded if pair[0].queue in broadcast]
        rest = [pair for pair in decoded if pair[0].queue not in broadcast]
        try:
            self._take_in(first, revoked, deliver=unknown is None)
        finally:
            self._take_in(rest, revoked, deliver=unknown is None)
        if unknown is not None:
            raise unknown

    def _take_in(
        self, decoded: Sequence[tuple[Claim, Envelope | Undecodable]], revoked: Collection[int], *, deliver: bool
    ) -> None:
        if not decoded:
            return
        at_once = Batch()
        with self._lock:
            for claim, envelope in decoded:
                delivery = self._register(claim, envelope, self._place(claim))
                action: Action | None = None
                if isinstance(envelope, Undecodable):
                    action = Action.UNDECODABLE
                elif claim.id in revoked:
                    action = Action.CANCELED
                elif delivery.consumer is None or not deliver:
                    action = Action.RETURN  # its consumer was canceled in the meantime, or it may be revoked
                elif delivery.no_ack:
                    action = Action.ACK
                if action is None:
                    delivery.window.put(delivery)
                else:
                    # What is acknowledged is delivered then; all else never is.
                    delivery.no_ack = action is Action.ACK
                    delivery.stage = Stage.SETTLING
                    detail = str(envelope) if isinstance(envelope, Undecodable) else None
                    at_once.add(Settlement(delivery, action, time.monotonic(), detail))
            self._announce()
        if at_once:
            self._write_at_once(at_once)

    def _write_at_once(self, batch: Batch) -> None:
        try:
            self._settler.write_others(batch)
            self._settler.write_acks(batch)
        finally:
            with self._lock:
                self._pending.put_back(batch)

    def _decode(self, claim: Claim) -> Envelope | Undecodable:
        try:
            return decode(claim.payload)
        except Undecodable as error:
            logger.error(  # noqa: TRY400  # the message says it all
                "execution %d in queue %r can't be decoded and becomes a dead letter: %s", claim.id, claim.queue, error
            )
            return error

    def _place(self, claim: Claim) -> tuple[Window, Consumer] | None:
        """The consumer with the most room, the longest unserved first."""
        best: tuple[Window, Consumer] | None = None
        most = 0
        for window in self._windows:
            for consumer in window.consumers_of(claim.queue):
                free = window.free(no_ack=consumer.no_ack)
                if best is None or free > most:
                    best, most = (window, consumer), free
        if best is not None:
            window, consumer = best
            # Of several consumers of a queue on one channel, the next gets the next message.
            del window.consumers[consumer.tag]
            window.consumers[consumer.tag] = consumer
        return best

    def _register(
        self, claim: Claim, envelope: Envelope | Undecodable, place: tuple[Window, Consumer] | None
    ) -> Delivery:
        window, consumer = place if place is not None else (_NOWHERE, None)
        message = envelope if isinstance(envelope, Envelope) else Envelope(b"")
        delivery = Delivery(claim, message, window, consumer, consumer is not None and consumer.no_ack)
        # The row's bytes are not needed any more, and a full window of them can be large.
        claim.payload = b""
        self._live[claim.id, claim.token] = delivery
        return delivery

    def _settled(self, taken: list[Delivery], refused: list[Delivery]) -> None:
        """The database has answered settlements."""
        self._keeper.drop([delivery.claim for delivery in (*taken, *refused)])
        with self._lock:
            for delivery in (*taken, *refused):
                self._live.pop((delivery.claim.id, delivery.claim.token), None)
            for delivery in taken:
                # Acked before it is delivered: at most once is what this consumer asked for.
                if delivery.no_ack and delivery.window.consumers.get(_tag(delivery)) is delivery.consumer:
                    delivery.stage = Stage.BUFFERED
                    delivery.window.put(delivery)
            self._announce()

    def _write_pending(self) -> None:
        with self._lock:
            batch = self._pending.split(math.inf)
        self._write_at_once(batch)

    def _fetch(self, window: Window, queue: str, *, no_ack: bool) -> Delivery | None:
        session = None if no_ack else self._keeper.session_for(queue)
        while claims := self.broker.dequeue([queue], 1, 0.0, owner=self._owner, session=session):
            (claim,) = claims
            if not no_ack:
                self._keeper.hold(claims)
            envelope = self._decode(claim)
            if isinstance(envelope, Undecodable):
                self._settle_undelivered(claim, Action.UNDECODABLE, str(envelope))
            elif self._is_revoked(claim, envelope):
                self._settle_undelivered(claim, Action.CANCELED)
            elif not no_ack or not self.broker.ack_many(claims):
                with self._lock:
                    delivery = self._register(claim, envelope, None)
                    delivery.window, delivery.no_ack = window, no_ack
                    window.hand_out(delivery)
                    if no_ack:
                        del self._live[claim.id, claim.token]
                return delivery
        return None

    def _is_revoked(self, claim: Claim, envelope: Envelope) -> bool:
        try:
            return bool(self.revoked.among([(claim, envelope)]))
        except TaskgateError:
            self._settle_undelivered(claim, Action.RETURN)
            raise

    def _settle_undelivered(self, claim: Claim, action: Action, detail: str | None = None) -> None:
        try:
            if action is Action.UNDECODABLE:
                self.broker.fail(claim, FailKind.SKIP, reason=Reason.UNDECODABLE, detail=detail)
            elif action is Action.CANCELED:
                self.broker.finish_canceled(claim)
            else:
                self.broker.requeue(claim, delivered=False)
        except LeaseLost:
            logger.debug("execution %d is not ours any more", claim.id)
        finally:
            # If that could not be written, the keeper finds a lease that nobody here knows, and gives it back.
            self._keeper.drop([claim])

    # -- retired -----------------------------------------------------------------------------------

    def _give_back_abandoned(self) -> None:
        """Requeue the messages that nobody has any more: those that a worker forgot when its connection broke."""
        self._look_at = time.monotonic() + LOOK
        if self._retired_at and time.monotonic() >= self._retired_at + COLLECT_AFTER:
            # What was in hand when the connection broke is often part of a cycle with the exception.
            self._retired_at = 0.0
            gc.collect()
        with self._lock:
            for window in self._windows:
                for delivery in window.unsettled:
                    if delivery.message is None or delivery.message() is None:
                        self._add(window.take(delivery.tag), Action.REQUEUE)
        self._end_forgotten()

    def _end_forgotten(self) -> None:
        """Runs that were acknowledged when they began, and whose message nobody has any more: nobody will end them."""
        with self._lock:
            for window in self._windows:
                for delivery in window.begun:
                    if delivery.message is None or delivery.message() is None:
                        self._add(window.take_begun(delivery.tag), Action.INTERRUPTED, _FORGOTTEN)

    def _let_go(self) -> bool:
        with self._lock:
            return not self._pending and not any(window.holds for window in self._windows)

    # -- outages -----------------------------------------------------------------------------------

    def _went_wrong(self, error: TaskgateError | None) -> None:
        now = time.monotonic()
        with self._lock:
            self._retry_at = now + self._retry_pause * random.uniform(0.5, 1.0)
            self._retry_pause = min(MAX_PAUSE, self._retry_pause * 2)
            waiting = len(self._pending.acks)
            began, self._out_since = self._out_since is None, self._out_since or now
        if began and error is not None:
            level = logging.WARNING if isinstance(error, StoreUnavailable) else logging.ERROR
            said = "the broker can't be used just now, will go on trying (%d acknowledgements wait): %s"
            logger.log(level, said, waiting, error)

    def _went_well(self) -> None:
        with self._lock:
            since, self._out_since = self._out_since, None
            self._retry_at, self._retry_pause = 0.0, MIN_PAUSE
            if since is not None:
                # What was away may have missed something, or be missing itself.
                self._upkeep_at = 0.0
        if since is not None:
            logger.warning("the broker can be used again after %.1f s", time.monotonic() - since)

    # -- what the keeper tells ---------------------------------------------------------------------

    def _on_lost(self, leases: list[Lease]) -> None:
        with self._lock:
            lost = []
            for lease in leases:
                delivery = self._live.pop((lease.id, lease.token), None)
                if delivery is None:
                    continue
                # Of one that is being settled the database's answer will tell.
                if delivery.stage in (Stage.DELIVERED, Stage.BEGUN):
                    lost.append(delivery.claim)
                room = delivery.window.free(no_ack=False)
                delivery.window.discard(delivery)
                delivery.stage = Stage.GONE
                self._room_changed(delivery.window, room)
        for claim in lost:
            logger.warning(
                "lease lost: another worker has execution %d now (queue %r, task_id %s); the result of this run will "
                "not be accepted",
                claim.id,
                claim.queue,
                claim.task_id,
            )

    def _on_canceled(self, leases: list[Lease]) -> None:
        """Finish what nobody has seen yet. A task that runs is left alone."""
        with self._lock:
            for lease in leases:
                delivery = self._live.get((lease.id, lease.token))
                if delivery is not None and delivery.stage is Stage.BUFFERED:
                    delivery.window.discard(delivery)
                    self._add([delivery], Action.CANCELED)


def _tag(delivery: Delivery) -> str:
    return "" if delivery.consumer is None else delivery.consumer.tag


#: Where a delivery belongs that no channel wants.
_NOWHERE = Window(lambda delivery: None)
