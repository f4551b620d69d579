"""The parts of the plug-in for vLLM that decide, without vLLM."""

from __future__ import annotations

import json
import mmap
import re
from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.programs import run_python

from phalanx import BackOff, Intensity
from phalanx.errors import SpecError
from phalanx.integrations.vllm import Policy, Unsupported, compat, supervised
from phalanx.integrations.vllm.compat import TESTED, check_version, installed_version
from phalanx.integrations.vllm.journal import REPEATABLE, Entry, Journal
from phalanx.integrations.vllm.policy import check_config, device_names
from phalanx.integrations.vllm.recovery import NotRestored
from phalanx.integrations.vllm.worker.engine_worker import EngineWorker
from phalanx.integrations.vllm.worker.resumption import (
    Resumption,
    drop_in_flight,
    obstacle,
    rewindable,
)
from phalanx.integrations.vllm.worker.shm_names import marked_address
from phalanx.integrations.vllm.worker.zero_pages import ZeroPages


def config(**parallel: Any) -> Any:
    sizes = {"nnodes": 1, "nnodes_within_dp": 1, "data_parallel_size": 1, **parallel}
    off = dict.fromkeys(("enable_elastic_ep", "enable_fault_tolerance", "numa_bind"), False)
    multimodal = SimpleNamespace(mm_processor_cache_type="lru")
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes, **off),
        model_config=SimpleNamespace(multimodal_config=multimodal),
        kv_transfer_config=None,
        ec_transfer_config=None,
    )


def request(**fields: Any) -> Any:
    usual = {
        "num_in_flight_tokens": 0,
        "num_stale_output_tokens": 0,
        "drop_stale_output": False,
        "num_computed_tokens": 0,
        "num_output_tokens": 0,
        "resumable": False,
        "sampling_params": SimpleNamespace(seed=None, temperature=1.0),
        "pooling_params": None,
    }
    return SimpleNamespace(**{**usual, **fields})


# --- what is needed of vLLM ---------------------------------------------------------------


@pytest.mark.parametrize(
    "version", ["0.31.4", "0.34.0", "1.0", "0.35.0+cpu", "0.32.0.dev5+g1", "dev"]
)
def test_a_version_that_lacks_something_is_refused_by_name_with_what_it_lacks(version: str) -> None:
    with pytest.raises(Unsupported) as caught:
        check_version(version, lambda: ["vllm.v1.request:Request: no status"])

    assert version in str(caught.value)
    assert f">={TESTED[0][0]}.{TESTED[0][1]}" in str(caught.value)
    assert version == "0.31.4" or "Request: no status" in str(caught.value)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.32.0rc1", "0.33.0"])
def test_a_tested_version_is_taken_without_a_probe(version: str) -> None:
    check_version(version, lambda: ["not asked"])


def test_a_newer_version_that_lacks_nothing_is_taken_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def probe() -> list[str]:
        return []

    for _ in range(2):
        check_version("0.40.1", probe)

    (record,) = caplog.records
    assert "vllm_untested version=0.40.1" in record.getMessage()


class Something:
    field: int

    def __init__(self, given: int) -> None:
        self.kept = given

    def method(self, known: int, more: int = 0) -> int:
        return known + more


class Mapped(dict[str, int]):
    """One whose base is written in C."""


def test_the_probe_names_what_is_missing() -> None:
    fits = "(given) (_) field kept method(known) method(_)  method(_,_) method(known,more)!"
    misfits = "gone method(known,other) method() method(_)! () method(_,_,_)"

    assert list(compat._lacks(Something, fits.split())) == []
    assert list(compat._lacks(Something, misfits.split())) == [
        "no gone",
        "method: got an unexpected keyword argument 'other'",
        "method: missing a required argument: 'known'",
        "method: it may be given more",
        "it: missing a required argument: 'given'",
        "method: too many positional arguments",
    ]
    assert list(compat._lacks(len, ["(_)", "(_,_)"])) == ["it: too many positional arguments"]
    assert list(compat._lacks(Mapped, ["keys", "gone"])) == ["no gone"]


@pytest.mark.skipif(installed_version() is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install() -> None:
    with pytest.raises(Unsupported, match=r"pip install 'phalanx\[vllm\]'"):
        supervised()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nnodes", 2),
        ("nnodes_within_dp", 2),
        ("data_parallel_size", 2),
        ("enable_elastic_ep", True),
        ("enable_fault_tolerance", True),
        ("numa_bind", True),
        ("kv_transfer_config", "nixl"),
        ("mm_processor_cache_type", "shm"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    given = config()
    places = (given, given.parallel_config, given.model_config.multimodal_config)
    vars(next(each for each in places if field in vars(each)))[field] = value

    with pytest.raises(SpecError) as caught:
        check_config(given)

    assert (caught.value.field, caught.value.value) == (field, value)


def test_one_node_is_taken() -> None:
    check_config(config())


def test_every_field_of_vllms_that_decides_whether_a_configuration_is_taken_is_probed() -> None:
    probed = {word for row in compat._ROWS for word in row}
    given = config()

    assert set(vars(given)) | set(vars(given.parallel_config)) <= probed
    assert {"multimodal_config", "mm_processor_cache_type", "assigned_physical_gpu_ids"} <= probed


def test_vllm_is_imported_in_one_file() -> None:
    folder = Path(compat.__file__).parent
    importing = re.compile(r"^ *(from|import) vllm\b|import_module\(.vllm", re.MULTILINE)

    found = [path.name for path in folder.rglob("*.py") if importing.search(path.read_text())]

    assert found == []  # `compat` resolves names


def test_it_is_registered_with_vllm_and_does_nothing_where_no_engine_of_ours_runs() -> None:
    (entry,) = (
        each for each in entry_points(group="vllm.general_plugins") if each.name == "phalanx"
    )

    done = run_python(
        "-c",
        f"import os, sys; from {entry.module} import {entry.attr} as register\n"
        "os.environ.pop('PHALANX_VLLM_STATE', None); register()\n"
        "print('vllm' in sys.modules, 'PHALANX_VLLM_STATE' in os.environ)",
    )

    assert done.stdout.split() == ["False", "False"], done.stderr


def test_the_core_does_not_import_it() -> None:
    code = "import sys, phalanx, phalanx.cli; print('phalanx.integrations' in sys.modules)"

    assert run_python("-c", code).stdout.strip() == "False"


# --- devices ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "assigned", "engine", "names"),
    [
        (None, None, 0, "cuda"),
        ("4,5,6,7", None, None, "cuda"),
        (None, None, 1, ["2", "3"]),
        ("4,5,6,7", None, 1, ["6", "7"]),
        ("GPU-a, GPU-b,GPU-c,GPU-d", None, 1, ["GPU-c", "GPU-d"]),
        ("MIG-a,MIG-b,MIG-c,MIG-d", None, 1, ["MIG-c", "MIG-d"]),
        ("4,5,6,7", [7, 6, 5, 4], 0, ["7", "6"]),
        ("4,5,6,7", [7, 6, 5, 4], 1, ["5", "4"]),
        ("4,5", None, 1, []),  # too few: the group says so
    ],
)
def test_each_engine_of_dense_data_parallelism_has_its_share_of_the_visible_gpus(
    mask: str | None, assigned: list[int] | None, engine: int | None, names: str | list[str]
) -> None:
    parallel = SimpleNamespace(
        world_size=2,
        data_parallel_rank_local=engine,
        data_parallel_index=0,
        assigned_physical_gpu_ids=assigned,
    )

    assert device_names(mask, parallel) == names


# --- the policy ---------------------------------------------------------------------------

POLICIES = [
    Policy(),
    Policy(intensity=Intensity(3, 30.0), standby=2, hang_after=20.0, stopped_after=None),
    Policy(backoff=BackOff(initial=0.5), report_dir="/var/reports", launch="exec"),
    Policy(preload=("mine",), replay=("update", "scale")),
    Policy(
        replay=("update",), superseding=("update",), harmless=("look",), on_weights_lost="mine:set"
    ),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_the_same_after_it_has_travelled_as_json(policy: Policy) -> None:
    travelled = json.loads(json.dumps(policy.to_json()))

    assert Policy.from_json(travelled) == policy


def test_a_policy_is_found_in_what_vllm_carries() -> None:
    assert Policy.of_config({"phalanx": {"standby": 2}, "mine": 1}) == Policy(standby=2)
    assert Policy.of_config({}) == Policy()
    for half in ([3], {"max_restarts": 3}):  # the rest is the plug-in's default
        assert Policy.from_json({"intensity": half}).intensity == Intensity(3, 60.0)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"retries": 3}, "phalanx.retries"),
        ({"intensity": 3}, "intensity"),
        ({"intensity": [3, 60, 1]}, "phalanx.intensity.more"),
        ({"intensity": [3, 0]}, "period"),
        ({"backoff": {"first": 1}}, "phalanx.backoff.first"),
        ({"standby": -1}, "standby"),
        ({"hang_after": 0}, "hang_after"),
        ({"launch": "inline"}, "launch"),
        ({"replay": "update"}, "replay"),
        ({"preload": [""]}, "preload"),
        ({"replay": ["update"], "superseding": ["finish"]}, "superseding"),
        ({"on_weights_lost": "no module"}, "on_weights_lost"),
        ({"replay": ["update"], "harmless": ["update"]}, "harmless"),
        ({"replay": ["update", "sleep"]}, "replay"),
        ("yes", "phalanx"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_by_name(said: Any, field: str) -> None:
    with pytest.raises(SpecError) as caught:
        Policy.from_json(said)

    assert caught.value.field == field


# --- the journal --------------------------------------------------------------------------


def told(journal: Journal) -> list[Any]:
    return [entry.method for entry in journal.entries()]


def test_a_new_worker_is_told_the_start_in_its_order_with_the_saved_arguments() -> None:
    journal = Journal()
    journal.note("get_kv_cache_spec")
    journal.note("set_kv_cache_layout", ("NHD",))
    journal.note("determine_available_memory", (), {}, [7, 8])
    journal.note("initialize_from_config", (["blocks"],))
    journal.note("update_max_model_len", (128,))
    journal.note("compile_or_warm_up_model")

    entries = journal.entries()

    assert [entry.method for entry in entries] == [
        "set_kv_cache_layout",
        "determine_available_memory",
        "update_max_model_len",
        "initialize_from_config",
        "compile_or_warm_up_model",
    ]
    assert entries[1].answers == (7, 8)
    assert entries[3].args == (["blocks"],)


def test_adapters_that_a_request_would_not_load_alike_are_loaded_again() -> None:
    journal = Journal()
    for number, load_inplace in ((1, False), (2, False), (3, False), (4, True)):
        added = SimpleNamespace(lora_int_id=number, load_inplace=load_inplace)
        journal.note("add_lora", (added,))
    journal.note("pin_lora", (2,))
    journal.note("pin_lora", (1,))
    journal.note("remove_lora", (1,))

    assert [
        (e.method, getattr(e.args[0], "lora_int_id", e.args[0])) for e in journal.entries()
    ] == [
        ("add_lora", 2),
        ("add_lora", 4),
        ("pin_lora", 2),
    ]


def test_a_profile_goes_on_until_it_is_stopped() -> None:
    journal = Journal()

    journal.note("profile", (True, "mine"), {})
    running = told(journal)
    journal.note("profile", (False, None), {})

    assert (running, told(journal)) == (["profile"], [])


def test_no_step_is_among_what_may_be_made_twice() -> None:
    assert not REPEATABLE & {"execute_model", "sample_tokens", "take_draft_token_ids"}


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (FileNotFoundError("adapter_config.json"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
    ],
)
def test_an_adapter_is_left_out_of_a_replay_unless_its_device_is_unusable(
    error: Exception, ends: bool
) -> None:
    def add_lora(_request: object) -> None:
        raise error

    warnings: list[str] = []
    log = SimpleNamespace(warning=lambda event, **_: warnings.append(event))
    worker: Any = EngineWorker(b"", "mark")
    worker.ctx = SimpleNamespace(epoch=1, log=log)
    worker._worker = SimpleNamespace(add_lora=add_lora)

    with pytest.raises(NotRestored, match="illegal memory") if ends else nullcontext():
        worker.prepare(1, [Entry("add_lora", (None,))])

    assert warnings == ([] if ends else ["phalanx.vllm_adapter_lost"])


# --- requests -----------------------------------------------------------------------------


def test_what_was_in_flight_is_dropped_also_where_it_would_have_been_taken() -> None:
    flying = request(num_in_flight_tokens=5, num_stale_output_tokens=2)
    idle = request()

    drop_in_flight(flying)
    drop_in_flight(idle)

    assert (flying.num_stale_output_tokens, flying.drop_stale_output) == (5, True)
    assert not idle.drop_stale_output


def late(mode: str) -> Any:
    return SimpleNamespace(late_interaction_params=SimpleNamespace(mode=mode))


SEEDED = {"sampling_params": SimpleNamespace(seed=1, temperature=0.5)}
GREEDY = {"sampling_params": SimpleNamespace(seed=1, temperature=0.0)}


@pytest.mark.parametrize(
    ("fields", "speculates", "keeps_generators", "ends"),
    [
        ({}, True, True, False),
        ({"resumable": True}, False, False, False),
        ({"resumable": True, "num_computed_tokens": 4}, False, False, True),
        ({"sampling_params": None}, True, True, False),
        ({"sampling_params": None, "pooling_params": late("cache_query")}, False, True, False),
        ({"sampling_params": None, "pooling_params": late("score_doc")}, False, True, True),
        ({"sampling_params": None, "pooling_params": SimpleNamespace()}, False, True, False),
        (SEEDED, True, True, False),
        ({**SEEDED, "num_output_tokens": 3}, True, True, True),
        ({**SEEDED, "num_output_tokens": 3}, True, False, False),
        ({**GREEDY, "num_output_tokens": 3}, True, True, False),
    ],
)
def test_only_what_cannot_be_continued_exactly_ends(
    fields: dict[str, Any], speculates: bool, keeps_generators: bool, ends: bool
) -> None:
    why = obstacle(
        request(**fields),
        is_running=False,
        speculates=speculates,
        keeps_generators=keeps_generators,
    )

    assert (why is not None) == ends


# --- a worker that takes requests up --------------------------------------------------------


def draw(generator: torch.Generator) -> int:
    return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long))


def runner() -> Any:
    def forward_cpu() -> None: ...

    return SimpleNamespace(
        requests={},
        sampler=SimpleNamespace(
            topk_topp_sampler=SimpleNamespace(forward=forward_cpu, use_fp64_gumbel=False)
        ),
    )


def record_of(seed: int | None) -> Any:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        req_id="r",
        output_token_ids=[],
        generator=generator,
        sampling_params=SimpleNamespace(seed=seed),
    )


def step_with(tokens: list[int] | None, seed: int | None) -> Any:
    new = SimpleNamespace(
        req_id="r",
        prompt_len=2,
        prefill_token_ids=tokens,
        sampling_params=SimpleNamespace(seed=seed, prompt_logprobs=3),
    )
    return SimpleNamespace(scheduled_new_reqs=[new])


def test_a_request_is_taken_up_with_its_output_and_the_place_of_its_generator() -> None:
    requests, record = Resumption(runner()), record_of(5)
    step = step_with([1, 2, 30, 40, 50], 5)
    never_died = torch.Generator().manual_seed(5)
    for _ in range(3):
        draw(never_died)

    requests.expect(step)
    requests["r"] = record

    assert requests == {"r": record}
    assert record.output_token_ids == [30, 40, 50]
    assert step.scheduled_new_reqs[0].sampling_params.prompt_logprobs is None
    assert draw(record.generator) == draw(never_died)


def test_a_request_that_is_new_is_left_as_it_is() -> None:
    requests, record = Resumption(runner()), record_of(None)
    step = step_with(None, None)

    requests.expect(step_with([1, 2, 30], None))  # it was not computed
    requests.expect(step)
    requests["r"] = record

    assert record.output_token_ids == []
    assert step.scheduled_new_reqs[0].sampling_params.prompt_logprobs == 3


def test_a_generator_on_the_cpu_steps_back_to_where_the_output_ends() -> None:
    record = record_of(9)
    record.output_token_ids = [4, 4]
    generator = rewindable(record, draw)
    expected = torch.Generator().manual_seed(9)
    for _ in range(2):
        draw(expected)
    for _ in range(3):  # the third for a token that is thrown away
        draw(generator)

    generator.set_offset(generator.get_offset() - 4)

    assert draw(generator) == draw(expected)


def test_ranks_meet_at_an_address_that_bears_the_mark_in_its_last_part() -> None:
    address = marked_address("127.0.0.1", 4711, "phxab", 3)

    assert address.startswith("tcp://127.0.0.1:4711")
    assert "phxabe3x" in address.split(":")[-1]


def test_bytes_of_zero_take_no_memory_before_they_are_used() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size, before = 1 << 28, resident()
    with ZeroPages():
        zeros = torch.zeros(size, dtype=torch.int8, device=torch.device("cpu"))

    assert resident() - before < size // 2
    assert (zeros.shape, zeros.dtype, zeros.is_contiguous()) == ((size,), torch.int8, True)
    zeros[1:3] = 3
    assert zeros.view(torch.float32)[:: size // 64].count_nonzero() == 1


@pytest.mark.parametrize("size", [5, (), (2, 3)])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dtype": torch.int8},
        {"dtype": torch.int64, "device": torch.device("cpu")},
        {"dtype": torch.int8, "device": torch.device("meta")},
        {"dtype": torch.int8, "device": torch.device("cpu")},
    ],
)
def test_other_zeros_are_as_torch_makes_them(size: Any, given: dict[str, Any]) -> None:
    expected = torch.zeros(size, **given)

    with ZeroPages():
        zeros = torch.zeros(size, **given)

    assert zeros.shape == expected.shape
    assert (zeros.dtype, zeros.device) == (expected.dtype, expected.device)
    assert zeros.is_meta or torch.equal(zeros, expected)
