"""The journal of one engine: the calls whose replay brings a new worker to its predecessor's state.

Guarantees: calls come in the order in which they were first made, each with its first arguments:
the blocks of the KV cache are not counted again, so that the scheduler's data about them stays
valid. A call that another one has undone is not replayed. A call that cannot be replayed, and may
have changed weights, is in `Journal.lost`. Pure.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cloudpickle

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


HARMLESS = frozenset(
    (
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
        *("start_weight_update", "start_draft_weight_update"),
        *("get_encoder_timing_stats", "save_tensorized_model"),
    )
)
"""Calls of vLLM's that change no weights: one that has to come before others fails these."""


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
    """The sleeping memory of the workers, and the few calls that bring a new worker to that."""

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
            calls = [self._call]
        elif self._asleep:
            # Whatever is awake has been filled again since the old worker slept. A new one has it
            # from its start, and would lose it in a deep sleep (level 2).
            wake = Entry("wake_up", kwargs={"tags": sorted(_ALL - self._asleep)})
            calls = [Entry("sleep", kwargs={"level": 1}), wake]
        given_away = sorted(self._discarded - self._asleep)
        return [*calls, Entry("discard", (tuple(given_away),))] if given_away else calls


class Journal:
    """The calls that have shaped the workers of one engine.

    Args:
        replay: Further methods whose calls are kept.
        superseding: Those of them after whose calls the earlier ones do not matter, back from the
            one before.
        harmless: Methods, and names of callables, that change no weights.
        most: How many bytes of arguments of *replay* are kept.
    """

    def __init__(
        self,
        replay: Iterable[str] = (),
        superseding: Iterable[str] = (),
        harmless: Iterable[str] = (),
        *,
        most: int = 1 << 30,
    ) -> None:
        self._replay = frozenset(replay)
        self._superseding = frozenset(superseding)
        self._harmless = HARMLESS.union(harmless)
        self._most = most
        self._start: dict[str, Entry] = {}
        self._loras: dict[int, Entry] = {}
        self._pinned: dict[int, Entry] = {}
        self._sleep = _Sleep()
        self._profile: Entry | None = None
        self._own: list[tuple[str, bytes]] = []
        self._lost: set[str] = set()
        self._lost_before: set[str] = set()  # before the last update of all weights

    @property
    def lost(self) -> list[str]:
        """Names of the calls that may have changed weights, and that a new worker does not make."""
        return sorted(self._lost | self._lost_before)

    def note_possible_update(self, name: str) -> None:
        """Note that the call *name* of a user's may have changed weights, or change them later."""
        if name not in REPEATABLE | self._harmless:
            self._lost.add(name)

    def note(
        self,
        method: str | bytes,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        answers: Sequence[Any] = (),
        *,
        name: str = "",
    ) -> None:
        """Note a call that all ranks have answered; *name* is that of a callable."""
        if isinstance(method, bytes):
            self.note_possible_update(name)
            return
        entry = Entry(method, args, dict(kwargs or {}))
        if method in self._replay:
            self._keep(entry)
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
            self._sleep.wake(_given(entry, "tags"))
        elif method == "profile":
            self._profile = entry if _given(entry, "is_start", default=True) else None
        else:
            self.note_possible_update(method)

    def entries(self) -> tuple[Entry, ...]:
        """Return the calls that a new worker makes, in order."""
        profile = [] if self._profile is None else [self._profile]
        return (
            *(self._start[name] for name in _START if name in self._start),
            *(entry for number, entry in self._loras.items() if self._is_due(number, entry)),
            *self._pinned.values(),
            *(Entry(method, *pickle.loads(packed)) for method, packed in self._own),
            *profile,
            *self._sleep.entries(),
        )

    def _is_due(self, number: int, entry: Entry) -> bool:
        """Whether an adapter is loaded again before the first request that needs it."""
        return number in self._pinned or _given(entry, "lora_request").load_inplace

    def _keep(self, entry: Entry) -> None:
        """Keep a copy of *entry*, as its arguments are now; forget what it supersedes."""
        method = str(entry.method)
        self._own.append((method, cloudpickle.dumps((entry.args, entry.kwargs))))
        if method in self._superseding:
            before = [n for n, (each, _) in enumerate(self._own[:-1]) if each in self._superseding]
            del self._own[: before[-1] + 1 if before else 0]
            # What is in doubt since the one before may be a part of this one.
            self._lost_before, self._lost = self._lost, set()
        if sum(len(packed) for _, packed in self._own) > self._most:
            self._own.clear()
            self._replay = frozenset()  # from now on each of them is lost, and none supersedes
            self._lost.add(f"{method} (more than {self._most} bytes to replay)")


def _given(entry: Entry, name: str, default: Any = None) -> Any:
    return entry.args[0] if entry.args else entry.kwargs.get(name, default)
