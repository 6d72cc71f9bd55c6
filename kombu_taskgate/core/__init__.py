"""The broker: leases, heartbeats and reaping over a SQL database. Knows neither kombu nor Celery."""
