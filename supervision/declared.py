"""Trees written as TOML, checked as a whole before anything starts.

Guarantees: the result is the same `SupervisorSpec` that Python code would build, and every error
is a `SpecError` whose field is the dotted place in the document. Supervisors name their children,
so that a document could say that one contains itself: that is an error too, with the way around.

::

    root = "app"

    [supervisor.app]
    strategy = "rest_for_one"
    intensity = { max_restarts = 3, period = 60.0 }
    children = ["store", "pool"]

    [supervisor.pool]
    strategy = "one_for_all"
    children = ["left", "right"]
    restart = "transient"                    # as a child of app

    [worker.store]
    start = "my.package:start_store"         # or a name that the caller passes in *starts*
    args = ["/data"]
    shutdown = 30.0
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from .backoff import BackOff
from .errors import SpecError
from .spec import ChildSpec, SupervisorSpec
from .window import Intensity

if TYPE_CHECKING:
    from collections.abc import Callable

    from .child import StartFunction

Table: TypeAlias = Mapping[str, Any]
Built = TypeVar("Built")

_AS_CHILD = {"restart", "shutdown", "significant", "start_within", "kill_within"}
_WORKER = _AS_CHILD | {"start", "args"}
_SUPERVISOR = _AS_CHILD | {
    "strategy",
    "intensity",
    "children",
    "auto_shutdown",
    "max_children",
    "backoff",
    "fruitless_limit",
    "count_preemption",
}
_INTENSITY = {"max_restarts", "period", "whole_seconds"}
_BACKOFF = {"initial", "factor", "maximum", "jitter", "reset_after"}


def tree_from_toml(text: str, starts: Mapping[str, StartFunction] | None = None) -> SupervisorSpec:
    """Return the tree that *text* declares.

    Args:
        text: The TOML document.
        starts: Start functions by the name the document uses for them; any other name is
            ``module:attribute`` and imported.

    Raises:
        SpecError: Something in it makes no sense; nothing has been started.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError("toml", str(error), "is not TOML") from error
    _known("", document, {"root", "supervisor", "worker"})
    declared = _Document(
        _table("supervisor", document.get("supervisor", {})),
        _table("worker", document.get("worker", {})),
        starts or {},
    )
    root = document.get("root")
    if not isinstance(root, str) or root not in declared.supervisors:
        raise SpecError("root", root, "must name a supervisor of this document")
    spec = declared.supervisor(root, ())
    for field in _AS_CHILD & set(declared.supervisors[root]):
        raise SpecError(
            f"supervisor.{root}.{field}", declared.supervisors[root][field], "the root is no child"
        )
    unused = declared.unused(root)
    if unused:
        raise SpecError("children", ", ".join(unused), "declared, but not a child of anything")
    return spec


@dataclass(frozen=True, slots=True)
class _Document:
    supervisors: Table
    workers: Table
    starts: Mapping[str, StartFunction]

    def supervisor(self, name: str, above: tuple[str, ...]) -> SupervisorSpec:
        """Return the spec of supervisor *name*; *above* are those it stands under."""
        place = f"supervisor.{name}"
        if name in above:
            way = " -> ".join((*above[above.index(name) :], name))
            raise SpecError(f"{place}.children", way, "a supervisor cannot contain itself")
        table = _table(place, self.supervisors[name])
        _known(place, table, _SUPERVISOR)
        fields = {key: value for key, value in table.items() if key not in _AS_CHILD}
        for key, kind, known in (
            ("intensity", Intensity, _INTENSITY),
            ("backoff", BackOff, _BACKOFF),
        ):
            if key in fields:
                part = _table(f"{place}.{key}", fields[key])
                _known(f"{place}.{key}", part, known)
                fields[key] = _placed(f"{place}.{key}", kind, part)
        children: object = fields.pop("children", [])
        if not isinstance(children, list):
            raise SpecError(f"{place}.children", children, "must be a list of names")
        names = cast("list[object]", children)
        below = [self.child(place, child, (*above, name)) for child in names]
        return _placed(place, SupervisorSpec, {"id": name, "children": below, **fields})

    def child(self, place: str, name: object, above: tuple[str, ...]) -> ChildSpec:
        """Return the spec of the child *name*, which the supervisor at *place* lists."""
        if isinstance(name, str) and name in self.supervisors:
            table = _table(f"supervisor.{name}", self.supervisors[name])
            start: StartFunction | SupervisorSpec = self.supervisor(name, above)
            where = f"supervisor.{name}"
        elif isinstance(name, str) and name in self.workers:
            where = f"worker.{name}"
            table = _table(where, self.workers[name])
            _known(where, table, _WORKER)
            start = self.start(where, table.get("start"))
        else:
            raise SpecError(f"{place}.children", name, "names nothing that is declared")
        fields = {key: value for key, value in table.items() if key in _AS_CHILD | {"args"}}
        return _placed(where, ChildSpec, {"id": name, "start": start, **fields})

    def start(self, place: str, name: object) -> StartFunction:
        """Return the start function that the worker at *place* names."""
        if isinstance(name, str) and name in self.starts:
            return self.starts[name]
        module, _, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
        if not module or not attribute:
            raise SpecError(f"{place}.start", name, "must be module:attribute, or be passed in")
        try:
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise SpecError(f"{place}.start", name, f"cannot be imported: {error}") from error
        return cast("StartFunction", found)

    def unused(self, root: str) -> list[str]:
        """Return what is declared but is nobody's child."""
        used = {root}
        for name in self.supervisors:
            used.update(_table(f"supervisor.{name}", self.supervisors[name]).get("children", ()))
        return sorted({*self.supervisors, *self.workers} - used)


def _table(place: str, value: object) -> Table:
    if not isinstance(value, dict):
        raise SpecError(place, value, "must be a table")
    return cast("Table", value)


def _known(place: str, table: Table, known: set[str]) -> None:
    for key in table:
        if key not in known:
            field = f"{place}.{key}" if place else key
            raise SpecError(field, table[key], f"unknown; known are {', '.join(sorted(known))}")


def _placed(place: str, build: Callable[..., Built], fields: Table) -> Built:
    """Build from *fields*; an error says where in the document it lies."""
    try:
        return build(**fields)
    except SpecError as error:
        raise SpecError(f"{place}.{error.field}", error.value, error.remedy) from error
