"""What a request loses with its workers, and which cannot go on as they would have.

Guarantees: nothing that was in flight is ever taken for output; a request is either continued
exactly, or one of the reasons here holds.

Pure: a request is anything with the attributes that are looked at.
"""

from __future__ import annotations

from typing import Any


def drop_in_flight(request: Any) -> None:
    """Have whatever of *request* is in flight be dropped when its step comes back.

    That holds also for one that had been preempted before, whose output would have been taken.
    """
    if request.num_in_flight_tokens:
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.drop_stale_output = True


def outputs_of(new: Any) -> list[int]:
    """Return the tokens that *new*, as it is sent to a worker, has generated before."""
    tokens: list[int] | None = new.prefill_token_ids
    return [] if tokens is None else list(tokens[new.prompt_len :])


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
            "its worker died: what a session with streamed input has computed cannot be computed "
            "again; begin the session anew"
        )
    sampling = request.sampling_params
    is_drawn = sampling is not None and sampling.seed is not None and sampling.temperature > 0
    if speculates and keeps_generators and is_drawn and request.num_output_tokens:
        return (
            "its worker died: how much a seeded request had drawn while tokens were drafted is not "
            "known, so it would have gone on with other tokens; send it again"
        )
    return None
