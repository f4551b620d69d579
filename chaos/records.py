"""Every kind of record there is, and the way back from a line of JSON.

Guarantees: a closed list; `record_of` returns what `Record.to_json` was made of, or says that the
text is no record of a run.

Left to others: files (`journal`), what may not happen (`checker`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from .call_records import Issued, Sent, Settled, Taken
from .group_records import (
    ChangePlanned,
    GroupBuilt,
    GroupDown,
    GroupEnded,
    GroupUp,
    NotStarted,
    RankDied,
    RankExited,
    RankReady,
    RankStarted,
)
from .referee_records import (
    Complained,
    Examined,
    Left,
    LifeBegan,
    LifeEnded,
    Missed,
    Struck,
)
from .worker_records import Began, Ended, Woke

if TYPE_CHECKING:
    from .record import Record

_KINDS: dict[str, type[Record]] = {
    each.kind: each
    for each in (
        *(LifeBegan, LifeEnded, Struck, Missed, Examined, Left, Complained),
        *(GroupBuilt, RankStarted, RankReady, RankExited, RankDied, NotStarted),
        *(GroupUp, GroupDown, GroupEnded, ChangePlanned),
        *(Issued, Sent, Settled, Taken),
        *(Woke, Began, Ended),
    )
}


def record_of(text: str) -> Record:
    """Return the record that `Record.to_json` made *text* of.

    Raises:
        ValueError: *text* is none.
    """
    loaded: Any = json.loads(text)
    try:
        found = _KINDS[loaded.pop("kind")]
        return found(**{name: _frozen(value) for name, value in loaded.items()})
    except (AttributeError, KeyError, TypeError) as error:
        msg = f"not a record of a run: {text[:200]}"
        raise ValueError(msg) from error


def _frozen(value: object) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(each) for each in cast("list[object]", value))
    return value
