"""Celery's own integration suite (``t/integration`` of its source distribution) on a broker and a result backend.

``python -m tests.conformance.celery_suite URL`` runs it; docs/conformance.md says how, and exceptions.toml which of its
tests do not pass, and why.
"""
