"""Memory that processes share and the kernel reads last of all: that of their locks.

Guarantees: it is unmapped when nothing refers to it any more, and not while anybody is noted as
using it: then, if need be, only by the end of the process. It keeps no descriptor.

Why: what a thread holds is noted in memory of the process, which the kernel reads as the thread
ends, after all that the interpreter frees at its own end; and which the C library writes to
whenever the same thread locks something else.

Left to others: what lies in it (`locks`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class LockMemory:
    """The first *size* bytes of the file *fd*, mapped and shared; *fd* may be closed then.

    Attributes:
        address: Where it lies in this process.
        words: It as words, for what must be written whole: a kill may come between two stores.
    """

    def __init__(self, fd: int, size: int) -> None:
        # By hand: the module mmap keeps a descriptor of its own for each.
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address: int = address
        weakref.finalize(self, _libc.munmap, address, size).atexit = False
        self.bytes = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        self.words = self.bytes.cast("Q")

    def keep(self, what: int) -> None:
        """Note that this thread uses *what* in it."""
        _kept.add((threading.get_ident(), self, what))

    def let_go(self, what: int) -> None:
        """Note that this thread uses *what* no more."""
        _kept.discard((threading.get_ident(), self, what))


_kept: set[tuple[int, LockMemory, int]] = set()
# The interpreter frees what modules refer to before its process ends. One reference too many keeps
# this set, and every memory in it, from that.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))
