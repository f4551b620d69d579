"""Nodes that join by themselves, as real `phalanx node` commands on this machine."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.support.drivers import Driver
from tests.support.joining_nodes import ROOT, Site
from tests.support.processes import LONG, is_alive, start_thread, wait_until
from tests.support.rank_faults import wait_healed
from tests.support.relayed_links import processes_of
from tests.support.workers import Echo, wait_for

from phalanx.cluster import NodeFenced, NodeLost
from phalanx.errors import ExecutorClosed, NoNode, RuntimeFault, StartFailed
from phalanx.runtime import PeerRejected, Runtime, procfs
from phalanx.supervision import Intensity, Strategy

OTHER_VERSION = (
    "import sys; from phalanx.cli import main; from phalanx.cluster.link import handshake;"
    "handshake.installed_version = lambda package: '9.9'; sys.exit(main(sys.argv[1:]))"
)
OTHER_GREETING = (
    "import sys; from phalanx.cli import main;"
    "from phalanx.cluster.link import messages, node_link;"
    "encode = lambda message: [messages.encode(message)[0].replace(b'kernel', b'core')];"
    "node_link.encode = encode; sys.exit(main(sys.argv[1:]))"
)


def broker_of(driver: int) -> int:
    """Return the pid of the broker of the nodes of *driver*."""
    (found,) = (
        pid
        for pid in procfs.descendants(procfs.read_all(), [driver])
        if "join.broker_main" in procfs.command(pid)
    )
    return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with contextlib.closing(Site(tmp_path)) as site:
        yield site


def test_ranks_are_on_the_machines_that_have_joined_and_the_commands_end_with_the_driver(
    site: Site, runtime: Runtime
) -> None:
    commands = [site.join(WORD=word) for word in ("one", "two")]

    group = site.group(Echo, 2, runtime)

    words = group.collective_rpc(lambda worker: os.environ["WORD"])
    secret = group.collective_rpc(lambda worker: os.environ.get("PHALANX_NODE_KEY"))
    assert sorted(words) == ["one", "two"]
    assert secret == [None, None]
    assert [node.state for node in group.status().nodes] == ["up", "up"]
    group.close()
    assert [command.ended() for command in commands] == [0, 0]
    assert all(command.says("has ended") for command in commands)


def test_a_command_that_finds_no_room_for_what_it_says_serves_all_the_same(
    site: Site, runtime: Runtime
) -> None:
    command = site.join(prefix=("sh", "-c", 'exec "$@" 2>/dev/full', "sh"))

    group = site.group(Echo, 1, runtime)

    assert group.collective_rpc("rank") == [0]
    group.close()
    assert command.ended() == 0


def test_modules_in_the_working_folder_take_the_place_of_none_of_ours_and_ranks_import_them(
    site: Site, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zmq", "queue"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from here')\n")
    (tmp_path / "own.py").write_text("WORD = 'own'\n")
    monkeypatch.chdir(tmp_path)  # of the broker
    program = (sys.executable, "-P", "-m", "phalanx.cli")  # as the command that is installed
    site.join(program=program, cwd=tmp_path, PYTHONPATH=str(ROOT))

    group = site.group(Echo, 1, runtime)

    assert group.collective_rpc(lambda _: importlib.import_module("own").WORD) == ["own"]


def test_after_its_node_process_was_killed_a_machine_joins_again_and_the_group_heals(
    site: Site, runtime: Runtime
) -> None:
    commands = [site.join(), site.join()]
    group = site.group(Echo, 2, runtime)

    old = site.lose(site.command_of(1))

    assert group.collective_rpc("rank", timeout=LONG, retries=3) == [0, 1]
    assert group.status().restarts == 1
    (fenced,) = site.of(NodeFenced)
    assert "its process has ended" in fenced.why  # and not its lease
    assert [command.process.poll() for command in commands] == [None, None]
    assert old not in {command.node_process() for command in commands}


def test_a_restart_waits_for_a_machine_that_joins_late(site: Site, runtime: Runtime) -> None:
    site.join()
    victim = site.join()
    group = site.group(Echo, 2, runtime)

    victim.process.kill()
    wait_until(lambda: site.of(NodeLost))
    future = group.collective_rpc("rank", non_block=True, retries=3)
    victim.ended()
    late = site.join()

    assert future.result(LONG) == [0, 1]
    assert group.status().restarts == 1
    assert late in {site.command_of(rank) for rank in (0, 1)}
    (fenced,) = site.of(NodeFenced)
    assert fenced.why == "its last word"  # and not its lease, for which all would have waited


def test_a_command_that_is_killed_while_its_node_begins_gives_way_to_another_machine(
    site: Site, runtime: Runtime
) -> None:
    commands = [site.join() for _ in range(3)]
    group = site.group(Echo, 1, runtime)
    wait_until(lambda: all(command.says("joined") for command in commands))
    serving = site.command_of(0)
    others = [command for command in commands if command is not serving]

    serving.process.kill()
    wait_until(lambda: any(command.node_process() for command in others))
    (first,) = (command for command in others if command.node_process())
    first.process.kill()
    first.ended()

    assert group.collective_rpc("rank", timeout=LONG, retries=3) == [0]


def test_a_machine_that_was_asked_for_by_a_resize_that_was_taken_back_gets_no_node(
    site: Site, runtime: Runtime
) -> None:
    site.join()
    site.join()
    group = site.group(Echo, 1, runtime, spare_nodes=1)
    group.resize(2, timeout=LONG)
    group.resize(1, timeout=LONG)
    assert [node.state for node in group.status().nodes] == ["up", "up"]

    late = site.join()
    wait_until(lambda: late.says("joined"))
    group.restart(timeout=LONG)

    assert group.collective_rpc("rank") == [0]
    assert [node.state for node in group.status().nodes] == ["up", "up"]
    assert late.node_process() is None


def test_a_host_that_is_not_known_is_told_at_once_and_again_at_the_end(site: Site) -> None:
    command = site.join(address="nowhere.invalid:29600", wait=3.0)

    wait_until(lambda: command.says("waiting for a driver at nowhere.invalid:29600: the host"))
    assert command.ended() == 1
    assert command.says("within 3 s: the host 'nowhere.invalid' is not found")


def test_a_resize_for_which_there_are_no_machines_changes_nothing(
    site: Site, runtime: Runtime
) -> None:
    site.join()
    group = site.group(Echo, 1, runtime, node_wait=1.5)
    before = group.ranks[0].pid

    with pytest.raises(NoNode, match=r"no machine in 1\.5 s: 2 more have to join at tcp://"):
        group.resize(3, timeout=LONG)
    with pytest.raises(TimeoutError, match="no machines for 2 ranks after 0.5 s; nothing was"):
        group.resize(2, timeout=0.5)

    assert group.collective_rpc("rank") == [0]
    assert group.ranks[0].pid == before
    late = site.join()  # nobody asks for it any longer
    wait_until(lambda: late.says("joined"))
    group.restart(timeout=LONG)
    assert late.node_process() is None
    group.resize(2, timeout=LONG)
    assert group.collective_rpc("rank") == [0, 1]
    assert [node.state for node in group.status().nodes] == ["up", "up"]


def test_calls_and_restarts_go_on_while_a_resize_waits_for_machines(
    site: Site, runtime: Runtime
) -> None:
    site.join()
    group = site.group(Echo, 1, runtime)
    done = threading.Event()

    def resize() -> None:
        group.resize(3, timeout=LONG)
        done.set()

    waiting = start_thread(resize)
    wait_until(lambda: len(group.status().nodes) == 3)  # two of them are asked for
    assert group.collective_rpc("rank") == [0]
    site.join()
    wait_until(lambda: [node.state for node in group.status().nodes].count("up") == 2)
    group.restart(timeout=LONG)  # which needs one machine only
    os.kill(group.ranks[0].pid or 0, signal.SIGKILL)
    wait_healed(group)
    assert group.collective_rpc("rank", timeout=LONG, retries=3) == [0]
    assert not done.is_set()
    site.join()

    waiting.join(LONG)
    assert done.is_set()
    assert group.collective_rpc("rank") == [0, 1, 2]


@pytest.mark.parametrize("how", ["close", "fail"])
def test_the_end_of_a_group_ends_a_resize_that_waits_for_machines(
    site: Site, runtime: Runtime, how: str
) -> None:
    command = site.join()
    group = site.group(Echo, 1, runtime, intensity=Intensity(0, 60.0))

    errors: list[BaseException] = []

    def resize() -> None:
        try:
            group.resize(3)
        except ExecutorClosed as error:
            errors.append(error)

    waiting = start_thread(resize)
    wait_until(lambda: len(group.status().nodes) == 3)
    if how == "close":
        group.close()
    else:
        os.kill(group.ranks[0].pid or 0, signal.SIGKILL)

    waiting.join(LONG)
    assert [type(error) for error in errors] == [ExecutorClosed]
    group.close()
    assert group.status().nodes == ()
    assert command.ended() == 0


def test_a_machine_that_is_lost_while_calls_in_flight_are_awaited_is_awaited_again(
    site: Site, runtime: Runtime, tmp_path: Path
) -> None:
    site.join()
    group = site.group(Echo, 1, runtime)
    before = group.ranks[0].pid
    gate = tmp_path / "gate"
    call = group.collective_rpc(lambda _: wait_for(str(gate), 10 * LONG), non_block=True)
    waiting = start_thread(partial(group.resize, 2))
    second = site.join()
    wait_until(lambda: [node.state for node in group.status().nodes] == ["up", "up"])

    site.lose(second)
    second.close()
    wait_until(lambda: [node.state for node in group.status().nodes].count("up") == 1)
    gate.touch()

    assert call.result(LONG) == [None]
    assert group.collective_rpc("rank") == [0]
    assert group.ranks[0].pid == before
    site.join()
    waiting.join(LONG)
    assert group.collective_rpc("rank") == [0, 1]
    assert group.status().restarts == 0


@pytest.mark.soak
def test_a_machine_that_is_needed_by_no_rank_waits_and_ends_with_the_driver(
    site: Site, runtime: Runtime
) -> None:
    commands = [site.join() for _ in range(3)]
    group = site.group(Echo, 1, runtime)
    wait_until(lambda: all(command.says("joined") for command in commands))
    idle = [command for command in commands if command.node_process() is None]
    assert len(idle) == 2

    group.resize(2, timeout=LONG)
    assert group.collective_rpc("rank") == [0, 1]
    group.resize(1, timeout=LONG)
    wait_until(lambda: sum(each.node_process() is None for each in commands) == 2)
    group.resize(3, timeout=LONG)  # the one that was let go is there again
    assert group.collective_rpc("rank") == [0, 1, 2]
    group.close()

    assert [command.ended() for command in commands] == [0] * 3


def test_after_their_broker_was_killed_machines_join_the_next_one_and_the_group_heals(
    site: Site, runtime: Runtime
) -> None:
    commands = [site.join(), site.join()]
    once = {"strategy": Strategy.ONE_FOR_ONE, "intensity": Intensity(1, 60.0)}
    group = site.group(Echo, 2, runtime, **once)

    os.kill(broker_of(os.getpid()), signal.SIGKILL)

    wait_until(lambda: len(site.of(NodeLost)) == 2)
    wait_healed(group)
    assert group.collective_rpc("rank", timeout=LONG, retries=3) == [0, 1]
    assert group.status().restarts == 1
    assert [command.process.poll() for command in commands] == [None, None]
    group.close()
    assert [command.ended() for command in commands] == [0, 0]


@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ALL, Strategy.ONE_FOR_ONE])
def test_nodes_that_end_with_their_broker_are_one_loss_whatever_is_heard_first(
    site: Site, runtime: Runtime, strategy: Strategy
) -> None:
    commands = [site.join(), site.join()]
    group = site.group(Echo, 2, runtime, strategy=strategy, intensity=Intensity(1, 60.0))
    nodes = [command.node_process() for command in commands]
    stops, goes_on = threading.Event(), threading.Event()

    def stop() -> None:
        stops.set()
        goes_on.wait(LONG)

    runtime.loop.post(stop)
    assert stops.wait(LONG)

    os.kill(broker_of(os.getpid()), signal.SIGKILL)
    wait_until(lambda: not any(pid and is_alive(pid) for pid in nodes))
    goes_on.set()

    wait_until(lambda: len(site.of(NodeLost)) == 2)
    wait_healed(group)
    assert group.collective_rpc("rank", timeout=LONG, retries=3) == [0, 1]
    assert group.status().restarts == 1
    (why,) = {event.why for event in site.of(NodeLost)}
    assert "the join broker has ended" in why


def test_a_close_just_after_their_broker_was_killed_ends_the_commands(
    site: Site, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.runtime.process.helper._CALM", LONG)  # until there is another
    commands = [site.join(), site.join()]
    group = site.group(Echo, 1, runtime)
    wait_until(lambda: all(command.says("joined") for command in commands))

    os.kill(broker_of(os.getpid()), signal.SIGKILL)
    group.close()

    assert [command.ended() for command in commands] == [0, 0]


def test_a_proxy_that_ends_each_connection_keeps_no_machine_from_a_driver_that_comes_later(
    site: Site, runtime: Runtime
) -> None:
    with socket.create_server((site.host, site.port)) as proxy:
        proxy.settimeout(LONG)
        command = site.join()
        for _ in range(15):  # more than of a driver with another key
            proxy.accept()[0].close()

    group = site.group(Echo, 1, runtime)

    assert group.collective_rpc("rank") == [0]
    assert command.node_process() is not None


def test_another_key_and_other_versions_are_refused_on_both_sides_and_the_next_one_is_the_spare(
    site: Site, runtime: Runtime, tmp_path: Path
) -> None:
    first = site.join()
    group = site.group(Echo, 1, runtime, spare_nodes=1)
    assert site.command_of(0) is first

    wrong = site.join(key=Site.new_key(tmp_path, "other"))
    other = site.join(program=(sys.executable, "-c", OTHER_VERSION))
    older = site.join(program=(sys.executable, "-c", OTHER_GREETING))

    assert [wrong.ended(), other.ended(), older.ended()] == [1, 1, 1]
    assert wrong.says("has another key")
    assert other.says("has phalanx 9.9, and the driver")
    assert older.says("different versions of phalanx")
    wait_until(lambda: len(site.of(PeerRejected)) >= 3)
    whys = " ".join(each.why for each in site.of(PeerRejected))
    assert "has another key" in whys
    assert "has phalanx 9.9" in whys
    assert "different versions of phalanx" in whys
    assert group.collective_rpc("rank") == [0]
    spare = site.join()
    wait_until(lambda: [each.state for each in group.status().nodes] == ["up", "up"])
    site.lose(first)

    assert group.collective_rpc("rank", timeout=LONG, retries=3) == [0]
    assert site.command_of(0) is spare


def test_unknown_peers_that_say_nothing_or_noise_keep_no_machine_away(
    site: Site, runtime: Runtime
) -> None:
    site.join()
    group = site.group(Echo, 1, runtime, spare_nodes=1)
    with contextlib.ExitStack() as unknown:
        for number in range(100):
            raw = socket.create_connection((site.host, site.port), LONG)
            unknown.enter_context(raw)
            if number % 2:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)

        site.join()

        wait_until(lambda: [each.state for each in group.status().nodes] == ["up", "up"])
    assert group.collective_rpc("rank") == [0]


def test_a_port_that_is_taken_is_told(site: Site, runtime: Runtime) -> None:
    with (
        socket.create_server((site.host, site.port)),
        pytest.raises((StartFailed, RuntimeFault)) as failed,
    ):
        site.group(Echo, 1, runtime)

    assert "cannot listen for nodes: Address already in use" in repr(
        (failed.value, failed.value.__cause__)
    )


def test_a_group_that_too_few_machines_join_ends_and_says_where_they_are_awaited(
    site: Site, runtime: Runtime
) -> None:
    site.join()

    with pytest.raises(StartFailed) as failed:
        site.group(Echo, 2, runtime, node_wait=4.0)

    assert isinstance(failed.value.__cause__, NoNode)
    assert f"1 more have to join at tcp://{site.address}" in str(failed.value.__cause__)


def test_nothing_is_left_of_a_driver_that_is_killed(
    site: Site, drive: Callable[..., Driver]
) -> None:
    command = site.join()
    driver = drive("joined_driver", str(site.port), str(site.key))
    assert driver.receive() == {"ranks": [0, 1]}
    assert len(command.processes()) > 5

    os.kill(driver.process.pid, signal.SIGKILL)

    assert command.ended() == 0


def test_a_node_whose_lease_is_over_says_so_and_one_that_begins_meanwhile_gives_its_machine_back(
    site: Site, runtime: Runtime
) -> None:
    command = site.join()
    group = site.group(Echo, 1, runtime)
    (gateway,) = processes_of(group, "gateway")

    os.kill(gateway, signal.SIGSTOP)  # no beat is answered, and no other node admitted

    wait_until(lambda: command.says("phalanx node 0 ends: its lease is over"))
    assert group.collective_rpc("rank", timeout=LONG, retries=3) == [0]


@pytest.mark.soak
def test_a_command_whose_driver_is_lost_without_a_word_ends_its_ranks_and_waits_for_a_driver(
    site: Site, runtime: Runtime, drive: Callable[..., Driver]
) -> None:
    command = site.join()
    driver = drive("joined_driver", str(site.port), str(site.key))
    assert driver.receive() == {"ranks": [0, 1]}
    short = site.join(wait=8.0)
    wait_until(lambda: short.says("joined"))

    broker = broker_of(driver.process.pid)
    os.kill(broker, signal.SIGSTOP)  # it is not to say anything
    os.kill(driver.process.pid, signal.SIGKILL)
    os.kill(broker, signal.SIGKILL)

    assert short.ended() == 1
    assert short.says("no driver was reached")
    wait_until(lambda: command.node_process() is None, "the end of what it ran")
    group = site.group(Echo, 1, runtime)
    assert group.collective_rpc("rank") == [0]
    assert site.command_of(0) is command


def test_a_command_that_is_ended_leaves_nothing(site: Site, runtime: Runtime) -> None:
    commands = [site.join(), site.join()]
    group = site.group(Echo, 2, runtime)
    group.collective_rpc("grandchild", kwargs={"daemon": True})

    for command, number in zip(commands, (signal.SIGTERM, signal.SIGINT), strict=True):
        command.process.send_signal(number)

    assert [command.ended() for command in commands] == [130, 130]
