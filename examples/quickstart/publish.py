"""Publish three tasks: one for now, one for later, and one that retries."""

from app import flaky, greet

greet.delay("now")
greet.apply_async(args=["a second later"], countdown=1)
flaky.delay()
print("published 3 tasks")
