"""Trees written as TOML, checked as a whole before anything starts.

The result is the `SupervisorSpec` that Python code would build; every error is a `SpecError` whose
field is the dotted place in the document. Supervisors name their children::

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

import pkgutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from phalanx.supervision.core.restart_rules import BackOff, Intensity
from phalanx.supervision.core.spec import ChildSpec, SupervisorSpec
from phalanx.supervision.errors import SpecError, error_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from phalanx.supervision.core.spec import StartFunction

Table: TypeAlias = Mapping[str, Any]
Load: TypeAlias = "Callable[[str, object], Any]"
Kind: TypeAlias = "Callable[[str, dict[str, Any], Load], ChildSpec]"
Built = TypeVar("Built")

_AS_CHILD = {"restart", "shutdown", "significant", "start_within", "kill_within"}
_SUPERVISOR = _AS_CHILD | {one.name for one in fields(SupervisorSpec)} - {"id", "decider"}


def tree_from_toml(
    text: str,
    starts: Mapping[str, StartFunction] | None = None,
    kinds: Mapping[str, Kind] = MappingProxyType({}),
) -> SupervisorSpec:
    """Return the tree that *text* declares.

    Args:
        text: The TOML document.
        starts: Start functions by the name the document uses for them; any other name is
            ``module:attribute`` and imported.
        kinds: Further kinds of children, by the name of their tables: each builds a child from its
            id, its table, and a function that returns what a field's ``module:attribute`` names.

    Raises:
        SpecError: The document is invalid; nothing has been started.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError("toml", str(error), "is not TOML") from error
    kinds = {"worker": _worker, **kinds}
    _known("", document, {"root", "supervisor", *kinds})
    declared = _Document(
        _table("supervisor", document.get("supervisor", {})),
        {kind: _table(kind, document.get(kind, {})) for kind in kinds},
        starts or {},
        kinds,
    )
    root = document.get("root")
    if not isinstance(root, str) or root not in declared.supervisors:
        raise SpecError("root", root, "must name a supervisor of this document")
    built = declared.built()
    for field in _AS_CHILD & set(table := declared.supervisors[root]):
        raise SpecError(f"supervisor.{root}.{field}", table[field], "the root is not a child")
    used = {child.id for spec in built.values() for child in spec.children} | {root}
    names = [name for table in (declared.supervisors, *declared.leaves.values()) for name in table]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SpecError("children", ", ".join(twice), "declared as more than one kind of child")
    if unused := sorted(set(names) - used):
        raise SpecError("children", ", ".join(unused), "declared, but not below the root")
    return built[root]


@dataclass(frozen=True, slots=True)
class _Document:
    supervisors: Table
    leaves: Mapping[str, Table]  # tables of each kind, by name
    starts: Mapping[str, StartFunction]
    kinds: Mapping[str, Kind]

    def built(self) -> dict[str, SupervisorSpec]:
        """Return the spec of every supervisor, by name."""
        below = {
            name: [each for each in self._children(name) if each in self.supervisors]
            for name in self.supervisors
        }
        built: dict[str, SupervisorSpec] = {}
        try:
            for name in TopologicalSorter(below).static_order():
                built[name] = self._supervisor(name, built)
        except CycleError as error:
            circle: list[str] = error.args[1][::-1]
            place, remedy = f"supervisor.{circle[0]}.children", "a supervisor cannot contain itself"
            raise SpecError(place, " -> ".join(circle), remedy) from None
        return built

    def _children(self, name: str) -> list[str]:
        place = f"supervisor.{name}"
        children: object = _table(place, self.supervisors[name]).get("children", [])
        if not isinstance(children, list):
            raise SpecError(f"{place}.children", children, "must be a list of names")
        return [str(name) for name in cast("list[object]", children)]

    def _supervisor(self, name: str, built: Mapping[str, SupervisorSpec]) -> SupervisorSpec:
        """Return the spec of supervisor *name*; those below it are *built*."""
        place = f"supervisor.{name}"
        table = _table(place, self.supervisors[name])
        _known(place, table, _SUPERVISOR)
        given = {key: value for key, value in table.items() if key not in _AS_CHILD}
        for key, kind in (("intensity", Intensity), ("backoff", BackOff)):
            if key in given:
                part = _table(f"{place}.{key}", given[key])
                _known(f"{place}.{key}", part, {one.name for one in fields(kind)})
                given[key] = _placed(f"{place}.{key}", kind, part)
        given["children"] = [self._child(place, child, built) for child in self._children(name)]
        return _placed(place, SupervisorSpec, {"id": name, **given})

    def _child(self, place: str, name: str, built: Mapping[str, SupervisorSpec]) -> ChildSpec:
        """Return the spec of the child *name*, which the supervisor at *place* lists."""
        if name in self.supervisors:
            where = f"supervisor.{name}"
            table = _table(where, self.supervisors[name])
            given = {key: value for key, value in table.items() if key in _AS_CHILD}
            return _placed(where, ChildSpec, {"id": name, "start": built[name], **given})
        for kind, tables in self.leaves.items():
            if name in tables:
                where = f"{kind}.{name}"
                table = dict(_table(where, tables[name]))
                return _placed(where, partial(self.kinds[kind], name, table, self.load), {})
        raise SpecError(f"{place}.children", name, "names nothing that is declared")

    def load(self, field: str, name: object) -> Any:
        """Return what the *field* of a table names."""
        if isinstance(name, str) and name in self.starts:
            return self.starts[name]
        module, _, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
        if not module or not attribute or module.startswith("."):
            raise SpecError(field, name, "must be module:attribute, or be passed in")
        try:
            return pkgutil.resolve_name(f"{module}:{attribute}")
        except (Exception, SystemExit) as error:  # a module may raise anything
            why = f"cannot be imported: {error_text(error)}"
            raise SpecError(field, name, why) from error


def _worker(name: str, table: dict[str, Any], load: Load) -> ChildSpec:
    _known("", table, _AS_CHILD | {"start", "args"})
    return ChildSpec(name, load("start", table.pop("start", None)), **table)


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
