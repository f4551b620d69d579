"""The server of examples/serve_fastapi.py, as its clients see it while its ranks are killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `examples` is not installed")
pytest.importorskip("uvicorn", reason="the extra `examples` is not installed")

EXAMPLE = Path(__file__).parents[3] / "examples" / "serve_fastapi.py"
LONG = 120.0
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("phalanx_leak_check")]


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int

    def stream(
        self, seed: int, length: int, begun: Callable[[], object] = lambda: None
    ) -> tuple[str, str, str]:
        """Return the text of a stream, the kind of its last event, and what that says."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        with contextlib.closing(connection):
            connection.request("GET", f"/generate?prompt=The+class&length={length}&seed={seed}")
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            text, kind = "", ""
            for line in answer:
                key, _, value = line.decode().rstrip("\n").partition(": ")
                if key == "event":
                    kind = value
                elif key == "data" and kind:
                    return text, kind, json.loads(value)
                elif key == "data":
                    text += json.loads(value)
                    if len(text) == 5:
                        begun()
            return text, kind, ""

    def health(self) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def kill_rank(self) -> None:
        os.kill(self.health()[1]["pids"][1], signal.SIGKILL)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> Server:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), "--port", "0", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line):
                return Server(process, int(found[1]))
        raise AssertionError("it does not serve")

    yield start
    for process in started:
        process.kill()
        process.wait(LONG)
        assert process.stderr is not None
        process.stderr.close()


def test_a_kill_during_streams_changes_no_letter_of_any_of_many(
    serve: Callable[..., Server],
) -> None:
    server = serve()
    alone = [server.stream(seed, 200) for seed in range(10)]
    kills = [server.kill_rank, *[lambda: None] * 9]

    with ThreadPoolExecutor(10) as clients:
        together = list(clients.map(lambda n: server.stream(n, 200, kills[n]), range(10)))

    assert together == alone
    assert {(len(text), kind) for text, kind, _ in together} == {(200, "done")}
    assert len({text for text, *_ in together}) == 10
    status, found = server.health()
    assert (status, found["restarts"], found["streams"]) == (200, 1, 0)


def test_sigterm_lets_the_streams_under_way_end_and_refuses_new_ones(
    serve: Callable[..., Server],
) -> None:
    server = serve()
    refused: list[BaseException] = []

    def terminate() -> None:
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + LONG
        while not refused:
            assert time.monotonic() < deadline
            with contextlib.suppress(TimeoutError):
                try:
                    server.health()
                except ConnectionError as error:
                    refused.append(error)

    text, kind, _ = server.stream(1, 600, terminate)

    assert (len(text), kind) == (600, "done")
    assert server.process.wait(LONG) == -signal.SIGTERM


def test_when_the_group_gives_up_streams_end_with_an_error_and_health_says_so(
    serve: Callable[..., Server],
) -> None:
    server = serve("--restarts", "0")

    text, kind, why = server.stream(1, 5000, server.kill_rank)

    assert kind == "error", text
    assert "killed (SIGKILL)" in why
    assert server.health()[0] == 503
