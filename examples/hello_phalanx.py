"""The smallest useful program: two workers, a death in the middle of a call, the right answer."""

import os
import signal

from phalanx import Executor, Strategy, WorkerActor, idempotent


class Primes(WorkerActor):
    """Counts primes, slowly."""

    @idempotent  # so that a call may be made again on the rank's replacement
    def count(self, low: int, high: int) -> int:
        """Return how many primes there are from *low* up to, but not including, *high*."""
        self.ctx.emit(f"rank {self.ctx.rank}, incarnation {self.ctx.incarnation}: counting")
        return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(low, high))


def main() -> None:
    """Count the primes below 200,000 with two workers, of which one is killed."""
    with Executor(Primes, world_size=2, strategy=Strategy.ONE_FOR_ONE, preload=()) as group:

        def on_event(event: object) -> None:
            print(event)
            # The first word of rank 1 is its last.
            if event == "rank 1, incarnation 1: counting":
                os.kill(group.ranks[1].pid, signal.SIGKILL)

        group.events(on_event)
        parts = group.scatter("count", per_rank=[(2, 100_000), (100_000, 200_000)])
        print(sum(parts), "primes")


if __name__ == "__main__":
    main()
