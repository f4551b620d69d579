"""A rank group with its calls, as an executor holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phalanx.actors.group.handle import Group
from phalanx.actors.health.diagnosis import check_health

from .client import CallClient

if TYPE_CHECKING:
    from phalanx.actors.group.handle import Parent
    from phalanx.actors.spec.options import ExecutorSpec
    from phalanx.actors.spec.worker import Methods
    from phalanx.runtime import Runtime


class RankGroup(Group):
    """A group of which calls can be made; its worker class has *methods*; see `Group`."""

    def __init__(
        self,
        spec: ExecutorSpec,
        methods: Methods,
        runtime: Runtime | None,
        named: str | None,
        parent: Parent | None,
        *,
        replace: bool = False,
        **seams: Any,
    ) -> None:
        super().__init__(spec, runtime, named, parent, replace=replace, **seams)
        self.call = CallClient(self, methods).call

    def check_health(self, timeout: float) -> None:
        """See `Executor.check_health`."""
        check_health(self, self.call, timeout)
