"""View of ``phalanx top`` for a terminal; control characters in names are escaped."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from phalanx.runtime import Sketch, render, safe_text

from .driver_selection import uptime

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from phalanx.runtime import DriverStream, Observer, Picture

    Row = tuple[Text, dict[str, Any]]

_GOOD: Final = ("serving", "up", "running", "started")
_BAD: Final = ("ended", "down", "stopped", "given_up", "lost")
_REFRESH: Final = 1.0
_STALE: Final = 3.0  # seconds without a status; there is one a second
_COLUMNS: Final = (
    *("STATE", "STARTS", "EPOCH", "SERVED", "CALLS/S", "OWED", "NOW IN", "RSS", "DEVICE", "PID"),
    "RESTARTS",
)
_LEFT_OUT: Final = ("EPOCH", "DEVICE", "OWED", "STARTS", "RSS", "CALLS/S", "SERVED")  # first first
_NUMBERS: Final = ("STARTS", "EPOCH", "SERVED", "CALLS/S", "OWED", "RSS", "PID", "RESTARTS")
_RULER: Final = Console(width=10_000)
_STYLES: Final = {"critical": "bold red", "error": "red", "warning": "yellow"}  # of events


def show(driver: DriverStream, picture: Picture) -> None:
    """Print *picture* once."""
    # Into a pipe or a file as wide as it needs to be: scripts read it.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(draw(driver, picture, (), console.width))


def follow(driver: DriverStream, observer: Observer) -> None:
    """Show what *driver* does until it ends, or closes its stream."""
    sketch, console = Sketch(), Console()
    picture: Picture | None = None
    view = draw(driver, None, (), console.width)
    with Live(view, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        drawn_at = 0.0
        while not observer.has_ended:
            record = observer.next(time.monotonic() + _REFRESH)
            if record is not None and observer.is_last(record):
                break
            whole = None if record is None else sketch.take(record)
            picture = whole or picture
            # Also without news: then it says for how long there has been none.
            if whole is not None or time.monotonic() - drawn_at > _REFRESH:
                live.update(draw(driver, picture, list(sketch.events), console.width), refresh=True)
                drawn_at = time.monotonic()
    end = "ended" if observer.has_ended else "closed its stream"
    console.print(f"driver {driver.pid} has {end}", highlight=False)


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
    title = Text(f"driver {driver.pid}{name}, up {uptime(driver)}", style="bold")
    if picture is None:
        return title.append("  waiting for its first word", style="yellow")
    ranks = sum(len(group["ranks"]) for group in picture.groups)
    restarts = sum(group["restarts"] for group in picture.groups)
    counts = ((len(picture.groups), "group"), (ranks, "rank"), (restarts, "restart"))
    counted = ", ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counts)
    title.append(f"  {counted}", style="none")
    silent = time.monotonic() - picture.at
    if silent > _STALE:
        title.append(f"  silent for {silent:.0f} s: it is stopped, or very busy", style="red")
    return title


def _table(picture: Picture, width: int) -> Table:
    """Return the table, without the columns for which *width* has no room."""
    rows = list(_rows(picture)) or [(Text("no groups", style="dim"), {})]
    table = _with_columns(_COLUMNS, rows)
    for count in range(1, len(_LEFT_OUT) + 1):
        if Measurement.get(_RULER, _RULER.options, table).maximum <= width:
            break
        table = _with_columns([n for n in _COLUMNS if n not in _LEFT_OUT[:count]], rows)
    return table


def _with_columns(names: Sequence[str], rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for row, cells in rows:
        table.add_row(row, *(cells.get(name, "") for name in names))
    return table


def _rows(picture: Picture) -> Iterator[Row]:
    groups = {group["group"]: group for group in picture.groups}
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
    return name, {
        "STATE": _state(child["state"]),
        "STARTS": str(child["incarnation"]),
        "NOW IN": Text(safe_text(child["last_exit"])[:30], style="dim"),
        "RESTARTS": _restarts(child["restarts"], child["max_restarts"]),
    }


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
        "RESTARTS": _restarts(group["restarts_in_window"], group["max_restarts"]),
    }
    yield name, cells
    for node in group.get("nodes", ()):
        yield _node(node, f"{indent}  node {node['node']}")
    for rank in group["ranks"]:
        yield _rank(rank, f"{indent}  rank {rank['rank']}")


def _node(node: dict[str, Any], name: str) -> Row:
    ranks = ", ".join(map(str, node["ranks"]))
    is_spare = not ranks and node["state"] == "up"
    about = [f"ranks {ranks}" if ranks else "spare" if is_spare else ""]
    if (age := node.get("beat_age")) is not None:
        about.append(f"beat {age:.1f} s ago")
    return Text(f"{name} {safe_text(node['host'])}".rstrip()), {
        "STATE": _state(node["state"]),
        "NOW IN": Text(", ".join(filter(None, about)), style="dim"),
        "DEVICE": Text(safe_text(" ".join(node.get("devices", ())))),
    }


def _rank(rank: dict[str, Any], name: str) -> Row:
    rate = rank["calls_per_s"]
    doing = safe_text(rank["method"])[:30]
    if rank.get("abandoned"):
        doing += " (abandoned)"
    if doing and rank["running_for"] >= 1.0:
        doing += f" for {rank['running_for']:.0f} s"
    where = f" on {safe_text(rank['host'])}" if rank.get("host") else ""
    return Text(f"{name}{where}"), {
        "STATE": _state(rank["state"]),
        "STARTS": str(rank["incarnation"]),
        "SERVED": str(rank["served"]),
        "CALLS/S": "" if rate is None else f"{rate:.1f}",
        "OWED": str(rank["owed"]),
        "NOW IN": Text(doing),
        "RSS": _bytes(rank["rss_bytes"]),
        "DEVICE": Text(safe_text(rank["device"])),
        "PID": "" if rank["pid"] is None else str(rank["pid"]),
    }


def _state(state: str) -> Text:
    style = "green" if state in _GOOD else "red" if state in _BAD else "yellow"
    return Text(state, style=style)


def _restarts(spent: int | None, most: int) -> str:
    return "" if spent is None else f"{spent}/{most}"


def _bytes(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count / (1 << 30):.1f}G" if count >= 1 << 30 else f"{count / (1 << 20):.0f}M"


def _event(record: dict[str, Any]) -> Text:
    lines = render(record).decode().splitlines()[:2]  # of a crash, the second is its report's first
    style = _STYLES.get(str(record.get("level")), "dim")
    text = " ".join(" ".join(lines).split())
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
