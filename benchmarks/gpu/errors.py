"""E2: which CUDA errors leave a process unusable, what they say, and what the decider makes of it.

Each error is made in another process, which then computes once more: if that fails too, the
error is *sticky*.
"""

from __future__ import annotations

import base64
import os
import pickle
from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx.supervision import DEVICE_ERRORS, GPU_WORKER, RESUME_UNLESS_BROKEN

from .device import Holder, synchronize

if TYPE_CHECKING:
    from collections.abc import Callable

    from .record import Record

_KERNELS = {
    "illegal address": "*(volatile int*)(0x10ull) = 1;",
    "misaligned": "*(volatile double*)((char*)p + 1) = 1.0;",
    "trap": 'asm volatile("trap;");',
}
_OTHERS = ("assert", "out of memory", "bad argument", "pinned memory", "forked")
KINDS = (*_OTHERS, *_KERNELS)


def run(record: Record) -> None:
    """Make each error, and judge it."""
    device, idle = record.device, record.wait_idle()
    for kind in KINDS:
        if not record.has_time(20.0):
            return

        def task(tell: Callable[[str], None], kind: str = kind) -> Any:
            tell(base64.b64encode(pickle.dumps(_observe(kind, device))).decode())
            return NotImplemented  # it ends

        with Holder(task) as holder:
            said = holder.line()
        if not said or said.startswith("error"):
            record.add("errors", kind=kind, said=said or "it ended without a word")
            continue
        row: dict[str, Any] = pickle.loads(base64.b64decode(said))
        record.add("errors", kind=kind, **row, settled=record.meter.settle(idle, 10.0))
    record.set(table=list(DEVICE_ERRORS))


def _observe(kind: str, device: str) -> dict[str, Any]:
    """Make the error *kind* and compute once more; return what was raised, and the verdicts."""
    try:
        trigger(kind, device)
    except Exception as error:  # noqa: BLE001  # it is what is looked at
        found = error
    else:
        return {"raised": None}
    try:
        if device == "cpu" and kind in _STAND_IN and _STAND_IN[kind][1]:
            raise type(found)(str(found))  # noqa: TRY301  # as CUDA repeats it
        _compute(device)
        second = ""
    except Exception as error:  # noqa: BLE001  # the same
        second = f"{type(error).__name__}: {str(error)[:200]}"
    return {
        "raised": f"{type(found).__module__}.{type(found).__name__}",
        "bases": [base.__name__ for base in type(found).__mro__],
        "text": str(found)[:400],
        "sticky": bool(second),
        "second": second,
        "default": str(RESUME_UNLESS_BROKEN.directive(found)),
        "gpu_worker": str(GPU_WORKER.directive(found)),
    }


def _compute(device: str) -> None:
    torch: Any = import_module("torch")
    assert float(torch.ones(8, device=device).sum()) == 8.0
    synchronize(device)


def trigger(kind: str, device: str) -> None:
    """Raise the error *kind* on *device*; on a CPU one of its type and text."""
    torch: Any = import_module("torch")
    if device == "cpu":
        name, _, text = _STAND_IN[kind]
        error = {"OutOfMemoryError": torch.OutOfMemoryError}.get(name, torch.AcceleratorError)
        raise (RuntimeError if name == "RuntimeError" else error)(text + _ADVICE)
    values = torch.zeros(64, device=device)
    if kind in _KERNELS:
        source = f'extern "C" __global__ void broken(int* p) {{ {_KERNELS[kind]} }}'
        kernel = torch.cuda._compile_kernel(source, "broken")  # noqa: SLF001  # there is no other
        kernel((1, 1, 1), (1, 1, 1), (values.view(torch.int32),))
    elif kind == "assert":
        values[torch.tensor([1 << 20], device=device)].sum().item()
    elif kind == "out of memory":
        torch.empty(1 << 44, dtype=torch.uint8, device=device)
    elif kind == "bad argument":
        source = 'extern "C" __global__ void fine(int* p) {}'
        kernel = torch.cuda._compile_kernel(source, "fine")  # noqa: SLF001  # as above
        kernel((1, 1, 1), (4096, 1, 1), (values.view(torch.int32),))
    elif kind == "pinned memory":
        torch.empty(1 << 44, dtype=torch.uint8, pin_memory=True)
    elif kind == "forked":
        _fork(torch, device)
    synchronize(device)


def _fork(torch: Any, device: str) -> None:
    """Raise what a forked child gets that uses the device."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = b""
        try:
            torch.zeros(1, device=device)
        except Exception as error:  # noqa: BLE001  # handed to the parent
            text = str(error).encode()
        os.write(writer, text)
        os._exit(0)
    os.close(writer)
    text = os.read(reader, 1 << 16)
    os.close(reader)
    os.waitpid(pid, 0)
    raise RuntimeError(text.decode())


_ADVICE = "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
# kind -> the type, whether it repeats, and the text: as seen on a device, before the advice.
_STAND_IN: dict[str, tuple[str, bool, str]] = {
    "assert": ("AcceleratorError", True, "CUDA error: device-side assert triggered"),
    "out of memory": ("OutOfMemoryError", False, "CUDA out of memory. Tried to allocate 16.00 TiB"),
    "bad argument": ("AcceleratorError", False, "CUDA error: invalid argument"),
    "pinned memory": ("AcceleratorError", False, "CUDA error: out of memory"),
    "forked": ("RuntimeError", False, "Cannot re-initialize CUDA in forked subprocess."),
    "illegal address": (
        "AcceleratorError",
        True,
        "CUDA error: an illegal memory access was encountered",
    ),
    "misaligned": ("AcceleratorError", True, "CUDA error: misaligned address"),
    "trap": ("AcceleratorError", True, "CUDA error: unspecified launch failure"),
}
