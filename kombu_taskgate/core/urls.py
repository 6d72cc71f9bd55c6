"""From the text of a URL to the database and dialect to use."""

from __future__ import annotations

import sqlalchemy as sa

from .dialects import find_dialect
from .dialects.base import Dialect
from .errors import ConfigError
from .settings import SECRET


def resolve(text: str) -> tuple[sa.URL, Dialect]:
    """Parse a database URL, choose its dialect and a driver that is installed.

    Raises:
        ConfigError: not a URL, an unsupported database, or no driver.
    """
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError):
        # The text may hold a password, so it is not repeated.
        raise ConfigError(
            "the database URL can't be read: it looks like dialect://user:password@host:port/database, "
            "with special characters of the password written as %XX"
        ) from None
    dialect = find_dialect(url)
    dialect.check_url(url)
    return dialect.choose_driver(url), dialect


def shown(url: sa.URL) -> str:
    """A URL as people may see it: without its password, and without those in its query, which drivers read too."""
    query = {name: "***" if SECRET.search(name) else value for name, value in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True)
