"""Texts of messages as every store can hold them."""

from __future__ import annotations

import hashlib
from typing import Any

from ..core.model import MAX_NAME


def short_text(value: Any) -> str | None:
    """A text that every store can hold: a strange name must not fail a publish, the message has it in full."""
    if not isinstance(value, str):
        return None
    return value.replace("\0", "").encode("utf-8", "replace").decode()[:MAX_NAME] or None


def id_text(value: Any) -> str | None:
    """An id as every store can hold it. One that has to be changed for that ends in its digest.

    By ids executions are told apart: two that only begin alike must not become one, or revoking the one would cancel
    the other.
    """
    text = short_text(value)
    if text is None or text == value:
        return text
    digest = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[: MAX_NAME - len(digest) - 1]}~{digest}"
