"""What the client of an engine learns of its workers, across processes."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.support.programs import run_python

from phalanx.integrations.vllm import HealthRoute, engine_state
from phalanx.integrations.vllm.engine_state import EngineState, cause_of_end, read_states

DEAD_CORE = """
from phalanx.integrations.vllm.engine_state import EngineState
state = EngineState()
state.add(recoveries=3)
state.set("ended", "rank 1 died")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHALANX_VLLM_STATE", str(tmp_path))
    return tmp_path


def health(query: bytes = b"", path: str = "/health", status: int = 200) -> tuple[int, str]:
    """Return what a client of a server with the middleware gets."""
    sent: list[dict[str, Any]] = []

    async def server(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "query_string": query}
    asyncio.run(HealthRoute(server)(scope, None, send))
    headers = dict(sent[0]["headers"])
    return sent[0]["status"], headers.get(b"x-phalanx-workers", b"").decode()


def test_the_cause_of_an_end_outlives_its_process_until_the_next_engine_begins() -> None:
    assert run_python("-c", DEAD_CORE).returncode == 0

    assert cause_of_end() == "rank 1 died"
    EngineState()
    assert cause_of_end() == ""


def test_an_end_is_final() -> None:
    state = EngineState()

    state.set("ended", "rank 1 died")
    state.set("serving")

    assert cause_of_end() == "rank 1 died"


def test_no_file_is_left_but_one_for_each_engine_core(folder: Path) -> None:
    state = EngineState()
    for _ in range(10):
        state.add(recoveries=1)

    assert [each.name for each in folder.iterdir()] == [f"{os.getpid()}.json"]
    assert read_states()[0]["recoveries"] == 10


def test_the_health_route_tells_recovering_from_serving_and_from_ended() -> None:
    state = EngineState()
    assert health() == health(b"ready") == (200, "serving")

    state.set("recovering", "rank 1 died")
    assert health() == (200, "recovering")  # a restart of the server would lose its requests
    assert health(b"ready") == (503, "recovering")
    assert health(path="/v1/models") == (200, "")

    state.set("ended", "too many")
    assert health() == (503, "ended")


def test_what_engines_recovered_from_is_among_the_metrics() -> None:
    state = EngineState()
    state.add(recoveries=2, restart=1.5, restore=0.25, recomputed=7, suspects=1, ended=1)
    state.set("recovering")
    registry = CollectorRegistry()
    registry.register(engine_state._Metrics())

    lines = generate_latest(registry).decode().splitlines()

    assert [line for line in lines if not line.startswith("#")] == [
        "vllm:phalanx_recoveries_total 2.0",
        "vllm:phalanx_recomputed_total 7.0",
        "vllm:phalanx_suspects_total 1.0",
        "vllm:phalanx_ended_total 1.0",
        'vllm:phalanx_recovery_seconds_total{phase="restart"} 1.5',
        'vllm:phalanx_recovery_seconds_total{phase="restore"} 0.25',
        "vllm:phalanx_recovering 1.0",
    ]


CLIENT = """
import sys
from phalanx.integrations.vllm import engine_state
engine_state.serve_states(type("Dead", (Exception,), {}))
print(engine_state.os.environ["PHALANX_VLLM_STATE"], flush=True)
print(engine_state.os.environ.get("VLLM_RPC_BASE_PATH"), flush=True)
sys.stdin.readline()
"""


def client(folder: Path, **inherited: str) -> subprocess.Popen[str]:
    """Start a client whose temporary files are in *folder*."""
    own = {"PHALANX_VLLM_STATE", "VLLM_RPC_BASE_PATH"}
    others = {key: text for key, text in os.environ.items() if key not in own}
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        env={**others, "TMPDIR": str(folder), **inherited},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_the_folder_of_a_client_that_was_killed_is_removed_by_the_next_and_no_other(
    tmp_path: Path,
) -> None:
    clients = [client(tmp_path) for _ in range(2)]
    killed, living = (
        (each, Path(each.stdout.readline().strip())) for each in clients if each.stdout
    )
    killed[0].kill()
    killed[0].communicate(timeout=60)
    assert killed[1].is_dir()

    last = client(tmp_path)
    assert last.stdout is not None
    own = Path(last.stdout.readline().strip())

    assert sorted(tmp_path.iterdir()) == sorted([living[1], own])
    for each in (living[0], last):
        each.communicate("end\n", timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_the_sockets_of_vllm_go_with_the_folder_of_their_client() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's are too long for sockets
        living = client(Path(folder))
        assert living.stdout is not None
        own, sockets = (Path(living.stdout.readline().strip()) for _ in range(2))
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(sockets / str(uuid.uuid4())))

        living.communicate("end\n", timeout=60)

        assert sockets == own
        assert list(Path(folder).iterdir()) == []


def test_a_client_whose_environment_names_the_folder_of_one_that_has_ended_has_its_own() -> None:
    with tempfile.TemporaryDirectory() as folder:
        gone = str(Path(folder) / "gone")
        inherited = {"PHALANX_VLLM_STATE": gone, "VLLM_RPC_BASE_PATH": gone}

        told, _ = client(Path(folder), **inherited).communicate("end\n", timeout=60)

        own, sockets = told.splitlines()
        assert own == sockets != gone


def test_a_folder_whose_name_is_too_long_for_sockets_is_not_theirs(tmp_path: Path) -> None:
    longest = tmp_path / ("n" * 70)
    longest.mkdir()

    told, _ = client(longest).communicate("end\n", timeout=60)

    assert told.splitlines()[1:] == ["None"]
