"""Errors of CUDA: which of them leave the process that got one unable to use its device.

After a *sticky* error the CUDA context of the process is unusable: every later call fails too,
often far from the cause. After the others the process goes on. The texts are those of the CUDA
runtime, which torch passes on.

The entries follow NVIDIA's documentation of ``cudaError_t`` until ``python -m benchmarks gpu e2``
has made the error on a device; `DeviceError.seen` says where it has.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceError:
    """One error.

    Attributes:
        phrase: What its text contains, in lower case.
        sticky: Whether the process cannot use its device after it.
        seen: On which device, driver and torch it was seen to be so; empty for not seen.
    """

    phrase: str
    sticky: bool
    seen: str = ""


DEVICE_ERRORS = (
    DeviceError("device-side assert", sticky=True),
    DeviceError("hardware stack error", sticky=True),
    DeviceError("invalid program counter", sticky=True),
    DeviceError("illegal memory access", sticky=True),
    DeviceError("illegal instruction", sticky=True),
    DeviceError("misaligned address", sticky=True),
    DeviceError("unspecified launch failure", sticky=True),
    DeviceError("uncorrectable ecc error", sticky=True),
    DeviceError("nvlink error", sticky=True),
    DeviceError("launch timed out", sticky=True),
    DeviceError("global/shared address space", sticky=True),
    DeviceError("invalid access of peer gpu memory", sticky=True),
    DeviceError("cublas_status_execution_failed", sticky=True),
    DeviceError("unhandled cuda error", sticky=True),  # NCCL's: its communicator cannot go on
    DeviceError("cuda error: unknown error", sticky=True),  # what many an Xid comes to
    DeviceError("out of memory", sticky=False),
    DeviceError("invalid argument", sticky=False),
    DeviceError("invalid configuration argument", sticky=False),
    DeviceError("no kernel image is available", sticky=False),
    DeviceError("cannot re-initialize cuda in forked subprocess", sticky=False),
)
"""The errors that are known; one that is not listed is taken for not sticky."""
