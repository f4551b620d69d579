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

from phalanx.supervision.core.policy import BackOff, Intensity
from phalanx.supervision.core.spec import ChildSpec, SupervisorSpec
from phalanx.supervision.errors import SpecError, error_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.supervision.core.child import StartFunction

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
    built = declared.supervisors_from(root)
    for field in _AS_CHILD & set(declared.supervisors[root]):
        raise SpecError(
            f"supervisor.{root}.{field}", declared.supervisors[root][field], "the root is no child"
        )
    unused = declared.unused(built)
    if unused:
        raise SpecError("children", ", ".join(unused), "declared, but not below the root")
    return built[root]


@dataclass(frozen=True, slots=True)
class _Document:
    supervisors: Table
    workers: Table
    starts: Mapping[str, StartFunction]

    def supervisors_from(self, root: str) -> dict[str, SupervisorSpec]:
        """Return the spec of *root* and of every supervisor below it, by name."""
        built: dict[str, SupervisorSpec] = {}
        # From the root to where we are, each with its children that are still to come: no
        # recursion, which a deep document would end.
        way = {root: iter(self._children(root))}
        while way:
            name = next(reversed(way))
            child = next(way[name], None)
            if child is None:
                built[name] = self._supervisor(name, built)
                del way[name]
            elif isinstance(child, str) and child in way:
                names = list(way)
                circle = " -> ".join((*names[names.index(child) :], child))
                raise SpecError(
                    f"supervisor.{child}.children", circle, "a supervisor cannot contain itself"
                )
            elif isinstance(child, str) and child in self.supervisors and child not in built:
                way[child] = iter(self._children(child))
        return built

    def _children(self, name: str) -> list[object]:
        place = f"supervisor.{name}"
        children: object = _table(place, self.supervisors[name]).get("children", [])
        if not isinstance(children, list):
            raise SpecError(f"{place}.children", children, "must be a list of names")
        found = cast("list[object]", children)
        for child in found:
            if not isinstance(child, str):
                raise SpecError(f"{place}.children", child, "names nothing that is declared")
        return found

    def _supervisor(self, name: str, built: Mapping[str, SupervisorSpec]) -> SupervisorSpec:
        """Return the spec of supervisor *name*; those below it are *built*."""
        place = f"supervisor.{name}"
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
        fields.pop("children", None)
        below = [self._child(place, child, built) for child in self._children(name)]
        return _placed(place, SupervisorSpec, {"id": name, "children": below, **fields})

    def _child(self, place: str, name: object, built: Mapping[str, SupervisorSpec]) -> ChildSpec:
        """Return the spec of the child *name*, which the supervisor at *place* lists."""
        if isinstance(name, str) and name in self.supervisors:
            table = _table(f"supervisor.{name}", self.supervisors[name])
            start: StartFunction | SupervisorSpec = built[name]
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
        if not module or not attribute or module.startswith("."):
            raise SpecError(f"{place}.start", name, "must be module:attribute, or be passed in")
        try:
            found: Any = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        except (Exception, SystemExit) as error:  # a module may raise anything
            why = f"cannot be imported: {error_text(error)}"
            raise SpecError(f"{place}.start", name, why) from error
        return cast("StartFunction", found)

    def unused(self, built: Mapping[str, SupervisorSpec]) -> list[str]:
        """Return what is declared but does not stand in the tree that was *built*."""
        used = {child.id for spec in built.values() for child in spec.children}
        return sorted({*self.supervisors, *self.workers} - used - set(built))


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
