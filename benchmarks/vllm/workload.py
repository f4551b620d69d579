"""Sixteen requests, no two alike: prompts, lengths, penalties, seeds, and ways of ending.

Guarantees: each is determined, by greed or by a seed, so that a second run must give the same
tokens; the options are named as both vLLM's ``SamplingParams`` and its HTTP server name them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

COUNT = 16


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        prompt: Token numbers.
    """

    prompt: list[int]
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class Answer:
    """What has come of one request, so far.

    Attributes:
        scores: The log-probability of each token, where it was asked for.
        error: Why there is no end; empty where there is one or may yet be.
    """

    tokens: list[int] = field(default_factory=list[int])
    scores: list[float] = field(default_factory=list[float])
    finish: str = ""
    stop: str = ""
    error: str = ""

    def equals(self, other: Answer, tolerance: float = 1e-3) -> bool:
        """Whether it is the same to a client: scores may differ by rounding, *tolerance*."""
        same = (self.tokens, self.finish, self.stop, self.error) == (
            other.tokens,
            other.finish,
            other.stop,
            other.error,
        )
        return (
            same
            and len(self.scores) == len(other.scores)
            and all(
                abs(mine - theirs) <= tolerance
                for mine, theirs in zip(self.scores, other.scores, strict=True)
            )
        )


def make_load(longest: int = 60, *, structured: bool = True) -> list[Ask]:
    """Return the requests; none generates more than *longest* tokens."""
    return [_ask(number, longest, structured=structured) for number in range(COUNT)]


def _ask(number: int, longest: int, *, structured: bool) -> Ask:
    length = 4 + 5 * number
    prompt = [(37 * number + place * place + 11 * place) % 256 for place in range(length)]
    most = max(4, longest - number)
    options: dict[str, Any] = {
        "max_tokens": most,
        "temperature": 0.0 if number % 2 else 0.9,
        "seed": 1000 + number,
        "ignore_eos": number % 4 != 3,
    }
    if number % 3 == 0:
        options["logprobs"] = 1
    match number % 8:
        case 0:
            options["repetition_penalty"] = 1.3
        case 1:
            options["frequency_penalty"] = 0.8
        case 2:
            options["presence_penalty"] = 0.9
            options["top_p"] = 0.9
        case 3:
            options["min_tokens"] = most // 2
            options["stop_token_ids"] = list(range(0, 256, 5))
        case 4:
            options["top_k"] = 20
            options["stop"] = ["e", "Q"]
        case 5:
            options["stop_token_ids"] = list(range(1, 256, 40))
        case 6:
            options["repetition_penalty"] = 1.1
            options["frequency_penalty"] = 0.4
        case _ if structured:
            options["structured_outputs"] = {"regex": "[a-f]{8}(-[0-9]{4}){8}"}
        case _:
            pass
    return Ask(prompt, options)
