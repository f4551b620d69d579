"""Requests that continue in a worker which did not see them begin.

Guarantees: what was in flight is never taken for output. A request that has generated tokens is
continued as if they had been generated here (penalties, ``min_tokens``, bad words and logits
processors see them as output, prompt log-probabilities are not computed twice, and the generator of
a request with a seed stands where it stood in the worker that died), or `obstacle` says why not.

vLLM's second model runner does all this by itself. The first one keeps a record of each request in
a dict; `Resumption` is that dict, and completes a record before the runner puts it into the batch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def drop_in_flight(request: Any) -> None:
    """Mark what of *request* is in flight as dropped when its step comes back.

    That holds also for one that had been preempted before, whose output would have been taken.
    """
    if request.num_in_flight_tokens:
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.drop_stale_output = True


def obstacle(
    request: Any, *, is_running: bool, speculates: bool, keeps_generators: bool
) -> str | None:
    """Return why *request* cannot be continued, for its client; None where it can.

    Args:
        is_running: Whether the scheduler has it among those it computes.
        speculates: Whether the engine drafts tokens.
        keeps_generators: Whether the model runner keeps a generator for each request with a seed,
            instead of making each token's noise from the seed and the token's place.
    """
    if getattr(request, "resumable", False) and (is_running or request.num_computed_tokens > 0):
        return (
            "its worker died: a session with streamed input cannot be recomputed; "
            "begin the session anew"
        )
    late = getattr(request.pooling_params, "late_interaction_params", None)
    if late is not None and late.mode == "score_doc":
        return "its worker died, and the query that it is scored against too; send both again"
    sampling = request.sampling_params
    is_drawn = sampling is not None and sampling.seed is not None and sampling.temperature > 0
    if speculates and keeps_generators and is_drawn and request.num_output_tokens:
        return (
            "its worker died: the generator state of a seeded request is unknown while tokens are "
            "drafted, so it would have continued with other tokens; send it again"
        )
    return None


class Resumption(dict[str, Any]):
    """The records of one model runner, which continue requests that began in another.

    Args:
        runner: vLLM's first model runner.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.requests)
        self._runner = runner
        self._draw: Callable[[Any], object] | None = None
        self._outputs: dict[str, list[int]] = {}

    def expect(self, scheduled: Any) -> None:
        """Take the requests that begin again with the step *scheduled*, before it is computed."""
        self._outputs.clear()
        for new in scheduled.scheduled_new_reqs:
            tokens: list[int] = new.prefill_token_ids or []
            if outputs := tokens[new.prompt_len :]:
                self._outputs[new.req_id] = outputs
                if new.sampling_params is not None:
                    new.sampling_params.prompt_logprobs = None  # they have been sent

    def __setitem__(self, name: str, record: Any) -> None:
        """Put the record of a request, with what it has generated before."""
        record.output_token_ids.extend(self._outputs.pop(name, ()))
        if record.generator is not None:
            if self._draw is None:
                self._draw = drawing(self._runner)
            if record.generator.device.type == "cpu":
                record.generator = rewindable(record, self._draw)
            for _ in record.output_token_ids:
                self._draw(record.generator)
        super().__setitem__(name, record)


def drawing(runner: Any) -> Callable[[Any], object]:
    """Return what takes from a generator as much as the sampler takes for one token."""
    torch = import_module("torch")
    sampler = runner.sampler.topk_topp_sampler
    in_double = bool(getattr(sampler, "use_fp64_gumbel", False))
    if sampler.forward.__name__ == "forward_cpu" and not in_double:
        return lambda generator: torch.randint(0, 2**31, (1,), generator=generator)
    kind = torch.float64 if in_double else torch.float32
    noise = torch.empty(runner.input_batch.vocab_size, dtype=kind, device=runner.device)
    return lambda generator: noise.exponential_(generator=generator)


def rewindable(request: Any, draw: Callable[[Any], object]) -> Any:
    """Return a generator for *request* that can step back, as the sampler asks of those of GPUs.

    It asks where only a part of a prompt was computed, whose token is thrown away. A request that
    begins anew is longer than it was, so its prompt may come in parts where it did not before.
    """

    def set_offset(generator: Any, _offset: int) -> None:
        generator.manual_seed(request.sampling_params.seed)
        for _ in request.output_token_ids:
            draw(generator)

    # Without an argument, int() is 0.
    base: type[Any] = import_module("torch").Generator
    kind = type("Rewindable", (base,), {"get_offset": int, "set_offset": set_offset})
    generator = kind(device="cpu")
    generator.manual_seed(request.sampling_params.seed)
    return generator
