"""Messages of the control link: their kinds, to bytes and back.

- A message is a JSON object, followed by the byte strings that it holds, unchanged. Nothing is
  pickled; a rank's factory is unpickled by the rank alone.
- Anything but a message of one of these kinds is refused with `MalformedMessage`.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NoReturn,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


MACHINE = 24
"""Digits of a node's place that name its machine; the others name a slot there."""

_WRONG = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class MalformedMessage(ValueError):
    """The data is not a message of a control link."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Message:
    """Base class of messages; a subclass is a frozen dataclass of keywords."""

    kinds: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        Message.kinds[cls.__name__] = cls


class NodeOrder(Message):
    """The order that a starter gives a node process. It holds no secret.

    Attributes:
        number: The node's.
        endpoint: Where the gateway listens, as ``tcp://HOST:PORT``.
        gateway_key: The gateway's public key, in ZeroMQ's encoding.
        lease: Seconds.
        join: Seconds from the start to the greeting.
        place: 32 hexadecimal digits. An engine that gives one place to one node at a time may name
            it by this: a new node there ends what one before it has left.
    """

    number: int
    endpoint: str
    gateway_key: str
    lease: float
    join: float
    place: str


class NodeKey(Message):
    """The public key of a node process, as of `EngineEvents.started`."""

    number: int
    key: str


class NodeUnreached(Message):
    """A node process gets no connection to the driver's side, as of `EngineEvents.unreached`."""

    number: int
    why: str


class NodeEnded(Message):
    """A node process has ended, as of `EngineEvents.gone`."""

    number: int
    why: str
    swept: bool


class Greeting(Message):
    """The first message of a node.

    Attributes:
        torch: Its version; empty if it is not installed.
        boot: The identity of the machine until its next boot.
        place: As in its order.
        address: The node's own address on the way to the gateway.
    """

    phalanx: str
    python: str
    torch: str
    kernel: str
    boot: str
    place: str
    host: str
    address: str


class RelayLink(Message):
    """The credentials of the relay of a node for the gateway: an `Invitation`."""

    number: int
    known: int
    endpoint: str
    server_key: str
    secret: bytes
    route: bytes
    heartbeat: float
    lost_after: float


class RankLaunch(Message):
    """One rank to start, a part of `Launch`: attributes of a `LaunchSpec`.

    Attributes:
        env: Is set over the node's environment.
        is_forked: From a zygote; else it is a new interpreter.
        gpus: How many GPUs of the node it gets, or which part of one; 0 for none.
        seat: Its number at the driver's side of the calls; 0 for a process that is sent nothing.
        epoch: Its first one.
    """

    rank: int
    incarnation: int
    entry: str
    label: str
    payload: bytes = b""
    title: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    is_forked: bool = True
    gpus: float = 0.0
    seat: int = 0
    epoch: int = 0


class Launch(Message):
    """Start all of *ranks*, within so many seconds, or none of them.

    Attributes:
        link: For those of them that are sent calls; None if there are none.
    """

    number: int
    ranks: tuple[RankLaunch, ...]
    link: RelayLink | None = None
    preload: tuple[str, ...] = ()
    within: float = 60.0


class Warm(Message):
    """Have a process ready that has imported these modules, for ranks to be forked from.

    Attributes:
        env: Variables of these ranks, over the node's.
    """

    preload: tuple[str, ...]
    env: Mapping[str, str]


class Piece(Message):
    """A piece of a long message, whose parts have *sizes*: given with its last piece alone."""

    data: bytes
    sizes: tuple[int, ...] = ()


class Taken(Message):
    """The last piece, or one `Output`, has come: the next may."""


class Withdraw(Message):
    """Give a launch up unless it is over."""

    number: int


class Started(Message):
    """The launch is over: the ranks run, and have these pids and devices."""

    number: int
    pids: tuple[int, ...]
    devices: tuple[str, ...] = ()


class NotStarted(Message):
    """The launch has failed; nothing is left of it."""

    number: int
    error: str


class Ended(Message):
    """A rank has ended, and all that came from it, unless it withstood being killed.

    Attributes:
        stacks: Its stacks, which it wrote on a signal.
        broken: The fault of its device for which the node has killed it; empty for none.
    """

    rank: int
    incarnation: int
    code: int | None = None
    signal: int | None = None
    core_dumped: bool = False
    oom: str = ""
    rusage: Mapping[str, float] = field(default_factory=dict[str, float])
    last_words: str = ""
    stacks: str = ""
    broken: str = ""


class Output(Message):
    """Output of a rank; `Taken` follows when the driver has it.

    Attributes:
        stream: ``stdout``, ``stderr``, or ``log``, where each record ends in a newline.
        text: Its bytes, of which those that are no UTF-8 are surrogates.
        dropped: How many bytes before it were dropped.
    """

    rank: int
    incarnation: int
    stream: str
    text: str
    dropped: int = 0


class Stopped(Message):
    """These ranks of the node are stopped by a signal, and no others."""

    ranks: tuple[int, ...]


class Beat(Message):
    """The node lives."""

    number: int


class Answer(Message):
    """The beat of that number has been heard, which extends the lease; 0 is no beat's."""

    number: int


class Kill(Message):
    """End a rank and all that came from it."""

    rank: int
    incarnation: int


class Signal(Message):
    """Send a rank a signal."""

    rank: int
    incarnation: int
    signal: int


class Stacks(Message):
    """Say where the threads of a rank are."""

    rank: int
    incarnation: int


class StackText(Message):
    """The stacks as the kernel sees them; empty if the rank has ended."""

    rank: int
    incarnation: int
    text: str


class Leave(Message):
    """End all ranks, and then yourself."""


class Fenced(Message):
    """The node is lost, or refused: it ends as by `Leave`. No beat is answered from then on."""

    why: str


class Swept(Message):
    """Nothing of the node runs but its process, which ends: its last message."""


def encode(message: Message) -> list[bytes]:
    """Return the parts of *message*: its JSON, and its byte strings."""
    blobs: list[bytes] = []

    def plain(value: Any) -> Any:
        match value:
            case bytes():
                blobs.append(value)
                return len(blobs) - 1
            case Message():
                names = [one.name for one in dataclasses.fields(value)]
                return {name: plain(getattr(value, name)) for name in names}
            case tuple():
                return [plain(each) for each in cast("tuple[object, ...]", value)]
            case Mapping():
                return dict(cast("Mapping[str, Any]", value))
            case _:
                return value

    head = {"kind": type(message).__name__, **plain(message)}
    return [json.dumps(head, allow_nan=False).encode(), *blobs]


def decode(parts: Sequence[bytes]) -> Message:
    """Return the message of *parts*.

    Raises:
        MalformedMessage: there is none in them.
    """
    try:
        head: Any = json.loads(parts[0], parse_constant=_refuse)
        kind = Message.kinds[head.pop("kind")]
        blobs: list[Any] = list(parts[1:])
        message: Message = _value(kind, head, blobs)
        if any(blob is not None for blob in blobs):
            _refuse("a byte string too many")
    except _WRONG as error:
        raise MalformedMessage(f"{type(error).__name__}: {error}"[:200]) from error
    return message


@cache
def _hints(kind: type[Message]) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(kind).items() if name != "kinds"}


def _value(hint: Any, value: Any, blobs: list[Any]) -> Any:
    """Return *value* as *hint* wants it; each of *blobs* is taken once."""
    origin, inner, kind = get_origin(hint), get_args(hint), _kind(value)
    if origin is types.UnionType:
        return None if value is None else _value(inner[0], value, blobs)
    if origin is tuple and kind is list:
        return tuple(_value(inner[0], each, blobs) for each in value)
    if origin is Mapping and kind is dict:
        return {name: _value(inner[1], each, blobs) for name, each in value.items()}
    if hint in Message.kinds.values() and kind is dict and value.keys() == _hints(hint).keys():
        return hint(**{name: _value(_hints(hint)[name], value[name], blobs) for name in value})
    if hint is bytes and kind is int and value >= 0:
        blob, blobs[value] = blobs[value], None
        return blob if isinstance(blob, bytes) else _refuse("a byte string is taken twice")
    if hint is float and kind is int:
        return float(value)
    return value if kind is hint else _refuse(f"{value!r} is no {hint}")


def _kind(value: Any) -> Any:
    return cast("Any", type(value))


def _refuse(why: str) -> NoReturn:
    raise MalformedMessage(why)
