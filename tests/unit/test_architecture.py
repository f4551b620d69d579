"""The folders are layers of rooms that import in one order; the supervision core has no effects."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Lower ones first.
LAYERS = ["supervision", "runtime", "cluster", "actors", "testing", "chaos", "integrations", "cli"]
# Room -> what else of its layer it imports: rooms that stand before it, and files beside them.
ROOMS: dict[str, dict[str, set[str]]] = {
    "supervision": {
        "core": {"errors.py", "validate.py"},
        "ranks": {"core"},
        "tree": {"core", "errors.py", "validate.py"},
    },
    "runtime": {
        "linux": set(),
        "threads": {"event.py", "linux"},
        "memory": {"linux", "threads"},
        "wire": {"linux", "memory"},
        "checkpoint": {"linux", "memory", "wire"},
        "observe": {"event.py", "linux", "threads"},
        "process": {"event.py", "linux", "observe"},
        "distributed": {"event.py", "linux", "threads", "process"},
        "devices": {"event.py", "threads"},
        "output": {"event.py", "linux", "observe", "process"},
        "worker": {"linux", "memory", "wire", "observe", "distributed"},
        "remote": {"event.py", "linux", "memory", "wire", "process"},
    },
    "cluster": {
        "nodes": set(),
        "link": set(),
        "node_process": {"nodes", "link"},
        "driver": {"nodes", "link"},
        "ray": {"link", "node_process", "driver"},
        "join": {"link", "node_process", "driver"},
    },
    "actors": {
        "spec": set(),
        "signals": set(),
        "calls": {"spec", "signals"},
        "observe": {"spec", "calls"},
        "checkpoint": {"spec", "calls"},
        "health": {"spec", "calls"},
        "worker_side": {"spec"},
        "remote": set(),
        "group": {
            "spec",
            "signals",
            "calls",
            "observe",
            "checkpoint",
            "health",
            "worker_side",
            "remote",
        },
        "api": {"spec", "signals", "calls", "checkpoint", "group"},
    },
    "chaos": {
        "history": set(),
        "nemesis": {"history"},
        "instrumentation": {"history", "nemesis"},
        "checker": {"history"},
        "workload": {"history", "nemesis"},
        "report": {"history", "checker"},
        "shrink": {"runner.py", "nemesis", "workload"},
    },
    "integrations": {
        "follower": set(),
        "prometheus": {"follower"},
        "torchrun": set(),
        "torch": {"torchrun"},  # where a script that it restarts finds memory
        "vllm": set(),
        "web": {"follower"},
    },
}
# (from, to): rooms whose types are named before the room itself, for the type checkers alone.
TYPES_OF_LATER_ROOMS: dict[str, set[tuple[str, str]]] = {
    "actors": {
        ("signals", "group"),
        ("calls", "observe"),
        ("calls", "checkpoint"),
        ("observe", "group"),
        ("checkpoint", "group"),
        ("health", "group"),
        ("remote", "group"),
    },
}
# Imported in functions, when they are used, or for the type checker: no circle at run time.
LATER = {
    (ROOT / "testing/plugin.py", "chaos"),
    (ROOT / "actors/api/executor.py", "testing"),
    (ROOT / "actors/api/calls.py", "testing"),
    (ROOT / "testing/inline.py", "actors"),  # it stands in for a class of that layer
    # The face of the runtime has no ZeroMQ, for the driver; this room is to move to this layer.
    (ROOT / "cluster/link/node_gateway_main.py", "runtime"),
    (ROOT / "cluster/join/broker_main.py", "runtime"),
}
MOST_FILES = 12
EFFECTS = {
    *("asyncio", "multiprocessing", "os", "random", "signal", "socket", "subprocess"),
    *("threading", "time", "torch", "zmq"),
}


def imports(path: Path, *, typing: bool = True) -> Iterator[str]:
    """Yield the full dotted names *path* imports; without *typing*, only those of run time."""
    tree = ast.parse(path.read_text())
    hints = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    return names(path, (node for node in ast.walk(tree) if typing or id(node) not in hints))


def names(path: Path, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield what those of *nodes* import that are statements of *path* which import."""
    package = ("phalanx", *path.relative_to(ROOT).parts[:-1])
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(filter(None, (base, node.module)))
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def modules(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(("phalanx", *path.relative_to(ROOT).with_suffix("").parts))


def room(name: str, layer: str) -> str:
    """Return the room of *layer* in which the module *name* is, or the file beside the rooms."""
    part = name.split(".")[2]
    return part if (ROOT / layer / part).is_dir() else f"{part}.py"


def edges(layer: str, *, typing: bool) -> set[tuple[str, str]]:
    """Return which rooms of *layer* import which, and which files beside them."""
    ends = {
        (room(dotted(path), layer), room(name, layer))
        for path in modules(layer)
        for name in imports(path, typing=typing)
        if name in MODULES and name.startswith(f"phalanx.{layer}.")
    }
    return {(here, there) for here, there in ends if here in ROOMS[layer] and here != there}


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_imports_only_the_faces_of_layers_below(layer: str) -> None:
    below = {f"phalanx.{name}" for name in LAYERS[: LAYERS.index(layer)]}
    faces = tuple(f"{name}." for name in below)
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules(layer)
        for name in imports(path)
        if name.partition(".")[0] in ("phalanx", *LAYERS)
        and name not in below
        and not name.startswith(f"phalanx.{layer}")
        and (path, name.partition(".")[2].partition(".")[0]) not in LATER
        and not (name.startswith(faces) and name.count(".") == 2 and name not in MODULES)
    ]

    assert found == []


MODULES = {dotted(path) for layer in LAYERS for path in modules(layer)} | {
    f"phalanx.{layer}.{name}" for layer in ROOMS for name in ROOMS[layer]
}


@pytest.mark.parametrize("layer", ROOMS)
def test_a_room_imports_only_rooms_before_it_and_exactly_those_of_the_table(layer: str) -> None:
    table = ROOMS[layer]
    known = {(here, there) for here, others in table.items() for there in others}
    order = list(table)

    assert edges(layer, typing=False) == known
    assert [e for e in known if e[1] in table and order.index(e[1]) > order.index(e[0])] == []


@pytest.mark.parametrize("layer", ROOMS)
def test_for_types_alone_a_room_imports_no_other_later_room(layer: str) -> None:
    order = list(ROOMS[layer])
    later = {
        (here, there)
        for here, there in edges(layer, typing=True)
        if there in order and order.index(there) > order.index(here)
    }

    assert later == TYPES_OF_LATER_ROOMS.get(layer, set())


@pytest.mark.parametrize("layer", LAYERS)
def test_the_table_has_every_room_and_no_folder_is_too_large(layer: str) -> None:
    rooms = {init.parent.name for init in (ROOT / layer).glob("*/__init__.py")}
    folders = {path.parent for path in modules(layer)}
    sizes = {
        str(folder.relative_to(ROOT)): len(
            [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        )
        for folder in folders
    }

    assert rooms == ROOMS.get(layer, {}).keys()
    assert {name: size for name, size in sizes.items() if size > MOST_FILES} == {}


def test_what_decides_has_no_effects_and_imports_nothing_that_acts() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (*modules("supervision"), *modules("cluster/nodes"))
        if path.parent.name != "tree"
        for name in imports(path)
        if name.partition(".")[0] in EFFECTS
        or (name.startswith("phalanx.supervision.tree") and path.name != "__init__.py")
    ]

    assert found == []


def test_of_the_cluster_only_the_processes_beside_the_driver_import_zeromq_and_ray() -> None:
    found = {
        (name.partition(".")[0], str(path.relative_to(ROOT)))
        for path in modules("cluster")
        for name in imports(path)
        if name.partition(".")[0] in ("zmq", "ray")
    }

    assert found == {
        ("ray", "cluster/ray/agent.py"),
        ("ray", "cluster/ray/broker_main.py"),
        ("ray", "cluster/ray/survey_main.py"),
        ("zmq", "cluster/join/broker_main.py"),
        ("zmq", "cluster/join/command.py"),
        ("zmq", "cluster/link/node_gateway_main.py"),
        ("zmq", "cluster/link/node_link.py"),
        ("zmq", "cluster/node_process/main.py"),
    }


def test_the_actors_of_supervision_use_threads_and_clocks_only() -> None:
    found = {
        name.partition(".")[0]
        for path in modules("supervision")
        for name in imports(path)
        if name.partition(".")[0] in EFFECTS
    }

    assert found == {"random", "threading", "time"}


@pytest.mark.parametrize("layer", LAYERS)
def test_the_files_of_a_layer_import_each_other_in_one_direction(layer: str) -> None:
    files = {dotted(path): path for path in modules(layer) if path.name != "__init__.py"}
    tops = {name: ast.parse(path.read_text()).body for name, path in files.items()}
    # What a file cannot be loaded without: imports at its top.
    above = {name: (files.keys() & names(files[name], tops[name])) - {name} for name in files}

    while free := {name for name, needed in above.items() if not needed & above.keys()}:
        for name in free:
            del above[name]

    assert above == {}
