"""A real Prometheus scrapes a driver; dashboard and alerts parse, and find data after a kill."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.parse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.integration.prometheus.conftest import GROUP, Served, get
from tests.support.processes import wait_until
from tests.support.programs import run_program

from phalanx.cli import main

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
FILES = Path(__file__).parents[3] / "integrations/prometheus"
DASHBOARD = json.loads((FILES / "dashboard.json").read_text())

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        PROMETHEUS is None or PROMTOOL is None,
        reason="no prometheus and promtool here: apt-get install prometheus",
    ),
]

PAGE = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text()
(CONFIG,) = re.findall(r"```yaml\n(global:.*?)```", PAGE, re.DOTALL)


class Prometheus:
    def __init__(self, folder: Path, target: str) -> None:
        config = folder / "prometheus.yml"
        own = {"15s": "1s", "alerts.yml": str(FILES / "alerts.yml"), "localhost:9464": target}
        config.write_text(re.sub("|".join(own), lambda found: own[found[0]], CONFIG))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}")
        self.popen = subprocess.Popen(
            [PROMETHEUS or "", *words, f"--web.listen-address=127.0.0.1:{port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, path: str, **about: str) -> Any:
        """Return the data that the API answers with."""
        _, text = get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(about)}")
        answer = json.loads(text)
        assert answer["status"] == "success", f"{about}: {answer}"
        return answer["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found

    def is_up(self) -> bool:
        try:
            return get(f"{self.url}/-/ready")[0] == 200
        except OSError:
            return False


@pytest.fixture
def prometheus(served: Served, tmp_path: Path) -> Iterator[Prometheus]:
    prometheus = Prometheus(tmp_path, served.url.removeprefix("http://"))
    try:
        wait_until(prometheus.is_up)
        yield prometheus
    finally:
        prometheus.popen.kill()
        prometheus.popen.wait()


def test_dashboard_and_alerts_find_data_after_a_kill_and_promtool_no_fault_in_the_metrics(
    served: Served, prometheus: Prometheus
) -> None:
    group = f'{{group="{GROUP}"}}'
    wait_until(lambda: prometheus.query(f"phalanx_group_up{group} == 1"))
    served.model.collective_rpc("echo")
    wait_until(lambda: prometheus.query(f"phalanx_calls_total{group} == 1"))

    os.kill(served.model.ranks[1].pid, signal.SIGKILL)
    wait_until(lambda: prometheus.query(f"phalanx_group_epoch{group} == 2"))
    for _ in range(20):
        served.model.collective_rpc("echo")

    killed = 'sum by (reason) (increase(phalanx_rank_deaths_total{reason="killed"}[1m])) > 0'
    wait_until(lambda: prometheus.query(killed))
    told = {"$__rate_interval": "30s", "$__range": "1m", "$group": ".*"}  # Grafana's variables
    for panel in DASHBOARD["panels"]:
        for each in panel["targets"]:
            expression = re.sub(r"\$\w+", lambda name: told[name[0]], each["expr"])
            wait_until(partial(prometheus.query, expression), expression)
    rules = prometheus.ask("rules")["groups"][0]["rules"]
    wait_until(
        lambda: all(
            rule["health"] == "ok" for rule in prometheus.ask("rules")["groups"][0]["rules"]
        )
    )
    for metric in {name for rule in rules for name in re.findall(r"phalanx_\w+", rule["query"])}:
        assert prometheus.query(metric), metric
    wait_until(
        lambda: any(
            alert["labels"]["alertname"] == "PhalanxRankDied"
            and alert["labels"]["reason"] == "killed"
            for alert in prometheus.ask("alerts")["alerts"]
        )
    )
    checked = run_program([PROMTOOL or "", "check", "metrics"], input=served.get("/metrics")[1])
    assert (checked.returncode, checked.stderr) == (0, "")


# By alert: series as promtool writes them, with a value each minute ("3x2": 3 and twice more); a
# minute at which it must not fire, and one at which it must.
GROUP_LABELS = 'instance="i", group="g"'
RANK_LABELS = f'{GROUP_LABELS}, rank="1"'
FIRINGS: dict[str, tuple[dict[str, str], int, int]] = {
    "PhalanxDriverSilent": ({'phalanx_driver_up{instance="i"}': "1x3 0x9"}, 4, 5),
    "PhalanxTargetGone": ({'up{job="phalanx", instance="i"}': "1x3 0x9"}, 4, 5),
    "PhalanxGroupDown": ({f"phalanx_group_up{{{GROUP_LABELS}}}": "1x3 0x9"}, 5, 6),
    "PhalanxRankDied": (
        {f'phalanx_rank_deaths_total{{{RANK_LABELS}, reason="killed"}}': "0x3 1x9"},
        *(3, 4),
    ),
    "PhalanxRestartBudgetSpent": (
        {
            f"phalanx_restart_budget_left{{{GROUP_LABELS}}}": "3 2 1 0x9",
            f'phalanx_restarts_total{{{GROUP_LABELS}, strategy="one_for_one"}}': "0 1 2 3x9",
        },
        *(2, 3),
    ),
    "PhalanxSupervisorDown": (
        {'phalanx_supervisor_up{instance="i", supervisor="root"}': "1x3 0x9"},
        *(4, 5),
    ),
    "PhalanxCallsFail": (
        {
            f'phalanx_calls_total{{{GROUP_LABELS}, outcome="ok"}}': "0+100x20",
            f'phalanx_calls_total{{{GROUP_LABELS}, outcome="cancelled"}}': "0+50x20",
            f'phalanx_calls_total{{{GROUP_LABELS}, outcome="died"}}': "0x5 10+10x14",
        },
        *(10, 14),
    ),
    "PhalanxNoProgress": (
        {
            f"phalanx_last_progress_timestamp_seconds{{{GROUP_LABELS}}}": "0x30",
            f"phalanx_calls_in_flight{{{GROUP_LABELS}}}": "0x16 1x13",
        },
        *(16, 17),
    ),
    "PhalanxRanksHang": (
        {f"phalanx_rank_hung_seconds_total{{{RANK_LABELS}}}": "0x3 60x9"},
        *(3, 4),
    ),
    "PhalanxSlowRecovery": (
        {
            f'phalanx_recovery_seconds_bucket{{{GROUP_LABELS}, phase="total", le="{le}"}}': values
            for le, values in (("120.0", "0x12"), ("300.0", "0x3 2x9"), ("+Inf", "0x3 2x9"))
        },
        *(3, 4),
    ),
    "PhalanxLowETTR": (
        {
            f"phalanx_serving_seconds_total{{{GROUP_LABELS}}}": "0+60x20 1200+30x60",
            f"phalanx_down_seconds_total{{{GROUP_LABELS}}}": "0x20 0+30x60",
        },
        *(20, 50),
    ),
    "PhalanxDeviceMemoryNotReleased": (
        {f"phalanx_device_draining_bytes{{{GROUP_LABELS}}}": "0 512 0 512x9"},
        *(3, 4),
    ),
}


def test_each_alert_that_is_printed_fires_when_it_should_and_not_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["metrics", "--print", "alerts"]) == 0
    rules = capsys.readouterr().out
    (tmp_path / "alerts.yml").write_text(rules)
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": each, "values": series[each]} for each in series],
            "promql_expr_test": [
                {
                    "eval_time": f"{minute}m",
                    "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})',
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }
                for minute, fires in ((calm, False), (firing, True))
            ],
        }
        for name, (series, calm, firing) in FIRINGS.items()
    ]
    about = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(json.dumps(about))  # JSON is YAML

    for words in (("check", "rules", "alerts.yml"), ("test", "rules", "tests.yml")):
        done = run_program([PROMTOOL or "", *words], cwd=tmp_path)

        assert done.returncode == 0, done.stdout + done.stderr
    assert set(FIRINGS) == set(re.findall(r"alert: (\w+)", rules))


def test_the_dashboard_that_is_printed_is_the_one_that_was_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["metrics", "--print", "dashboard"]) == 0
    assert json.loads(capsys.readouterr().out) == DASHBOARD
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
