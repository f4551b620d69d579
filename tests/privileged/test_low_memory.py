"""Too little memory, of every kind: an error for that call, and the next one works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.memory_cgroup import limited_group
from tests.support.options import Make
from tests.support.programs import run_program
from tests.support.workers import Echo

from phalanx.supervision import MessageTooLarge

MIB = 1 << 20
WAIT = 30.0
ROOT = Path(__file__).parents[2]


class Short(Echo):
    """Can be left without room for more."""

    def leave_room(self, size: int) -> None:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        room = pages * resource.getpagesize() + size
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))

    def size(self, array: Any) -> int:
        return int(array.nbytes)

    def made(self, size: int) -> Any:
        return np.zeros(size, dtype=np.uint8)


def test_a_worker_without_address_space_refuses_that_call_and_serves_on(make: Make) -> None:
    ex = make(Short, 1)
    ex.call("leave_room", WAIT, args=(16 * MIB,), rank=0)

    with pytest.raises(MemoryError, match=f"{64 * MIB} bytes"):
        ex.call("size", WAIT, args=(np.zeros(64 * MIB, dtype=np.uint8),), rank=0)

    assert ex.call("size", WAIT, args=(np.zeros(MIB, dtype=np.uint8),), rank=0) == MIB
    assert ex.ranks[0].incarnation == 1


def test_more_than_the_machine_has_is_refused_before_a_byte_is_written(make: Make) -> None:
    ex = make(Short, 1)
    try:
        huge = np.empty(1 << 44, dtype=np.uint8)
    except MemoryError:
        pytest.skip("this kernel promises no more address space than it has memory")

    with pytest.raises(MessageTooLarge) as caught:
        ex.call("size", WAIT, args=(huge,), rank=0)

    assert caught.value.size >= 1 << 44 > caught.value.limit
    assert str(caught.value.limit) in str(caught.value)
    assert ex.call("size", WAIT, args=(np.zeros(MIB, dtype=np.uint8),), rank=0) == MIB


IN_A_GROUP = """
import sys
from pathlib import Path
import numpy as np
import pytest
from phalanx import Executor
from phalanx.errors import MessageTooLarge
from tests.privileged.test_low_memory import MIB, WAIT, Short

def nothing(size):
    return np.zeros(size, dtype=np.uint8)

group, limit, gate = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
(group / "cgroup.procs").write_text("0")
with Executor(Short, 2, launch=dict(preload=())) as ex:
    with pytest.raises(MessageTooLarge) as sent:
        ex.collective_rpc("size", WAIT, args=(nothing(512 * MIB),))
    with pytest.raises(MessageTooLarge) as answered:
        ex.collective_rpc("made", WAIT, args=(512 * MIB,))
    for error in (sent.value, answered.value):
        assert error.size >= 512 * MIB > limit > error.limit, error
    for size in (100 * MIB, 140 * MIB):  # there is no room for both, and no need
        assert ex.collective_rpc("size", WAIT, args=(nothing(size),)) == [size] * 2
    ex.collective_rpc("gated", args=(str(gate),), non_block=True)
    row = []
    with pytest.raises(MessageTooLarge):
        for _ in range(60):
            row.append(ex.collective_rpc("size", args=(nothing(8 * MIB),), non_block=True))
    gate.touch()
    assert [future.result(WAIT) for future in row] == [[8 * MIB] * 2] * len(row)
    assert [rank.incarnation for rank in ex.ranks] == [1, 1]
print("answered")
"""


def test_more_than_its_control_group_has_is_refused_and_kills_nobody(gate: Path) -> None:
    limit = 384 * MIB
    with limited_group(limit) as group:
        words = (str(group), str(limit), str(gate))
        done = run_program([sys.executable, "-c", IN_A_GROUP, *words], cwd=ROOT)

    assert done.stdout == "answered\n", done.stderr


ECHOES = """
import numpy as np
from phalanx import Executor
from tests.support.transport import TRANSPORT
from tests.support.workers import Echo

with Executor(Echo, 2, launch=dict(preload=(), transport=TRANSPORT)) as executor:
    for size in (10, 100_000, 4 << 20):
        sent = np.arange(size, dtype=np.uint8)
        replies = executor.collective_rpc("echo", 30, args=(sent,))
        assert all((reply == sent).all() for reply in replies)
print("answered")
"""
UNSHARE = ["unshare", "--mount", "sh", "-c"]


@pytest.mark.parametrize(
    "how",
    [
        "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full",
        'mount --bind "$0" /dev/shm && mount -o remount,ro,bind /dev/shm',
    ],
    ids=["full", "read-only"],
)
def test_calls_need_no_dev_shm(tmp_path: Path, how: str) -> None:
    if subprocess.run([*UNSHARE, "true"], check=False).returncode:
        pytest.skip("mount namespaces are not allowed here")

    command = [*UNSHARE, f'{how} && exec "$@"', str(tmp_path), sys.executable, "-c", ECHOES]
    done = run_program(command, cwd=ROOT)

    assert done.stdout == "answered\n", done.stderr
