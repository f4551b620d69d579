"""vLLM's server with supervised workers: ``python -m phalanx.integrations.vllm serve ...``.

Guarantees: every option is that of ``vllm serve``; the workers are under `SupervisedExecutor`.

``vllm serve --distributed-executor-backend phalanx.integrations.vllm.SupervisedExecutor`` does the
same, except with pipeline stages: vLLM checks whether an executor supports those before it resolves
a name, and assumes that a name does not. Here it is given the class.
"""

from __future__ import annotations

import os
from typing import Any

from . import compat
from .policy import supervised


def main() -> None:
    """Run it."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's command line does
    parser: Any = compat.FlexibleArgumentParser(prog="python -m phalanx.integrations.vllm")
    (serve,) = compat.serve_commands()
    serve.subparser_init(parser.add_subparsers(required=True))
    arguments = parser.parse_args()
    arguments.distributed_executor_backend = supervised()["distributed_executor_backend"]
    compat.configure_logging_from_args(arguments)
    serve.validate(arguments)
    serve.cmd(arguments)


if __name__ == "__main__":
    main()
