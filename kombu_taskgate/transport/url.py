"""The database URL behind a kombu connection, and how it is shown.

kombu hands a URL over in one of two ways. The first URL of a connection arrives as text in ``hostname``
(without ``taskgate+``). An alternate that it has failed over to arrives taken apart into fields, without its
query, and with what the alternate left out still set from the one before. So the alternate's own text is
looked up by its fields, and only where there is none is the URL put together again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

from kombu.utils.url import url_to_parts

from ..core.errors import ConfigError
from ..core.settings import SECRET

PREFIX = "taskgate+"
#: scheme, user, password, the rest. The password may hold any character, as SQLAlchemy reads it; one that holds an
#: @ ends at the last @ before the path.
_URL = re.compile(
    r"(?P<scheme>[\w+.-]+)://"
    r"(?:(?P<user>[^:/@?]*)(?::(?P<password>[^@]*(?:@(?=[^/?]*@)[^/?@]*)*))?@)?"
    r"(?P<rest>.*)\Z",
    re.DOTALL,
)


def database_url(client: Any) -> str:
    """The URL of the database that a :class:`kombu.Connection` means now.

    Raises:
        ConfigError: it names no database.
    """
    text = _text(client)
    if not text:
        raise ConfigError(
            "the broker URL names no database: write taskgate+postgresql://user:password@host/database, "
            "taskgate+mysql://…, taskgate+sqlite:///file.db or taskgate+memory://"
        )
    return _with_credentials(text, client.userid, client.password)


def shown_url(client: Any, *, include_password: bool = False, mask: str = "**") -> str:
    """The URL as people may see it; never raises."""
    text = _text(client)
    if not text:
        return "taskgate://"
    if include_password:
        return PREFIX + _with_credentials(text, client.userid, client.password)
    return PREFIX + masked(_with_credentials(text, client.userid, mask if client.password else None), mask)


def masked(url: str, mask: str = "**") -> str:
    """The URL with its passwords replaced, also those in its query."""
    match = _URL.match(url)
    if match is not None and match["password"]:
        shown = f":{mask}" if mask else ""
        url = f"{match['scheme']}://{match['user']}{shown}@{match['rest']}"
    start, question, query = url.partition("?")
    if not question:
        return url
    pairs = parse_qsl(query, keep_blank_values=True)
    shown_pairs = [(name, mask if SECRET.search(name) else value) for name, value in pairs]
    return f"{start}?{urlencode(shown_pairs, safe='*/:,')}"


def hide_password(client: Any) -> None:
    """Move the password from the text of the URL to its own field, which kombu and Celery know not to show."""
    text = client.hostname
    match = _URL.match(text) if isinstance(text, str) else None
    if match is None or not match["password"] or client.password:
        return
    client.password = unquote(match["password"])
    client.hostname = f"{match['scheme']}://{match['user']}@{match['rest']}"


def forget_old_port(client: Any) -> None:
    """After a failover to a URL without a port, take away the port of the URL before it."""
    if isinstance(client.hostname, str) and "://" in client.hostname:
        return
    text = _text(client)
    if text:
        with suppress(ValueError):
            client.port = url_to_parts(text).port


class Alternates:
    """The failover order of a connection, with the queries taken off the URLs.

    ``Connection.switch`` takes each parameter of a query for one of its own and fails. The full text is found
    again in ``Connection.alt``.
    """

    def __init__(self, urls: Iterator[str]) -> None:
        self._urls = urls

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._urls).partition("?")[0]


def _text(client: Any) -> str | None:
    """The database URL as text, possibly without user and password."""
    host = _strip(client.hostname)
    if "://" in host:
        return None if host.startswith("taskgate://") else host
    scheme = client.transport_cls
    if not isinstance(scheme, str) or not scheme.startswith(PREFIX):
        return None
    # kombu writes the prefix before a missing host name too.
    host = "" if host == "None" else host
    return _alternate(client, scheme, host) or _from_fields(client, scheme, host)


def _strip(host: str | None) -> str:
    """Take off the prefix, which a connection copied after a failover can have several times."""
    host = host or ""
    while host.startswith(PREFIX):
        host = host[len(PREFIX) :]
    return host


def _alternate(client: Any, scheme: str, host: str) -> str | None:
    for url in client.alt or ():
        if not isinstance(url, str) or "://" not in url:
            continue
        try:
            parts = url_to_parts(url)
        except ValueError:
            continue
        if (parts.scheme, parts.hostname or "") != (scheme, host) or parts.username != client.userid:
            continue
        # Left out fields keep what an earlier URL has set, so only those that are there tell something.
        told: list[tuple[Any, Callable[[], Any]]] = [
            (parts.port, lambda: client.port),
            (parts.path, lambda: client.virtual_host),
            (parts.password, lambda: client.password),
        ]
        if all(value is None or value == current() for value, current in told):
            return _strip(url)
    return None


def _from_fields(client: Any, scheme: str, host: str) -> str:
    user = f"{quote(client.userid, safe='')}@" if client.userid else ""
    port = f":{client.port}" if client.port and host else ""
    path = client.virtual_host if client.virtual_host not in (None, "/") else ""
    host = f"[{host}]" if ":" in host else quote(host, safe=".-_")
    return f"{_strip(scheme)}://{user}{host}{port}/{path}"


def _with_credentials(url: str, user: str | None, password: str | Callable[[], str] | None) -> str:
    """Add user and password where the URL has none; a password may be a callable that returns it."""
    match = _URL.match(url)
    if match is None or not (user or password):
        return url
    if not match["rest"].partition("/")[0] and match["user"] is None:
        return url  # a file has no user
    if callable(password):
        password = password()
    named = match["user"] or (quote(user, safe="") if user else match["user"])
    if named is None:
        return url
    secret = match["password"] or (quote(password, safe="*") if password else None)
    return f"{match['scheme']}://{named}{'' if secret is None else ':' + secret}@{match['rest']}"
