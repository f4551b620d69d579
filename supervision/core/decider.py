"""Deciders: rules that overrule OTP's table of exits, by exception type, exit kind or predicate.

- The first rule that applies decides. If none does, `Decider.directive` returns None and the
  default of the caller holds. A rule whose predicate raises does not apply.
- *resume*: it continues. *restart*: an abnormal exit, which counts. *stop*: the child ends for
  good, as a transient one that ended normally. *escalate*: the supervisor gives up at once.
- The caller of a method that raised gets its exception first, whatever the directive; unless its
  rank is ended for it, and the call is sent again.

Prior art: the supervision directives of Akka.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias, cast

from phalanx.supervision.errors import SpecError, error_text
from phalanx.supervision.validate import check_kind

from .restart_rules import ExitKind, ExitReason


class Directive(StrEnum):
    """The reaction to an exception or an exit."""

    RESUME = "resume"
    RESTART = "restart"
    STOP = "stop"
    ESCALATE = "escalate"


Cause: TypeAlias = BaseException | ExitReason
Match: TypeAlias = type[BaseException] | ExitKind | str | Callable[[Cause], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """A *match* leads to *directive*, in the child of id *child* or, if that is None, in all.

    It is an exception type (subclasses too), an `ExitKind` or its word, the name of an exception
    type (bare or qualified, for types that the driver has not imported), or a predicate.
    """

    match: Match
    directive: Directive
    child: str | None = None

    def __post_init__(self) -> None:
        given = cast("object", self.match)
        kind = cast("type[object]", given) if isinstance(given, type) else BaseException
        is_cause = issubclass(kind, BaseException | ExitReason)
        if not (is_cause and (callable(given) or isinstance(given, str))):
            remedy = "give an exception type, its name, an ExitKind or a predicate"
            raise SpecError("match", given, remedy)
        check_kind("directive", self.directive, Directive)
        check_kind("child", self.child, str | None)

    def applies(self, cause: Cause, child: str | None) -> bool:
        """Return whether this rule decides about *cause* in *child*."""
        if self.child is not None and self.child != child:
            return False
        match self.match:
            case str() as name:  # an ExitKind, or its word, too
                if isinstance(cause, ExitReason):
                    return cause.kind == name
                return name in _names(type(cause))
            case type() as kind:
                return isinstance(cause, kind)
            case predicate:
                return bool(predicate(cause))


def _names(kind: type[BaseException]) -> set[str]:
    plain = {base.__qualname__ for base in kind.__mro__}
    return plain | {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}


@dataclass(frozen=True, slots=True)
class Decider:
    """Rules, tried in order; if none applies, *default*, where None leaves it to the caller."""

    rules: tuple[Rule, ...] = ()
    default: Directive | None = None

    def __post_init__(self) -> None:
        check_kind("rules", self.rules, list | tuple)
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            check_kind("rules", rule, Rule)
        check_kind("default", self.default, Directive | None)

    def directive(
        self,
        cause: Cause,
        child: str | None = None,
        *,
        failed: Callable[[BaseException], None] | None = None,
    ) -> Directive | None:
        """Return what to do about *cause*, or None if no rule applies and there is no default.

        *failed* is called with each exception that a predicate raises.
        """
        for rule in self.rules:
            try:
                applies = rule.applies(cause, child)
            except BaseException as error:  # noqa: BLE001 # an exit must not be lost to a mistake in a predicate
                applies = False
                if failed is not None:
                    failed(error)
            if applies:
                return rule.directive
        return self.default


DEVICE_ERRORS = (
    "device-side assert triggered",  # not torch's advice on device-side assertions
    "hardware stack error",
    "invalid program counter",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "unspecified launch failure",
    "uncorrectable ecc error",
    "nvlink error",
    "gpu is lost",
    "launch timed out",
    "global/shared address space",
    "invalid access of peer gpu memory",
    "cublas_status_execution_failed",
    "unhandled cuda error",  # NCCL's: its communicator cannot go on
    "cuda error: unknown error",  # what many an Xid comes to
)
"""Texts of *sticky* CUDA errors, in lower case; after one of them every later call fails too.

Seen on a device (docs/gpu.md): the assertion, the illegal access, the misaligned address, the
launch failure. The others are from NVIDIA's documentation of ``cudaError_t``.
"""


_CUDAS = ("AcceleratorError", "Cuda", "CUDA")  # in the names of the types of several libraries


def is_sticky_device_error(cause: Cause) -> bool:
    """Return whether *cause* is a CUDA error after which its process cannot go on.

    So is an exception that was raised from one, or while one was handled.
    """
    return any(map(_is_sticky, _chain(cause)))


def _is_sticky(error: BaseException) -> bool:
    names = _names(type(error))
    text = error_text(error).lower()
    is_cudas = isinstance(error, RuntimeError) and "cuda" in text
    if not is_cudas and not any(word in name for name in names for word in _CUDAS):
        return False
    return "OutOfMemoryError" not in names and any(phrase in text for phrase in DEVICE_ERRORS)


def _chain(cause: Cause) -> Iterator[BaseException]:
    """Yield *cause*, what it was raised from, and so on; nothing for an exit."""
    seen: set[int] = set()
    left = [None if isinstance(cause, ExitReason) else cause]
    while left:
        error = left.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        yield error
        left += [error.__cause__, error.__context__]
        if isinstance(error, BaseExceptionGroup):
            left += cast("BaseExceptionGroup[BaseException]", error).exceptions


_BROKEN_GROUP = {"DistBackendError", "DistNetworkError"}


def is_broken_process_group(cause: Cause) -> bool:
    """Return whether *cause*, or an exception it was raised from, reports a broken process group.

    Gloo does not raise torch's types: its errors are RuntimeErrors whose text begins with a line of
    gloo's source. Nor does NCCL if it is called without torch, as by vLLM. After any such error, a
    timeout included, the connections are closed for good.
    """
    return any(map(_is_of_broken_group, _chain(cause)))


def _is_of_broken_group(error: BaseException) -> bool:
    text = error_text(error) if isinstance(error, RuntimeError) else ""
    is_texts = "gloo/transport/" in text or "NCCL error" in text
    return is_texts or bool(_names(type(error)) & _BROKEN_GROUP)


GPU_WORKER = Decider(
    rules=(
        # Memory that one call could not have is free again when it has failed.
        Rule("OutOfMemoryError", Directive.RESUME),
        Rule(is_sticky_device_error, Directive.RESTART),
        Rule(is_broken_process_group, Directive.RESTART),
        Rule(Exception, Directive.RESUME),
    )
)
"""Directives for methods of GPU workers: an error that leaves the process unusable restarts it."""

RESUME_UNLESS_BROKEN = Decider((Rule(is_sticky_device_error, Directive.RESTART),))
"""The default for methods of a rank: it goes on unless its process cannot."""
