"""Chords without a counter and without a task that polls.

Each header task leaves a part (see :mod:`kombu_taskgate.core.chords`); whoever sees that all are there ends the chord.
Where the broker has the same tables, the messages of the body are stored in the very transaction that ends it, so the
body starts exactly once, whoever is killed when. Where it is another broker one worker at a time takes the end upon
itself; killed between publishing the body and saying so, it leaves a chord whose body is published once more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery._state import get_current_task
from celery.app.task import Context
from celery.canvas import group, maybe_signature
from celery.exceptions import ChordError
from celery.result import GroupResult, allow_join_result, result_from_tuple
from celery.states import EXCEPTION_STATES, FAILURE, PROPAGATE_STATES
from celery.utils.functional import _regen, maybe_list
from kombu.exceptions import OperationalError
from kombu.serialization import dumps, loads, prepare_accept_content
from kombu.utils.encoding import bytes_to_str, ensure_bytes

from kombu_taskgate.core.chords import Chord, ChordPart, ChordState
from kombu_taskgate.core.errors import PayloadTooLarge, StoreUnavailable, TaskgateError
from kombu_taskgate.core.model import NewTask
from kombu_taskgate.transport.capture import capturing
from kombu_taskgate.transport.connection import tell_stored

from .lease import lease_of

if TYPE_CHECKING:
    from celery.backends.base import Backend as _Base
else:
    _Base = object

logger = logging.getLogger("celery_ext.chords")

#: Seconds for which one worker may be ending a chord before another one tries.
CLAIM = 60.0
#: Seconds after its last part in which a complete chord is certainly being ended by whoever has brought that part.
STUCK_AFTER = 5.0
#: Stuck chords that are asked for at once.
STUCK_AT_ONCE = 100


class PartFailed(ChordError):
    """A task of the header has failed; ``called``: error callbacks that were called for it."""

    called: Sequence[Any] = ()


@contextmanager
def _refused() -> Iterator[None]:
    """What can never be published fails the chord; what can't be now is tried again."""
    try:
        yield
    except PayloadTooLarge as error:  # kombu takes it for something that may pass
        raise ChordError(f"Callback error: {error!r}") from error
    except (StoreUnavailable, OperationalError):
        raise
    except Exception as error:
        raise ChordError(f"Callback error: {error!r}") from error


class ChordMixin(_Base):
    """What Celery asks of a result backend that joins chords by itself."""

    def apply_chord(self, header_result_args: Any, body: Any, **kwargs: Any) -> None:
        """Note a chord that is about to be published."""
        header = None
        # The tasks of a generator are not known yet, and they are not nested.
        if not isinstance(header_result_args[1], _regen):
            result = self.app.GroupResult(*header_result_args)
            # Parts come back flat; what the header looked like is needed only where it is nested.
            if any(isinstance(one, GroupResult) for one in result.results):
                header = ensure_bytes(self.encode({"result": result.as_tuple()}))
        key, message, expires = self.key_of(header_result_args[0]), self._dump_body(body), self._chord_expires_in()
        self.surely(lambda: self.broker.chords.begin(key, header=header, body=message, expires_in=expires))

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Celery says how many parts there will be, before it publishes the last task of the header."""
        task = get_current_task()
        by = lease_of(task.request).execution if task is not None else 0
        key, expires = self.key_of(group_id), self._chord_expires_in()
        self.surely(lambda: self.broker.chords.set_size(key, chord_size, by=by, expires_in=expires))

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        """A task joins the header."""
        key, task_id = self.key_of(chord_id), self.key_of(result.id)
        self.surely(lambda: self.broker.chords.add(key, task_id))

    def on_chord_part_return(
        self, request: Any, state: str, result: Any, *, called: Sequence[Any] = (), **kwargs: Any
    ) -> None:
        """A task of a header has ended.

        Args:
            request: its request.
            state: what it has come to.
            result: its value, or its exception.
            called: error callbacks that were called for it, and that are not to be called again for the chord.
            kwargs: what versions of Celery add.
        """
        task_id, group_id = request.id, request.group
        if not group_id or not task_id:
            return
        lease = lease_of(request)
        place = getattr(request, "group_index", None)
        part = ChordPart(
            task_id=self.key_of(task_id),
            place=-1 if place is None else int(place),
            status=state,
            payload=ensure_bytes(self.encode(_with_called(self.encode_result(result, state), called))),
            execution=lease.execution,
            token=lease.token,
            fenced=lease.held and self.is_broker,
        )
        key, expires = self.key_of(group_id), self._chord_expires_in()
        chord = self.surely(lambda: self.broker.chords.put(key, part, expires_in=expires))
        if not chord.has_body and chord.state is ChordState.OPEN:
            body = self._dump_body(request.chord)
            self.surely(lambda: self.broker.chords.begin(key, header=None, body=body, expires_in=expires))
        if chord.complete:
            self._end_chord(chord, maybe_signature(request.chord, app=self.app))

    def end_stuck_chords(self, *, since: float | None = None) -> int:
        """End the chords whose last worker died before it could; returns how many were found.

        Args:
            since: only look at those to which a part came in so many seconds.
        """
        chords = self.broker.chords.stuck(STUCK_AFTER, STUCK_AT_ONCE, since=since)
        for chord in chords:
            logger.warning("chord %s is complete and its body was not published: doing it now", chord.group_id)
            # Perhaps another worker can read it; the next chord is none of its business.
            signature = self.body_of_chord(chord.group_id)
            if signature is None:
                logger.error("chord %s has no body that could be published here", chord.group_id)
                continue
            self._end_chord(chord, signature)
        return len(chords)

    def body_of_chord(self, group_id: str) -> Any | None:
        """The body of a chord as it was noted; ``None``: there is no such chord, or its body can't be read here."""
        body = self.broker.chords.contents(self.key_of(group_id))[1]
        try:
            return None if body is None else maybe_signature(self._load_body(body), app=self.app)
        except Exception:
            logger.exception("the body of chord %s can't be read here", group_id)
            return None

    # -- ending --------------------------------------------------------------------------------------

    def _end_chord(self, chord: Chord, body: Any) -> None:
        """Publish the body, or tell of the failure. Does not raise: the task that brought the last part has ended."""
        key, claim = chord.group_id, None
        try:
            try:
                values = self._join_chord(chord)
            except ChordError:
                raise
            except (StoreUnavailable, OperationalError):
                raise
            except Exception as error:
                raise ChordError(f"Join error: {error!r}") from error
            if self.is_broker:
                self._store_body(key, body, values)
                return
            claim = self.surely(lambda: self.broker.chords.claim(key, CLAIM))
            if claim is not None:
                self._delay(body, values)
                self.surely(lambda: self.broker.chords.end(key, ChordState.DONE, claim=claim))
        except ChordError as error:
            logger.exception("chord %s has failed", key)
            self._fail_chord(key, body, error, claim)
        except (StoreUnavailable, OperationalError) as error:
            logger.warning("chord %s is complete, but can't be ended now; it is tried again: %s", key, error)

    def _store_body(self, key: str, body: Any, values: list[Any]) -> None:
        with capturing(self.publishing) as captured:
            self._delay(body, values)
        with _refused():
            ended = self.surely(lambda: self.broker.chords.end(key, ChordState.DONE, tasks=captured.tasks))
        if ended:
            tell_stored(self.publishing, captured.tasks)

    def _delay(self, body: Any, values: list[Any]) -> None:
        with _refused():
            body.delay(values)

    def _fail_chord(self, key: str, body: Any, error: ChordError, claim: int | None) -> None:
        """Tell of the failure; ``claim``: one that is held already."""
        if isinstance(error, PartFailed):
            body = _without_errbacks(body, error.called)
            # What is stored is Celery's own error.
            error = _as_chord_error(error)
        try:
            if claim is None:
                claim = self.surely(lambda: self.broker.chords.claim(key, CLAIM))
            if claim is None:
                return
            if not self.is_broker:
                self.chord_error_from_stack(body, error)
                self._fail_around(body, error)
                self.surely(lambda: self.broker.chords.end(key, ChordState.FAILED, claim=claim))
                return
            with capturing(self.publishing) as captured:
                self.chord_error_from_stack(body, error)
            self._fail_around(body, error)
            self._end_failed(key, claim, captured.tasks)
        except (StoreUnavailable, OperationalError) as unavailable:
            logger.warning("chord %s has failed, and nobody can be told now; it is tried again: %s", key, unavailable)
        except Exception:
            logger.exception("chord %s has failed, and its error callbacks failed too", key)

    def _end_failed(self, key: str, claim: int, tasks: list[NewTask]) -> None:
        """End a chord and store what its error callbacks have published."""
        chords = self.broker.chords
        try:
            ended = self.surely(lambda: chords.end(key, ChordState.FAILED, claim=claim, tasks=tasks))
        except StoreUnavailable:
            raise
        except TaskgateError:
            # One that is never stored must not have all of them called again and again.
            if self.surely(lambda: chords.end(key, ChordState.FAILED, claim=claim)):
                self._publish_singly(key, tasks)
            return
        if ended:
            tell_stored(self.publishing, tasks)

    def _publish_singly(self, key: str, tasks: list[NewTask]) -> None:
        for task in tasks:
            try:
                self.surely(lambda task=task: self.broker.enqueue(task))
            except TaskgateError as error:
                logger.error("an error callback of chord %s can't be published: %s", key, error)  # noqa: TRY400  # it says all
            else:
                tell_stored(self.publishing, [task])

    def _fail_around(self, body: Any, error: ChordError) -> None:
        """A body that will not run is a part of the chord around it, whose other tasks would wait for it for ever."""
        for one in body.tasks if isinstance(body, group) else [body]:
            context = Context(one)
            context.update(context.options)
            context.id, context.group = one.options.get("task_id"), one.options.get("group_id")
            if context.chord:
                # chord.link_error links a callback to this body too, as a nested chord's: once is enough.
                called = maybe_list(one.options.get("link_error")) or ()
                self.on_chord_part_return(context, FAILURE, error, called=called)

    # -- joining -------------------------------------------------------------------------------------

    def _join_chord(self, chord: Chord) -> list[Any]:
        """The values of the header in its order.

        Raises:
            ChordError: a task has failed; its exception is the cause.
        """
        parts = self.broker.chords.parts(chord.group_id)
        values = [self._value_of(part) for part in parts]
        header = self.broker.chords.contents(chord.group_id)[0]
        if header is None:
            return values
        by_id = {part.task_id: value for part, value in zip(parts, values, strict=True)}
        structure = result_from_tuple(self.decode(header)["result"], app=self.app)
        return [self._shaped(one, by_id) for one in structure.results]

    def _value_of(self, part: ChordPart) -> Any:
        value = self.decode(part.payload)
        called: Sequence[Any] = ()
        if part.status in PROPAGATE_STATES:
            # Of those only: what a task returns is its own.
            value, called = _called_with(value)
        if part.status in EXCEPTION_STATES:
            value = self.exception_to_python(value)
        if part.status in PROPAGATE_STATES:
            error = PartFailed(f"Dependency {part.task_id} raised {value!r}")
            error.called = called
            raise error from (value if isinstance(value, Exception) else None)
        return value

    def _shaped(self, result: Any, by_id: dict[str, Any]) -> Any:
        if isinstance(result, GroupResult):
            return [self._shaped(one, by_id) for one in result.results]
        key = self.key_of(result.id)
        if key in by_id:
            return by_id[key]
        # Part of the structure, but not of the chord: it has ended before what depends on it could.
        with allow_join_result():
            return result.get(timeout=self.app.conf.result_chord_join_timeout, propagate=True)

    # -- the body as it is kept ------------------------------------------------------------------------

    def _dump_body(self, body: Any) -> bytes:
        """As the message that it will be: with the task's serializer, not that of results."""
        content_type, content_encoding, data = dumps(dict(body), serializer=self.app.conf.task_serializer)
        kept: bytes = f"{content_type}\n{content_encoding}\n".encode() + ensure_bytes(data)
        return kept

    def _load_body(self, kept: bytes) -> Any:
        content_type, content_encoding, data = kept.split(b"\n", 2)
        accept = prepare_accept_content(self.app.conf.accept_content)
        return loads(data, bytes_to_str(content_type), bytes_to_str(content_encoding), accept=accept)

    def _chord_expires_in(self) -> float | None:
        given = self.app.conf.get("result_chord_expires")
        expires = self.expires if given is None else self.prepare_expires(given)
        return float(expires) if expires else None


#: Keys of a failed part that has something to say about error callbacks.
_ERROR, _CALLED = "taskgate_error", "taskgate_called"


def _with_called(error: Any, called: Sequence[Any]) -> Any:
    return {_ERROR: error, _CALLED: list(called)} if called else error


def _called_with(value: Any) -> tuple[Any, Sequence[Any]]:
    if isinstance(value, dict) and value.keys() == {_ERROR, _CALLED}:
        return value[_ERROR], value[_CALLED]
    return value, ()


def _without_errbacks(body: Any, called: Sequence[Any]) -> Any:
    """The body less error callbacks that were called already."""
    if not called:
        return body
    body = body.clone()
    body.options["link_error"] = [one for one in maybe_list(body.options.get("link_error")) or () if one not in called]
    return body


def _as_chord_error(error: PartFailed) -> ChordError:
    plain = ChordError(*error.args)
    plain.__cause__ = error.__cause__
    return plain
