"""What the body of a message says, as the workers of an app read it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kombu.message import Message
from kombu.serialization import dumps, prepare_accept_content, registry

from kombu_taskgate.transport.codec import Envelope


def body_of(app: Any, message: Envelope) -> Any:
    """Decompress and decode the body.

    Raises:
        Exception: whatever the serializer raises, and kombu for content that the app does not accept.
    """
    return Message(
        body=message.body,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        headers=dict(message.headers),
        properties={},
        accept=prepare_accept_content(app.conf.accept_content),
        postencode="utf-8",
    ).decode()


def with_body(message: Envelope, body: Any) -> Envelope:
    """The same message with another body, in the same kind of content."""
    name = registry.type_to_name[message.content_type]
    content_type, content_encoding, data = dumps(body, serializer=name)
    headers = {key: value for key, value in message.headers.items() if key != "compression"}
    return replace(message, body=data, content_type=content_type, content_encoding=content_encoding, headers=headers)
