"""Options of ``phalanx torchrun``: torchrun's, and additional ones.

- Each may be given by ``PET_`` and its name, as with torchrun; the command line has precedence.
- A switch that is not needed here is accepted, and listed in `Options.ignored`; a value that cannot
  be honoured, or contradicts another, is a `SpecError` that names both.

Source: ``get_args_parser`` and ``run`` in ``torch/distributed/run.py`` of torch 2.13.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.runtime import DevicePool, ReportFolder
from phalanx.supervision import PhalanxError, SpecError

from .environment import RunEnvironment, environment_of
from .logs import LogSpec, streams_of
from .program import Program, find_program

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a run; checked.

    Attributes:
        hang_after: Seconds without any use of the processor after which a rank counts as hung;
            None for no limit.
        longest_delay: Seconds between restarts in a row, at most; 0 for none.
        shutdown_timeout: Seconds from a signal to SIGKILL.
        signals: Those that are passed on to the ranks.
        preload: Modules that are imported once for all ranks, beside torch.
        report_dir: The folder of crash reports; None for none.
        ignored: Switches that were given and have no effect, each with why.
    """

    world_size: int
    program: Program
    environment: RunEnvironment
    logs: LogSpec
    hang_after: float | None
    longest_delay: float
    shutdown_timeout: float
    signals: tuple[signal.Signals, ...]
    preload: tuple[str, ...]
    report_dir: ReportFolder | None
    ignored: tuple[str, ...] = ()


def _commas(text: str) -> tuple[str, ...]:
    """Return the parts of *text*; two commas stand for one that does not separate."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",") if part)


@dataclass(frozen=True, slots=True)
class _Switch:
    """One option.

    Attributes:
        unneeded: Why it has no effect; empty if it has.
    """

    names: str
    default: Any
    help: str
    type: Callable[[str], Any] = str
    choices: Sequence[str] | None = None
    unneeded: str = ""

    @property
    def dest(self) -> str:
        return self.names.split()[-1].lstrip("-").replace("-", "_")

    @property
    def about(self) -> str:
        """The text of ``--help``, with the default if there is one."""
        has_default = self.default not in {None, "", ()} and "(" not in self.help
        return f"{self.help} ({self.default})" if has_default else self.help

    @property
    def title(self) -> str:
        return self.names.split()[-1]


_STORE = "each round has a store and a port of its own"
_TABLE = (
    _Switch("--nnodes", "1:1", "number of machines; one"),
    _Switch("--nproc-per-node", "1", "ranks: a number, gpu, cpu or auto"),
    _Switch("--rdzv-backend", "static", "rendezvous backend", choices=_BACKENDS, unneeded=_STORE),
    _Switch("--rdzv-endpoint", "", "rendezvous address, on this machine", unneeded=_STORE),
    _Switch("--rdzv-id", "", "id of the run"),
    _Switch("--rdzv-conf", "", "rendezvous configuration", unneeded=_STORE),
    _Switch("--max-restarts", 0, "restarts of all ranks before the run fails", int),
    _Switch(
        *("--monitor-interval", 0.1, "seconds between looks at the ranks", float),
        unneeded="the kernel reports each exit at once",
    ),
    _Switch(
        *("--start-method", "spawn", "how multiprocessing starts ranks", str),
        choices=("spawn", "fork", "forkserver"),
        unneeded="ranks are forked from a process that has imported torch",
    ),
    _Switch(
        *("--event-log-handler", "null", "handler of elastic events"),
        unneeded="events are shown by `phalanx logs` and `phalanx top`",
    ),
    _Switch("--role", "default", "name of the ranks' role"),
    _Switch("--log-dir", None, "folder of log files", Path),
    _Switch("-r --redirects", "0", "streams that go to files: 0 to 3, or rank:number,..."),
    _Switch("-t --tee", "0", "streams that go to files and the console"),
    _Switch("--local-ranks-filter", "", "ranks whose output the console shows"),
    _Switch("--duplicate-stdout-filters", (), "teed lines that one file has too", _commas),
    _Switch("--duplicate-stderr-filters", (), "teed lines that one file has too", _commas),
    _Switch("--node-rank", 0, "number of this machine", int),
    _Switch("--master-addr", "127.0.0.1", "address, on this machine", unneeded=_STORE),
    _Switch("--master-port", None, "port of the rendezvous", int, unneeded=_STORE),
    _Switch("--local-addr", None, "address of this machine", unneeded=_STORE),
    _Switch("--logs-specs", None, "entry point of a class of torch's"),
    _Switch("--numa-binding", None, "how ranks are bound to processors"),
    _Switch(
        "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", "signals that ranks are passed"
    ),
    _Switch("--shutdown-timeout", None, "seconds from a signal to SIGKILL (30)", float),
)
_FLAGS = {
    "--standalone": "a run on this machine; here every run is",
    "-m --module": "run a module, as python -m does",
    "--no-python": "execute the program itself",
    "--run-path": "run the script in the rank's process; here every script is",
    "--virtual-local-rank": "LOCAL_RANK is 0, and a rank sees one GPU",
}
_OWN = (
    _Switch(
        "--hang-after", None, "seconds without use of a processor after which a rank is hung", float
    ),
    _Switch("--longest-delay", 10.0, "seconds between restarts in a row, at most (10)", float),
    _Switch("--preload", (), "modules that are imported once for all ranks: a,b", _commas),
    _Switch("--report-dir", None, "folder of crash reports", Path),
)


def add_arguments(parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ) -> None:
    """Describe the command line; defaults are what *environ* gives."""
    groups = (
        (parser.add_argument_group("torchrun's options"), _TABLE),
        (
            parser.add_argument_group("further options"),
            _OWN,
        ),
    )
    for group, table in groups:
        for switch in table:
            group.add_argument(
                *_spellings(switch.names),
                default=environ.get(f"PET_{switch.dest.upper()}", switch.default),
                type=switch.type,
                choices=switch.choices,
                help=switch.about,
                metavar=None if switch.choices else switch.dest.upper(),
            )
    for names, text in _FLAGS.items():
        spellings = _spellings(names)
        name = spellings[-1].lstrip("-").upper()
        given = environ.get(f"PET_{name}", "0")
        groups[0][0].add_argument(
            *spellings, action="store_true", default=given if given != "0" else False, help=text
        )
    parser.add_argument("training_script", help="script, module (-m) or program (--no-python)")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")


def _spellings(names: str) -> list[str]:
    """Return *names*, each long one with dashes and with underscores."""
    words = names.split()
    return list(dict.fromkeys([*words, words[-1][:2] + words[-1][2:].replace("-", "_")]))


def options_of(parsed: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Options:
    """Return the options of a command line.

    Raises:
        SpecError: naming the option and its value.
    """
    for name in _FLAGS:
        dest = name.split()[-1].lstrip("-").replace("-", "_")
        if getattr(parsed, dest) not in {True, False, "1"}:
            raise SpecError(f"PET_{dest.upper()}", getattr(parsed, dest), "give 0 or 1")
    _check_one_machine(parsed)
    size = _world_size(parsed.nproc_per_node)
    program = find_program(
        parsed.training_script,
        parsed.training_script_args,
        module=bool(parsed.module),
        no_python=bool(parsed.no_python),
        run_path=bool(parsed.run_path),
        environ=environ,
    )
    if parsed.max_restarts < 0:
        raise SpecError("--max-restarts", parsed.max_restarts, "give 0 or more")
    for name in ("hang_after", "longest_delay", "shutdown_timeout"):
        _check_seconds(f"--{name.replace('_', '-')}", getattr(parsed, name), name == "hang_after")
    for name in ("logs_specs", "numa_binding"):
        if (value := getattr(parsed, name)) is not None:
            raise SpecError(f"--{name.replace('_', '-')}", value, "not supported: leave it out")
    given = parsed.report_dir
    environment = environment_of(
        environ,
        world_size=size,
        run_id=_run_id(parsed),
        role=parsed.role,
        max_restarts=parsed.max_restarts,
        virtual=bool(parsed.virtual_local_rank),
    )
    return Options(
        world_size=size,
        program=program,
        environment=environment,
        logs=_logs(parsed, size, environ),
        hang_after=parsed.hang_after,
        longest_delay=parsed.longest_delay,
        shutdown_timeout=_shutdown_timeout(parsed, environ),
        signals=_signals(parsed.signals_to_handle),
        preload=parsed.preload,
        report_dir=given and ReportFolder.of("--report-dir", given),
        ignored=tuple(_ignored(parsed)),
    )


def _check_one_machine(parsed: argparse.Namespace) -> None:
    low, _, high = parsed.nnodes.partition(":")
    if not low.isdigit() or (high and not high.isdigit()) or int(low) < 1:
        raise SpecError("--nnodes", parsed.nnodes, "give a number above 0, or MIN:MAX")
    most = int(high or low)
    is_static = parsed.rdzv_backend == "static" and not parsed.standalone
    # With a static rendezvous torchrun waits for all that there may be.
    if int(low) != 1 or most < 1 or (most > 1 and is_static):
        raise SpecError("--nnodes", parsed.nnodes, "phalanx torchrun runs on one machine: give 1")
    if parsed.node_rank != 0:
        raise SpecError("--node-rank", parsed.node_rank, "with one machine there is only 0")
    endpoint = parsed.rdzv_endpoint.rpartition(":")[0] or parsed.rdzv_endpoint
    for name, host in (("--rdzv-endpoint", endpoint), ("--master-addr", parsed.master_addr)):
        if host and not parsed.standalone and not _is_here(host.strip("[]")):
            raise SpecError(name, host, "not an address of this machine")
    port = parsed.master_port
    if port is not None and not 0 <= port < 1 << 16:
        raise SpecError("--master-port", port, "give a port: 0 to 65535")


def _is_here(host: str) -> bool:
    """Whether *host* is this machine; one that cannot be resolved may be its own name."""
    if host in {"localhost", socket.gethostname(), socket.getfqdn()}:
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, proto, _, address in found:
        try:
            with socket.socket(family, kind, proto) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


def _world_size(text: str) -> int:
    """Return how many ranks ``--nproc-per-node`` means."""
    name = "--nproc-per-node"
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text not in {"cpu", "gpu", "auto"}:
        raise SpecError(name, text, "give a number above 0, gpu, cpu or auto")
    gpus = 0 if text == "cpu" else _gpus()
    if text == "gpu" and not gpus:
        raise SpecError(name, text, "no GPU is visible")
    return gpus or len(os.sched_getaffinity(0))


def _gpus() -> int:
    try:
        with DevicePool.of("cuda", 1) as pool:
            return len(pool.status())
    except PhalanxError:
        return 0


def _check_seconds(name: str, value: float | None, positive: bool) -> None:
    if (value is not None and not (value > 0 if positive else value >= 0)) or value == float("inf"):
        raise SpecError(name, value, f"give seconds {'>' if positive else '>='} 0")


def _shutdown_timeout(parsed: argparse.Namespace, environ: Mapping[str, str]) -> float:
    if parsed.shutdown_timeout is not None:
        return float(parsed.shutdown_timeout)
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    text = environ.get(name, "30")
    try:
        seconds = float(text)
    except ValueError:
        raise SpecError(name, text, "give a number of seconds") from None
    _check_seconds(name, seconds, positive=False)
    return seconds


def _joins(parsed: argparse.Namespace) -> bool:
    """Whether torchrun would join a rendezvous; otherwise it makes up the run's id."""
    named = parsed.rdzv_endpoint or parsed.master_port is not None
    return not parsed.standalone and (parsed.rdzv_backend != "static" or bool(named))


def _run_id(parsed: argparse.Namespace) -> str:
    if not _joins(parsed):
        return str(uuid.uuid4())
    name = parsed.rdzv_id or "none"
    if "/" in name or "\0" in name:
        raise SpecError("--rdzv-id", name, "it is part of a folder's name: leave out '/'")
    return name


def _logs(parsed: argparse.Namespace, size: int, environ: Mapping[str, str]) -> LogSpec:
    words = [word.strip() for word in parsed.local_ranks_filter.split(",") if word]
    if not all(word.isdigit() for word in words):
        raise SpecError("--local-ranks-filter", parsed.local_ranks_filter, "give ranks: 0,1,2")
    folder: Path | None = parsed.log_dir
    if folder is not None and folder.exists() and not folder.is_dir() and str(folder) != os.devnull:
        raise SpecError("--log-dir", str(folder), "it is a file: name a folder")
    spec = LogSpec(
        folder=folder,
        redirects=streams_of("--redirects", parsed.redirects, size),
        tee=streams_of("--tee", parsed.tee, size),
        shown=frozenset(map(int, words)),
        filters={
            "stdout": parsed.duplicate_stdout_filters,
            "stderr": parsed.duplicate_stderr_filters,
        },
    )
    if prefix := environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"):
        spec = replace(spec, prefix=prefix)
    if str(folder) != os.devnull:
        return spec
    return LogSpec(folder=folder, redirects=(0,) * size, tee=(0,) * size)


def _signals(text: str) -> tuple[signal.Signals, ...]:
    found: list[signal.Signals] = []
    for name in filter(None, map(str.strip, text.split(","))):
        number = getattr(signal, name, None)
        if not isinstance(number, signal.Signals) or number in {signal.SIGKILL, signal.SIGSTOP}:
            raise SpecError("--signals-to-handle", name, "give signals: SIGTERM,SIGINT")
        found.append(number)
    return tuple(found)


def _ignored(parsed: argparse.Namespace) -> list[str]:
    """Return a line for each switch that was given and has no effect."""
    lines: list[str] = []
    for switch in _TABLE:
        value = getattr(parsed, switch.dest)
        if switch.unneeded and value != switch.default:
            lines.append(f"{switch.title} {value} is ignored: {switch.unneeded}")
    if parsed.rdzv_id and not _joins(parsed):
        lines.append(f"--rdzv-id {parsed.rdzv_id} is ignored: a new id is made for the run")
    return lines
