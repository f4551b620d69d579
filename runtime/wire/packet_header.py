"""Protocol constants of the call and control sockets: header, kinds, flags and limits.

Every frame carries call id, epoch and incarnation. A socket belongs to one incarnation, so a call
carries in its place the round it was sent in (`progress_page`): one encoding serves every rank.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

MAGIC: Final = 0x5048
HEADER = struct.Struct("<HBBIQII")
"""magic, kind, flags, epoch, call id, incarnation, extra: 24 bytes."""

INLINE_LIMIT: Final = 96 * 1024
"""Bytes of body that travel in the packet itself, at most."""

_IN_ALL: Final = 256 * 1024


def inline_limit(ranks: int) -> int:
    """Return the bytes of body that travel in the packets to each of so many *ranks*.

    Their sender copies them for each, into an arena once for all: from so many bytes in all on that
    is faster.
    """
    return max(BUNDLE_LIMIT, min(INLINE_LIMIT, _IN_ALL // max(1, ranks)))


BUNDLE_LIMIT: Final = 32 * 1024
"""Bytes of frames that travel in one packet."""

PACKET_LIMIT: Final = HEADER.size + INLINE_LIMIT + 4096

EVERY_RANK: Final = 0xFFFFFFFF

ANCILLARY: Final = socket.CMSG_SPACE(4 * 4)
"""Bytes of room for the descriptors of a packet."""

# Plain integers: arithmetic on an `IntFlag` takes a microsecond.
CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
CUT: Final = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)


class Kind:
    """Kind of a frame. Plain integers: the lookup of an enum's member costs as much as a call."""

    CALL: Final[int] = 1
    STOP: Final[int] = 2
    HELLO: Final[int] = 3
    MORE: Final[int] = 4
    CLOSE: Final[int] = 5
    BUNDLE: Final[int] = 6
    ASSIGN: Final[int] = 8
    REFORM: Final[int] = 9
    RESTORE: Final[int] = 10
    ASK: Final[int] = 11
    GO_ON: Final[int] = 12
    REPLY: Final[int] = 16
    ERROR: Final[int] = 17
    SKIPPED: Final[int] = 18
    READY: Final[int] = 19
    START_FAILED: Final[int] = 20
    EVENT: Final[int] = 21
    LAST_WORDS: Final[int] = 22
    ITEM: Final[int] = 23
    STANDBY: Final[int] = 24
    LEFT: Final[int] = 25
    NOT_REFORMED: Final[int] = 26
    PASSED: Final[int] = 27
    LINK_ENDED: Final[int] = 28
    SAVED: Final[int] = 29
    NOT_SAVED: Final[int] = 30
    RESTORING: Final[int] = 31
    PULSE: Final[int] = 32
    ENDING: Final[int] = 33
    SAVING: Final[int] = 34
    PART: Final[int] = 35
    DRAINING: Final[int] = 36
    TERMINATE: Final[int] = 37
    VOID: Final[int] = 38
    VOIDED: Final[int] = 39


class Flag:
    """Flags of a frame."""

    NONE: Final[int] = 0
    FILE: Final[int] = 1  # the body is in the memory file whose descriptor came along
    COLLECTIVE: Final[int] = 2  # cancelled through the progress page if not begun
    HELD: Final[int] = 2  # an error after which the worker waits for `Kind.GO_ON`
    TELL: Final[int] = 4  # the answer is an acknowledgement, whatever the method returns
    FATAL: Final[int] = 4  # an error for which the worker is about to be restarted
    BROKEN: Final[int] = 8  # an error of a broken process group: a death may be its cause
    MARKED: Final[int] = 8  # the worker's state is stored with this call, before its answer
    ARENA: Final[int] = 16  # the body is in the sender's arena
    LOST: Final[int] = 64  # set on receipt: no descriptor was free for the body's
    STREAM: Final[int] = 32  # the result is iterated, and its items are sent
    PACED: Final[int] = 128  # the next call is sent after `Kind.PASSED`


IN_FILE = struct.Struct("<Q")
"""Place of a body in a memory file: its size."""

IN_ARENA = struct.Struct("<IQQ")
"""Place of a body in an arena: slot, start, size."""

LARGE: Final = Flag.FILE | Flag.ARENA
