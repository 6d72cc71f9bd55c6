"""The wheel has what it must, and a fresh environment that has only it finds the transport by itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import celery_ext

ROOT = Path(__file__).resolve().parents[2]

USER_CODE = """
from importlib.metadata import distribution

from celery import Celery

app = Celery("shop", broker="taskgate+memory://")
transport = app.connection().transport
print(type(transport).__module__.partition(".")[0], transport.driver_type)
for entry_point in distribution("celery-taskgate").entry_points:
    entry_point.load()  # nothing is advertised that is not there
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, so that no build folder of the checkout slips old files into the wheel.
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in ("kombu_taskgate", "celery_ext"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL, timeout=100)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_content(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    packaged = {name for name in names if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT))
        for package in ("kombu_taskgate", "celery_ext")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packaged == sources
    assert {"kombu_taskgate/py.typed", "celery_ext/py.typed"} <= packaged
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.slow
def test_fresh_environment_finds_the_transport(wheel, tmp_path):
    environment = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=60)
    python = environment / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL, timeout=110)
    done = subprocess.run(
        [str(python), "-c", USER_CODE], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "kombu_taskgate"
    # Celery switches a worker's events off for driver type "sql".
    assert done.stdout.split()[1] != "sql"


def test_version_is_the_distributions():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{celery_ext.__version__}"' in pyproject
