"""The pure parts of training: samples, seeds, agreement, packing, state; and the buffers alone."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, RandomSampler

from phalanx.integrations.torch import (
    HiddenState,
    MemoryCheckpoint,
    NoRoom,
    ShapeChanged,
    State,
    StateLost,
    TrainingError,
    WorldSizeChanged,
    WrongDevice,
    sample_indices,
    seed_step,
    step_seed,
)
from phalanx.integrations.torch.agreement import Claim, agree
from phalanx.integrations.torch.buffers import RankBuffers, Store
from phalanx.integrations.torch.packing import Packed, Shard, unpack
from phalanx.integrations.torch.training import rank_environment
from phalanx.integrations.torch.untracked_state import Untouched, check_attributes
from phalanx.supervision import SpecError

# --- samples and seeds ------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "batch", "samples"), [(1, 1, 1), (2, 3, 24), (4, 2, 103)])
def test_an_epoch_uses_each_sample_at_most_once_and_all_that_fit(
    world: int, batch: int, samples: int
) -> None:
    steps = samples // (world * batch)

    def epoch(number: int) -> list[int]:
        return [
            index
            for step in range(1 + number * steps, 1 + (number + 1) * steps)
            for rank in range(world)
            for index in sample_indices(
                5, step, rank, world_size=world, batch=batch, samples=samples
            )
        ]

    for number in range(3):
        assert len(set(epoch(number))) == steps * world * batch
        assert all(0 <= index < samples for index in epoch(number))
    if samples > 20:
        assert epoch(0) != epoch(1)
        assert epoch(0) != sorted(epoch(0))


def test_a_sampler_without_enough_samples_for_one_step_is_refused() -> None:
    with pytest.raises(SpecError, match="samples=7: one step of 2 ranks uses 8"):
        sample_indices(0, 1, 0, world_size=2, batch=4, samples=7)
    for rank in (-1, 2):
        with pytest.raises(SpecError, match=f"rank={rank}: there are 2"):
            sample_indices(0, 1, rank, world_size=2, batch=4, samples=8)
    with pytest.raises(SpecError, match="world_size=0"):
        sample_indices(0, 1, 0, world_size=0, batch=4, samples=8)


def test_seeds_differ_by_seed_step_rank_and_stream_and_give_the_same_numbers_again() -> None:
    seeds = {step_seed(*key) for key in [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1), (0, 1, 0, 1)]}
    assert len(seeds) == 5
    own = torch.Generator()

    def drawn() -> list[Any]:
        seed_step(3, 4, 5, [own])
        return [torch.rand(3).tolist(), random.random(), torch.rand(2, generator=own).tolist()]

    assert drawn() == drawn()


# --- agreement ------------------------------------------------------------------------------


def claims(*pairs: tuple[int, tuple[int, ...]]) -> list[Claim]:
    return [Claim(step, kept) for step, kept in pairs]


@pytest.mark.parametrize(
    ("given", "sharded", "kind", "step", "complete", "leader"),
    [
        # A survivor has applied 5, another has not, the third is new.
        (claims((4, (4, 3)), (5, (4, 5)), (-1, (4, 3))), False, "memory", 5, 4, 1),
        # Nobody has a whole state in memory: from the buffers, of the last complete set.
        (claims((-1, (4, 5)), (-1, (3, 4))), False, "buffers", 4, 4, -1),
        # Survivors are behind the buffers, for their parameters were changed and are void.
        (claims((-1, (7, 6)), (5, (6, 7))), False, "buffers", 7, 7, -1),
        # Sharded: what a survivor has in memory is of no use to the others.
        (claims((5, (5, 4)), (-1, (4, 3))), True, "buffers", 4, 4, -1),
        (claims((-1, ()), (-1, ())), False, "new", 0, -1, 0),
        # One of the buffers was being written when all died.
        (claims((-1, (3,)), (-1, (3, 4)), (-1, (4, 3))), True, "buffers", 3, 3, -1),
    ],
)
def test_all_go_on_from_the_highest_step_that_all_can_have(
    given: list[Claim], *, sharded: bool, kind: str, step: int, complete: int, leader: int
) -> None:
    source = agree(given, sharded=sharded, used=False)

    assert (source.kind, source.step, source.complete, source.leader) == (
        kind,
        step,
        complete,
        leader,
    )


def test_a_run_whose_buffers_have_no_complete_set_does_not_begin_anew() -> None:
    with pytest.raises(StateLost, match="no step is whole on every rank"):
        agree(claims((-1, (4,)), (-1, (5,))), sharded=True, used=True)


# --- packing --------------------------------------------------------------------------------


def test_a_tree_comes_back_with_dtypes_shapes_and_strides() -> None:
    tree: dict[str, Any] = {
        "plain": torch.arange(6.0).reshape(2, 3),
        "turned": torch.arange(6).reshape(2, 3).t(),
        "gapped": torch.arange(20)[::3],
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "mirrored": torch.tensor([[1 + 2j, 3j], [4, 5 - 1j]]).conj().t(),
        "rest": (1, "a", [None, {"deep": torch.ones(3)}]),
    }
    packed = Packed(tree)
    got = unpack(packed.meta, packed.to_bytes())

    assert got["rest"][0:2] == (1, "a")
    assert torch.equal(got["rest"][2][1]["deep"], torch.ones(3))
    for name in ("plain", "turned", "gapped", "half", "none", "flags", "mirrored"):
        assert got[name].dtype == tree[name].dtype
        assert torch.equal(got[name], tree[name])
    assert got["turned"].stride() == (1, 3)
    assert b"\x00\x00\x80?" not in packed.meta, "tensors are not pickled"


def test_parts_of_the_bytes_put_together_are_all_of_them() -> None:
    packed = Packed([torch.rand(n) for n in (3, 1000, 17, 0, 64)])
    whole = packed.to_bytes()
    for cut in (0, 1, 64, 900, packed.size - 1, packed.size):
        parts = torch.zeros_like(whole)
        packed.copy_to(parts[:cut], 0, cut)
        packed.copy_to(parts[cut:], cut, packed.size)
        assert torch.equal(parts, whole)


# --- state ----------------------------------------------------------------------------------


def make(width: int = 8, optimizer: Any = torch.optim.AdamW) -> tuple[nn.Sequential, State]:
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optim = optimizer(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 2)
    return model, State(
        model=model, optimizer=optim, schedule=schedule, generator=torch.Generator()
    )


def do(model: nn.Sequential, state: State, step: int) -> None:
    forward(model, step)
    for each in state.optimizers.values():
        each.step(lambda: float(model(torch.ones(2, 4)).sum()))
    state.others["schedule"].step()
    state.generators["generator"].manual_seed(step)
    state.commit(step, f"loss {step}")


def forward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    model(torch.full((5, 4), 0.1 * step) + torch.arange(5)[:, None]).sum().backward()


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adafactor],
)
def test_a_new_process_goes_on_from_a_state_as_the_old_one(optimizer: Any) -> None:
    model, state = make(optimizer=optimizer)
    for step in (1, 2, 3):
        do(model, state, step)
    packed = state.packed()
    meta, data = packed.meta, packed.to_bytes()
    other_model, other = make(optimizer=optimizer)
    other.load(unpack(meta, data))

    assert (other.step, other.result) == (3, "loss 3")
    assert other.digest() == state.digest()
    do(model, state, 4)
    do(other_model, other, 4)
    assert other.digest() == state.digest()
    other.load(unpack(meta, data.clone()))
    do(other_model, other, 4)
    assert other.digest() == state.digest(), "in place"


def of(model: nn.Sequential, place: int) -> Any:
    return model[place]


def _replace_data(model: nn.Sequential, state: State) -> None:
    for each in model.parameters():
        each.data = each.data + 1


def _turn(model: nn.Sequential, state: State) -> None:
    square = of(model, 3).weight
    square.data = square.data.t()


def _replace_parameter(model: nn.Sequential, state: State) -> None:
    of(model, 0).weight = nn.Parameter(torch.rand(8, 4))


def _add_module(model: nn.Sequential, state: State) -> None:
    model[1].add_module("more", nn.Linear(2, 2))


def _rename(model: nn.Sequential, state: State) -> None:
    name, weight = next(iter(model[3].named_parameters()))
    delattr(model[3], name)
    model[3].register_parameter(name + "_", weight)


def _move_module(model: nn.Sequential, state: State) -> None:
    one, other = of(model, 4), of(model, 5)
    (other if len(one) else one).append((one if len(one) else other).pop(0))


def _move_parameter(model: nn.Sequential, state: State) -> None:
    last = of(model, 3)
    if "late" not in dict(last.named_parameters()):
        last.early, last.late = nn.Parameter(torch.ones(2)), None
    last.early, last.late = last.late, last.early


def _exchange_key(model: nn.Sequential, state: State) -> None:
    kept: Any = state.optimizers["optimizer"].state
    kept[f"key{state.step}"] = kept.pop(f"key{state.step - 1}", {"sum": torch.ones(2)})


def _add_group(model: nn.Sequential, state: State) -> None:
    state.optimizers["optimizer"].add_param_group({"params": [nn.Parameter(torch.rand(3))]})


def _replace_optimizer_state(model: nn.Sequential, state: State) -> None:
    state.optimizers["optimizer"].state[of(model, 0).weight]["exp_avg"] = torch.rand(8, 4)


def _number_in_optimizer_state(model: nn.Sequential, state: State) -> None:
    kept = state.optimizers["optimizer"].state[of(model, 0).weight]
    kept["count"] = kept.get("count", 0) + 1


def _gaps_in_optimizer_state(model: nn.Sequential, state: State) -> None:
    kept = state.optimizers["optimizer"].state[of(model, 0).weight]
    if kept["exp_avg"].is_contiguous():
        kept["exp_avg"] = torch.rand(8, 8)[:, ::2]
    kept["exp_avg"].add_(1)


def _forget_optimizer_state(model: nn.Sequential, state: State) -> None:
    state.optimizers["optimizer"].state.pop(of(model, 0).weight, None)


@pytest.mark.parametrize(
    "change",
    [
        _replace_data,
        _turn,
        _replace_parameter,
        _add_module,
        _move_module,
        _move_parameter,
        _exchange_key,
        _rename,
        _add_group,
        _replace_optimizer_state,
        _number_in_optimizer_state,
        _gaps_in_optimizer_state,
        _forget_optimizer_state,
    ],
)
def test_what_is_packed_is_what_is_there_whatever_a_step_exchanges(
    change: Callable[[nn.Sequential, State], None],
) -> None:
    model, state = make()
    model.extend([nn.Linear(3, 3), nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList()])
    do(cast("nn.Sequential", model[:3]), state, 1)
    for _ in range(3):
        state.packed()
        change(model, state)
        state.commit(state.step + 1)

        check_packed(state)


def test_the_arrangement_of_shards_is_kept_until_one_is_exchanged() -> None:
    dist: Any = torch.distributed  # gloo keeps its descriptors: hence a group that sends nothing
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        fully_shard(model)
        state = State(model=model, optimizer=torch.optim.AdamW(model.parameters()))
        for step in range(1, 10):
            forward(model, step)
            state.optimizers["optimizer"].step()
            if step % 3 == 0:
                model.double().float()
            state.commit(step)
            before = state._large
            check_packed(state)
            assert (state._large is before) == (step > 1 and step % 3 != 0)
    finally:
        dist.destroy_process_group()


def check_packed(state: State) -> None:
    packed, expected = state.packed(), Packed(state._large_tree())
    got = unpack(packed.meta, packed.to_bytes())
    assert got["step"] == state.step
    for kind, there in unpack(expected.meta, expected.to_bytes()).items():
        assert_equal(got[kind], there)


def assert_equal(one: Any, other: Any) -> None:
    """Raise unless both are the same values in the same order, tensors bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, Shard):
        assert_equal(one.local, other.local)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert [*one] == [*other]
        assert_equal([*one.values()], [*other.values()])
    elif isinstance(one, list):
        pairs: list[tuple[Any, Any]] = [*zip(one, other, strict=True)]
        for pair in pairs:
            assert_equal(*pair)
    else:
        assert one == other


def test_a_step_that_failed_before_it_changed_parameters_is_rolled_back() -> None:
    model, state = make()
    do(model, state, 1)
    before = state.digest()
    forward(model, 2)
    state.others["schedule"].step()

    assert state.digest() != before
    assert state.is_committed
    state.roll_back()
    assert state.digest() == before
    model[1].num_batches_tracked = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ShapeChanged, match="model.1.num_batches_tracked"):
        state.roll_back()


def test_what_a_step_that_failed_has_made_is_gone() -> None:
    """Else the step would go on from it when it is done again."""
    model, state = make()
    model.register_buffer("center", None)
    state = State(model=model, **state.optimizers)
    optimizer = state.optimizers["optimizer"]
    packed = state.packed()
    first = packed.meta, packed.to_bytes()
    before = state.digest()
    for undo in (state.roll_back, lambda: state.load(unpack(*first))):
        model.center = torch.ones(2)
        optimizer.param_groups[0]["steps"] = 1
        if undo != state.roll_back:
            forward(model, 1)
            optimizer.step()
            kept: Any = optimizer.state
            kept["steps"] = 1
        undo()

        assert model.center is None
        assert "steps" not in optimizer.param_groups[0]
        assert not optimizer.state
    with torch.no_grad():
        for each, one in zip(model.parameters(), make()[0].parameters(), strict=True):
            assert torch.equal(each, one)
    assert state.digest() == before
    model.register_buffer("late", torch.ones(2))
    with pytest.raises(ShapeChanged, match=r"model\.late .*has nothing.* has \(2,\) float32"):
        state.roll_back()


def test_what_join_does_beside_parameters_counts_before_the_first_step_alone() -> None:
    model, state = make()

    def join() -> None:
        with state.as_built():
            assert of(model, 0).weight.requires_grad
            model.train()
            model(torch.rand(5, 4))
            state.optimizers["optimizer"].param_groups[0]["lr"] *= 2

    before = state.digest()
    join()
    assert state.digest() != before
    model[1].eval()
    model[0].requires_grad_(False)
    state.commit(1)
    before = state.digest()
    join()
    assert state.digest() == before
    assert not of(model, 0).weight.requires_grad


def _train_statistics(model: nn.Sequential, _: State) -> None:
    model.train()
    model(torch.rand(5, 4))


def _set_rate(_: nn.Sequential, state: State) -> None:
    state.optimizers["optimizer"].param_groups[0]["lr"] = 1.0


def _freeze(model: nn.Sequential, _: State) -> None:
    model[0].requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_replace_data, "model"),
        (_train_statistics, "model"),
        (_set_rate, "optimizer"),
        (_freeze, "requires_grad"),
    ],
)
def test_a_method_between_two_steps_changes_modes_alone(
    change: Callable[[nn.Sequential, State], None], told: str
) -> None:
    model, state = make()
    model[1].eval()
    state.commit(1)
    before = state.digest()
    with state.unchanged("evaluate"):
        model.eval()
        model(torch.rand(5, 4))
    assert state.digest() == before

    with (
        pytest.raises(TrainingError, match=rf"^evaluate\(\) changes {told}, between two steps"),
        state.unchanged("evaluate"),
    ):
        change(model, state)


@pytest.mark.parametrize("change", ["optimizer", "by hand", "momentum", "uncounted"])
def test_a_step_that_changed_parameters_and_did_not_commit_is_known(change: str) -> None:
    model, state = make()
    do(model, state, 1)
    state.begin(watch=True)
    forward(model, 2)
    assert state.is_committed
    if change == "optimizer":
        state.optimizers["optimizer"].step()
    elif change == "by hand":
        with torch.no_grad():
            next(model.parameters()).add_(1)
    elif change == "momentum":
        state.optimizers["optimizer"].state[next(model.parameters())]["exp_avg"].mul_(0.5)
    else:
        next(model.parameters()).data.add_(1)

    assert not state.is_committed
    state.touch()
    state.commit(2)
    state.begin(watch=False)
    assert state.is_committed == (change != "uncounted")


@pytest.mark.parametrize("found_by", ["state", "step"])
def test_parameters_without_an_optimizer_are_kept_and_cleared_like_others(found_by: str) -> None:
    model, frozen = nn.Linear(4, 4), nn.Linear(4, 1)
    model.frozen = frozen if found_by == "state" else nn.Identity()
    state = State(model=model, optimizer=torch.optim.SGD([model.weight, model.bias]))
    model.frozen = frozen  # one that a step puts there is found with the next state of the buffers
    state.commit(1)
    state.packed()
    frozen(model(torch.ones(2, 4))).sum().backward()

    assert all(each.grad is not None for each in model.parameters())
    state.clear_gradients()
    assert all(each.grad is None for each in model.parameters())
    state.commit(2)
    assert state.is_committed
    with torch.no_grad():
        frozen.bias.add_(1)
    assert not state.is_committed


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"width": 9}, r"model.0.weight .*\(8, 4\) float32.*\(9, 4\) float32"),
        ({"optimizer": torch.optim.SGD}, "the type of optimizer: .* has AdamW, .* has SGD"),
    ],
)
def test_a_state_of_another_shape_is_refused_by_name_and_changes_nothing(
    options: dict[str, Any], told: str
) -> None:
    model, state = make()
    do(model, state, 1)
    packed = state.packed()
    _, other = make(**options)
    before = other.digest()

    with pytest.raises(ShapeChanged, match=told):
        other.load(unpack(packed.meta, packed.to_bytes()))
    assert other.digest() == before


def test_what_modules_keep_beside_tensors_is_kept() -> None:
    class Counter(nn.Linear):
        count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    module = Counter(1, 1)
    state = State(model=nn.Sequential(module))
    module.count = 3
    state.commit(1)
    module.count = 5

    state.roll_back()

    assert module.count == 3


def test_a_scaler_unscales_again_in_a_step_that_is_done_again() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    state = State(model=model, optimizer=optimizer, scaler=scaler)

    for _ in range(2):
        scaler.scale(model(torch.ones(1)).sum()).backward()
        scaler.unscale_(optimizer)
        state.roll_back()
        state.clear_gradients()


def test_a_state_on_another_device_is_refused_by_name() -> None:
    state = State(model=nn.Linear(2, 2))

    with pytest.raises(WrongDevice, match="model.weight is on cpu, and this rank's device is cuda"):
        state.check_device("cuda:0")
    state = State(model=nn.Sequential(nn.LSTM(2, 2, num_layers=2, dropout=0.5)))
    state.check_device("cpu")
    with pytest.raises(HiddenState, match="model.0 is a LSTM, which has state .* give dropout=0"):
        state.check_device("cuda:0")


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.empty(2, device="meta"), "model.kept is on meta"),
        (nn.UninitializedBuffer(), "model.kept has no shape yet: run its module once in build"),
        (torch.eye(2).to_sparse(), "model.kept is torch.sparse_coo, which cannot be kept"),
        (torch.zeros(1).expand(4), "model.kept is expanded"),
        (torch.ones(2, dtype=torch.complex64).conj(), "model.kept is quantized, or a conjugate"),
    ],
    ids=["meta", "lazy", "sparse", "expanded", "conjugate"],
)
def test_a_tensor_without_memory_of_its_own_is_refused_by_name(
    tensor: torch.Tensor, told: str
) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("kept", tensor)

    with pytest.raises(TrainingError, match=told):
        State(model=model)


# --- hidden state ---------------------------------------------------------------------------

DATA: Any = list(range(8))


@pytest.mark.parametrize(
    "value",
    [
        DataLoader(DATA, shuffle=True),
        RandomSampler(DATA),
        iter(DATA),
        (each for each in DATA),
        random.Random(1),
        torch.Generator(),
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0),
        torch.amp.GradScaler("cpu"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_hidden_state_is_refused_in_words(value: Any) -> None:
    with pytest.raises(HiddenState, match=f"^data is a {type(value).__qualname__}, which has"):
        check_attributes(SimpleNamespace(data=value), [], [])
    inner = SimpleNamespace(data=[value])
    inner.inner = inner
    outer = SimpleNamespace(inner=inner)
    with pytest.raises(HiddenState, match=r"^inner.data is a"):
        check_attributes(outer, [], [])
    check_attributes(outer, [inner], [])
    check_attributes(outer, [], ["inner"])
    model = nn.ModuleDict({"a": nn.Linear(1, 1)})
    model["a"].drawn = value
    with pytest.raises(HiddenState, match=r"^model.a.drawn is a"):
        check_attributes(SimpleNamespace(model=model), [model], [])
    check_attributes(SimpleNamespace(model=model), [model, value], [])
    check_attributes(SimpleNamespace(data=value), [], ["data"])
    within = {"train": value}, {"train": deque([{"a": value}])}
    for data in (*within, lambda: value, value.__repr__, partial(print, value)):
        with pytest.raises(HiddenState, match="data is a"):
            check_attributes(SimpleNamespace(data=data), [], [])
    if isinstance(value, (torch.Generator, torch.optim.Optimizer, torch.amp.GradScaler)):
        return
    with pytest.raises(HiddenState, match="data is a") as refused:
        State(data=value)
    assert "State(" not in str(refused.value)


def test_iterators_of_classes_and_in_slots_are_found() -> None:
    class Slotted:
        __slots__ = ("drawn",)

        def __init__(self) -> None:
            self.drawn = iter(DATA)

    class Holder:
        def __init__(self) -> None:
            self.inner = Slotted()

    class Drawing:
        batches = iter(DATA)

    @cache
    def drawn() -> Iterator[int]:
        return iter(DATA)

    class Caching:
        def draw(self) -> int:
            return next(drawn())

    with pytest.raises(HiddenState, match=r"^inner.drawn is a"):
        check_attributes(Holder(), [], [])
    with pytest.raises(HiddenState, match=r"^batches is a"):
        check_attributes(Drawing(), [], [])
    Caching().draw()
    with pytest.raises(HiddenState, match=r"^draw is a"):
        check_attributes(Caching(), [], [])
    with Path(os.devnull).open("ab") as log:
        check_attributes(SimpleNamespace(log=log), [], [])


count = 0


def draw() -> None:
    global count  # noqa: PLW0603
    count += 1


class Sampler:
    drawn = 0

    def __init__(self) -> None:
        self.at = 0

    def draw(self) -> None:
        self.at += 1
        Sampler.drawn += 1


elsewhere: Any = ModuleType("elsewhere")
elsewhere.inner = ModuleType("elsewhere.inner")
vars(elsewhere).update(__file__="/home/x/elsewhere.py", at=0)
vars(elsewhere.inner).update(__file__="/home/x/inner.py", at=0)


class Counted:
    drawn = 0


class Inner:
    drawn = 0

    @classmethod
    def draw(cls) -> None:
        cls.drawn += 1


def draw_from(box: list[int] = [0]) -> None:  # noqa: B006  # which is the point
    box.append(1)


def count_calls() -> None:
    vars(count_calls)["calls"] += 1


vars(count_calls)["calls"] = 0
of_thread = threading.local()
of_thread.drawn = 0
of_context: ContextVar[int] = ContextVar("of_context", default=0)


class Elsewhere:
    """Stands for a class of another module of the user."""

    at = 0


class Initialised(nn.Sequential):
    inited = False


class Stateful:
    def __init__(self) -> None:
        self.sampler, self.model = Sampler(), Initialised(nn.Linear(2, 2))
        self.teacher = nn.ReLU()
        self.teacher.register_buffer("mean", torch.zeros(1 << 20))
        self.rows, self.replay, self.other = np.zeros((4, 2)), [0.5], Elsewhere()
        self.order = deque(range(2000), 2000)
        self.pairs = [0, *range(2000), 0]
        self.hidden = torch.zeros(2)
        self.mask: torch.Tensor | None = None
        self.masks: dict[int, torch.Tensor] = {}

    def draw(self) -> None:
        draw()

    def names(self) -> object:
        return Counted.drawn, Inner.draw, draw_from, count_calls, of_thread, of_context

    def imports(self) -> object:
        return elsewhere.at, elsewhere.inner.at


CHANGES: dict[str, Any] = {
    "sampler.at": lambda one: one.sampler.draw(),
    "sampler.drawn": lambda one: one.sampler.draw(),
    "count": lambda one: one.draw(),
    "model.inited": lambda one: setattr(one.model, "inited", True),
    "teacher.mean": lambda one: one.teacher.mean.data.add_(1),
    "rows": lambda one: one.rows.__setitem__((1, 1), 2.0),
    "replay": lambda one: one.replay.append(1.5),
    "order": lambda one: one.order.append(1),
    "hidden": lambda one: setattr(one, "hidden", torch.ones(2)),
    "other.at": lambda one: setattr(one.other, "at", 3),
    "Counted.drawn": lambda _: setattr(Counted, "drawn", Counted.drawn + 1),
    "Inner.drawn": lambda _: Inner.draw(),
    "draw_from": lambda _: draw_from(),
    "count_calls": lambda _: count_calls(),
    "of_thread": lambda _: setattr(of_thread, "drawn", of_thread.drawn + 1),
    "of_context": lambda _: of_context.set(of_context.get() + 1),
    "pairs": lambda one: one.pairs.reverse(),
    "elsewhere.at": lambda _: setattr(elsewhere, "at", elsewhere.at + 1),
    "elsewhere.inner.at": lambda _: setattr(elsewhere.inner, "at", elsewhere.inner.at + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_that_a_step_changes_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in (elsewhere, elsewhere.inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Elsewhere, "__module__", "elsewhere")
    trainer = Stateful()
    weight: torch.Tensor = next(trainer.model.parameters())

    def look(*allowed: str) -> Untouched:
        kept = [trainer.model]
        return check_attributes(trainer, kept, allowed, [weight])

    before = look()
    weight.data.add_(1)
    trainer.mask = trainer.masks[2] = torch.ones(2)  # what was empty may be filled
    trainer.teacher.eval()
    made = look()
    made.check_since(before)
    look().check_since(made)
    CHANGES[name](trainer)

    rest = [other for other in CHANGES if other.startswith("sampler") and other != name]
    told = rf"^{name} is a value that a step changed.* set without_state = \('{name}',\)"
    with pytest.raises(HiddenState, match=told):
        look(*rest).check_since(made)
    look(*rest, name).check_since(made)


class Warming(torch.optim.SGD):
    """Has a state that its ``state_dict`` has not."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.count, self.rows = 0, bytearray(4)

    def step(self, closure: Any = None) -> Any:
        whole: Any = super()
        return whole.step(closure)


def counting(box: list[int]) -> Any:
    def call(*_: Any) -> float:
        box[0] += 1
        return 1.0

    return call


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("what", ["count", "rows", "hook", "schedule", "gradient"])
def test_what_is_beside_the_state_of_an_optimizer_may_not_change(
    what: str, *, is_named: bool
) -> None:
    model, calls = nn.Linear(1, 1), [0]
    optimizer = Warming(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, counting(calls if what == "schedule" else [0])
    )
    if what == "hook":
        optimizer.register_step_post_hook(counting(calls))
    if what == "gradient":
        weight: Any = model.weight
        weight.register_hook(counting(calls))
        weight.register_post_accumulate_grad_hook(counting([0]))
    state = State(model=model, optimizer=optimizer, schedule=schedule)
    trainer = SimpleNamespace(**({"o": optimizer, "s": schedule} if is_named else {}))

    def look(*allowed: str) -> Untouched:
        kept = (state, model, optimizer, schedule)
        return check_attributes(trainer, kept, allowed, state.tensors())

    before = look()
    if what != "hook":
        optimizer.step()
    look().check_since(before)
    calls[0] += 1
    optimizer.count += what == "count"
    optimizer.rows[3] = what == "rows"
    with pytest.raises(HiddenState, match="is a value that a step changed") as refused:
        look().check_since(before)

    allowed = refused.value.args[0].partition("without_state = ('")[2].partition("'")[0]
    look(allowed).check_since(before)


class Nested(nn.Module):
    """Has a hook on a parameter, and so has what is in it."""

    def __init__(self, boxes: list[list[int]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        cast("Any", self.weight).register_hook(counting(boxes[0]))
        self.inner = Nested(boxes[1:]) if len(boxes) > 1 else None


def test_the_hooks_on_all_tensors_of_nested_modules_are_looked_at() -> None:
    boxes = [[0] for _ in range(9)]
    model = Nested(boxes)
    state = State(model=model)

    def look() -> Untouched:
        return check_attributes(SimpleNamespace(), (state, model), (), state.tensors())

    for box in boxes:
        before = look()
        box[0] += 1
        with pytest.raises(HiddenState, match="is a value that a step changed"):
            look().check_since(before)


@pytest.mark.parametrize("is_listed", [True, False])
def test_what_torch_sets_on_an_optimizer_and_optimizers_in_it_are_no_hidden_state(
    *, is_listed: bool
) -> None:
    class Own(torch.optim.SGD):
        inner: Any = None

    model = nn.Linear(1, 1)
    optimizer = Own(model.parameters(), 0.1, fused=True)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    inner.state = optimizer.state
    optimizer.inner = [inner] if is_listed else inner
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = State(model=model, optimizer=optimizer, schedule=schedule)
    kept = (state, model, optimizer, schedule)

    before = check_attributes(SimpleNamespace(), kept, (), state.tensors())
    for _ in range(2):
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        schedule.step()
    check_attributes(SimpleNamespace(), kept, (), state.tensors()).check_since(before)


class Wrapping(torch.Tensor):
    """Has its elements in another tensor."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        return cls(torch.zeros(2)) if "detach" in str(func) else NotImplemented


class Named(torch.Tensor):
    """Has memory like any other."""


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Wrapping(torch.zeros(2)), "SGD has 'odd', a Wrapping, which cannot be kept"),
        (torch.zeros(2).to_sparse(), "SGD has 'odd', which is torch.sparse_coo"),
    ],
)
def test_what_an_optimizer_has_that_cannot_be_copied_is_refused_by_name(
    value: torch.Tensor, told: str
) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = State(model=model, optimizer=optimizer)
    optimizer.state[model.weight]["odd"] = value

    for look in (state.checksums, state.packed, state.digest):
        with pytest.raises(TrainingError, match=told):
            look()


def test_a_parameter_without_memory_of_its_own_is_refused_by_name() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("wrapped", Wrapping(torch.zeros(2)))

    with pytest.raises(TrainingError, match=r"model\.wrapped is a Wrapping, which cannot be kept"):
        State(model=model)
    model.wrapped = torch.zeros(2).as_subclass(Named)
    State(model=model)


def test_a_tensor_outside_of_the_state_may_not_change_in_place() -> None:
    model, teacher = nn.Linear(2, 2), nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = State(model=model, optimizer=optimizer)
    moments = [each["momentum_buffer"] for each in optimizer.state.values()]
    static, views = torch.zeros(2), [model.weight[0], *moments]
    trainer = SimpleNamespace(
        state=state, ema=teacher, static=static, views=views, frozen=torch.ones(2)
    )
    kept = [state, model, optimizer]

    untouched = check_attributes(trainer, kept, ["static"], state.tensors())
    optimizer.step()
    static.add_(1)
    trainer.views = []
    teacher.eval()(torch.ones(1, 2))
    untouched.check()

    names = ["static", "ema.running_mean", "ema.running_var"]
    untouched = check_attributes(trainer, kept, names, state.tensors())
    teacher.train()(torch.ones(2, 2))
    with pytest.raises(
        HiddenState, match=r"^ema.num_batches_tracked is a tensor that a step changed"
    ):
        untouched.check()


def test_a_parameter_that_only_an_optimizer_has_is_kept() -> None:
    def build() -> tuple[nn.Linear, torch.Tensor, State]:
        torch.manual_seed(0)
        model, alone = nn.Linear(2, 1), torch.zeros(1, requires_grad=True)
        groups: Any = [{"params": model.parameters()}, {"params": [alone], "lr": 0.5}]
        return model, alone, State(model=model, optimizer=torch.optim.Adam(groups))

    model, alone, state = build()
    digests = {state.digest()}
    for step in (1, 2):
        (model(torch.ones(2)).sum() + alone.sin().sum() + alone.sum()).backward()
        state.optimizers["optimizer"].step()
        state.commit(step)
        packed = state.packed()
    data, kept = packed.to_bytes(), alone.detach().clone()
    with torch.no_grad():
        alone.add_(1)
    assert not state.is_committed
    digests.add(state.digest())

    _, other, copy = build()
    copy.load(unpack(packed.meta, data))

    assert other == kept
    assert len(digests | {copy.digest()}) == 3
    assert "optimizer.1.0" in copy.names()


def test_a_buffer_that_a_step_has_made_is_kept() -> None:
    def build() -> tuple[nn.Module, State]:
        model = nn.Linear(2, 1)
        model.register_buffer("mask", None, persistent=False)
        return model, State(model=nn.ModuleDict({"part": model}))

    model, state = build()
    packed = state.packed()
    first = packed.meta, packed.to_bytes()
    model.mask = torch.arange(3)
    state.commit(1)
    packed = state.packed()

    other, copy = build()
    copy.load(unpack(packed.meta, packed.to_bytes()))

    assert torch.equal(cast("torch.Tensor", other.mask), torch.arange(3))
    assert copy.digest() == state.digest()
    copy.load(unpack(*first))
    assert other.mask is None


def test_shards_outside_of_modules_and_parameters_are_refused_by_name() -> None:
    class Average:
        def __init__(self, model: nn.Module) -> None:
            self.kept = [each.detach() for each in model.parameters()]

        def state_dict(self) -> dict[str, Any]:
            return {"kept": self.kept}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.kept = state["kept"]

    dist: Any = torch.distributed
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        model: Any = nn.Linear(4, 4)
        fully_shard(model)
        with pytest.raises(TrainingError, match="average: .* has a DTensor: keep it in a module"):
            State(model=model, average=Average(model))
        optimizer = torch.optim.Adam(model.parameters())
        state = State(model=model, optimizer=optimizer)
        optimizer.state[model.weight]["row"] = model.weight.detach()[:1]
        with pytest.raises(TrainingError, match="Adam has 'row', a DTensor of another shape"):
            state.packed()
    finally:
        dist.destroy_process_group()


def test_a_commit_that_fails_commits_nothing() -> None:
    class Meter:
        value: Any = 0

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    model, meter = nn.Linear(2, 1), Meter()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = State(model=model, optimizer=optimizer, meter=meter)
    model(torch.ones(2)).sum().backward()
    state.begin(watch=False)
    state.touch()
    optimizer.step()
    meter.value = threading.Lock()

    with pytest.raises(TypeError, match="cannot pickle"):
        state.commit(1)

    assert (state.step, state.is_committed) == (0, False)


def test_a_default_device_of_the_user_has_no_part_in_what_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("none", torch.zeros(0))
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters()))
    expected = state.digest()

    with torch.device("meta"):
        state.commit(0)
        packed = state.packed()
        state.roll_back()
        state.load(unpack(packed.meta, packed.to_bytes()))
        assert state.digest() == expected


def test_a_state_that_cannot_be_pickled_is_refused_by_name() -> None:
    class Odd:
        def state_dict(self) -> Any:
            return {"f": lambda: None}

        def load_state_dict(self, _state: Any) -> None:
            raise NotImplementedError

    with pytest.raises(HiddenState, match=r"odd is a .*Odd.*its state_dict\(\) cannot be pickled"):
        State(odd=Odd())


def test_the_digest_tells_what_is_no_tensor() -> None:
    model, own = nn.Linear(1, 1), torch.Generator()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    state = State(model=model, scaler=scaler, generator=own)
    before = state.digest()
    torch.rand(1, generator=own)  # each step seeds it, on each rank with another number
    assert state.digest() == before
    model.eval()
    evaluating = state.digest()
    model.train()
    assert state.digest() == before != evaluating
    scaler.load_state_dict({**scaler.state_dict(), "growth_interval": 3})
    assert state.digest() != before


class Kept:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(
    ("make_value", "other"),
    [
        (lambda: np.zeros((2, 3)), np.array([[0, 0, 0], [0, 0, 1.0]])),
        (lambda: np.zeros(2), np.zeros(2, dtype=np.int64)),
        (lambda: np.int64(1), np.int64(2)),
        (lambda: np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        (lambda: deque([1.0, 2.0]), deque([2.0, 1.0])),
        (lambda: {"a", "b"}, {"a", "c"}),
    ],
)
def test_arrays_and_sets_of_an_object_are_compared_too(
    make_value: Callable[[], Any], other: Any
) -> None:
    one, same, different = (State(kept=Kept(each)) for each in (make_value(), make_value(), other))

    assert (one.digest(), one.checksums()) == (same.digest(), same.checksums())
    assert one.digest() != different.digest()
    assert one.checksums() != different.checksums()


def test_an_object_with_a_tensor_that_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(TrainingError, match=r"^kept: .* has a tensor that cannot be kept"):
        State(kept=Kept(Wrapping(torch.zeros(2))))


def test_an_optimizer_with_a_state_dict_of_its_own_is_refused() -> None:
    class Counting(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "count": 1}

    with pytest.raises(HiddenState, match="optimizer is a .*Counting, .* give an optimizer"):
        State(optimizer=Counting(nn.Linear(1, 1).parameters(), lr=1.0))


# --- buffers --------------------------------------------------------------------------------


def run(world: int = 2, **changes: int) -> dict[str, int]:
    return {"world_size": world, "seed": 0, "sharded": 0, "threads": 1, **changes}


def tree(step: int, rank: int = 0) -> dict[str, Any]:
    return {"step": step, "x": torch.full((1000,), step + rank * 0.5), "y": torch.ones(3)}


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("in_folder", [True, False])
def test_what_every_rank_has_written_can_be_read_and_one_set_is_always_whole(
    tmp_path: Path, *, spread: bool, in_folder: bool
) -> None:
    folder = tmp_path / "run" if in_folder else None
    store = Store(folder, run())
    ranks = [RankBuffers(store.paths, rank, spread=spread) for rank in (0, 1)]
    for step in range(5):
        for rank, each in enumerate(ranks):
            each.write(step, Packed(tree(step, 0 if spread else rank)))
            common = set(ranks[0].steps()) & set(ranks[1].steps())
            assert common or (step, rank) == (0, 0), "a complete set at any moment"
    if in_folder:
        for each in ranks:
            each.close()
        store.close()
        store = Store(folder, run())
        ranks = [RankBuffers(store.paths, rank, spread=spread) for rank in (0, 1)]
    for rank, each in enumerate(ranks):
        assert set(each.steps()) == {3, 4}
        for step in (3, 4):
            got = each.read(step)
            want = tree(step, 0 if spread else rank)
            assert got["step"] == step
            assert torch.equal(got["x"], want["x"])
        with pytest.raises(StateLost, match="no buffer in .* holds step 9"):
            each.read(9)
        each.close()
    store.close()


def test_no_room_leaves_the_other_buffer_and_holds_up_no_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store(None, run())
    ranks = [RankBuffers(store.paths, rank, spread=False) for rank in (0, 1)]
    for step in (0, 1):
        for each in ranks:
            each.write(step, Packed(tree(step)))
    large = Packed({"x": torch.zeros(1 << 20)})
    with monkeypatch.context() as patch:
        patch.setattr("phalanx.integrations.torch.buffers.writable_bytes", lambda _: 4096)
        with pytest.raises(NoRoom, match="no room for .* bytes of state in memory: 4096 bytes"):
            ranks[0].write(2, large)
    ranks[1].write(2, large)
    assert 1 in set(ranks[0].steps()) & set(ranks[1].steps())
    for each in ranks:
        each.write(3, large)
    for each in ranks:
        assert set(each.steps()) == {1, 3}
        each.close()
    store.close()


def test_memory_that_others_take_meanwhile_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(None, run(1))
    buffers = RankBuffers(store.paths, 0, spread=False)
    buffers.write(0, Packed(tree(0)))
    free = iter([1 << 40])
    with monkeypatch.context() as patch:
        patch.setattr(
            "phalanx.integrations.torch.buffers.writable_bytes", lambda _: next(free, 4096)
        )
        with pytest.raises(NoRoom, match="no room for .*: 4096 bytes are free"):
            buffers.write(1, Packed({"x": torch.zeros(6 << 20)}))
    buffers.write(1, Packed(tree(1)))

    assert set(buffers.steps()) == {0, 1}
    assert sum(Path(path).stat().st_size for path in store.paths.slots[0]) < 4 << 20
    buffers.close()
    store.close()


def test_a_torn_buffer_counts_as_none(tmp_path: Path) -> None:
    store = Store(tmp_path / "run", run(1))
    buffers = RankBuffers(store.paths, 0, spread=False)
    for step in (0, 1):
        buffers.write(step, Packed(tree(step)))
    buffers.close()
    second = Path(store.paths.slots[0][1])
    second.write_bytes(second.read_bytes()[:5000])
    buffers = RankBuffers(store.paths, 0, spread=False)
    assert len(buffers.steps()) == 1
    buffers.close()
    store.close()


def test_a_folder_is_one_runs_and_says_what_differs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    store = Store(folder, run())
    with pytest.raises(SpecError, match="another run uses it"):
        Store(folder, run())
    store.close()
    with pytest.raises(WorldSizeChanged, match="that of 2 ranks, and there are 4 now"):
        Store(folder, run(4))
    with pytest.raises(SpecError, match="seed=7"):
        Store(folder, run(seed=7))
    again = Store(folder, run(threads=5))
    assert again.run["threads"] == 1
    again.close()
    (folder / "training.json").write_text("{")
    with pytest.raises(StateLost, match="damaged"):
        Store(folder, run())


def test_the_memory_of_a_script_is_that_of_the_ranks_of_its_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MemoryCheckpoint, "_is_made", False)
    store = Store(None, run(1))
    paths = ":".join([*store.paths.slots[0], store.paths.table])
    environ = {"RANK": "0", "WORLD_SIZE": "1", "PHALANX_STATE_MEMORY": f"job id {paths}"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    state = State(model=nn.Linear(2, 2))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of a launch within")
    assert MemoryCheckpoint(state)._buffers is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job id")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WorldSizeChanged, match="that of 1 ranks, and there are 2 now"):
        MemoryCheckpoint(state)
    monkeypatch.setenv("WORLD_SIZE", "1")
    kept = MemoryCheckpoint(state)
    dist: Any = torch.distributed
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(WorldSizeChanged, match="that of 1 ranks, and there are 2 now"):
            kept.load()
    finally:
        dist.destroy_process_group()
        cast("RankBuffers", kept._buffers).close()
        store.close()


def test_the_ranks_have_tunables_beside_those_of_the_driver_and_none_that_is_empty() -> None:
    alone, beside = (
        rank_environment(environ)["GLIBC_TUNABLES"].split(":")
        for environ in ({}, {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"})
    )

    assert alone == ["glibc.cpu.x86_non_temporal_threshold=0x40000"]
    assert beside == [*alone, "glibc.malloc.tcache_count=7"]
