"""What a Celery worker does differently with taskgate as its broker; docs/workers.md tells it to users."""
