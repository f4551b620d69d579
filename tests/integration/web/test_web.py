"""`phalanx web` serves a page of a driver, live: its groups, trees and deaths."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.support.drivers import Driver
from tests.support.programs import run_program
from tests.support.workers import Echo

from phalanx.actors import Executor, Launch, executor_child
from phalanx.cli import main
from phalanx.integrations.follower.follower import Follower
from phalanx.integrations.web.live_view import LiveView
from phalanx.runtime import DriverStream, Runtime
from phalanx.supervision import Supervisor, SupervisorSpec

LONG = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("phalanx_leak_check")]


class Page:
    """A running `phalanx web`."""

    def __init__(self, whom: str) -> None:
        words = [sys.executable, "-m", "phalanx.cli", "web", whom, "--port", "0"]
        self.popen = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        said = self.popen.stdout.readline()
        found = re.fullmatch(r"serving (http://127\.0\.0\.1:(\d+)/)\n", said)
        assert found is not None, said
        self.url, self.port = found[1], int(found[2])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        with closing(self.connect()) as connection:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def states(self) -> Generator[dict[str, Any]]:
        """Yield each state that a browser gets."""
        with closing(self.connect()) as connection:
            connection.request("GET", "/events")
            with connection.getresponse() as answer:
                while line := answer.readline().decode():
                    if line.startswith("data: "):
                        yield json.loads(line.removeprefix("data: "))


@contextmanager
def page_of(whom: str) -> Generator[Page]:
    page = Page(whom)
    try:
        yield page
    finally:
        page.popen.kill()
        page.popen.communicate()


@pytest.fixture
def name() -> Iterator[str]:
    """A driver under this name: a tree with a group of two ranks, and a group beside it."""
    name = f"web-{uuid.uuid4().hex[:8]}"  # other tests have drivers on this machine, too
    more: dict[str, Any] = {"launch": Launch(preload=())}
    with Runtime(console=None, name=name) as runtime:
        more["runtime"] = runtime
        spec = SupervisorSpec(id="root", children=[executor_child("tp", Echo, 2, **more)])
        with Supervisor(spec), Executor(Echo, 1, name="free", **more):
            yield name


def test_what_happens_to_a_group_is_told_as_it_happens(name: str) -> None:
    with page_of(name) as page:
        states = page.states()
        calm = next(state for state in states if len(state["groups"]) == 2 and not state["problem"])
        tree, group = calm["trees"][0], calm["groups"][1]
        assert (calm["driver"]["pid"], calm["driver"]["name"]) == (os.getpid(), name)
        assert (tree["root"]["path"], group["group"]) == ("root", "root/tp")
        assert [rank["state"] for rank in group["ranks"]] == ["up", "up"]

        os.kill(group["ranks"][1]["pid"], signal.SIGKILL)

        healed = next(
            state
            for state in states
            if state["reports"] and not state["problem"] and state["groups"][1]["restarts"] == 1
        )
        assert healed["groups"][1]["ranks"][1]["incarnation"] == 2
        assert "died: killed (SIGKILL)" in healed["reports"][0]
        assert any("phalanx.group_up" in event for event in healed["events"])
        states.close()

    with page_of(name) as later, page_of(name) as last:  # those who come later are told, once
        for page in (last, later):
            with closing(page.states()) as states:
                told = next(state for state in states if state["reports"] and state["groups"])
            assert told["reports"] == healed["reports"]


def test_who_names_another_site_is_told_nothing_and_who_asks_for_the_head_gets_no_body(
    name: str,
) -> None:
    with page_of(name) as page:
        assert page.get("/state.json", Host=f"evil.example:{page.port}")[0] == 403
        assert page.get("/", Host="evil.example")[0] == 403
        assert page.get("/state.json", Host=f"localhost:{page.port}")[0] == 200
        assert page.get("/state.json", Host=f"LOCALHOST:{page.port}")[0] == 200
        assert page.get("/state.json", Host="[::1]")[0] == 200
        assert page.get("/state.json", Host="[::1")[0] == 403
        assert page.get("/nothing")[0] == 404
        for path in ("/", "/state.json", "/events"):
            assert page.get(path, "HEAD") == (200, "")
        assert page.get("/nothing", "HEAD") == (404, "")


def test_it_ends_with_the_driver_of_that_pid_and_says_when_one_of_that_name_has_ended() -> None:
    name = f"ends-{os.getpid()}"  # else that of another run of these tests is a second one
    with Runtime(console=None, name=name) as runtime:
        group = Executor(Echo, 1, launch=Launch(preload=()), runtime=runtime)
        with page_of(name) as page:
            states = page.states()
            next(state for state in states if state["groups"])
            group.close()
            runtime.close()
            ended = next(state for state in states if not state["groups"])
            assert ended["problem"] in (
                f"driver {os.getpid()} has closed its stream",
                f"no driver runs under the name {name}",
            )
            states.close()


def test_of_two_runtimes_in_one_process_the_newest_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = DriverStream(pid=11, name="", started_at=0.0, address="older")
    newest = replace(driver, address="newer")
    module = "phalanx.integrations.follower.follower"
    monkeypatch.setattr(f"{module}.find_drivers", lambda: [driver, newest])

    assert Follower(LiveView())._find() == newest


def test_a_driver_that_is_stopped_is_not_shown_as_well(drive: Callable[..., Driver]) -> None:
    name = f"stopped-{uuid.uuid4().hex[:8]}"
    driver = drive("metrics_driver", name)
    driver.expect("url")
    with page_of(name) as page, closing(page.states()) as states:
        next(state for state in states if state["groups"] and not state["problem"])
        driver.send(signal.SIGSTOP)
        try:
            told = next(state for state in states if state["problem"])
        finally:
            driver.send(signal.SIGCONT)
        next(state for state in states if state["groups"] and not state["problem"])

    assert re.fullmatch(r"the driver has not answered for \d+ s", told["problem"])
    assert told["groups"]  # as they were last


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["4294967297"], 1, "no process 4294967297"),
        (["9" * 20], 1, f"no process {'9' * 20}"),
        (["--port", "70000"], 2, "port"),
        (["--host", "300.1.1.1"], 2, "host"),
        (["--host", "127.0.0..1"], 2, "host"),
        (["999999999"], 1, "no process 999999999"),
    ],
)
def test_what_makes_no_sense_is_said(
    words: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["web", *words]) == code
    assert told in capsys.readouterr().err


@pytest.mark.skipif(BROWSER is None, reason=f"no browser here; looked for {', '.join(NAMES)}")
def test_a_browser_shows_trees_groups_and_deaths(name: str, tmp_path: Path) -> None:
    assert BROWSER is not None
    with page_of(name) as page:
        states = page.states()
        calm = next(state for state in states if len(state["groups"]) == 2 and not state["problem"])
        os.kill(calm["groups"][1]["ranks"][1]["pid"], signal.SIGKILL)
        next(state for state in states if state["reports"] and not state["problem"])
        states.close()
        words = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"),
            *("--timeout=3000", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"),
        ]
        own = {each: str(tmp_path) for each in ("HOME", "XDG_RUNTIME_DIR")}
        done = run_program([BROWSER, *words, page.url], env={**os.environ, **own})
    seen = unescape(re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL))

    assert f"driver {os.getpid()} ({name})" in seen, done.stderr[-2000:]
    assert "every group is complete" in seen
    assert "supervisor root" in seen
    assert "group root/tp" in seen
    assert '<td class="good">serving' in seen or '<td class="good">up' in seen
    assert "died: killed (SIGKILL)" in re.findall(r"<summary>(.*?)</summary>", seen)[0]
