"""How a supervised engine heals: what `supervised` takes, in the form that travels with vLLM's own.

Guarantees: a policy that exists makes sense; what `Policy.to_json` returns is plain JSON, so that
the same can be given to ``vllm serve`` as ``--additional-config '{"phalanx": {...}}'``; a name that
is not known is an error and never ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from phalanx.supervision import BackOff, Intensity, SpecError, Strategy

KEY = "phalanx"
"""Under which name of vLLM's ``additional_config`` a policy travels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How the workers of one engine are supervised.

    Attributes:
        strategy: Who is restarted with a rank that died. Ranks share a process group, so for more
            than one rank this is `Strategy.ONE_FOR_ALL`.
        intensity: How many restarts are allowed; one more ends the engine, as any death does
            without this plug-in.
        backoff: How long to wait before restarts in a row; None does not wait.
        standby: How many spare processes are kept warm; as many as there are ranks let all of them
            be replaced at once. 0 for none.
        hang_after: Seconds that a step may run on a rank before that rank is taken for hung,
            examined and killed. None takes vLLM's own limit for a step.
        stopped_after: Seconds that a rank which owes an answer may be stopped (SIGSTOP); None for
            ever.
        start_timeout: Seconds from a rank's start until its weights are loaded.
        report_dir: Where crash reports are also written as files; None writes none, unless the
            variable ``PHALANX_REPORT_DIR`` names a folder.
        launch: ``"zygote"`` forks ranks from a process that has imported vLLM once; ``"exec"``
            starts an interpreter for each, which takes as long as it does without this plug-in.
        preload: Further modules for that process to import, such as those of your own models.
        replay: Names of worker methods whose calls change what a worker computes, such as one that
            updates weights: after a restart, those that were made by ``collective_rpc`` are made
            again, in order, with the same arguments.
    """

    strategy: Strategy = Strategy.ONE_FOR_ALL
    intensity: Intensity = Intensity(10, 60.0)  # noqa: RUF009  # frozen
    backoff: BackOff | None = None
    standby: int = 0
    hang_after: float | None = None
    stopped_after: float | None = 10.0
    start_timeout: float = 600.0
    report_dir: str | None = None
    launch: Literal["zygote", "exec"] = "zygote"
    preload: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_kind("strategy", self.strategy, Strategy)
        _check_kind("intensity", self.intensity, Intensity)
        if self.strategy.has_instances:
            raise SpecError(
                "strategy", self.strategy, "give one_for_all, or one of the others for one rank"
            )
        if self.backoff is not None:
            _check_kind("backoff", self.backoff, BackOff)
        spares: Any = self.standby
        if isinstance(spares, bool) or not isinstance(spares, int) or spares < 0:
            raise SpecError("standby", spares, "give an integer >= 0")
        for name in ("hang_after", "stopped_after"):
            value = getattr(self, name)
            if value is not None:
                _check_seconds(name, value)
        _check_seconds("start_timeout", self.start_timeout)
        if self.launch not in ("zygote", "exec"):
            raise SpecError("launch", self.launch, "give one of zygote, exec")
        for name in ("preload", "replay"):
            object.__setattr__(self, name, _check_names(name, getattr(self, name)))
        where: Any = self.report_dir
        if where is not None:
            if not isinstance(where, str | Path):
                raise SpecError("report_dir", where, "give a folder")
            object.__setattr__(self, "report_dir", str(where))

    def check_size(self, world_size: int) -> None:
        """Raise `SpecError` where *world_size* ranks cannot be supervised so."""
        if world_size > 1 and self.strategy is not Strategy.ONE_FOR_ALL:
            raise SpecError(
                "strategy",
                self.strategy,
                f"{world_size} ranks share a process group and restart together: give one_for_all",
            )

    def to_json(self) -> dict[str, Any]:
        """Return what differs from the defaults, as plain JSON."""
        said: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            match value:
                case Strategy():
                    value = value.value
                case Intensity():
                    value = [value.max_restarts, value.period]
                case BackOff():
                    value = dataclasses.asdict(value)
                case tuple():
                    value = list(cast("tuple[str, ...]", value))
                case _:
                    pass
            said[field.name] = value
        return said

    @classmethod
    def from_json(cls, said: object) -> Policy:
        """Return the policy that *said* describes; the opposite of `to_json`."""
        if said is None:
            return cls()
        if not isinstance(said, Mapping):
            raise SpecError(KEY, said, "give a mapping with the names of a Policy's fields")
        given = dict(cast("Mapping[str, Any]", said))
        known = {field.name for field in dataclasses.fields(cls)}
        for name, value in given.items():
            if name not in known:
                names = ", ".join(sorted(known))
                raise SpecError(f"{KEY}.{name}", value, f"known are {names}")
        if "strategy" in given:
            given["strategy"] = _strategy(given["strategy"])
        if "intensity" in given:
            given["intensity"] = _intensity(given["intensity"])
        if given.get("backoff") is not None:
            given["backoff"] = _backoff(given["backoff"])
        return cls(**given)

    @classmethod
    def of_config(cls, additional: object) -> Policy:
        """Return the policy in vLLM's ``additional_config``; the defaults where there is none."""
        if isinstance(additional, Mapping):
            return cls.from_json(cast("Mapping[str, Any]", additional).get(KEY))
        return cls()


def _strategy(said: str) -> Strategy:
    try:
        return Strategy(said)
    except ValueError:
        names = ", ".join(each.value for each in Strategy if not each.has_instances)
        raise SpecError(f"{KEY}.strategy", said, f"give one of {names}") from None


def _intensity(said: object) -> Intensity:
    if isinstance(said, Intensity):
        return said
    if isinstance(said, Mapping):
        named = cast("Mapping[str, Any]", said)
        pair: Sequence[Any] = (named.get("max_restarts"), named.get("period"))
    else:
        pair = cast("Sequence[Any]", said if isinstance(said, list | tuple) else ())
    if len(pair) != 2:
        raise SpecError(f"{KEY}.intensity", said, "give [restarts, seconds], such as [3, 60]")
    restarts, period = cast("tuple[int, float]", tuple(pair))
    return Intensity(restarts, period)


def _backoff(said: object) -> BackOff:
    if isinstance(said, BackOff):
        return said
    names = [field.name for field in dataclasses.fields(BackOff)]
    if not isinstance(said, Mapping) or not set(cast("Mapping[str, Any]", said)) <= set(names):
        raise SpecError(f"{KEY}.backoff", said, f"give a mapping with any of {', '.join(names)}")
    return BackOff(**cast("Mapping[str, Any]", said))


def _check_kind(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise SpecError(field, value, f"give a {kind.__name__}")


def _check_seconds(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SpecError(field, value, "give seconds > 0")


def _check_names(field: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(
        isinstance(each, str) for each in cast("Sequence[object]", value)
    ):
        raise SpecError(field, value, "give a list of names")
    return tuple(cast("Sequence[str]", value))
