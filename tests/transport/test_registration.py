"""The names in kombu's table, and how light it is to put them there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kombu.serialization
import pytest
from kombu.transport import TRANSPORT_ALIASES, get_transport_cls

from kombu_taskgate import registration
from kombu_taskgate.core.dialects import all_dialects
from kombu_taskgate.transport import Transport

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_is_light_and_registers():
    out = run(
        "import sys, kombu_taskgate\n"
        "from kombu.transport import TRANSPORT_ALIASES\n"
        "print('taskgate+postgresql' in TRANSPORT_ALIASES)\n"
        "print([m for m in ('sqlalchemy', 'celery', 'psycopg', 'kombu.serialization') if m in sys.modules])\n"
    )
    assert out.split("\n")[:2] == ["True", "[]"]


def test_it_can_be_imported_in_the_middle_of_kombus_own_start():
    """kombu loads the entry point while its serializers are being imported."""
    out = run(
        "import kombu.utils.compat as compat\n"
        "class EntryPoint:\n"
        "    name = 'taskgate'\n"
        "real = compat.entrypoints\n"
        "def entrypoints(group):\n"
        "    import kombu_taskgate.registration as r\n"
        "    return [(EntryPoint, r.SERIALIZER)] if group == 'kombu.serializers' else real(group)\n"
        "compat.entrypoints = entrypoints\n"
        "import kombu.serialization\n"
        "from kombu import Connection\n"
        "print(type(Connection('taskgate+memory://').transport).__module__)\n"
    )
    assert out.strip() == "kombu_taskgate.transport.transport"


def test_a_program_without_celery_imports_the_package():
    """kombu.Connection alone does not import kombu's serializers, and so no entry point either."""
    out = run(
        "import sys, kombu_taskgate\n"
        "from kombu import Connection\n"
        "print(type(Connection('taskgate+memory://').connect()).__module__, 'celery' in sys.modules)\n"
    )
    assert out.strip() == "kombu_taskgate.transport.connection False"


def test_the_serializer_name_can_neither_write_nor_read():
    registry = kombu.serialization.SerializerRegistry()
    registry.register("json", lambda value: "{}", lambda text: {}, "application/json")
    registry.register("taskgate", *registration.SERIALIZER)
    with pytest.raises(kombu.serialization.SerializerNotInstalled):
        registry.dumps({}, serializer="taskgate")
    with pytest.raises(kombu.serialization.ContentDisallowed):
        registry.loads("x", registration.SERIALIZER[2], "utf-8", accept={"application/json"})
    assert registry.dumps({}, serializer="json")[2] == "{}"


def test_there_is_a_scheme_for_every_dialect_and_driver():
    expected = {"taskgate", "taskgate+memory"}
    for dialect in all_dialects():
        for backend in dialect.backends:
            expected.add(f"taskgate+{backend}")
            expected |= {f"taskgate+{backend}+{driver}" for driver, _ in dialect.drivers}
    assert set(registration.schemes()) == expected
    for scheme in expected:
        assert get_transport_cls(scheme) is Transport


def test_registering_again_changes_nothing(monkeypatch):
    monkeypatch.setitem(TRANSPORT_ALIASES, "taskgate+memory", "somebody.elses:Transport")
    registration.register()
    assert TRANSPORT_ALIASES["taskgate+memory"] == "somebody.elses:Transport"
