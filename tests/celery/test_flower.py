"""Flower as a user starts it, looked at with a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests import services
from tests.workers.fixtures import MakeLab
from tests.workers.harness import ROOT, Lab, wait_for
from tests.workers.servers import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # browsers are slow to start on a busy machine


@dataclass
class Site:
    """A Flower and the browser that looks at it."""

    lab: Lab
    browser: str
    address: str

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            return str(answer.read().decode())

    def page(self, path: str) -> str:
        """The text that a person sees, after the page's scripts have run."""
        command = [
            self.browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000",
            f"--user-data-dir={self.lab.folder / 'browser'}", "--dump-dom", self.address + path,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        # A name may be cut into spans, to be shown in two colours.
        text = re.sub(r"<(script|style).*?</\1>|</?span[^>]*>", "", done.stdout, flags=re.DOTALL)
        return html.unescape(re.sub(r"(<[^>]*>|\s)+", " ", text))

    def page_with(self, path: str, *patterns: str) -> str:
        """The same, once all of the patterns are found on it: what it shows may have come to Flower a moment ago."""

        def found() -> str:
            seen.append(self.page(path))
            return seen[-1] if all(re.search(pattern, seen[-1]) for pattern in patterns) else ""

        seen: list[str] = []
        try:
            return wait_for(found, 60, f"{patterns} on {path}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {seen[-1]}") from None


@pytest.fixture
def browser() -> str:
    with services.skip_if_missing():
        for name in ("chromium", "chromium-browser", "google-chrome"):
            found = shutil.which(name)
            if found is not None:
                return found
        raise services.ServiceMissing("no Chromium is installed: install the package chromium")


@pytest.fixture
def start_flower(browser: str) -> Iterator[Callable[..., Site]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(lab: Lab, command: str, *arguments: str) -> Site:
        with services.skip_if_missing():
            try:
                import flower  # noqa: F401
            except ImportError:
                raise services.ServiceMissing("Flower is not installed: pip install flower") from None
        port = free_port()
        log = lab.folder / "flower.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "tests.workers.app", command, f"--port={port}", *arguments],
                cwd=ROOT,
                env=lab.environment(FLOWER_UNAUTHENTICATED_API="1"),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        started.append(process)
        site = Site(lab, browser, f"http://127.0.0.1:{port}")

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return site.get("/healthcheck").startswith("OK")
            except OSError:  # not all of them are made a URLError
                return False

        wait_for(answers, 60, "Flower answers")
        wait_for(
            lambda: lab.send("echo") and "SUCCESS" in site.get("/api/tasks"), 60, "Flower hears of tasks", every=0.3
        )
        names = [worker.name for worker in lab.workers]
        wait_for(lambda: all(name in site.get("/api/workers") for name in names), 30, "and knows the workers")
        return site

    yield start
    for process in started:
        process.terminate()
        process.wait(60)


def with_password(url: str) -> str:
    """The same database by a URL with a password, where it has any."""
    return url.replace("postgres@", "postgres:s3cret@")


@pytest.fixture
def lab(make_lab: MakeLab, main_url: str) -> Lab:
    """Three workers."""
    lab = make_lab(with_password(main_url))
    for _ in range(3):
        lab.start_worker("-c1", "-E", "-P", "solo", ready=False)
    for worker in lab.workers:
        worker.wait_ready()
    return lab


def heard_of_workers(site: Site, lab: Lab) -> str:
    """The page of workers, once all are on it: a task is heard of by the events of one of them."""

    def page() -> str:
        text = site.page("/workers")
        return text if all(worker.name in text for worker in lab.workers) and "Offline" not in text else ""

    return wait_for(page, 60, "Flower has heard of the workers")


def test_pages(lab: Lab, start_flower: Callable[..., Site]) -> None:
    """Workers online, finished tasks, one task's details, and the queues with their lengths; nowhere a password."""
    site = start_flower(lab, "taskgate-flower")
    ids = [lab.send("work", 0.01, f"tag {number}") for number in range(6)]
    wait_for(lambda: all(id in site.get("/api/tasks") for id in ids), 30, "Flower has heard of the tasks")
    wait_for(
        lambda: all(task["state"] == "SUCCESS" for task in json.loads(site.get("/api/tasks")).values()), 30, "success"
    )
    waiting = [lab.send("work", 0, countdown=3600) for _ in range(4)]

    workers = heard_of_workers(site, lab)
    assert workers.count("Online") >= 3
    assert "Offline" not in workers
    tasks = site.page_with("/tasks", *ids, "SUCCESS.*" * len(ids))
    task = site.page_with(f"/task/{ids[0]}", ids[0], "tests.workers.app.work", "SUCCESS", "tag 0", "Runtime")
    worker = site.page_with(f"/worker/{lab.workers[0].name}", "(?i)celery.concurrency.solo:taskpool")
    broker = site.page_with("/broker", f"celery {len(waiting)} — {len(waiting)} 3 ")
    (length,) = json.loads(site.get("/api/queues/length"))["active_queues"]
    assert (length["name"], length["messages"], length["consumers"]) == ("celery", len(waiting), 3)
    assert lab.url.replace("s3cret", "**") in broker
    log = (lab.folder / "flower.log").read_text()
    assert "s3cret" not in workers + tasks + task + worker + broker + log


def test_flowers_own_command(lab: Lab, start_flower: Callable[..., Site]) -> None:
    """All but the queues is there without taskgate's command too; a worker can be told things from the pages."""
    site = start_flower(lab, "flower")
    id = lab.send("work", 0.01)
    wait_for(lambda: id in site.get("/api/tasks"), 30, "Flower has heard of the task")
    heard_of_workers(site, lab)
    site.page_with("/tasks", id)
    site.page_with("/broker", "'taskgate' broker is not supported")
    worker, *others = lab.workers
    request = urllib.request.Request(f"{site.address}/api/worker/shutdown/{worker.name}", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
    assert worker.process.wait(60) == 0
    assert all(other.alive for other in others)
