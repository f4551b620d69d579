"""A driver's metrics are served beside it, whatever happens to its ranks, to it and to them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.prometheus.conftest import GROUP, Served, get
from tests.support.drivers import Driver
from tests.support.processes import is_alive, wait_until
from tests.support.workers import Echo

from phalanx import Executor, Runtime
from phalanx.cli import main
from phalanx.errors import RuntimeFault, SpecError, WorkerDied
from phalanx.integrations.prometheus import MetricsServer
from phalanx.integrations.prometheus.metric_definitions import OUTCOMES, TABLE

ROOT = Path(__file__).parents[3]
Health = Callable[..., tuple[int, str]]


def ready(served: Served) -> Callable[[], bool]:
    return lambda: served.get("/readyz") == (200, "ok\n")


def test_a_kill_a_recovery_and_the_calls_around_it_are_counted(served: Served) -> None:
    wait_until(ready(served))
    victim = served.model.ranks[1].pid
    served.model.collective_rpc("echo")
    with pytest.raises(ValueError, match="boom"):
        served.model.collective_rpc("fail")
    os.kill(victim, signal.SIGKILL)

    labels = f'group="{GROUP}"'
    killed = f'phalanx_rank_deaths_total{{{labels},rank="1",reason="killed"}}'
    wait_until(lambda: served.value(killed) == 1.0)
    wait_until(lambda: served.value(f"phalanx_group_epoch{{{labels}}}") == 2.0)
    wait_until(lambda: served.value(f'phalanx_calls_total{{{labels},outcome="error"}}') == 1.0)
    wait_until(lambda: served.value(f'phalanx_rank_up{{{labels},rank="1"}}') == 1.0)

    assert served.value(f'phalanx_restarts_total{{{labels},strategy="one_for_all"}}') == 1.0
    assert served.value(f'phalanx_calls_total{{{labels},outcome="ok"}}') == 1.0
    assert served.value(f"phalanx_call_seconds_count{{{labels}}}") == 2.0
    for phase in ("gate", "launch", "start", "reform", "total"):
        count = f'phalanx_recovery_seconds_count{{{labels},phase="{phase}"}}'
        assert served.value(count) == 1.0
    assert 0.0 < (served.value(f"phalanx_ettr_ratio{{{labels}}}") or 0.0) < 1.0
    assert served.value(f"phalanx_last_progress_timestamp_seconds{{{labels}}}") is not None
    assert served.value('phalanx_supervisor_up{supervisor="root"}') == 1.0


def test_a_server_in_the_place_of_one_killed_serves_every_metric_of_the_documents_and_no_other(
    served: Served,
) -> None:
    wait_until(ready(served))
    pid = served.metrics._process.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: served.metrics._process.pid != pid)
    wait_until(ready(served))

    families = text_string_to_metric_families(served.get("/metrics")[1])
    seen = {
        (family.name + "_total" if family.type == "counter" else family.name, family.type)
        for family in families
    }
    document = (ROOT / "docs/reference/metrics.md").read_text()
    rows = re.findall(r"^\| `(phalanx_\w+)` \| (\w+) \| ([^|]*?) \|", document, re.MULTILINE)

    assert seen == {(family.name, family.kind) for family in TABLE}
    assert rows == [
        (family.name, family.kind, ", ".join(f"`{label}`" for label in family.labels))
        for family in TABLE
    ]
    assert all(f"`{outcome}`" in document for outcome in OUTCOMES)


def test_it_is_live_before_there_is_an_executor_and_ready_when_all_ranks_are() -> None:
    with MetricsServer(0, labels={"run": 'a "b"'}) as metrics:
        assert get(f"{metrics.url}/readyz")[0] == 503
        wait_until(lambda: get(f"{metrics.url}/healthz") == (200, "ok\n"))
        with (
            Runtime(console=None) as runtime,
            Executor(Echo, 2, launch={"preload": ()}, runtime=runtime) as model,
        ):
            wait_until(lambda: get(f"{metrics.url}/readyz") == (200, "ok\n"))
            families = list(text_string_to_metric_families(get(f"{metrics.url}/metrics")[1]))
            os.kill(model.ranks[0].pid or 0, signal.SIGSTOP)
            with pytest.raises(WorkerDied):
                model.collective_rpc("kill_self", args=(1,), timeout=60)
            wait_until(lambda: get(f"{metrics.url}/readyz")[0] == 503)  # until rank 0 is killed
            wait_until(lambda: get(f"{metrics.url}/readyz") == (200, "ok\n"))
        wait_until(lambda: get(f"{metrics.url}/readyz")[0] == 503)
        assert get(f"{metrics.url}/healthz") == (200, "ok\n")
        assert get(f"{metrics.url}/other")[0] == 404
    of_the_user = {sample.labels["run"] for family in families for sample in family.samples}
    assert of_the_user == {'a "b"'}  # on every series


def test_closing_it_twice_or_in_a_forked_child_does_no_harm() -> None:
    metrics = MetricsServer(0)
    child = os.fork()
    if not child:
        metrics.close()
        os._exit(0)
    os.waitpid(child, 0)

    assert get(f"{metrics.url}/healthz")[0] in (200, 503)
    metrics.close()
    metrics.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", metrics.port), timeout=5)


def test_neither_a_path_in_sys_path_nor_a_module_in_the_working_folder_is_a_hindrance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)

    with MetricsServer(0) as metrics:
        wait_until(lambda: get(f"{metrics.url}/healthz") == (200, "ok\n"))


def test_a_server_that_ends_at_once_is_started_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[float] = []

    def start(_server: MetricsServer) -> subprocess.Popen[bytes]:
        started.append(time.monotonic())
        return subprocess.Popen(["true"])

    monkeypatch.setattr(MetricsServer, "_start", start)
    monkeypatch.setattr("phalanx.integrations.prometheus.server._CALM", 0.01)
    with MetricsServer(0):
        wait_until(lambda: len(started) >= 6)

    assert started[5] - started[4] >= 0.16


def test_a_port_in_use_is_said_to_be() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RuntimeFault, match=f"port {port} of 127.0.0.1 cannot be had"):
            MetricsServer(port)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"port": 70000}, "port"),
        ({"port": "9464"}, "port"),
        ({"port": True}, "port"),
        ({"host": "203.0.113.7"}, "host"),
        ({"host": "no such host"}, "host"),
        ({"host": ""}, "host"),
        ({"labels": {"a-b": "x"}}, "labels"),
        ({"labels": {"__name__": "x"}}, "labels"),
        ({"labels": {"group": "x"}}, "labels"),
        ({"labels": {"le": "x"}}, "labels"),
        ({"labels": {"run": 7}}, "labels['run']"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as refused:
        MetricsServer(**cast("Any", {"port": 0, **arguments}))

    assert refused.value.field == field


def test_on_loopback_who_names_another_site_is_told_nothing_and_beyond_it_any_name_will_do() -> (
    None
):
    with MetricsServer(0) as local, MetricsServer(0, "0.0.0.0") as everywhere:
        for path in ("/metrics", "/healthz", "/readyz"):
            assert get(local.url + path, Host=f"evil.example:{local.port}")[0] == 403
            assert get(local.url + path, Host=f"LOCALHOST:{local.port}")[0] != 403
            assert get(local.url + path)[0] != 403  # by address
            assert get(f"http://127.0.0.1:{everywhere.port}{path}", Host="model.ns.svc")[0] != 403


# --- the commands ---------------------------------------------------------------------------


@pytest.fixture
def health(capsys: pytest.CaptureFixture[str]) -> Health:
    def health(*words: str) -> tuple[int, str]:
        code = main(["health", *words])
        return code, "".join(capsys.readouterr())

    return health


def test_the_command_follows_a_name_from_one_driver_that_is_killed_to_the_next(
    drive: Callable[..., Driver],
) -> None:
    name = f"metrics-{uuid.uuid4().hex[:8]}"
    command = [sys.executable, "-m", "phalanx.cli", "metrics", name, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as serving:
        try:
            assert serving.stdout is not None
            said = serving.stdout.readline()
            url = said.removeprefix("serving ").strip().removesuffix("/metrics")
            wait_until(lambda: f"under the name {name}" in get(f"{url}/healthz")[1])
            for _ in range(2):
                driver = drive("metrics_driver", name)
                own = driver.expect("url")
                wait_until(lambda: get(f"{url}/readyz") == (200, "ok\n"))
                assert get(f"{own}/healthz")[0] in (200, 503)
                driver.kill()
                driver.assert_gone()  # with its server
                wait_until(lambda: get(f"{url}/healthz")[0] == 503)
        finally:
            serving.kill()


def test_health_is_an_exit_status_and_one_line(
    drive: Callable[..., Driver], health: Health
) -> None:
    name = f"metrics-{uuid.uuid4().hex[:8]}"
    absent = health(name)
    driver = drive("metrics_driver", name)
    rank = driver.expect("rank")
    whole = health(name)
    driver.send(signal.SIGSTOP)
    silent = health(name, "--live", "--timeout", "0.5")
    driver.send(signal.SIGCONT)
    live = health(name, "--live")

    assert absent[0] == 1
    assert absent[1].startswith(f"phalanx health: driver='{name}'")
    assert absent[1].count("\n") == 1
    assert whole == live == (0, "ok: 1 group\n")
    assert silent[0] == 1
    assert silent[1].startswith("phalanx health: ")
    assert "did not answer within 0.5 s" in silent[1]
    assert is_alive(rank)


def test_a_group_that_gave_up_is_not_ready_until_one_of_its_name_serves(health: Health) -> None:
    name, hostile = f"metrics-{uuid.uuid4().hex[:8]}", "a\x1b]0;x\x07\x9b2J"
    more: dict[str, Any] = {"launch": {"preload": ()}}
    with Runtime(console=None, name=name) as more["runtime"], Executor(Echo, 1, name="b", **more):
        lost = Executor(Echo, 1, name=hostile, intensity=(0, 60.0), **more)
        os.kill(lost.ranks[0].pid or 0, signal.SIGKILL)
        lost.wait_closed(60.0)
        with MetricsServer(0) as late:  # which has not heard of the end
            wait_until(lambda: " has ended" in get(f"{late.url}/readyz")[1])
        ended = health(name)
        with Executor(Echo, 1, name=hostile, **more):
            again = health(name)
        closed = health(name)

    assert ended == (1, f"group a\\x1b]0;x\\x07\\x9b2J has ended: {lost.exit_reason}\n")
    assert again == (0, "ok: 2 groups\n")
    assert closed == (0, "ok: 1 group\n")


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (("--label", "run"), 2, "--label='run': give NAME=VALUE"),
        (("--label", "rank=1"), 2, "labels='rank': metrics have"),
        (("4194304",), 1, "there is no process 4194304 to follow"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    words: tuple[str, ...], code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["metrics", "--port", "0", *words]) == code

    told = capsys.readouterr().err
    assert problem in told
    assert told.count("\n") == 1
