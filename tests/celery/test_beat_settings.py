"""The settings of beat: where its lease is, what is refused, and that Django's namespace works."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_ext.beat.settings import beat_settings
from celery_ext.beat.stores import Stores
from kombu_taskgate.core.errors import ConfigError


def app_with(broker: str, **conf: Any) -> Celery:
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.update(conf)
    return app


DATABASE = "postgresql://user:s3cret@host/shop"


@pytest.mark.parametrize("url", [None, DATABASE, f"taskgate+{DATABASE}"])
def test_a_lease_in_the_brokers_database(url: str | None) -> None:
    """Its tables are the broker's, however it is written, so that a tick and its message can be one transaction."""
    options = {"table_prefix": "p_", "schema": "jobs"}
    app = app_with(f"taskgate+{DATABASE}", broker_transport_options=options, beat_taskgate_lease_url=url)
    settings = beat_settings(app)
    assert settings.is_broker
    assert settings.database is not None
    assert (settings.database.url, settings.database.table_prefix, settings.database.schema) == (DATABASE, "p_", "jobs")
    assert settings.key == "beat:shop"
    assert (settings.ttl, settings.interval) == (15.0, 5.0)
    assert "s3cret" not in Stores(settings).shown
    assert "s3cret" not in repr(settings)


def test_a_lease_elsewhere() -> None:
    other = "postgresql://user@host/other"
    assert not beat_settings(app_with(f"taskgate+{DATABASE}", beat_taskgate_lease_url=other)).is_broker
    redis = beat_settings(app_with("redis://host", beat_taskgate_lease_url="redis://:s3cret@host/3"))
    assert (redis.redis_url, redis.database, redis.is_broker) == ("redis://:s3cret@host/3", None, False)
    assert "s3cret" not in Stores(redis).shown
    assert "s3cret" not in repr(redis)
    results = beat_settings(app_with("redis://host", result_backend="taskgate+sqlite:///results.db"))
    assert results.database is not None
    assert results.database.url == "sqlite:///results.db"
    with pytest.raises(ConfigError, match="beat_taskgate_lease_url"):
        beat_settings(app_with("redis://host"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("lease_tll", 5, "did you mean beat_taskgate_lease_ttl"),
        ("lease_ttl", "5", "must be a number of seconds, not '5'"),
        ("lease_ttl", True, "must be a number"),
        ("lease_ttl", float("nan"), "must be a number"),
        ("lease_ttl", 0, "0.5 seconds to 100 years"),
        ("starting_deadline", -1, "0 seconds to 100 years"),
        ("key", "x" * 256, "256 characters"),
        ("lease_url", "nothing", "must be a URL"),
        ("lease_url", 7, "must be a URL"),
        ("lease_interval", 10, "beat_taskgate_lease_interval 10 s is too long .* less than 10 s"),
    ],
)
def test_what_can_not_be_right(name: str, value: Any, said: str) -> None:
    app = app_with("taskgate+sqlite:///a.db", **{f"beat_taskgate_{name}": value})
    with pytest.raises(ConfigError, match=said):
        beat_settings(app)


@pytest.mark.parametrize("value", ["soon", -1, True, float("nan")])
def test_celerys_own_deadline(value: Any) -> None:
    """It is looked at when a tick was missed, which is too late to find out."""
    app = app_with("taskgate+sqlite:///a.db", beat_cron_starting_deadline=value)
    with pytest.raises(ConfigError, match="beat_cron_starting_deadline must be"):
        beat_settings(app)


def test_in_a_namespace() -> None:
    """As Django projects write them."""

    class Conf:
        CELERY_BROKER_URL = "taskgate+sqlite:///a.db"
        CELERY_BEAT_TASKGATE_LEASE_TTL = 7
        CELERY_BEAT_TASKGATE_KEY = "ours"

    app = Celery("shop", set_as_current=False)
    app.config_from_object(Conf, namespace="CELERY")
    assert (beat_settings(app).ttl, beat_settings(app).key) == (7.0, "ours")

    class Wrong(Conf):
        CELERY_BEAT_TASKGATE_LEASE_TTLL = 8

    app = Celery("shop", set_as_current=False)
    app.config_from_object(Wrong, namespace="CELERY")
    with pytest.raises(ConfigError, match="CELERY_BEAT_TASKGATE_LEASE_TTLL"):
        beat_settings(app)
