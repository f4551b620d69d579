"""The table of `python -m benchmarks training`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from benchmarks.harness.stats import of, percentile
from benchmarks.harness.tables import seconds, table, with_interval

from .ranks.model import BATCH, LENGTH

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from .figures import Found

_HEADS = (
    *("system", "ranks", "step", "steps", "kills", "ETTR", "stall, median", "p99"),
    *("done again", "lost, doubled", "protection costs, %", "hash equal"),
)


def render(found: Sequence[Found], asked: argparse.Namespace) -> str:
    """Return the table, and what its columns mean."""
    often = "every 10 steps, where all are made anew or it is sharded every step"
    if asked.every is not None:
        often = f"every {asked.every} steps"
    about = f"""\
SIGKILL of a random rank every {asked.cadence:g} s for {asked.seconds:g} s, seed {asked.seed}; the \
same ranks at the same times for every system. gloo, width {asked.width}, {asked.layers} layers, \
{BATCH} samples of {LENGTH} bytes a rank and step.

- step: the system's own median step in that time, of those that no kill fell into.
- ETTR: the share of that time that the steps of the final state took; one that a kill fell into \
counts as a median step.
- stall: from SIGKILL to the end of the first step that was begun after it and was done, be it \
one that had been done before; less the median step.
- done again: steps that were begun more than once, those that a kill interrupted included.
- lost, doubled: samples that the final state lacks or has too often, all steps considered.
- protection costs: {asked.rounds} blocks of {asked.block} steps, in turns with the same script \
under torchrun without checkpoints; median and its interval.
- hash equal: that of parameters and optimizer states, to the one of the same script undisturbed \
with as many steps. torchrun, `phalanx torchrun` and NVRx run the same script.
- DDP and FSDP2 are ours; their state is in buffers {often}.
- torchrun, `phalanx torchrun` and NVRx load a checkpoint, written every 20 steps; torchft loads \
one only where no rank has the state. With `memory` the script keeps its state after each step by \
`MemoryCheckpoint`, and has its DDP buckets fixed. NVRx has {asked.reserves} \
reserves; all its processes are started again when they are used up.
- Deadline: a system that does no step for {asked.patience:g} s is given up."""
    lines = [_row(each) for each in found]
    reasons = [f"- {each.system}, {each.ranks} ranks: {each.why}" for each in found if each.why]
    parts = [table(_HEADS, lines), about]
    if reasons:
        parts.append("Not measured, or given up:\n\n" + "\n".join(reasons))
    return "\n\n".join(parts)


def _row(each: Found) -> list[str]:
    name, stalls = [each.system, str(each.ranks)], each.stalls
    equal = {True: "yes", False: "NO", None: "see below" if each.why else "-"}[each.equal]
    cost = with_interval(of([100 * share for share in each.overhead]))
    if each.step is None or each.ettr is None:
        return [*name, *["-"] * (len(_HEADS) - 4), cost, equal]
    return [
        *(*name, seconds(each.step), str(each.steps), str(each.kills)),
        f"{100 * each.ettr:.1f} %",
        seconds(statistics.median(stalls) if stalls else None),
        seconds(percentile(stalls, 99) if stalls else None),
        *(str(each.redone), f"{each.lost}, {each.doubled}"),
        *(cost, equal),
    ]
