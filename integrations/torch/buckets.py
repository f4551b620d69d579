"""DistributedDataParallel whose sums do not depend on the age of a process.

DDP puts gradients into buckets when it is made, and anew after the first backward pass. With more
than two ranks the place of an element in its bucket decides in which order it is added up, so that
the first step after a death would add in another order than the undisturbed run. Here the buckets
are built for the second time at once, from the last parameter to the first, and then stay: nearly
the order in which a backward pass has the gradients, so that they travel while it goes on.
"""

from __future__ import annotations

import inspect
from typing import Any, cast
from weakref import WeakSet

from torch.distributed import ProcessGroup
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from .errors import TrainingError

# Its name since torch 2.13, and before.
_SYNCS_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)
_replicas: WeakSet[DistributedDataParallel] = WeakSet()


def replicate(module: Any, **options: Any) -> DistributedDataParallel:
    """Return *module* in DDP, for the epoch that this rank has joined.

    The ranks hold equal parameters and buffers already, so none are sent.

    Args:
        module: In the `State`, on the rank's device.
        options: Passed on to `DistributedDataParallel`.
    """
    given: dict[str, Any] = {"init_sync": False, _SYNCS_BUFFERS: False, **options}
    wrapped = DistributedDataParallel(module, **given)
    fix_buckets(wrapped)
    _replicas.add(wrapped)
    return wrapped


def is_replica(wrapped: DistributedDataParallel) -> bool:
    """Whether `replicate` has made it: others are sent rank 0's state when they are made."""
    return wrapped in _replicas


def note_replicas(made: list[DistributedDataParallel]) -> None:
    """Have every DDP that this process makes put into *made*, with its parameters reversed."""

    def note(module: object, *_: object) -> None:
        if isinstance(module, DistributedDataParallel):  # in its constructor
            _reverse_parameters(module)
            made.append(module)

    register_module_module_registration_hook(note)


def _reverse_parameters(wrapped: Any) -> None:
    """Have *wrapped*, which is being made, hand its parameters to its reducer from last to first.

    Those are then the order of the buckets that `fix_buckets` builds. Where DDP has unused
    parameters looked for, it reverses the order itself, and keeps the first buckets.
    """
    name = "_build_params_for_reducer"

    def build() -> tuple[list[Any], list[bool]]:
        delattr(wrapped, name)  # else the two would keep one another
        parameters, are_sparse = getattr(wrapped, name)()
        if wrapped.find_unused_parameters:
            return parameters, are_sparse
        return parameters[::-1], are_sparse[::-1]

    if hasattr(wrapped, name):  # a private one; without it the gradients travel last
        setattr(wrapped, name, build)


def hook_with_state(wrapped: DistributedDataParallel) -> str:
    """Return the type of the state of a communication hook of *wrapped*, as PowerSGD's has one."""
    for _, state in cast("Any", wrapped)._comm_hooks:  # noqa: SLF001  # DDP has no other list
        if not isinstance(state, ProcessGroup | None):
            return type(state).__qualname__
    return ""


def fix_buckets(wrapped: DistributedDataParallel) -> None:
    """Have *wrapped* build its buckets now and never again; every rank must, and before a step.

    With ``find_unused_parameters`` DDP never builds them anew.

    Raises:
        TrainingError: this version of torch does it otherwise.
    """
    if is_fixed(wrapped):
        return
    reducer = cast("Any", wrapped.reducer)
    reducer._push_all_rebuilt_params()  # noqa: SLF001  # as DDP's own `join` does
    if not reducer._rebuild_buckets():  # noqa: SLF001
        msg = "DistributedDataParallel has done a step already: wrap the module anew in join()"
        raise TrainingError(msg)
    setattr(wrapped, _MARK, True)


def is_fixed(wrapped: DistributedDataParallel) -> bool:
    """Whether its buckets stay as they are."""
    if wrapped.find_unused_parameters and not wrapped.static_graph:
        return True
    return bool(getattr(wrapped, _MARK, False))


_MARK = "_phalanx_fixed_buckets"
