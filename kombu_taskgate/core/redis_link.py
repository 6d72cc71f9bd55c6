"""A Redis server that holds terms, or what is written under them: the connection, names of keys, time, and errors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .clock import Clock
from .errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    from typing import TypeAlias

    from redis import Redis

    #: A URL, or a client.
    Server: TypeAlias = str | Redis

#: Longest wait in seconds for a connection, and for an answer. Once each is tried again.
TIMEOUT = 2.0

#: Begins every script: the time in milliseconds, by ARGV[1] if that is a number and by the server otherwise; and whole
#: numbers as texts.
PRELUDE = """
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local function text(number) return string.format('%.0f', number) end
"""


class RedisLink:
    """What stores in Redis share. Its scripts are atomic, and all keys of one of them have one hash tag.

    Args:
        server: URL (``redis://``, ``rediss://`` or ``unix://``), or a client, which the caller closes.
        prefix: put before the name of every key; without braces.
        clock: replaces the server's time in tests.

    Raises:
        ConfigError: the URL or the prefix is wrong, or the package redis is not installed.
    """

    def __init__(self, server: Server, prefix: str, clock: Clock | None = None) -> None:
        try:
            import redis
        except ImportError:
            raise ConfigError("the package redis is not installed: pip install 'celery-taskgate[redis]'") from None
        if not isinstance(server, str) and not hasattr(server, "eval"):
            raise ConfigError(f"the Redis server must be a URL or a client of the package redis, not {server!r}")
        if "{" in prefix or "}" in prefix:
            raise ConfigError(f"the prefix of keys in Redis must not contain braces: {prefix!r}")
        self._errors = redis.exceptions
        self._prefix = prefix
        self._clock = clock
        self._owned = isinstance(server, str)
        self._client: Any = _connect(server) if isinstance(server, str) else server
        self.shown = _shown(server) if isinstance(server, str) else _shown_client(server)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shown}>"

    def names(self, key: str, *kinds: str) -> list[str]:
        """The names of keys in Redis that belong to one key of ours: all in one slot of a cluster."""
        # The tag ends at the first brace, so there must be none in it.
        tag = key.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
        return [f"{self._prefix}{{{tag}}}:{kind}" for kind in kinds]

    def run(self, script: str, keys: list[str], *values: str | float) -> Any:
        """Run a script (see :data:`PRELUDE`); texts in its answer are ``str``.

        Raises:
            StoreUnavailable: the server can't be reached or refuses just now.
            ConfigError: it will never do this (wrong password, rights, a key that is something else).
        """
        now = "" if self._clock is None else self._clock.now_ms()
        errors = self._errors
        try:
            return _decoded(self._client.eval(PRELUDE + script, len(keys), *keys, now, *values))
        except (errors.AuthenticationError, errors.NoPermissionError) as error:
            raise ConfigError(f"Redis at {self.shown} refuses: {error}") from None
        except errors.ResponseError as error:
            if "WRONGTYPE" in str(error):
                raise ConfigError(f"a key in Redis at {self.shown} is used by something else: {error}") from None
            raise StoreUnavailable(f"Redis at {self.shown} refuses just now: {error}") from error
        except (errors.RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis at {self.shown} is not available: {error}") from error

    def close(self) -> None:
        """Close the connections, unless the client is the caller's. Idempotent."""
        if self._owned:
            self._client.close()


def _connect(url: str) -> Redis:
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    try:
        # Tried again once, because an idle connection may have been closed by the other side.
        return Redis.from_url(
            url,
            socket_timeout=TIMEOUT,
            socket_connect_timeout=TIMEOUT,
            socket_keepalive=not url.startswith("unix:"),
            retry=Retry(NoBackoff(), 1),
        )
    except (ValueError, TypeError):
        # The text may hold a password, so it is not repeated.
        raise ConfigError("the Redis URL can't be read: it looks like redis://user:password@host:6379/0") from None


def _shown(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    try:
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        port = ""
    return f"{parts.scheme}://{parts.hostname or 'localhost'}{port}{parts.path}"


def _shown_client(client: Any) -> str:
    known = getattr(getattr(client, "connection_pool", None), "connection_kwargs", {})
    if "path" in known:
        return f"unix://{known['path']}"
    return f"{known['host']}:{known.get('port', 6379)}/{known.get('db', 0)}" if "host" in known else "a cluster"


def _decoded(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_decoded(one) for one in answer]
    return answer.decode() if isinstance(answer, bytes) else answer


def milliseconds(text: str) -> int:
    """A number in an answer. Redis keeps scores as floating-point numbers; instants are exact in them."""
    return math.floor(float(text)) if "." in text or "e" in text else int(text)
