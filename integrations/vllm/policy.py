"""The policy of a supervised engine, and `supervised`, which gives it to vLLM.

Guarantees: a `Policy` is valid once it exists; all checks that need no model are made before it
reaches vLLM.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from phalanx.actors import group_of
from phalanx.supervision import (
    BackOff,
    Intensity,
    SpecError,
    check_choice,
    check_count,
    check_kind,
    check_limit,
    check_seconds,
)

from .compat import check_installed
from .journal import REPEATABLE

KEY = "phalanx"
"""The name in vLLM's ``additional_config`` under which a policy travels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The supervision options of the workers of one engine.

    Attributes:
        intensity: How many restarts are allowed, in its period or in a row without an output; one
            more ends the engine.
        backoff: The delays before restarts in a row; None for none.
        standby: How many spare processes are kept warm; 0 for none.
        hang_after: Seconds that a step may run on a rank before that is examined and killed. None
            takes vLLM's own limit for a step.
        stopped_after: Seconds that a rank which owes an answer may be stopped (SIGSTOP); None for
            ever.
        start_timeout: Seconds from a rank's start until its weights are loaded, and as many again
            for what follows after a restart: the KV cache, warm-up, adapters, and *replay*.
        suspect_after: At how many losses of the workers in a row a request has to be running to be
            tried alone; one that kills again ends with an error. 0 for never.
        report_dir: Where crash reports are also written as files; None writes none, unless the
            variable ``PHALANX_REPORT_DIR`` names a folder.
        launch: ``"zygote"`` forks ranks from a process that has imported vLLM once; ``"exec"``
            starts an interpreter for each.
        preload: Further modules for that process to import, such as those of your own models.
        replay: Names of worker methods that update weights: after a restart the calls of them by
            ``collective_rpc`` are made again, in order, with the same arguments.
        superseding: Those of *replay* that end an update of all weights: after one of their calls
            those up to the one before are forgotten.
        replay_bytes: How many bytes of arguments are kept; beyond it the weights count as lost.
        harmless: Names of worker methods, and of functions, called by ``collective_rpc``, that
            change no weights. Any other of yours, not in *replay*, counts as one that did.
        on_weights_lost: A function ``"module:name"`` that sets lost weights in restarted workers,
            for *start_timeout* at most; it gets a `WeightsLost`. None ends the engine instead.
    """

    intensity: Intensity = Intensity(10, 60.0)  # noqa: RUF009  # frozen
    backoff: BackOff | None = None
    standby: int = 0
    hang_after: float | None = None
    stopped_after: float | None = 10.0
    start_timeout: float = 600.0
    suspect_after: int = 2
    report_dir: str | None = None
    launch: Literal["zygote", "exec"] = "zygote"
    preload: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    superseding: tuple[str, ...] = ()
    replay_bytes: int = 1 << 30
    harmless: tuple[str, ...] = ()
    on_weights_lost: str | None = None

    def __post_init__(self) -> None:
        check_kind("intensity", self.intensity, Intensity)
        check_kind("backoff", self.backoff, BackOff | None)
        check_count("standby", self.standby, least=0)
        check_count("suspect_after", self.suspect_after, least=0)
        check_limit("hang_after", self.hang_after)
        check_limit("stopped_after", self.stopped_after)
        check_seconds("start_timeout", self.start_timeout, positive=True)
        check_choice("launch", self.launch, ("zygote", "exec"))
        check_count("replay_bytes", self.replay_bytes, least=0)
        for name in ("preload", "replay", "superseding", "harmless"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        for name in set(self.superseding) - set(self.replay):
            raise SpecError("superseding", name, "name it in replay too")
        for name in REPEATABLE.intersection(self.replay):
            raise SpecError("replay", name, "vLLM's own: it is replayed without that; omit it")
        for name in set(self.replay) & set(self.harmless):
            raise SpecError("harmless", name, "it is in replay: a call cannot be in both")
        if self.on_weights_lost is not None:
            check_kind("on_weights_lost", self.on_weights_lost, str)
            if not re.fullmatch(r"[\w.]+:[\w.]+", self.on_weights_lost):
                raise SpecError("on_weights_lost", self.on_weights_lost, "give 'module:name'")
        if self.report_dir is not None:
            check_kind("report_dir", self.report_dir, str | Path)
            object.__setattr__(self, "report_dir", str(self.report_dir))

    def to_json(self) -> dict[str, Any]:
        """Return what differs from the defaults, for JSON."""
        said = dataclasses.asdict(self)
        return {
            field.name: said[field.name]
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    @classmethod
    def from_json(cls, said: object) -> Policy:
        """Return the policy that *said* describes; the opposite of `to_json`."""
        if said is not None and not isinstance(said, Mapping):
            raise SpecError(KEY, said, "give a mapping with the names of a Policy's fields")
        given = dict(cast("Mapping[str, Any]", said or {}))
        for name, base in (("intensity", cls().intensity), ("backoff", BackOff())):
            if isinstance(value := given.get(name), Mapping | list | tuple):
                given[name] = _group(name, base, value)
        return group_of(KEY, cls, given)

    @classmethod
    def of_config(cls, additional: object) -> Policy:
        """Return the policy in vLLM's ``additional_config``; the defaults where there is none."""
        given = additional if isinstance(additional, Mapping) else {}
        return cls.from_json(cast("Mapping[str, Any]", given).get(KEY))


def _group(name: str, base: Any, said: Any) -> Any:
    """Return *base* with the fields that *said* has: by name, or the first ones in their order."""
    known = dataclasses.asdict(base)
    given = said if isinstance(said, Mapping) else dict(zip((*known, "more"), said, strict=False))
    return group_of(f"{KEY}.{name}", type(base), {**known, **given})


def _names(field: str, value: object) -> tuple[str, ...]:
    given = cast("Sequence[object]", value if isinstance(value, list | tuple) else (None,))
    names = tuple(each for each in given if isinstance(each, str) and each)
    if len(names) != len(given):
        raise SpecError(field, value, "give a list of names")
    return names


def check_config(config: Any) -> None:
    """Raise `SpecError` for the first field of a vLLM configuration that is not supported."""
    parallel = config.parallel_config
    media = config.model_config.multimodal_config
    on_one_node = "ranks on one node only; run one engine on each node"
    connected = "a connector's state outside of the workers is not restored; omit it"
    for place, field, usual, remedy in (
        (parallel, "nnodes", 1, on_one_node),
        (parallel, "nnodes_within_dp", 1, on_one_node),
        (parallel, "data_parallel_size", 1, "its engines compute together; run independent ones"),
        (parallel, "enable_elastic_ep", False, "ranks come and go by it; turn off"),
        (parallel, "enable_fault_tolerance", False, "vLLM would recover by it too; turn off"),
        (parallel, "numa_bind", False, "ranks start without it; run the program under numactl"),
        (config, "kv_transfer_config", None, connected),
        (config, "ec_transfer_config", None, connected),
        (media, "mm_processor_cache_type", "lru", "restarted workers cannot read it; omit it"),
    ):
        given = usual if place is None else getattr(place, field)
        if given != usual:
            raise SpecError(field, given, remedy)


def device_names(mask: str | None, parallel: Any) -> str | list[str]:
    """Return the GPUs of one engine among those that ``CUDA_VISIBLE_DEVICES=mask`` shows.

    Each of several engines has its share, in the order of vLLM's ``--device-ids`` or of the mask.
    """
    size = parallel.world_size
    engine = parallel.data_parallel_rank_local
    first = size * (parallel.data_parallel_index if engine is None else engine)
    assigned = parallel.assigned_physical_gpu_ids
    if assigned is None and first == 0:
        return "cuda"
    named = range(first + size) if mask is None else mask.split(",")
    return [str(each).strip() for each in (assigned or named)[first : first + size]]


def supervised(
    *, additional_config: Mapping[str, Any] | None = None, **policy: Any
) -> dict[str, Any]:
    """Return the arguments with which vLLM runs its workers under supervision.

    ``LLM(model, tensor_parallel_size=2, **supervised())``, and alike for ``EngineArgs`` and
    ``AsyncEngineArgs``. For ``vllm serve`` see ``docs/tutorials/vllm.md``.

    Args:
        additional_config: Your own argument of that name; it is kept.
        policy: The fields of `Policy`, by name; all have defaults.

    Raises:
        Unsupported: vLLM is missing, or its version has not been tested.
        SpecError: a field is invalid.
    """
    if additional_config is not None and not isinstance(cast("object", additional_config), Mapping):
        raise SpecError("additional_config", additional_config, "give a mapping")
    if KEY in (additional_config or {}):
        remedy = f"give the fields of {KEY} to supervised() itself"
        raise SpecError("additional_config", additional_config, remedy)
    said = Policy.from_json(policy).to_json()
    check_installed()
    from .executor import SupervisedExecutor  # noqa: PLC0415  # it derives from a class of vLLM's

    return {
        "distributed_executor_backend": SupervisedExecutor,
        "additional_config": {**(additional_config or {}), KEY: said},
    }
