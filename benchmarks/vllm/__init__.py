"""vLLM engines with and without phalanx: answers while ranks are killed, and throughput at rest.

``python -m benchmarks.vllm.survive`` and ``python -m benchmarks.vllm.throughput``, from the
project's root, in an environment with vLLM (``docs/tutorials/vllm.md``).
"""
