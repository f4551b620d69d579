"""What a new worker has to be told before it can stand in for the one that died.

Guarantees: the calls that brought the workers to the state they were in, in the order in which they
were made, each with the arguments it had the first time: the blocks of the KV cache are not counted
again, so that what the scheduler knows of them stays true; a call that another one has undone is
not made again.

Left to others: making the calls (`worker`), and when (`executor`). Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .entry import Entry
from .sleep import Sleep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_START = (
    "set_kv_cache_layout",
    "determine_available_memory",
    "update_max_model_len",
    "initialize_from_config",
    "compile_or_warm_up_model",
)
"""What the engine has its workers do when it starts, in its order; each is told once."""

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
        self._sleep = Sleep()
        self._profile: Entry | None = None
        self._own: list[Entry] = []
        self._forgotten: set[str] = set()

    @property
    def forgotten(self) -> list[str]:
        """Names of the user's methods whose calls a new worker is not told."""
        return sorted(self._forgotten)

    def note(
        self,
        method: str | bytes,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        answers: Sequence[Any] = (),
    ) -> None:
        """Note that the call was made on all ranks, and that they answered it."""
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
        """Return the calls that a new worker is to be told, in order."""
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
