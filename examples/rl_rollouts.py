"""Reinforcement learning with rollout workers that are killed again and again.

The policy learns to add two digits: rollout ranks make trajectories with its weights, which are
scored, and from which the learner makes the next version. A call interrupted by a death is resent.

    python examples/rl_rollouts.py --kills 8
"""

import argparse
import asyncio
import os
import random
import zlib
from collections import Counter
from typing import Any

import torch

from phalanx import Runtime, Supervisor, SupervisorSpec, WorkerActor, executor_child

TRAJECTORIES, PROMPTS, ANSWERS = 8, 16, 16  # of a version; of a trajectory; to a prompt
PARTS = ("prompts", "answers", "rewards")


class Policy(torch.nn.Sequential):
    """Gives the logits of two digits, the sum, for two digits."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(20, 256), torch.nn.ReLU(), torch.nn.Linear(256, 20))

    def likely(self, prompts: torch.Tensor) -> torch.Tensor:
        """Return how likely each digit of each answer is, as logarithms."""
        logits: torch.Tensor = self(torch.nn.functional.one_hot(prompts, 10).flatten(-2).float())
        return logits.view(*prompts.shape, 10).log_softmax(-1)

    def checksum(self) -> int:
        """Return the checksum of the weights."""
        return zlib.crc32(b"".join(each.detach().numpy().tobytes() for each in self.parameters()))


class Rollout(WorkerActor):
    """Makes trajectories."""

    version, policy = -1, Policy()

    def load(self, version: int, weights: dict[str, Any]) -> None:
        """Use these *weights* from now on."""
        self.policy.load_state_dict(weights)
        self.version = version

    def make(self, version: int, number: int) -> dict[str, Any] | None:
        """Return the trajectory of this name, or None without the weights of *version*."""
        if self.version != version:
            return None
        dice = torch.Generator().manual_seed(version * TRAJECTORIES + number)
        prompts = torch.randint(0, 10, (PROMPTS, 1, 2), generator=dice).expand(-1, ANSWERS, -1)
        likely = self.policy.likely(prompts).exp().flatten(0, -2)
        answers = likely.multinomial(1, generator=dice).view_as(prompts)
        by = version, self.policy.checksum()
        return {"name": (version, number), "by": by, "prompts": prompts, "answers": answers}


class Reward(WorkerActor):
    """Scores trajectories."""

    def score(self, made: dict[str, Any]) -> dict[str, Any]:
        """Return the trajectory *made* with its rewards: 1 for each digit that is right."""
        right = made["prompts"].sum(-1, keepdim=True) // torch.tensor([10, 1]) % 10
        return {**made, "rewards": (made["answers"] == right).float()}


class Learner(WorkerActor):
    """Has the policy, and a book of the trajectories it was trained with and of their weights."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # so that no sum depends on how threads share it
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]  # torch's gap
        self.policy, self.version, self.book, self.stale = Policy(), 0, Counter[Any](), 0
        self.optimizer = torch.optim.Adam(self.policy.parameters(), 0.02)

    def look(self) -> tuple[dict[str, Any], Counter[Any], int, int]:
        """Return the weights, the book, how many entries of it are stale, and the checksum."""
        return self.policy.state_dict(), self.book, self.stale, self.policy.checksum()

    def update(self, batch: list[dict[str, Any]]) -> float:
        """Make the next version by policy gradient; return how many answers in one are right."""
        self.book.update(each["name"] for each in batch)
        self.stale += sum(each["by"] != (self.version, self.policy.checksum()) for each in batch)
        prompts, answers, rewards = (torch.cat([each[part] for each in batch]) for part in PARTS)
        likely = self.policy.likely(prompts)
        chosen = likely.gather(-1, answers.unsqueeze(-1)).squeeze(-1)
        better = rewards - rewards.mean(1, keepdim=True)  # than the other answers to its prompt
        loss = 0.03 * (likely.exp() * likely).sum(-1).mean() - (chosen * better).mean()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]  # torch's gap
        self.version += 1
        return rewards.prod(-1).mean().item()


async def learn(tree: Supervisor, options: argparse.Namespace) -> bool:
    """Make so many versions, and print the table; return whether all trajectories are right."""
    learner, rollouts, reward = (tree.executor(each) for each in ("learner", "rollouts", "reward"))
    chance, refused = random.Random(options.seed), 0
    again: Any = {"timeout": 60.0, "retries": options.kills + 1}  # restarts are waited for
    kill_in = set(chance.sample(range(options.versions), options.kills))

    async def trajectory(version: int, number: int, weights: Any) -> Any:
        nonlocal refused
        if version in kill_in and number == 2:
            os.kill(chance.choice([each.pid for each in rollouts.current().ranks if each.pid]), 9)
        while (made := await rollouts.aio.submit("make", args=(version, number), **again)) is None:
            refused += 1
            await rollouts.aio.collective_rpc("load", args=(version, weights), **again)
        return await reward.aio.submit("score", args=(made,), **again)

    for version in range(options.versions):
        weights, *_ = await learner.aio.call("look", 60.0, rank=0)
        await rollouts.aio.collective_rpc("load", args=(version, weights), **again)
        making = (trajectory(version, number, weights) for number in range(TRAJECTORIES))
        right = await learner.aio.call("update", 60.0, (await asyncio.gather(*making),), rank=0)
        print(f"version {version}: {right:.0%} of the answers are right", flush=True)
    _, book, stale, checksum = await learner.aio.call("look", 60.0, rank=0)
    print("rollout ranks restarted", rollouts.status().restarts, "calls without weights", refused)
    lost, doubled = options.versions * TRAJECTORIES - len(book), book.total() - len(book)
    print("trajectories", len(book), "lost", lost, "doubled", doubled, "stale", stale)
    print(f"weights {checksum:08x}")
    return not (lost or doubled or stale)


def main() -> int:
    """Learn; return 0 if all trajectories are right."""
    parser = argparse.ArgumentParser(description="Learn while rollout workers are killed.")
    for name, default in (("--ranks", 2), ("--versions", 100), ("--kills", 8), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default, help=f"default {default}")
    options = parser.parse_args()
    for name, low, high in (("ranks", 1, 64), ("versions", 1, 999), ("kills", 0, options.versions)):
        if not low <= (value := getattr(options, name)) <= high:
            parser.error(f"--{name} {value}: give {low} to {high}")
    often = options.kills + 3, 60.0  # restarts allowed, in seconds
    groups = ("learner", Learner, 1), ("reward", Reward, 1), ("rollouts", Rollout, options.ranks)
    with Runtime(console=None) as runtime:  # the reports of deaths are left out
        own: Any = {"strategy": "one_for_one", "intensity": often, "runtime": runtime}
        children = [executor_child(*group, **own) for group in groups]
        with Supervisor(SupervisorSpec("rl", children=children)) as tree:
            return 0 if asyncio.run(learn(tree, options)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
