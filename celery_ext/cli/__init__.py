"""``celery taskgate …``: what operators type. One file for each subcommand."""
