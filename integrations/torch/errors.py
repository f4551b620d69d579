"""Errors of training: each names the object that cannot be kept exact, and the remedy.

All of them survive pickling: a worker's error reaches the driver with its type.
"""

from __future__ import annotations

from phalanx.supervision import PhalanxError


class TrainingError(PhalanxError):
    """The state of a training run cannot be kept exact, or cannot be restored."""


class HiddenState(TrainingError):
    """An object changes with each use, and its state is not among what is kept.

    Attributes:
        name: The attribute of the trainer, or the name in `State`, that holds it.
    """

    def __init__(self, name: str, kind: str, remedy: str) -> None:
        super().__init__(f"{name} is a {kind}, which has state that is not kept: {remedy}")
        self.name = name


class WrongDevice(TrainingError):
    """A tensor of the state is not on the device that is leased to the rank."""

    def __init__(self, name: str, device: str, expected: str) -> None:
        super().__init__(
            f"{name} is on {device}, and this rank's device is {expected}: "
            "move the module there before its optimizer is built"
        )
        self.name = name


class ShapeChanged(TrainingError):
    """The state that is kept does not fit the modules and optimizers of this process.

    Attributes:
        name: The first tensor or object that differs.
    """

    def __init__(self, name: str, kept: str, now: str) -> None:
        super().__init__(
            f"{name}: the state that is kept has {kept}, this process has {now}; "
            "build the same model and optimizer, or give another folder to begin anew"
        )
        self.name = name


class WorldSizeChanged(TrainingError):
    """The state that is kept is that of another number of ranks."""

    def __init__(self, kept: int, now: int) -> None:
        super().__init__(
            f"the state that is kept is that of {kept} ranks, and there are {now} now: another "
            f"number sums in another order, so start {kept} ranks, or give another folder"
        )
        self.kept = kept
        self.now = now


class NoRoom(TrainingError):
    """There is no memory, or no space on the disk, for a rank's state; older states stay.

    Attributes:
        size: Bytes that were needed.
    """

    def __init__(self, where: str, size: int, why: str) -> None:
        super().__init__(
            f"no room for {size} bytes of state in {where}: {why}; make room or give another "
            "folder: the buffers are kept, and a step that was applied is not lost"
        )
        self.size = size


class StateLost(TrainingError):
    """No state of the ranks is complete: the run cannot go on exactly."""
