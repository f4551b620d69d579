"""What a history is made of: one frozen value for each thing that happened in a run.

Guarantees: every record is one line of JSON; `line` tells it to a person.

Left to others: the kinds there are, by who tells of them: the referee of the faults and of what was
left behind (`referee_records`), the driver of groups and calls as it sees them (`group_records`,
`call_records`), the workers of what they really ran (`worker_records`). Who wrote a record is part
of the evidence. Also the way back from JSON (`records`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import ClassVar

Ranks = tuple[tuple[int, int], ...]
"""(rank, incarnation), ..."""

_UNTOLD = ("at", "thread")
_NOTHING: tuple[object, ...] = (None, "", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One thing that happened.

    Attributes:
        at: When: in a file on the monotonic clock of the machine, in a `History` since the run
            began; in seconds.
    """

    kind: ClassVar[str] = ""
    at: float

    def line(self) -> str:
        """Return it as a person reads it, without what says nothing."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name not in _UNTOLD)
        named = (f"{name}={value!r}" for name, value in values if value not in _NOTHING)
        return f"{self.at:9.3f}  {self.kind:<13} {' '.join(named)}"

    def to_json(self) -> str:
        """Return it as one line."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({"kind": self.kind, **named})
