"""A picture of a driver, for a terminal.

Guarantees: what workers and users named does not reach the terminal as commands.
"""

from __future__ import annotations

import datetime as dt
import time
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from phalanx.runtime import safe_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from phalanx.runtime import DriverStream

    from .picture import Picture

    Row = tuple[Text, dict[str, Any]]

_GOOD: Final = ("serving", "up", "running", "started")
_BAD: Final = ("ended", "down", "stopped", "given_up")
_STALE: Final = 3.0  # seconds without a word; it tells once a second
_COLUMNS: Final = (
    *("STATE", "#", "EPOCH", "SERVED", "CALLS/S", "OWED", "NOW IN", "RSS", "DEVICE", "PID"),
    "RESTARTS",
)
_IF_WIDE: Final = ("EPOCH", "CALLS/S", "DEVICE", "PID")
_WIDE: Final = 120  # characters
_NUMBERS: Final = ("#", "EPOCH", "SERVED", "CALLS/S", "OWED", "RSS", "PID")


def draw(
    driver: DriverStream, picture: Picture | None, events: Sequence[dict[str, Any]], width: int
) -> Group:
    """Return the whole view, *width* characters wide."""
    parts: list[Any] = [_title(driver, picture)]
    if picture is not None:
        parts.append(_table(picture, width))
    if events:
        parts += [Text(), *map(_event, events)]
    return Group(*parts)


def _title(driver: DriverStream, picture: Picture | None) -> Text:
    name = f" ({safe_text(driver.name)})" if driver.name else ""
    up = dt.timedelta(seconds=int(max(0.0, time.time() - driver.started_at)))
    title = Text(f"driver {driver.pid}{name}, up {up}", style="bold")
    if picture is None:
        return title.append("  waiting for its first word", style="yellow")
    ranks = sum(len(group["ranks"]) for group in picture.groups)
    restarts = sum(group["restarts"] for group in picture.groups)
    counted = f"  {len(picture.groups)} groups, {ranks} ranks, {restarts} restarts"
    title.append(counted, style="none")
    silent = time.monotonic() - picture.at
    if silent > _STALE:
        title.append(f"  silent for {silent:.0f} s: it is stopped, or very busy", style="red")
    return title


def _table(picture: Picture, width: int) -> Table:
    shown = [name for name in _COLUMNS if width >= _WIDE or name not in _IF_WIDE]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for name in shown:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    groups = {group["group"]: group for group in picture.groups}
    for row, cells in _rows(picture, groups):
        table.add_row(row, *(cells.get(name, "") for name in shown))
    if not table.row_count:
        table.add_row(Text("no groups", style="dim"))
    return table


def _rows(picture: Picture, groups: dict[str, dict[str, Any]]) -> Iterator[Row]:
    for tree in picture.trees:
        yield from _tree(tree, groups)
    for group in groups.values():  # those that are left are part of no tree
        yield from _group(group, Text(safe_text(group["group"]), style="bold"), "")


def _tree(tree: dict[str, Any], groups: dict[str, dict[str, Any]]) -> Iterator[Row]:
    root = tree["root"]
    yield _child(root, Text(safe_text(root["path"]), style="bold"))
    for child in tree["children"]:
        indent = "  " * (child["path"].count("/") - root["path"].count("/"))
        name = Text(indent + safe_text(child["path"].rpartition("/")[2]))
        group = groups.pop(child["path"], None)
        if group is None:
            yield _child(child, name)
        else:
            yield from _group(group, name, indent)
    if tree["hidden"]:
        yield Text(f"  and {tree['hidden']} more", style="dim"), {}


def _child(child: dict[str, Any], name: Text) -> Row:
    about = child["strategy"] or child["restart"]
    name.append(f"  {about}", style="dim")
    cells: dict[str, Any] = {
        "STATE": _state(child["state"]),
        "#": str(child["incarnation"]),
        "NOW IN": Text(safe_text(child["last_exit"])[:30], style="dim"),
        "RESTARTS": _restarts(child["restarts"], child["max_restarts"], child["period"]),
    }
    return name, cells


def _group(group: dict[str, Any], name: Text, indent: str) -> Iterator[Row]:
    name.append(f"  {group['worker']} x {group['world_size']}, {group['strategy']}", style="dim")
    inside = f"{group['in_flight']} in flight"
    if group["waiting"]:
        inside += f", {group['waiting']} wait"
    if group["standby"]:
        inside += f", {group['standby']} spare"
    cells: dict[str, Any] = {
        "STATE": _state(group["phase"]),
        "EPOCH": str(group["epoch"]),
        "NOW IN": Text(inside, style="dim"),
        "RESTARTS": _restarts(
            group["restarts_in_window"], group["max_restarts"], group["period"], group["restarts"]
        ),
    }
    yield name, cells
    for rank in group["ranks"]:
        yield _rank(rank, f"{indent}  rank {rank['rank']}")


def _rank(rank: dict[str, Any], name: str) -> Row:
    rate = rank["calls_per_s"]
    doing = safe_text(rank["method"])[:30]
    if doing and rank["running_for"] >= 1.0:
        doing += f" for {rank['running_for']:.0f} s"
    cells: dict[str, Any] = {
        "STATE": _state(rank["state"]),
        "#": str(rank["incarnation"]),
        "SERVED": str(rank["served"]),
        "CALLS/S": "" if rate is None else f"{rate:.1f}",
        "OWED": str(rank["owed"]),
        "NOW IN": Text(doing),
        "RSS": _bytes(rank["rss_bytes"]),
        "DEVICE": Text(safe_text(rank["device"])),
        "PID": "" if rank["pid"] is None else str(rank["pid"]),
    }
    return Text(name), cells


def _state(state: str) -> Text:
    style = "green" if state in _GOOD else "red" if state in _BAD else "yellow"
    return Text(state, style=style)


def _restarts(spent: int | None, most: int, period: float, ever: int | None = None) -> str:
    if spent is None:
        return ""
    told = f"{spent} of {most} in {period:g} s"
    return told if ever is None else f"{ever}; {told}"


def _bytes(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"


def _event(record: dict[str, Any]) -> Text:
    about = record.get("report") or record
    who = "" if about.get("rank") is None else f"/{about['rank']}"
    group = about.get("group", "")
    why: Any = about.get("reason") or about.get("cause") or ""
    if about is not record:  # a report's
        why = f"{why['kind']} ({why['detail']}), then: {about['decision']}"
    level = str(record.get("level", "info"))
    style = {"critical": "bold red", "error": "red", "warning": "yellow"}.get(level, "dim")
    clock = str(record.get("timestamp", ""))[11:19]
    text = f"{clock} {record.get('event')} {group}{who} {why}"
    return Text(safe_text(" ".join(text.split())), style=style, no_wrap=True, overflow="ellipsis")
