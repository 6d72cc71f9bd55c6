"""When a consumer looks for work.

Who has found some looks again soon, since more often follows; who has found nothing, after a pause that grows. Where
the store tells of new work it sleeps until it is told, until something is due, or until a word may have been lost (see
:mod:`..core.watch`). Who has got room since, or found as much as it had room for, does not wait for that.

Nothing here locks: all of it is used under the lock of the delivery engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from ..core.settings import BrokerSettings
from ..core.watch import LOOK_ON, Polling, Watch
from .intake import Request
from .window import Window

#: A channel, and whether its consumers without or those with acknowledgement are meant.
Who = tuple[Window, bool]

#: Seconds for which whoever has found work that nobody told of looks for it as if nobody ever told.
LOOK_AFTER_UNTOLD = 600.0
#: How often things are looked at that tell nobody when they change.
LOOK = 0.25
#: The first pause after work was found, as a part of poll_min, and by what pauses grow.
SOON, GROWTH = 0.1, 1.5


class Looking:
    """What one engine's looks have found, and when the next is due (monotonic seconds).

    Args:
        settings: how long the pauses are.
        due_in: for how many seconds there will be nothing in some queues, as far as is known; see
            :meth:`..core.broker.Broker.due_in`.
    """

    def __init__(self, settings: BrokerSettings, due_in: Callable[[Sequence[str]], float]) -> None:
        self._settings = settings
        self._due_in = due_in
        #: How the store tells of new work.
        self.watch: Watch = Polling(settings.poll_max)
        #: When those look again who have found nothing.
        self.at = 0.0
        self.found_nothing: set[Who] = set()
        #: Whether each channel is to have a call of its own: one with little room holds up the others.
        self.split = False
        self._pause = settings.poll_min
        #: Whoever has heard or found something goes on looking until then.
        self.on_until = 0.0
        #: Whoever has found what nobody told of does not count on being told until then.
        self._distrusts_until = 0.0
        #: Whether the next look is one that nobody is expected to have to tell of.
        self.untold = False

    def woken(self) -> None:
        """Look now: somebody has told of work."""
        self.at = 0.0
        self._pause = self._settings.poll_min * SOON
        self.untold = False
        self.heard()

    def heard(self, concerned: Iterable[Who] = ()) -> None:
        """Somebody has told of work for these."""
        self.found_nothing.difference_update(concerned)
        self.on_until = time.monotonic() + LOOK_ON

    def forget(self, who: Iterable[Who]) -> None:
        """What these have found does not count any more."""
        self.found_nothing.difference_update(who)

    def due(self, who: Who, room_due: float) -> float:
        """When somebody with room, who would claim at ``room_due``, looks."""
        return max(room_due, self.at) if who in self.found_nothing else room_due

    def any_due(self, who: Iterable[Who]) -> bool:
        """Whether one of these has a reason to look now."""
        return time.monotonic() >= self.at or any(one not in self.found_nothing for one in who)

    def hold(self, windows: Collection[Window]) -> None:
        """Nobody may claim at the moment."""
        # Not later, however long somebody with room has been sleeping: others have got room since.
        self.at = time.monotonic() + LOOK
        self.found_nothing.update((window, no_ack) for window in windows for no_ack in (False, True))

    def looked(self, requests: Sequence[Request], windows: Collection[Window], *, began: float, woken: bool) -> None:
        """Plan the next look.

        Args:
            requests: what the look was made of, and what it has found.
            windows: the channels that are open now.
            began: when it began.
            woken: whether somebody has told of work meanwhile, or it failed.
        """
        now = time.monotonic()
        for request in requests:
            # But for a channel that has been closed meanwhile.
            keys = {intake.key for intake in request.intakes if intake.window in windows}
            self.found_nothing = self.found_nothing - keys if request.full else self.found_nothing | keys
        full = any(request.full for request in requests)
        self.split = any(request.curbed for request in requests) or (self.split and full)
        found = any(request.found for request in requests)
        # Before the sleep has ended, say for an acknowledgement, a look may find what is about to be told.
        if found and self.untold and began >= self.at:
            # The connection may have died, or there are publishers who do not tell: an older version, or one with
            # listen=False.
            self.watch.doubt()
            self._distrusts_until = now + LOOK_AFTER_UNTOLD
        self.untold = False
        if full or woken:
            self.at = 0.0
            return
        if found:
            self._pause = self._settings.poll_min * SOON
            self.on_until = now + LOOK_ON
        else:
            self._pause = min(self._pause * GROWTH, self._settings.poll_max, self.watch.longest_pause)
        pause = self._pause * random.uniform(0.8, 1.0)
        # The look must have begun after the time to look on, however long its answer took.
        if self.watch.live and began >= max(self.on_until, self._distrusts_until):
            pause = self._sleep(requests) or pause
        self.at = now + pause

    def _sleep(self, requests: Sequence[Request]) -> float:
        """How long to sleep where the store tells of new work; 0 where it is not known that there is nothing."""
        longest = self.watch.longest_pause * random.uniform(0.8, 1.0)
        due_in = min(self._due_in(request.queues) for request in requests)
        self.untold = due_in > longest
        return max(self._settings.poll_min, min(longest, due_in)) if due_in else 0.0
