"""What a contestant is, and the lines by which it is driven: one JSON object in, one out.

Guarantees: what a library prints goes to stderr and never between the lines. A contestant whose
conductor is gone reads the end of its input, closes, and ends. An exception is an answer, with its
type and text; it does not end the contestant.

Left to others: when which contestant has its turn, and everything that is seen from outside
(processors, memory, what is left behind).

Imports nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import IO, Any

CRASH = "PHALANX_BENCH_CRASH"
_EVERY = 0.01  # seconds between attempts to call a group that does not work


_REQUESTS = 64
_NEW, _PROMPT, _BLOCKS = 4, 512, 32  # requests that have just come, with so many tokens and blocks
STRUCTURE_BYTES = 16 << 10  # about as many as the pickle of `scheduler_output` has


@dataclass
class NewRequest:
    """A request that its worker does not know yet, as in vLLM's ``NewRequestData``."""

    req_id: str
    prompt_token_ids: list[int]
    sampling: dict[str, Any]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class CachedRequests:
    """What has changed of the others, as in vLLM's ``CachedRequestData``."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_token_ids: list[list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]


@dataclass
class SchedulerOutput:
    """What a step of vLLM's scheduler sends to its workers."""

    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    num_common_prefix_blocks: list[int]
    finished_req_ids: set[str]
    free_encoder_mm_hashes: list[str]
    grammar_bitmask: Any


def scheduler_output() -> SchedulerOutput:
    """Return a step with 64 requests, four of which are new."""
    import numpy as np  # noqa: PLC0415  # not every contestant's environment has it

    names = [f"cmpl-{number:032x}-0" for number in range(_REQUESTS)]
    old = names[_NEW:]
    sampling = {"temperature": 0.7, "top_p": 0.95, "top_k": 50, "max_tokens": 512, "stop": ["END"]}
    tokens = [number * 37 % 128_000 for number in range(_PROMPT)]
    return SchedulerOutput(
        [
            NewRequest(name, tokens[:], sampling, (list(range(_BLOCKS)),), 0)
            for name in names[:_NEW]
        ],
        CachedRequests(
            old,
            set(old[:2]),
            [[number] for number in range(len(old))],
            [([number * 5 + 1000],) if number % 16 == 0 else None for number in range(len(old))],
            [number * 11 + 300 for number in range(len(old))],
            [number + 20 for number in range(len(old))],
        ),
        {name: _PROMPT if name in names[:_NEW] else 1 for name in names},
        _NEW * _PROMPT + len(old),
        {name: [1, 2, 3] for name in old[:8]},
        [2],
        set(names[-2:]),
        [],
        np.arange(_REQUESTS * 8, dtype=np.int32).reshape(_REQUESTS, 8),
    )


class Contestant:
    """N workers that answer calls, by whatever means.

    A subclass makes the blocking call of all of them; what it inherits then measures it.
    """

    def open(self, ranks: int, variant: str) -> None:
        """Start *ranks* workers; *variant* names the settings of a run with deaths."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop them."""

    def version(self) -> str:
        """Return the version of what is measured."""
        raise NotImplementedError

    def pids(self) -> list[int]:
        """Return the workers' processes by rank; empty where they are threads."""
        return []

    def driver(self) -> int:
        """Return the process that the others depend on."""
        return os.getpid()

    def payload(self, form: str, size: int) -> Any:
        """Return what is sent: *size* bytes, or a scheduler's message."""
        if form == "structure":
            return scheduler_output()
        return b"\1" * size if form == "bytes" else self.tensor(size)

    def tensor(self, size: int) -> Any:
        """Return *size* bytes of numbers, of the type that this contestant sends fastest."""
        import numpy as np  # noqa: PLC0415  # not every contestant's environment has it

        return np.ones(size // 8, np.int64)

    def call(self, method: str, *args: Any) -> Any:
        """Call *method* of every worker; return when all have answered."""
        raise NotImplementedError

    def pipeline(self, times: int, window: int) -> None:
        """Make *times* empty calls to all, of which *window* may be unanswered at a time."""
        raise NotImplementedError

    def many(
        self, method: str, args: tuple[Any, ...], times: int, seconds: float, least: int
    ) -> list[int]:
        """Call up to *times*, for about *seconds* and *least* times at least.

        Returns the nanoseconds of each call.
        """
        clock, call = time.perf_counter_ns, self.call
        until = clock() + int(seconds * 1e9)
        spent: list[int] = []
        while len(spent) < times:
            began = clock()
            call(method, *args)
            now = clock()
            spent.append(now - began)
            if now > until and len(spent) >= least:
                break
        return spent

    def slow(self, seconds: float, notes: str) -> list[str]:
        """Call every worker's ``slow``; return for each what its caller got.

        Raises the exception that a call to all of them raises.
        """
        return [str(answer) for answer in self.call("slow", seconds, notes)]

    def works(self, timeout: float) -> None:
        """Return when an empty call to all has been answered within *timeout* seconds."""
        del timeout
        self.call("nothing")


class Echo:
    """What a worker can do, in every library alike.

    While the file that `CRASH` names is there, none can be made: each dies in its start.
    """

    def __init__(self) -> None:
        super().__init__()  # a library's own actor may stand behind this class
        flag = os.environ.get(CRASH)
        if flag is not None and os.path.exists(flag):  # noqa: PTH110  # quick, and before anything
            note(flag, "died")
            os.kill(os.getpid(), signal.SIGKILL)

    def nothing(self, _value: Any = None) -> None:
        """Do nothing."""

    def keep(self, value: Any) -> None:
        """Keep *value* for `kept`."""
        self._value = value

    def kept(self) -> Any:
        """Return what was kept."""
        return self._value

    def read(self, value: Any) -> int:
        """Read every byte of *value*."""
        return int(value.sum())

    def pid(self) -> int:
        """Return the process this is."""
        return os.getpid()

    def slow(self, seconds: float, notes: str) -> str:
        """Take *seconds*, and note in the file *notes* when this began and when it ended."""
        note(notes, "began")
        time.sleep(seconds)
        note(notes, "ended")
        return f"answer of {os.getpid()}"


def beside() -> str:
    """Return a folder for what only the benchmark needs: it is not in the one that is looked at."""
    return os.path.dirname(os.environ[CRASH])  # noqa: PTH120  # as above


def note(path: str, what: str) -> None:
    """Append one line in one write: whole, also if other processes write."""
    with open(path, "ab", buffering=0) as file:  # noqa: PTH123  # one write is the point
        file.write(f"{what} {os.getpid()} {time.monotonic():.6f}\n".encode())


def serve(contestant: Contestant) -> None:
    """Do what each line of standard input says, until there are no more."""
    lines = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    turns = _Turns(contestant, answers)
    for line in lines:
        order = json.loads(line)
        try:
            answer = getattr(turns, order.pop("do"))(**order)
        except Exception as error:  # noqa: BLE001  # is the answer
            answer = {"error": tell(error)}
        turns.say({"done": True, **(answer or {})})
    turns.close()
    sys.stdout.flush()
    # Threads of a library that was interrupted need not let the process end.
    os._exit(0)


def tell(error: BaseException) -> str:
    """Return what *error* is on one line: type and the beginning of its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


class _Turns:
    """The orders, one method each."""

    def __init__(self, contestant: Contestant, answers: IO[str]) -> None:
        self._contestant = contestant
        self._answers = answers
        self._is_open = False
        self._args: dict[tuple[str, int], tuple[Any, ...]] = {}
        self._kept: tuple[str, int] | None = None

    def say(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def open(self, ranks: int, variant: str = "") -> dict[str, Any]:
        self._is_open = True  # whatever it comes to, there may be something to close
        began = time.monotonic()
        self._contestant.open(ranks, variant)
        self._contestant.works(120.0)
        return {
            "seconds": time.monotonic() - began,
            "version": self._contestant.version(),
            "pids": self._contestant.pids(),
            "driver": self._contestant.driver(),
        }

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._contestant.close()

    def call(
        self,
        method: str,
        size: int,
        *,
        times: int,
        seconds: float,
        least: int = 3,
        form: str = "tensor",
        back: bool = False,
    ) -> dict[str, Any]:
        args = self._of(form, size)
        if back:
            if self._kept != (form, size):
                self._contestant.call("keep", *args)
                self._kept = (form, size)
            method, args = "kept", ()
        return {"ns": self._contestant.many(method, args, times, seconds, least)}

    def pipeline(self, times: int, window: int) -> dict[str, Any]:
        began = time.perf_counter_ns()
        self._contestant.pipeline(times, window)
        return {"ns": time.perf_counter_ns() - began}

    def slow(self, seconds: float, notes: str) -> dict[str, Any]:
        self.say({"begun": time.monotonic()})
        try:
            answers = self._contestant.slow(seconds, notes)
        except Exception as error:  # noqa: BLE001  # is what the caller gets
            return {"at": time.monotonic(), "failed": tell(error)}
        return {"at": time.monotonic(), "answers": answers}

    def works(self, timeout: float) -> dict[str, Any]:
        """Call until a call succeeds: when that was, and what came before."""
        deadline = time.monotonic() + timeout
        failures: list[str] = []
        while True:
            try:
                self._contestant.works(max(0.1, deadline - time.monotonic()))
            except Exception as error:  # noqa: BLE001  # counted
                failures.append(tell(error))
            else:
                at = time.monotonic()
                return {"at": at, "failures": failures, "pids": self._contestant.pids()}
            if time.monotonic() > deadline:
                return {"failures": failures}
            time.sleep(_EVERY)

    def pids(self) -> dict[str, Any]:
        return {"pids": self._contestant.pids()}

    def _of(self, form: str, size: int) -> tuple[Any, ...]:
        what = (form, size)
        if what not in self._args:
            self._args[what] = (self._contestant.payload(form, size),) if size else ()
        return self._args[what]
