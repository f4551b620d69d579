"""The smallest useful program: two workers, a death in the middle of a call, the correct answer."""

import os
import signal

from phalanx import Executor, Launch, WorkerActor, method
from phalanx.events import Emitted


class Primes(WorkerActor):
    """Counts primes, slowly."""

    @method(idempotent=True)  # may run twice, so a death sends the call again
    def count(self, low: int, high: int) -> int:
        """Return how many primes there are from *low* up to, but not including, *high*."""
        self.ctx.emit(os.getpid())
        return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(low, high))


def chaos() -> Executor[Primes]:
    """Return what `phalanx chaos` does its faults to."""
    return Executor(Primes, world_size=2, launch=Launch(preload=()))


def main() -> None:
    """Count the primes below 200,000 with two workers, one of which is killed at it."""
    with chaos() as group:

        def kill(event: object) -> None:
            if isinstance(event, Emitted) and (event.rank, event.incarnation) == (1, 1):
                os.kill(event.value, signal.SIGKILL)
                print(f"killed rank 1 (pid {event.value})")

        group.subscribe(kill)
        primes = group.scatter("count", args=[(2, 100_000), (100_000, 200_000)])
        print(f"{sum(primes)} primes; restarts: {group.status().restarts}")


if __name__ == "__main__":
    main()
