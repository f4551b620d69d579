"""Each measurement runs, small, and gives what it promises; figures are not judged."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from benchmarks.__main__ import main
from benchmarks.harness.roster import TRANSPORTS, choose
from benchmarks.harness.venvs import FOLDER, RECIPES, Environments, Recipe
from benchmarks.training.command import OURS
from tests.integration.benchmarks.conftest import ROOT, bench

pytestmark = [pytest.mark.usefixtures("phalanx_leak_check"), pytest.mark.timeout(300)]


def test_rpc_gives_a_table_figures_and_a_picture_and_names_who_is_not_there(
    tmp_path: Path,
) -> None:
    # An interpreter without Ray stands for a peer that breaks.
    done = bench(
        *("rpc", "--ranks", "1", "--sizes", "0,64K", "--rounds", "2", "--seconds", "0.01"),
        *("--rest", "0.1", "--no-growth", "--only", "memcpy,pyzmq,pipe,pykka,ray,xoscar"),
        *("--peer-env", f"ray={sys.executable}", "--json", "out.json", "--plot", "out.png"),
        cwd=tmp_path,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    measured = {(row["size"], row["contestant"]) for row in found["calls"]}
    ours = {"phalanx", "pyzmq", "pipe", "pykka"}
    assert measured == {(0, name) for name in ours} | {(65536, n) for n in {*ours, "memcpy"}}
    assert all(row["median"]["rounds"] == 2 for row in found["calls"])
    assert {row["contestant"] for row in found["pipelined_per_second"]} == ours
    assert {row["contestant"] for row in found["rest"]} == {*ours, "memcpy"}
    assert [row["contestant"] for row in found["broken"]] == ["ray"]
    assert "No module named" in found["broken"][0]["why"]
    assert "install xoscar" in found["absent"]["xoscar"]
    states = {target["what"]: target["state"] for target in found["targets"]}
    assert states["empty call, 1 rank: at most 0.6 of pyzmq"] in ("met", "missed")
    assert states["empty call, 8 ranks: at most 0.5 of pyzmq"] == "not measured"
    assert "| 64 KiB | memcpy " in done.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_rpc_measures_every_form_in_both_directions(tmp_path: Path) -> None:
    done = bench(
        *("rpc", "--messages", "--ranks", "1", "--sizes", "0,1K", "--rounds", "1"),
        *("--seconds", "0.01", "--only", "pipe,pyzmq", "--no-plot", "--json", "-"),
        cwd=tmp_path,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] == []
    rows = [row for row in found["calls"] if row["contestant"] == "phalanx"]
    forms = [(form, back) for back in (False, True) for form in ("tensor", "bytes", "structure")]
    assert [(row["form"], row["back"]) for row in rows] == [("tensor", False), *forms]
    judged = [each["what"] for each in found["targets"] if each["state"] != "not measured"]
    assert any(what.startswith("structure, back, 1 rank: at most 0.7 of pipe") for what in judged)


def test_profile_tells_the_steps_of_a_call(tmp_path: Path) -> None:
    done = bench(
        *("profile", "--ranks", "2", "--sizes", "1K", "--calls", "20", "--json", "-"), cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["calls"]
    assert [row["back"] for row in rows] == [False] * 4 + [True] * 3
    assert all(row["encode"] > 0 for row in rows[1:4])
    assert all(row[step] > 0 for row in rows for step in ("send", "run", "match", "all"))


def test_a_transport_takes_part_only_where_it_is_asked_for() -> None:
    def names(only: list[str] | None, more: tuple[str, ...] = ()) -> set[str]:
        present, absent = choose(only, ["none"], Environments(), more)
        assert not absent
        return {each.entry.name for each in present}

    usual = {"phalanx", "memcpy", "pyzmq", "pipe", "pykka"}
    assert names(None) == usual
    assert names(None, TRANSPORTS) == usual | {"phalanx-tcp", "phalanx-ipc"}
    assert names(["pipe", "phalanx-tcp"]) == {"phalanx", "pipe", "phalanx-tcp"}


@pytest.mark.soak
def test_recovery_tells_every_row_of_its_targets(tmp_path: Path) -> None:
    done = bench("recovery", "--kills", "1", "--ranks", "2", "--json", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["bare_pidfd"]) == 1
    assert len(found["targets"]) == 6
    assert {target["state"] for target in found["targets"]} <= {"met", "missed"}
    assert all(seconds > 0 for row in found["times"] for seconds in row["seconds"])


@pytest.mark.soak
def test_cluster_tells_every_row_that_needs_neither_ray_nor_peers(tmp_path: Path) -> None:
    done = bench(
        *("cluster", "--rounds", "1", "--cuts", "1", "--calls", "200", "--json", "-"), cwd=tmp_path
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["left"] == []
    assert found["about"].startswith("Machines are ")
    assert found["why"].keys() <= {"driver", "ray"}
    assert 0 < found["figures"]["rank.known"][0] < found["figures"]["rank.next"][0]
    assert found["figures"]["silence.overlap"] == [0, 0]
    assert found["figures"]["eight.restarts"] == [1]
    assert {found["figures"][f"accounts.{what}"][0] for what in ("lost", "doubled", "stale")} == {0}
    assert found["figures"]["accounts.nodes"][0] > 0


@pytest.mark.soak
def test_training_through_kills_is_exact_and_gives_its_figures(tmp_path: Path) -> None:
    model = ("--ranks", "2", "--layers", "1", "--block", "7")
    small = ("--seconds", "9", "--cadence", "3", "--calm", "1", "--rounds", "1", "--width", "32")
    forms = [word for form in (*OURS, "torchrun") for word in ("--form", form)]
    done = bench("training", *model, *small, *forms, "--json", "-", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [found["system"] for found in runs] == [*OURS, "torchrun"]
    for found in runs:
        assert (found["equal"], found["lost"], found["doubled"]) == (True, 0, 0), found
        assert found["steps"] > 0
        assert found["kills"] > 0
        assert len(found["overhead"]) == 1


def test_another_phalanx_takes_part_only_where_its_place_is_named() -> None:
    present, absent = choose(["phalanx-before"], ["all"], Environments())

    assert [each.entry.name for each in present] == ["phalanx"]
    assert absent == {"phalanx-before": "absent: --peer-env phalanx=PATH"}


def test_training_goes_on_without_a_peer_that_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))

    code = main(["training", "--ranks", "2", "--form", "torchft", "--form", "NVRx in-process"])

    assert code == 0
    text = capsys.readouterr().out
    assert "- torchft, 2 ranks: absent: python -m benchmarks peers --install torchft" in text
    assert "- NVRx in-process, 2 ranks: absent: python -m benchmarks peers --install nvrx" in text


def test_training_goes_on_without_a_system_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    broken = tmp_path / "python"
    broken.write_bytes(b"\0")
    broken.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    forms = [word for form in ("torchft", "NVRx in-process") for word in ("--form", form)]
    code = main(
        ["training", "--ranks", "2", "--rounds", "0", *forms, "--peer-env", f"torchft={broken}"]
    )

    assert code == 0
    text = capsys.readouterr().out
    assert "- torchft, 2 ranks: broke: OSError(8, 'Exec format error')" in text
    assert "- NVRx in-process, 2 ranks: absent" in text
    assert list(tmp_path.iterdir()) == [broken]


def test_training_that_is_interrupted_tells_what_there_was(tmp_path: Path) -> None:
    words = ("training", "--ranks", "1", "--rounds", "0", "--form", "torchrun")
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *words, "--json", str(tmp_path / "figures")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as training:
        assert training.stderr is not None
        while "kills" not in training.stderr.readline():
            assert training.poll() is None
        training.send_signal(signal.SIGINT)
        text, said = training.communicate(timeout=100)

    assert training.returncode == 130, said
    assert "| torchrun | 1 " in text
    (found,) = json.loads((tmp_path / "figures").read_text())["runs"]
    assert (found["system"], found["equal"], found["why"]) == ("torchrun", None, "")


def test_metrics_are_compared_in_a_single_round_as_well(tmp_path: Path) -> None:
    done = bench("metrics", "--rounds", "1", "--calls", "5", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "on/off  median of 1 pairs" in done.stdout


def test_a_peer_that_cannot_be_installed_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setitem(RECIPES, "nvrx", Recipe("no_such_module", (str(tmp_path / "none.whl"),)))

    code = main(["peers", "--install", "nvrx"])

    assert code == 1
    assert "nvrx: pip ended with exit code 1" in capfd.readouterr().out
    assert Environments().python("nvrx") is None


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("startup", "--ranks", "1", "--warm", "1"), "phalanx_cold_seconds"),
        (("supervision", "--most", "10"), "bytes_per_child"),
    ],
)
def test_the_others_give_their_figures(words: tuple[str, ...], key: str, tmp_path: Path) -> None:
    done = bench(*words, "--json", "-", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[key] > 0


def test_scale_gives_what_a_group_takes_by_its_size(tmp_path: Path) -> None:
    words = ("scale", "--ranks", "1,2", "--rounds", "1", "--calls", "2")
    done = bench(*words, "--json", "figures", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    rounds = json.loads((tmp_path / "figures").read_text())["rounds"]
    assert rounds["2"][0]["descriptors"] > rounds["1"][0]["descriptors"] > 0
    assert min(rounds["2"][0].values()) > 0
    assert "| descriptors of the driver: 2 ranks to 1, at most 2" in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("rpc", "--only", "nobody"), "there is no such one"),
        (("rpc", "--peers", "pipe"), "there is no such one"),
        (("kill", "--scenarios", "boredom"), "there are in-flight, idle"),
        (("kill", "--only", "nobody"), "there are phalanx, ray"),
        (("rpc", "--peer-env", "ray=/nowhere"), "neither bin/python nor an interpreter"),
        (("rpc", "--peer-env", "dask=/usr"), "write NAME=PATH"),
        (("rpc", "--json", "nowhere/out.json"), "its folder does not exist"),
        (("rpc", "--sizes", "1Q"), "is no size"),
        (("rpc", "--ranks", "0"), "at least 1"),
        (("training", "--ranks", ","), "name at least one"),
        (("rpc", "--seconds", "1e300"), "from 0 to 1e+09"),
        (("recovery", "--kills", "none"), "at least 1"),
        (("training", "--cadence", "0"), "at least 1"),
        (("training", "--width", "30"), "give a multiple of 4"),
        (("cluster", "--only", "moon"), "there are rank, node"),
        (("peers", "--install", "dask"), "no such peer"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(list(words))
    except SystemExit as refused:  # by the parser
        code = refused.code

    printed = capsys.readouterr()
    assert code == 2
    assert told in printed.err
    assert printed.out == ""


def test_peers_shows_where_each_peer_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["peers", "--peer-env", f"vllm={sys.executable}"])

    assert code == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line]
    lines = {row[1].strip(): row for row in rows}
    assert lines["vllm"][2].strip() == sys.executable
    assert "ray==" in lines["ray"][3]
