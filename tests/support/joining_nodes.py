"""For tests of nodes that join by themselves: `phalanx node` commands, and a group of theirs."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.node_engine import ONE_ZYGOTE
from tests.support.processes import LONG, wait_until
from tests.support.relayed_links import free_port

from phalanx.actors import Executor
from phalanx.cluster import JoinedNodes, NodeLost
from phalanx.runtime import process_tree, procfs

ROOT = Path(__file__).parents[2]


class NodeCommand:
    """One run of `phalanx node`; all that comes from it carries its mark.

    Attributes:
        log: What it has said.
    """

    def __init__(
        self,
        address: str,
        key: Path,
        *,
        prefix: Sequence[str] = (),
        program: Sequence[str] = (sys.executable, "-m", "phalanx.cli"),
        wait: float = LONG,
        cwd: Path = ROOT,
        **environment: str,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self.log = key.with_name(f"{self._mark}.log")
        words = [*prefix, *program, "node", "--join", address, "--key-file", str(key)]
        words += ["--wait", str(wait)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "PHALANX_TEST_MARK": self._mark, **environment},
                cwd=cwd,
                start_new_session=True,
            )

    def processes(self) -> dict[int, Any]:
        """Return what has come from it and runs, itself included."""
        return dict(process_tree.find(process_tree.TreeTarget(self._mark.encode()))[0])

    def node_process(self) -> int | None:
        """Return the pid of the node process, if there is one."""
        for pid in self.processes():
            if "node_process.main" in procfs.command(pid):
                return pid
        return None

    def says(self, what: str) -> bool:
        return what in self.log.read_text()

    def ended(self) -> int:
        """Return the exit code; nothing is left then."""
        code = self.process.wait(LONG)
        wait_until(lambda: not self.processes(), "the end of all that has come from a node")
        return code

    def close(self) -> None:
        self.process.kill()
        self.ended()


class Site:
    """A port for a group, the key of its nodes, and the commands that join.

    Attributes:
        told: The events of the group.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.host, self.port = host, free_port(host)
        self.address = f"{host}:{self.port}"
        self.key = self.new_key(folder, "key")
        self.commands: list[NodeCommand] = []
        self.groups: list[Executor[Any]] = []
        self.told: list[Any] = []

    @staticmethod
    def new_key(folder: Path, name: str) -> Path:
        file = folder / name
        file.write_text(secrets.token_hex(32) + "\n")
        file.chmod(0o600)
        return file

    def join(
        self, *, address: str | None = None, key: Path | None = None, **options: Any
    ) -> NodeCommand:
        """Start a command."""
        self.commands.append(NodeCommand(address or self.address, key or self.key, **options))
        return self.commands[-1]

    def group(self, worker: Any, size: int, runtime: Any, **given: Any) -> Executor[Any]:
        """Start a group of *size*; options of its nodes are among those given."""
        names = ("ranks_per_node", "spare_nodes", "node_timeout", "node_wait")
        own: dict[str, Any] = {"ranks_per_node": 1, "node_timeout": 3.0, "node_wait": LONG}
        own |= {name: given.pop(name) for name in names if name in given}
        nodes = JoinedNodes(bind=self.host, port=self.port, key_file=str(self.key), **own)
        given = {"launch": ONE_ZYGOTE, "devices": "cpu", **given}
        group = Executor(worker, size, cluster=nodes, runtime=runtime, **given)
        self.groups.append(group)
        group.subscribe(self.told.append)
        return group

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]

    def command_of(self, rank: int) -> NodeCommand:
        """Return the command on whose node *rank* is."""
        pid = self.groups[-1].ranks[rank].pid
        return next(each for each in self.commands if pid in each.processes())

    def lose(self, command: NodeCommand) -> int:
        """Kill the node process of *command*, and return its pid once that is known."""
        before, pid = len(self.of(NodeLost)), command.node_process()
        assert pid is not None
        os.kill(pid, 9)
        wait_until(lambda: len(self.of(NodeLost)) > before, "the loss of a node")
        return pid

    def close(self) -> None:
        for group in self.groups:
            group.close()
        for command in self.commands:
            command.close()
