"""Requests that go on in a worker which never saw them begin.

Guarantees: a request that comes with tokens it has generated already is taken up as if they had
been generated here: penalties, ``min_tokens``, bad words and logits processors see them as output,
and prompt log-probabilities are not computed twice; the generator of a request with a seed stands
where it stood in the worker that died.

vLLM's second model runner does all this by itself, and is left alone. The first one keeps what it
knows of a request from step to step, and has no way of being told; it is told here, at the place
where it would begin the request: between making its record and putting that into the batch.

Left to others: which tokens a request has (`healing`).
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .losses import outputs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence


class Resumption:
    """Takes up requests in one worker.

    Args:
        wrapper: vLLM's ``WorkerWrapperBase``.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._draw: Callable[[Any], object] | None = None
        worker = wrapper.worker
        self._is_needed = not getattr(worker, "use_v2_model_runner", False)

    @contextmanager
    def of(self, scheduled: Any) -> Generator[None]:
        """Take up what the step *scheduled* brings, while the body computes it."""
        new = scheduled.scheduled_new_reqs if self._is_needed else ()
        outputs = {each.req_id: outputs_of(each) for each in new}
        if not any(outputs.values()) and not any(map(_is_seeded, new)):
            yield
            return
        runner = self._wrapper.worker.model_runner
        batch = runner.input_batch
        add = batch.add_request

        def add_resumed(request: Any) -> int:
            self._take_up(runner, request, outputs.pop(request.req_id, ()))
            index: int = add(request)
            return index

        batch.add_request = add_resumed
        try:
            yield
        finally:
            del batch.add_request

    def _take_up(self, runner: Any, request: Any, outputs: Sequence[int]) -> None:
        if outputs:
            request.output_token_ids.extend(outputs)
            runner.num_prompt_logprobs.pop(request.req_id, None)
        generator = request.generator
        if generator is None:
            return
        if self._draw is None:
            self._draw = drawing(runner)
        if generator.device.type == "cpu":
            generator = rewindable(request, self._draw)
            request.generator = generator
        for _ in request.output_token_ids:
            self._draw(generator)


def _is_seeded(new: Any) -> bool:
    return new.sampling_params is not None and new.sampling_params.seed is not None


def drawing(runner: Any) -> Callable[[Any], object]:
    """Return what takes from a generator as much as the sampler takes for one token."""
    torch = import_module("torch")
    sampler = runner.sampler.topk_topp_sampler
    in_double = bool(getattr(sampler, "use_fp64_gumbel", False))
    if sampler.forward.__name__ == "forward_cpu" and not in_double:

        def draw_seed(generator: Any) -> None:
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)

        return draw_seed
    noise = torch.empty(
        runner.input_batch.vocab_size,
        dtype=torch.float64 if in_double else torch.float32,
        device=runner.device,
    )

    def draw_noise(generator: Any) -> None:
        noise.exponential_(generator=generator)

    return draw_noise


def rewindable(request: Any, draw: Callable[[Any], object]) -> Any:
    """Return a generator for *request* that can step back, as the sampler asks of those of GPUs.

    It asks where only a part of a prompt was computed, whose token is thrown away. A request that
    begins anew is longer than it was, so its prompt may come in parts where it did not before.
    """

    def get_offset(_generator: Any) -> int:
        return 0

    def set_offset(generator: Any, _offset: int) -> None:
        generator.manual_seed(request.sampling_params.seed)
        for _ in request.output_token_ids:
            draw(generator)

    base: type[Any] = import_module("torch").Generator
    kind = type("Rewindable", (base,), {"get_offset": get_offset, "set_offset": set_offset})
    generator = kind(device="cpu")
    generator.manual_seed(request.sampling_params.seed)
    return generator
