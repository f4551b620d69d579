"""vLLM's command line with supervised workers: ``python -m phalanx.integrations.vllm serve ...``.

Guarantees: every option is vLLM's own; what is built is what the options say, with workers under
`SupervisedExecutor`.

``vllm serve --distributed-executor-backend phalanx.integrations.vllm.SupervisedExecutor`` does the
same, except with pipeline stages: vLLM asks whether an executor can do those before it looks up a
name, and takes the name's silence for a no.
"""

from __future__ import annotations

from typing import Any

from . import compat
from .policy import supervised


def main() -> None:
    """Run it."""
    executor: Any = supervised()["distributed_executor_backend"]
    arguments: Any = compat.EngineArgs
    create = arguments.create_engine_config

    def create_supervised(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.distributed_executor_backend = executor
        return create(self, *args, **kwargs)

    arguments.create_engine_config = create_supervised
    compat.command_line.main()


if __name__ == "__main__":
    main()
