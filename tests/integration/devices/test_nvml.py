"""The questions to NVML, asked of a library that is built here and says what it is told.

What runs against it runs in a process of its own, which finds it before any other by
``LD_LIBRARY_PATH``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.node_engine import LocalNodes
from tests.support.processes import wait_until
from tests.support.workers import Echo

from phalanx.actors import Executor, Launch
from phalanx.errors import StartFailed
from phalanx.runtime import Runtime
from phalanx.runtime.devices.inventory import BoundedCaller, Unanswered

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1 in it."""
    pytest.importorskip("pynvml")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the library with")
    folder = tmp_path_factory.mktemp("nvml")
    source, target = ROOT / "tests/support/nvml_stub.c", folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    build = [compiler, *flags, "-o", str(target), str(source)]
    subprocess.run(build, check=True, timeout=60)
    return folder


# Runs what it is told, line by line, and says what that printed.
SERVER = """
import contextlib, io, json, os, sys, traceback
from pathlib import Path
from phalanx.runtime.devices.inventory import find_gpus

def say(*lines):
    new = Path(os.environ["FAKE_NVML"] + ".new")
    new.write_text("\\n".join(lines) + "\\n")
    new.rename(os.environ["FAKE_NVML"])

state, out = os.environ["FAKE_NVML"], os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    told, printed, error = json.loads(line), io.StringIO(), ""
    os.environ["FAKE_NVML"] = state
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ.update(told["environment"])
    say(*told["said"])
    try:
        with contextlib.redirect_stdout(printed):
            exec(told["code"], {"find_gpus": find_gpus, "say": say, "os": os, "sys": sys})
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps([printed.getvalue(), error]), file=out, flush=True)
"""


@pytest.fixture(scope="module")
def server(library: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the library; one for all tests, for imports take their time."""
    env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    env |= {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(library / "state")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


@pytest.fixture
def ask(server: subprocess.Popen[str]) -> Callable[..., list[str]]:
    """Runs code beside the library; ``say(...)`` in it changes what the library says."""

    def run(*said: str, code: str, **environment: str) -> list[str]:
        order = {"said": said, "code": textwrap.dedent(code), "environment": environment}
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        printed, error = json.loads(server.stdout.readline())  # pytest's own limit ends a hang
        assert not error, error
        lines: list[str] = printed.splitlines()
        return lines

    return run


TWO = ("gpu GPU-aaaa H200 100 0 0 0 ok", "gpu GPU-bbbb H200 0 0 0 0 ok")


def test_devices_are_listed_and_measured_without_cuda(ask: Any) -> None:
    said = ask(
        *TWO,
        f"proc 0 {os.getpid()} 60",
        "proc 0 2000000000 20",  # of another namespace
        code="""
        inventory = find_gpus()
        print(*inventory.gpus(), sep="\\n")
        print(inventory.used_bytes("GPU-aaaa") >> 20, inventory.processes("GPU-aaaa"))
        print(inventory.processes("GPU-bbbb"), inventory.faults("GPU-aaaa"))
        print(inventory.used_bytes("GPU-none"), inventory.faults("GPU-none")[0].kind)
        inventory.close()
        maps = open("/proc/self/maps").read()
        print("torch" in sys.modules, "libcuda.so" in maps, "libnvidia-ml.so.1" in maps)
        """,
    )

    assert said == [
        "Gpu(uuid='GPU-aaaa', index=0, name='H200', parent='')",
        "Gpu(uuid='GPU-bbbb', index=1, name='H200', parent='')",
        f"100 {{{os.getpid()}: {60 << 20}, 2000000000: None}}",
        "{} ()",
        "None lost",
        "False False True",
    ]


def test_a_device_that_is_not_to_be_had_hides_no_other(ask: Any) -> None:
    said = ask(
        "gpu GPU-aaaa H200 0 0 0 0 denied",
        "gpu GPU-bbbb H200 70 0 0 0 ok",
        code="""
        inventory = find_gpus()
        print(*inventory.gpus(), inventory.used_bytes("GPU-bbbb") >> 20)
        inventory.close()
        """,
    )

    assert said == ["Gpu(uuid='GPU-bbbb', index=0, name='H200', parent='') 70"]


def test_instances_stand_for_the_gpu_that_is_cut_up(ask: Any) -> None:
    said = ask(
        "gpu GPU-aaaa H200 0 1 0 4 ok",
        "gpu GPU-bbbb H200 0 0 0 0 ok",
        "mig 0 MIG-one 10",
        "mig 0 MIG-two 20",
        code="""
        inventory = find_gpus()
        print(*((gpu.uuid, gpu.index, gpu.parent) for gpu in inventory.gpus()))
        print(inventory.used_bytes("MIG-two") >> 20, inventory.faults("MIG-two"))
        inventory.close()
        """,
    )

    assert said[0] == "('MIG-one', 0, 'GPU-aaaa') ('MIG-two', 1, 'GPU-aaaa') ('GPU-bbbb', 2, '')"
    assert said[1].startswith("20 (Fault(kind='recovery', text='it wants to be drained")


def test_faults_are_told_apart_and_the_applications_own_errors_are_none(ask: Any) -> None:
    said = ask(
        "gpu GPU-aaaa H200 0 0 -1 -1 ok",
        "gpu GPU-bbbb H200 0 0 0 0 ok",
        "xid 0 79",
        code="""
        inventory = find_gpus()
        def show(*uuids):
            for uuid in uuids:
                print(uuid, *(f"{f.kind}:{f.fatal}:{f.count}" for f in inventory.faults(uuid)))
        show("GPU-aaaa")  # what was before we came is nothing to us
        base = ["gpu GPU-aaaa H200 0 0 2 1 ok", "gpu GPU-bbbb H200 0 0 0 0 ok", "xid 0 79"]
        show("GPU-bbbb")
        say(*base, "xid 0 31", "xid 0 94", "xid 0 94", "xid 1 79")
        show("GPU-aaaa", "GPU-bbbb")
        say(base[0], "gpu GPU-bbbb H200 0 0 0 0 lost")
        show("GPU-bbbb")
        print(inventory.used_bytes("GPU-bbbb"))
        say("gpu GPU-aaaa H200 0 0 2 1 broken")
        show("GPU-aaaa", "GPU-bbbb")
        inventory.close()
        """,
    )

    assert said == [
        "GPU-aaaa",
        "GPU-bbbb",
        "GPU-aaaa xid:False:2 recovery:True:1 ecc:False:2",
        "GPU-bbbb xid:True:1",
        "GPU-bbbb lost:True:1",
        "None",
        "GPU-aaaa unknown:False:1",
        "GPU-bbbb lost:True:1",
    ]


def test_an_error_of_the_binding_itself_is_a_fault_too(ask: Any) -> None:
    said = ask(
        *TWO,
        code="""
        import types
        inventory = find_gpus()
        def broken(*_):
            b"\\xff".decode()
        known = {**vars(inventory._nvml), "nvmlDeviceGetTotalEccErrors": broken}
        inventory._nvml = types.SimpleNamespace(**known)
        (fault,) = inventory.faults("GPU-aaaa")
        print(fault.kind, fault.fatal, "UnicodeDecodeError" in fault.text)
        inventory.close()
        """,
    )

    assert said == ["unknown False True"]


def test_a_driver_whose_nvml_does_not_start_has_no_gpu(ask: Any) -> None:
    said = ask(
        code="""
        del os.environ["FAKE_NVML"]
        import threading
        before = threading.active_count()
        inventory = find_gpus()
        print(type(inventory).__name__, threading.active_count() - before)
        """
    )

    assert said == ["ProcInventory 0"]


def test_ranks_get_devices_from_nvml_of_which_no_thread_stays(ask: Any) -> None:
    said = ask(
        *TWO,
        code="""
        import threading
        from phalanx import Executor, Runtime
        from tests.support.workers import Echo
        with Runtime(console=None, stream=False) as runtime:
            with Executor(Echo, 2, launch={"preload": ()}, runtime=runtime) as ex:
                print(*ex.collective_rpc(lambda w: os.environ["CUDA_VISIBLE_DEVICES"], 60))
        print([t.name for t in threading.enumerate() if "nvml" in t.name])
        """,
    )

    assert said == ["GPU-aaaa GPU-bbbb", "[]"]


def test_the_doctor_shows_what_can_be_leased_and_what_is_ill(ask: Any) -> None:
    said = ask(
        "gpu GPU-aaaa H200 2048 0 3 0 ok",
        *TWO[1:],
        code="""
        from phalanx.cli import doctor
        found = doctor._devices()
        print(found.state)
        print(*found.found.split("; "), sep="\\n")
        print(found.remedy[:29])
        """,
    )

    ecc = "3 uncorrected ECC error(s) since its driver was loaded"
    assert said == [
        "note",
        "2 GPU(s)",
        f"0: H200 GPU-aaaa, 2.0 GiB in use, in quarantine: {ecc}",
        "1: H200 GPU-bbbb, 0.0 GiB in use, can be leased",
        "ranks get the other devices; ",
    ]


def test_a_question_that_is_never_answered_costs_its_limit_once() -> None:
    caller = BoundedCaller("test", 0.05)
    let_go = threading.Event()
    with pytest.raises(Unanswered, match="no answer within"):
        caller.call(let_go.wait)

    with pytest.raises(Unanswered, match="still without an answer"):
        caller.call(lambda: None)

    def answers() -> bool:
        with contextlib.suppress(Unanswered):
            return caller.call(lambda: 7) == 7
        return False

    let_go.set()
    wait_until(answers)


def test_a_question_for_which_there_is_no_thread_is_answered_all_the_same() -> None:
    caller = BoundedCaller("test", 30.0)
    before = threading.stack_size(1 << 46)  # more than any process may map
    try:
        assert caller.call(threading.get_ident) == threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            caller.call(lambda: 1 // 0)
    finally:
        threading.stack_size(before)

    assert caller.call(threading.get_ident) != threading.get_ident()


def test_an_error_of_a_question_is_raised_where_it_was_asked_and_keeps_nothing_of_that() -> None:
    caller = BoundedCaller("test", 30.0)

    def ask() -> weakref.ref[Any]:
        mine = threading.Event()
        try:
            caller.call(lambda: 1 // 0)
        except ZeroDivisionError:
            return weakref.ref(mine)
        raise AssertionError

    asked = ask()

    wait_until(lambda: asked() is None)  # not by the garbage collector
    assert caller.call(lambda: 7) == 7


def test_the_meter_of_the_experiments_reads_memory_processes_and_what_the_device_is(
    ask: Any,
) -> None:
    said = ask(
        "gpu GPU-aaaa H200 100 0 0 0 ok",
        "proc 0 4711 60",
        code="""
        from benchmarks.gpu.device import NvmlMeter
        meter = NvmlMeter()
        print(meter.used() >> 20, meter.pids(), meter.settle(100 << 20, 1.0) < 1.0)
        say("gpu GPU-aaaa H200 900 0 0 0 ok")
        print(meter.settle(100 << 20, 0.05))
        about = meter.describe()
        print(about["gpu"], about["gpus"], about["mig"], sorted(about))
        """,
    )

    assert said[:2] == ["100 [4711] True", "None"]
    assert said[2].startswith("H200 1 0 ['compute_mode', 'cuda_driver', 'driver', 'ecc',")


@pytest.fixture
def on_nodes(library: Path, runtime: Runtime, tmp_path: Path) -> Callable[..., Executor[Any]]:
    """Builds groups on nodes of two ranks, each of which finds those GPUs by NVML."""

    def build(world_size: int, *gpus: str) -> Executor[Any]:
        (tmp_path / "state").write_text("\n".join(gpus) + "\n")
        own = (f"LD_LIBRARY_PATH={library}", f"FAKE_NVML={tmp_path / 'state'}")
        prefix = ("env", "-u", "CUDA_VISIBLE_DEVICES", *own)
        nodes = LocalNodes(
            ranks_per_node=2, node_timeout=5.0, engine_options={"prefix": lambda _slot: prefix}
        )
        options: dict[str, Any] = {"launch": Launch(preload=()), "strategy": "one_for_one"}
        return Executor(Echo, world_size, cluster=nodes, devices="cuda", runtime=runtime, **options)

    return build


def test_ranks_on_nodes_get_gpus_of_their_own_and_keep_them_over_a_death(
    on_nodes: Callable[..., Executor[Any]],
) -> None:
    def seen(worker: Any) -> tuple[str, str]:
        return os.environ["CUDA_VISIBLE_DEVICES"], worker.ctx.device

    with on_nodes(4, *TWO) as group:
        before = group.collective_rpc(seen)
        os.kill(group.ranks[1].pid or 0, signal.SIGKILL)
        after = group.collective_rpc(seen, retries=3)
        devices = [rank.device for rank in group.ranks]
        leased = [node.devices for node in group.status().nodes]

    assert leased == [("GPU-aaaa", "GPU-bbbb")] * 2
    assert before == [(name, "cuda:0") for name in ("GPU-aaaa", "GPU-bbbb") * 2]
    assert after == before
    assert devices == ["GPU-aaaa", "GPU-bbbb"] * 2


def test_more_ranks_on_a_node_than_it_has_gpus_are_refused(
    on_nodes: Callable[..., Executor[Any]],
) -> None:
    with pytest.raises(StartFailed, match="devices"):
        on_nodes(2, TWO[0])
