"""The journal of one engine: the calls that bring a new worker to the state of the one that died.

Guarantees: calls come in the order in which they were first made, each with its first arguments:
the blocks of the KV cache are not counted again, so that what the scheduler knows of them stays
true. A call that another one has undone is not made again. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_START = (
    "set_kv_cache_layout",
    "determine_available_memory",
    "update_max_model_len",
    "initialize_from_config",
    "compile_or_warm_up_model",
)
"""The calls of an engine's start, in its order; a new worker makes each once."""

REPEATABLE = frozenset(
    (
        *_START,
        *("get_kv_cache_spec", "get_supported_kv_cache_layouts", "get_supported_tasks"),
        *("supports_draft_weight_updates", "get_encoder_output_width", "check_health"),
        *("add_lora", "remove_lora", "pin_lora", "list_loras"),
        *("sleep", "wake_up", "discard", "profile", "synchronize_device"),
        *("reset_mm_cache", "reset_encoder_cache", "execute_dummy_batch"),
        *("get_model_inspection", "compute_weight_checksums", "save_sharded_state"),
        "release_late_interaction_query_cache",
    )
)
"""Calls that may be made twice: after a death they are made again, and the caller waits."""


WEIGHTS = frozenset(("update_weights", "finish_weight_update", "reload_weights", "reset_weights"))
"""Calls of vLLM's after which an engine serves other weights than those it was started with."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One call that a new worker makes.

    Attributes:
        answers: Of the ranks, if a new worker takes them over instead of making the call.
    """

    method: str | bytes
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    answers: tuple[Any, ...] = ()


_ALL = frozenset(("weights", "kv_cache"))
"""The parts that fall asleep together; each can be woken alone."""


class _Sleep:
    """Which memory of the workers sleeps, and the few calls that bring a new worker to that."""

    def __init__(self) -> None:
        self._call: Entry | None = None
        self._asleep: frozenset[str] = frozenset()
        self._discarded: frozenset[str] = frozenset()

    def begin(self, call: Entry) -> None:
        """Note *call*, by which everything fell asleep."""
        self._call, self._asleep = call, _ALL

    def discard(self, tags: Iterable[str]) -> None:
        """Note that the memory named *tags* was given away."""
        self._discarded |= frozenset(tags)

    def wake(self, tags: Iterable[str] | None) -> None:
        """Note that what *tags* name is awake again; None names all."""
        woken = self._asleep | self._discarded if tags is None else frozenset(tags)
        self._asleep -= woken
        self._discarded -= woken

    def entries(self) -> list[Entry]:
        """Return the calls that have a new worker sleep so."""
        calls: list[Entry] = []
        if self._asleep == _ALL and self._call is not None:
            calls.append(self._call)
        elif self._asleep:
            # Whatever is awake has been filled again since the old worker slept. A new one has it
            # from its start, and would lose it in a deep sleep (level 2).
            calls.append(Entry("sleep", kwargs={"level": 1}))
            calls.append(Entry("wake_up", kwargs={"tags": sorted(_ALL - self._asleep)}))
        if self._discarded - self._asleep:
            calls.append(Entry("discard", (tuple(sorted(self._discarded - self._asleep)),)))
        return calls


class Journal:
    """The calls that have shaped the workers of one engine.

    Args:
        replay: Further methods whose calls are kept, all of them.
    """

    def __init__(self, replay: Sequence[str] = ()) -> None:
        self._replay = frozenset(replay)
        self._start: dict[str, Entry] = {}
        self._loras: dict[int, Entry] = {}
        self._pinned: dict[int, Entry] = {}
        self._sleep = _Sleep()
        self._profile: Entry | None = None
        self._own: list[Entry] = []
        self._forgotten: set[str] = set()

    @property
    def forgotten(self) -> list[str]:
        """Names of the user's methods whose calls a new worker does not make."""
        return sorted(self._forgotten)

    def note(
        self,
        method: str | bytes,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        answers: Sequence[Any] = (),
    ) -> None:
        """Note a call that all ranks have answered."""
        if isinstance(method, bytes):
            self._forgotten.add("a callable")  # it has no name to be listed under
            return
        entry = Entry(method, args, dict(kwargs or {}))
        if method in self._replay:
            self._own.append(entry)
        elif method in _START:
            if method == "determine_available_memory":
                entry = Entry(method, args, entry.kwargs, tuple(answers))
            self._start[method] = entry
        elif method == "add_lora":
            self._loras[_given(entry, "lora_request").lora_int_id] = entry
        elif method == "remove_lora":
            lora = _given(entry, "lora_id")
            self._loras.pop(lora, None)
            self._pinned.pop(lora, None)
        elif method == "pin_lora":
            self._pinned[_given(entry, "lora_id")] = entry
        elif method == "sleep":
            self._sleep.begin(entry)
        elif method == "discard":
            self._sleep.discard(_given(entry, "tags"))
        elif method == "wake_up":
            self._sleep.wake(entry.kwargs.get("tags", entry.args[0] if entry.args else None))
        elif method == "profile":
            self._profile = entry if _is_start(entry) else None
        elif method not in REPEATABLE:
            self._forgotten.add(method)

    def entries(self) -> tuple[Entry, ...]:
        """Return the calls that a new worker makes, in order."""
        started = [self._start[name] for name in _START if name in self._start]
        profile = [] if self._profile is None else [self._profile]
        return (
            *started,
            *self._loras.values(),
            *self._pinned.values(),
            *self._own,
            *profile,
            *self._sleep.entries(),
        )


def _given(entry: Entry, name: str) -> Any:
    return entry.args[0] if entry.args else entry.kwargs[name]


def _is_start(entry: Entry) -> bool:
    return bool(entry.kwargs.get("is_start", entry.args[0] if entry.args else True))
