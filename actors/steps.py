"""The step methods of an executor: its worker class's own, as functions with their signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from .layout import Layout
    from .worker import Method


class Steps:
    """The step methods of an executor."""

    def __init__(self, executor: object) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def step_function(
    collective_rpc: Callable[..., Any], layout: Layout, method: Method
) -> Callable[..., Any]:
    """Return a function that makes the step *method* a *collective_rpc*, as it is declared."""
    declared = method.declared
    reply = declared.reply
    want = layout.output_rank if reply == "output" else reply if isinstance(reply, int) else None
    drivers = layout.driver_ranks

    def pick(values: list[Any], _lead: int) -> list[Any]:
        return [values[rank] for rank in drivers]

    def call(*args: Any, non_block: bool = False, **kwargs: Any) -> Any:
        return collective_rpc(
            method.name,
            declared.timeout,
            args,
            kwargs,
            non_block=non_block,
            unique_reply_rank=want,
            aggregate=pick if reply == "driver" else None,
        )

    call.__name__ = call.__qualname__ = method.name
    if method.signature is not None:
        call.__signature__ = method.signature  # type: ignore[attr-defined]  # inspect reads it
    return call
