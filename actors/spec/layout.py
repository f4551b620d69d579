"""`Layout`: the parallel dimensions of the ranks of a group.

The world size is the product of the named sizes, or nothing is built. Ranks count tensor first,
then prefill context, then pipeline stage, as LLM engines number them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.supervision import SpecError, check_count, check_kind

_OWN_NAMES = ("tensor", "pipeline", "prefill_context", "tp", "pp", "pcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the parallel dimensions.

    Attributes:
        tensor: Ranks that share one layer.
        pipeline: Stages that layers are split over.
        prefill_context: Ranks that share one prompt.
        extra: Further dimensions by name (decode-context, expert, ...), size each. They do not
            add ranks: each must divide the world size, and shows in titles and logs.
    """

    tensor: int = 1
    pipeline: int = 1
    prefill_context: int = 1
    extra: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        check_kind("extra", self.extra, Mapping)
        object.__setattr__(self, "extra", dict(self.extra))  # what is changed later is not checked
        for name in self.extra:
            if name in _OWN_NAMES:
                raise SpecError("extra", name, f"give another name than {', '.join(_OWN_NAMES)}")
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline}
        sizes |= {"prefill_context": self.prefill_context, **self.extra}
        for name, size in sizes.items():
            check_count(name, size)
        for name, size in self.extra.items():
            if self.world_size % size:
                raise SpecError(
                    name, size, f"must divide the world size, which is {self.world_size}"
                )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline * self.prefill_context

    @property
    def output_rank(self) -> int:
        """The first tensor rank of the last pipeline stage: whose output leads."""
        return self.world_size - self.tensor * self.prefill_context

    @property
    def driver_ranks(self) -> tuple[int, ...]:
        """The ranks that feed their tensor group."""
        return tuple(rank for rank in range(self.world_size) if rank % self.tensor == 0)

    def is_driver(self, rank: int) -> bool:
        """Whether *rank* feeds its tensor group."""
        return rank % self.tensor == 0

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of *rank* in every dimension that has more than one."""
        place = {
            "tp": (rank % self.tensor, self.tensor),
            "pcp": (rank // self.tensor % self.prefill_context, self.prefill_context),
            "pp": (rank // (self.tensor * self.prefill_context), self.pipeline),
            **{name: (rank % size, size) for name, size in self.extra.items()},
        }
        return {name: at for name, (at, size) in place.items() if size > 1}

    def check_rank(self, field: str, rank: object) -> None:
        """Raise a `SpecError` for *field* unless *rank* is one of its ranks."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise SpecError(field, rank, f"give a rank from 0 to {self.world_size - 1}")

    def check(self, world_size: int) -> None:
        """Raise a `SpecError` that prints the arithmetic unless *world_size* is the product."""
        if world_size != self.world_size:
            raise SpecError(
                "world_size",
                world_size,
                f"must be tensor {self.tensor} x pipeline {self.pipeline} x prefill_context "
                f"{self.prefill_context} = {self.world_size}",
            )
