"""A message as the bytes of one row: a line of JSON, a newline, and the body as it is.

Operators can read the line, and the body is neither encoded nor copied into text. Only AMQP's own properties
are kept, as an AMQP broker does it; what can't be written as JSON is left out of headers and properties
instead of failing a publish that AMQP would accept. Bytes, dates, decimals and UUIDs can be written.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kombu.utils import json as kombu_json

from .errors import Undecodable

logger = logging.getLogger("kombu_taskgate.transport")

#: Basic properties of AMQP 0-9-1, without those that have a place of their own.
PROPERTIES = (
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
VERSION = 1
_NEWLINE = b"\n"
_TEXT, _BYTES, _NOTHING = "text", "bytes", "none"


@dataclass(slots=True)
class Envelope:
    """A message as it was published."""

    body: bytes | str | None
    content_type: str | None = None
    content_encoding: str | None = None
    headers: dict[str, Any] = field(default_factory=dict)
    properties: dict[str, Any] = field(default_factory=dict)
    exchange: str = ""
    routing_key: str = ""


def encode(envelope: Envelope) -> bytes:
    """The bytes to store.

    Raises:
        TypeError: the body is neither text nor bytes.
    """
    kind, body = _body_bytes(envelope.body)
    known = {name: value for name in PROPERTIES if (value := envelope.properties.get(name)) is not None}
    line = {
        "v": VERSION,
        "type": envelope.content_type,
        "encoding": envelope.content_encoding,
        "exchange": envelope.exchange,
        "key": envelope.routing_key,
        "body": kind,
        "headers": envelope.headers,
        "properties": known,
    }
    return _line(line) + _NEWLINE + body


def _body_bytes(body: Any) -> tuple[str, bytes]:
    if isinstance(body, str):
        return _TEXT, body.encode("utf-8", "surrogatepass")
    if isinstance(body, (bytes, bytearray, memoryview)):
        return _BYTES, bytes(body)
    if body is None:
        return _NOTHING, b""
    raise TypeError(f"the body of a message is text or bytes, not {type(body).__name__}: let the producer serialize it")


def _line(line: dict[str, Any]) -> bytes:
    try:
        return json.dumps(line, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError):
        # "typed" says that the line must be read with the types that kombu's JSON knows.
        line["typed"] = True
        line["headers"] = _writable(line["headers"], "header")
        line["properties"] = _writable(line["properties"], "property")
        text: str = kombu_json.dumps(line, separators=(",", ":"))
        return text.encode("ascii")


def _writable(values: Any, what: str) -> dict[str, Any]:
    kept = {}
    for name, value in dict(values).items():
        try:
            kombu_json.dumps({name: value})
        except Exception as error:  # noqa: BLE001  # a value's own conversion may raise anything
            logger.debug("%s %r can't be written as JSON and is left out: %s", what, name, error)
        else:
            kept[name] = value
    return kept


def decode(payload: bytes) -> Envelope:
    """The message that was stored as these bytes.

    Raises:
        Undecodable: they are no message; says why.
    """
    first, newline, body = payload.partition(_NEWLINE)
    if not newline:
        raise Undecodable("the payload has no header line: it was not written by this transport")
    try:
        line = json.loads(first)
        if isinstance(line, dict) and line.get("typed"):
            line = kombu_json.loads(first)
    except MemoryError:
        raise  # it says nothing about the message
    except Exception as error:  # a type that was registered with kombu may raise anything
        raise Undecodable(f"the header line of the payload is not JSON: {error}") from error
    if not isinstance(line, dict) or "body" not in line:
        raise Undecodable("the header line of the payload is JSON, but of something else")
    if line.get("v") != VERSION:
        raise Undecodable(f"the message has version {line.get('v')!r}, this code reads version {VERSION}")
    return Envelope(
        body=_read_body(line["body"], body),
        content_type=_optional_text(line, "type"),
        content_encoding=_optional_text(line, "encoding"),
        headers=_mapping(line, "headers"),
        properties=_mapping(line, "properties"),
        exchange=_optional_text(line, "exchange") or "",
        routing_key=_optional_text(line, "key") or "",
    )


def _read_body(kind: Any, body: bytes) -> bytes | str | None:
    if kind == _BYTES:
        return body
    if kind == _NOTHING:
        return None
    if kind == _TEXT:
        try:
            return body.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise Undecodable(f"the body is said to be text and is not UTF-8: {error}") from error
    raise Undecodable(f"the body is of unknown kind {kind!r}")


def _optional_text(line: Mapping[str, Any], name: str) -> str | None:
    value = line.get(name)
    if value is not None and not isinstance(value, str):
        raise Undecodable(f"{name!r} in the header line is not a text")
    return value


def _mapping(line: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = line.get(name)
    if not isinstance(value, dict):
        raise Undecodable(f"{name!r} in the header line is not a mapping")
    return value
