"""The tables. ``Tables`` builds them for one prefix and schema; migrations.py creates them step by step.

Instants are BIGINT milliseconds since the epoch (UTC), by the database's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from .dialects.base import Dialect
from .model import MAX_NAME

#: Column ``lane``: which index entry a row has. Only LANE_READY rows are in the claim index, so that a claim
#: never walks over rows that can't be claimed; what is delayed is promoted when it is due.
LANE_NONE = 0
LANE_READY = 1
LANE_DELAYED = 2
LANE_BLOCKED = 3


def _name(key: str, **options: Any) -> sa.Column[str]:
    return sa.Column(key, sa.String(MAX_NAME), **options)


def _count(key: str, default: int = 0) -> sa.Column[int]:
    return sa.Column(key, sa.Integer, nullable=False, server_default=str(default))


class Tables:
    """All tables of one installation.

    Args:
        prefix: put before every table and index name.
        schema: database schema, or ``None`` for the default one.
        dialect: its types and kinds of index.
        options: keyword arguments for every ``Table`` (the dialect's ``table_options``).
    """

    def __init__(self, prefix: str, schema: str | None, dialect: Dialect, options: Mapping[str, Any]) -> None:
        self.prefix = prefix
        self._dialect = dialect
        self.metadata = sa.MetaData(schema=schema)
        self._options = dict(options)
        self.version = self._version()
        self.tasks = self._tasks()
        self.deps = self._deps()
        self.sessions = self._sessions()
        self.quotas = self._quotas()
        self.queues = self._queues()
        self.exchanges = self._exchanges()
        self.bindings = self._bindings()
        self.consumers = self._consumers()
        self.revocations = self._revocations()
        self.results = self._results()
        self.groups = self._groups()
        self.chords = self._chords()
        self.chord_parts = self._chord_parts()
        self.waits = self._waits()
        self.terms = self._terms()
        self.candidates = self._candidates()
        self.entries = self._entries()
        self.ticks = self._ticks()

    def _table(self, name: str, *parts: sa.Column[Any] | sa.Index, **options: Any) -> sa.Table:
        return sa.Table(self.prefix + name, self.metadata, *parts, **self._options, **options)

    def _index(self, name: str, *columns: str, unique: bool = False, where: str | None = None) -> sa.Index:
        partial = {} if where is None else self._dialect.partial_index(where)
        return sa.Index(f"{self.prefix}{name}", *columns, unique=unique, **partial)

    def _version(self) -> sa.Table:
        return self._table(
            "schema",
            sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
            sa.Column("version", sa.Integer, nullable=False),
        )

    def _tasks(self) -> sa.Table:
        return self._table(
            "tasks",
            sa.Column("id", self._dialect.id_type, primary_key=True, autoincrement=True),
            _name("queue", nullable=False),
            sa.Column("state", sa.String(10), nullable=False),
            sa.Column("lane", sa.SmallInteger, nullable=False),
            # Ascending, so that one index direction serves every database: rank = -priority.
            sa.Column("rank_", sa.SmallInteger, nullable=False),
            sa.Column("run_at", sa.BigInteger, nullable=False),
            sa.Column("created_at", sa.BigInteger, nullable=False),
            sa.Column("expires_at", sa.BigInteger),
            sa.Column("finished_at", sa.BigInteger),
            # Fencing token of the newest claim; 0 before the first.
            sa.Column("token", sa.BigInteger, nullable=False, server_default="0"),
            sa.Column("session", sa.BigInteger),
            _name("owner"),
            sa.Column("lease_until", sa.BigInteger),
            sa.Column("cancel_mark", sa.SmallInteger, nullable=False, server_default="0"),
            # 1: has parents or children, so that settling it must look at the deps table.
            sa.Column("linked", sa.SmallInteger, nullable=False, server_default="0"),
            sa.Column("fail_fast", sa.SmallInteger, nullable=False, server_default="1"),
            _count("pending_parents"),
            _count("deliveries"),
            _count("lease_lost"),
            _count("attempts"),
            _count("max_retry", 3),
            _count("throttled"),
            _name("type", nullable=False, server_default=""),
            _name("task_id"),
            _name("root_id"),
            _name("parent_task_id"),
            _name("group_id"),
            _name("key_"),
            # Place in the chain of replays that share a business key.
            _count("seq"),
            sa.Column("replay_of", sa.BigInteger),
            sa.Column("reason", sa.String(32)),
            sa.Column("detail", self._dialect.text_type),
            sa.Column("payload", self._dialect.blob_type, nullable=False),
            sa.Column("result", self._dialect.blob_type),
            # What later versions have added stands last, where ALTER TABLE puts it.
            # 1: the run has been acknowledged when it began, and is not to be repeated.
            sa.Column("begun", sa.SmallInteger, nullable=False, server_default="0"),
            _name("unique_key"),
            # The unique key again, as long as it is locked.
            _name("lock_"),
            # From when on somebody may answer for this final row; NULL: nothing to answer.
            sa.Column("answer_at", sa.BigInteger),
            self._claim_index(),
            self._index("tasks_later", "lane", "run_at", "queue", where=f"lane >= {LANE_DELAYED}"),
            self._index("tasks_lease", "session", "lease_until", where="state = 'running'"),
            self._index("tasks_task_id", "task_id"),
            self._answer_index(),
            self._index("tasks_finished", "state", "finished_at", where="finished_at IS NOT NULL"),
            self._index("tasks_key", "key_", "seq", unique=True, where="key_ IS NOT NULL"),
            self._index("tasks_lock", "lock_", unique=True, where="lock_ IS NOT NULL"),
            self._index("tasks_replay_of", "replay_of", unique=True, where="replay_of IS NOT NULL"),
            **self._dialect.never_reuse_ids,
        )

    def _claim_index(self) -> sa.Index:
        # "lane" leads for databases without partial indexes; in the others it is a constant in a short index.
        return self._index("tasks_claim", "lane", "queue", "rank_", "run_at", "id", where=f"lane = {LANE_READY}")

    def _answer_index(self) -> sa.Index:
        return self._index("tasks_answer", "answer_at", where="answer_at IS NOT NULL")

    def _deps(self) -> sa.Table:
        return self._table(
            "deps",
            sa.Column("child_id", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("parent_id", sa.BigInteger, primary_key=True, autoincrement=False),
            self._index("deps_parent", "parent_id"),
        )

    def _sessions(self) -> sa.Table:
        return self._table(
            "sessions",
            sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
            _name("owner", nullable=False),
            sa.Column("started_at", sa.BigInteger, nullable=False),
            sa.Column("until_", sa.BigInteger, nullable=False),
            self._index("sessions_until", "until_"),
        )

    def _quotas(self) -> sa.Table:
        return self._table(
            "quotas",
            _name("key_", primary_key=True),
            sa.Column("window_ms", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("window_start", sa.BigInteger, nullable=False),
            sa.Column("used", sa.BigInteger, nullable=False),
        )

    def _queues(self) -> sa.Table:
        return self._table(
            "queues",
            _name("name", primary_key=True),
            sa.Column("durable", sa.SmallInteger, nullable=False),
            sa.Column("auto_delete", sa.SmallInteger, nullable=False),
            sa.Column("exclusive", sa.SmallInteger, nullable=False),
            sa.Column("expires_ms", sa.BigInteger),
            sa.Column("message_ttl_ms", sa.BigInteger),
            sa.Column("touched_at", sa.BigInteger, nullable=False),
        )

    def _exchanges(self) -> sa.Table:
        return self._table(
            "exchanges",
            _name("name", primary_key=True),
            sa.Column("type", sa.String(32), nullable=False),
            sa.Column("durable", sa.SmallInteger, nullable=False),
            sa.Column("auto_delete", sa.SmallInteger, nullable=False),
        )

    def _bindings(self) -> sa.Table:
        return self._table(
            "bindings",
            # Digest of the other columns: together they are too long for a key on some databases.
            sa.Column("digest", sa.String(64), primary_key=True),
            _name("exchange", nullable=False),
            _name("queue", nullable=False),
            sa.Column("routing_key", sa.String(MAX_NAME), nullable=False),
            sa.Column("arguments", self._dialect.text_type, nullable=False),
            self._index("bindings_exchange", "exchange"),
            self._index("bindings_queue", "queue"),
        )

    def _consumers(self) -> sa.Table:
        return self._table(
            "consumers",
            _name("queue", primary_key=True),
            sa.Column("session", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("number", sa.Integer, nullable=False),
            self._index("consumers_session", "session"),
        )

    def _revocations(self) -> sa.Table:
        return self._table(
            "revocations",
            # First in the key: it is asked for by values.
            _name("value_", primary_key=True),
            # Empty: the value is a task id.
            _name("header", primary_key=True),
            sa.Column("until_", sa.BigInteger, nullable=False),
            self._index("revocations_until", "until_"),
        )

    def _results(self) -> sa.Table:
        return self._table(
            "results",
            _name("task_id", primary_key=True),
            sa.Column("status", sa.String(64), nullable=False),
            # See results.Finality.
            sa.Column("finality", sa.SmallInteger, nullable=False),
            _name("type", nullable=False, server_default=""),
            # Grows with each write, so that whoever waits sees that there is something new.
            _count("version", 1),
            # The lease under which it was stored; 0: under none.
            sa.Column("execution", sa.BigInteger, nullable=False, server_default="0"),
            sa.Column("token", sa.BigInteger, nullable=False, server_default="0"),
            # What became of the newest write, for databases whose upsert has no condition of its own.
            sa.Column("outcome", sa.SmallInteger, nullable=False, server_default="0"),
            sa.Column("stored_at", sa.BigInteger, nullable=False),
            sa.Column("expires_at", sa.BigInteger),
            sa.Column("content_type", sa.String(MAX_NAME), nullable=False, server_default=""),
            sa.Column("content_encoding", sa.String(MAX_NAME), nullable=False, server_default=""),
            sa.Column("payload", self._dialect.blob_type, nullable=False),
            # 1: an execution may wait for what follows, so that storing it must look at the waits table.
            sa.Column("awaited", sa.SmallInteger, nullable=False, server_default="0"),
            self._index("results_expires", "expires_at", where="expires_at IS NOT NULL"),
        )

    def _waits(self) -> sa.Table:
        return self._table(
            "waits",
            sa.Column("child_id", sa.BigInteger, primary_key=True, autoincrement=False),
            _name("parent_task_id", primary_key=True),
            # The workflow that the parent belongs to: while that goes on, another task may end in the parent's name.
            _name("root_id"),
            self._index("waits_parent", "parent_task_id"),
        )

    def _groups(self) -> sa.Table:
        return self._table(
            "groups",
            _name("group_id", primary_key=True),
            sa.Column("stored_at", sa.BigInteger, nullable=False),
            sa.Column("expires_at", sa.BigInteger),
            sa.Column("payload", self._dialect.blob_type, nullable=False),
            self._index("groups_expires", "expires_at", where="expires_at IS NOT NULL"),
        )

    def _chords(self) -> sa.Table:
        return self._table(
            "chords",
            _name("group_id", primary_key=True),
            sa.Column("state", sa.String(10), nullable=False),
            # How many parts it needs; NULL until whoever publishes the header knows.
            sa.Column("size", sa.Integer),
            # The execution that published the header; 0: none, or not known.
            sa.Column("applied_by", sa.BigInteger, nullable=False, server_default="0"),
            # Parts of executions up to this one belong to a run that is over.
            sa.Column("past", sa.BigInteger, nullable=False, server_default="0"),
            # Who is ending it, and until when nobody else may.
            sa.Column("claim_", sa.BigInteger),
            sa.Column("claimed_until", sa.BigInteger),
            sa.Column("touched_at", sa.BigInteger, nullable=False),
            sa.Column("expires_at", sa.BigInteger),
            sa.Column("header", self._dialect.blob_type),
            sa.Column("body", self._dialect.blob_type),
            self._index("chords_state", "state", "touched_at"),
            self._index("chords_expires", "expires_at", where="expires_at IS NOT NULL"),
        )

    def _chord_parts(self) -> sa.Table:
        return self._table(
            "chord_parts",
            _name("group_id", primary_key=True),
            _name("task_id", primary_key=True),
            # Place in the header; two entries may share a task id, or a place. -1: none.
            sa.Column("place", sa.Integer, primary_key=True, autoincrement=False),
            # Empty: a task that was added to the header and has not ended.
            sa.Column("status", sa.String(64), nullable=False),
            # 1: it was added to the header, beyond its size.
            sa.Column("added", sa.SmallInteger, nullable=False, server_default="0"),
            sa.Column("execution", sa.BigInteger, nullable=False, server_default="0"),
            sa.Column("stored_at", sa.BigInteger, nullable=False),
            sa.Column("payload", self._dialect.blob_type, nullable=False),
            self._index("chord_parts_stored", "stored_at"),
        )

    def _terms(self) -> sa.Table:
        return self._table(
            "terms",
            _name("key_", primary_key=True),
            _name("holder", nullable=False),
            sa.Column("number", sa.BigInteger, nullable=False),
            sa.Column("acquired_at", sa.BigInteger, nullable=False),
            sa.Column("renewed_at", sa.BigInteger, nullable=False),
            sa.Column("until_", sa.BigInteger, nullable=False),
            # For how long it was given at a time: a longer one dates from before the clock was set back.
            sa.Column("ttl_ms", sa.BigInteger, nullable=False),
        )

    def _candidates(self) -> sa.Table:
        return self._table(
            "candidates",
            _name("key_", primary_key=True),
            _name("holder", primary_key=True),
            sa.Column("since", sa.BigInteger, nullable=False),
            sa.Column("seen_at", sa.BigInteger, nullable=False),
        )

    def _entries(self) -> sa.Table:
        # Made to be written by hand as well: all but key_, name, task and schedule has a default.
        return self._table(
            "entries",
            _name("key_", primary_key=True),
            _name("name", primary_key=True),
            sa.Column("source", sa.String(10), nullable=False, server_default="added"),
            _name("task", nullable=False),
            sa.Column("schedule", sa.String(MAX_NAME), nullable=False),
            _name("timezone", nullable=False, server_default=""),
            sa.Column("args", self._dialect.text_type),
            sa.Column("kwargs", self._dialect.text_type),
            sa.Column("options", self._dialect.text_type),
            sa.Column("enabled", sa.SmallInteger, nullable=False, server_default="1"),
            sa.Column("no_overlap", sa.SmallInteger, nullable=False, server_default="0"),
            sa.Column("one_off", sa.SmallInteger, nullable=False, server_default="0"),
            sa.Column("starting_deadline", sa.Float(53)),
            sa.Column("base_at", sa.BigInteger),
            sa.Column("last_run_at", sa.BigInteger),
            sa.Column("last_due_at", sa.BigInteger),
            sa.Column("total_run_count", sa.BigInteger, nullable=False, server_default="0"),
            sa.Column("requested_at", sa.BigInteger),
            sa.Column("created_at", sa.BigInteger, nullable=False, server_default="0"),
            sa.Column("changed_at", sa.BigInteger, nullable=False, server_default="0"),
        )

    def _ticks(self) -> sa.Table:
        return self._table(
            "ticks",
            _name("key_", primary_key=True),
            _name("name", primary_key=True),
            sa.Column("due_at", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("state", sa.String(10), nullable=False),
            _name("task_id", nullable=False, server_default=""),
            sa.Column("sent_at", sa.BigInteger, nullable=False),
            # Number of the term under which it was sent.
            sa.Column("term", sa.BigInteger, nullable=False),
            self._index("ticks_due", "key_", "due_at"),
            self._index("ticks_sent", "sent_at"),
            self._index("ticks_unsent", "state", where="state = 'sending'"),
        )
