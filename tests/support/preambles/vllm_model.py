"""A small model in the folder ``my/model``, and room for it on a machine that others use too."""

import os
from pathlib import Path

from benchmarks.vllm.http_server import environment
from benchmarks.vllm.toy_model import make_model

os.environ.update({**environment(), **os.environ})
make_model(Path("my/model"))
