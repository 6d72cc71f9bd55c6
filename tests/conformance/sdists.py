"""Source distributions of kombu and Celery, of the versions that are installed.

Their own tests and examples are in those and not in what is installed. pip fetches them, from wherever it is set up
to fetch packages, and pytest's cache keeps them; nothing of theirs is kept in this repository.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.services import ServiceMissing

#: Seconds. pip builds the metadata of what it downloads, for which it fetches a build tool too.
TIMEOUT = 100


def installed_sdist(name: str, cache: Path) -> Path:
    """The archive of a package at its installed version; downloaded when the cache folder lacks it.

    Raises:
        ServiceMissing: it is not there and can't be had, as on a machine without a network.
    """
    archive = cache / f"{name}-{version(name)}.tar.gz"
    if not archive.exists():
        _download(name, archive)
    return archive


def unpack(archive: Path, part: str, folder: Path) -> Path:
    """Unpack one folder or file of an archive, without the rest: the package beside it would hide the installed one."""
    top = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as tar:
        members = [member for member in tar.getmembers() if f"{member.name}/".startswith(f"{top}/{part}/")]
        tar.extractall(folder, members, filter="data")
    return folder / top / part


def _download(name: str, archive: Path) -> None:
    what = f"{name}=={version(name)}"
    # In a folder beside it and then renamed, so that several test processes may do it at once.
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", "--no-binary", name, "--dest", folder, what]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            raise ServiceMissing(f"the source distribution of {what} was not downloaded in {TIMEOUT} s") from None
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module named" in line]
            why = lines[-1].strip() if lines else f"pip ended with {done.returncode}"
            raise ServiceMissing(f"the source distribution of {what} can't be downloaded: {why}")
        (found,) = Path(folder).glob("*.tar.gz")
        shutil.move(found, archive)
