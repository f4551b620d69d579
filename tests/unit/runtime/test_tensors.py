"""Tensors travel through host memory, and land where the reader's process says."""

from __future__ import annotations

import copyreg
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.programs import run_python

from phalanx.runtime.wire.codec import decode, encode, encode_by_value
from phalanx.runtime.wire.tensor_reducers import place_on, reduce_tensor

torch: Any = pytest.importorskip("torch")


@pytest.fixture
def placed_on_meta() -> Iterator[None]:
    """Land on torch's device without memory: it is on every machine, and it is not the host."""
    place_on("meta")
    yield
    place_on(None)


class OnGpu:
    """What the reducer sees of a tensor on a GPU; its ``cpu`` is the copy to the host."""

    __slots__ = ("_host", "copies", "device", "requires_grad")

    dtype = torch.float32
    layout = torch.strided
    is_cpu = False
    is_quantized = False
    is_nested = False

    def __init__(self, host: Any, *, requires_grad: bool = False) -> None:
        self._host = host
        self.requires_grad = requires_grad
        self.device = torch.device("cuda", 3)
        self.copies = 0

    def detach(self) -> OnGpu:
        return self

    def cpu(self) -> Any:
        self.copies += 1
        return self._host

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return reduce_tensor(self)


def travel(value: object) -> Any:
    encoded = encode(value, "a value")
    return decode(encoded.body, [memoryview(bytearray(view)) for view in encoded.buffers])


class Foreign:
    pass


def test_a_reducer_that_is_registered_behind_the_first_message_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    travel(torch.zeros(1))

    monkeypatch.setitem(copyreg.dispatch_table, Foreign, lambda _: (int, ("7",)))

    assert travel(Foreign()) == 7


@pytest.mark.parametrize("size", [0, 3, 1 << 16])
def test_a_tensor_from_a_gpu_arrives_on_the_host_of_a_process_without(size: int) -> None:
    tensor = OnGpu(torch.arange(size, dtype=torch.float32))

    arrived = travel({"x": [tensor]})["x"][0]

    assert arrived.device.type == "cpu"
    assert torch.equal(arrived, torch.arange(size, dtype=torch.float32))
    assert tensor.copies == 1
    arrived.add_(1)  # it is the reader's own


@pytest.mark.usefixtures("placed_on_meta")
def test_a_tensor_from_a_gpu_lands_on_the_device_of_the_reader_and_one_of_the_host_stays() -> None:
    arrived = travel(OnGpu(torch.ones(2, 3), requires_grad=True))

    assert (arrived.device.type, tuple(arrived.shape)) == ("meta", (2, 3))
    assert arrived.requires_grad
    assert arrived.is_leaf
    assert travel(torch.ones(2)).device.type == "cpu"


def test_a_parameter_of_a_gpu_module_arrives_as_one() -> None:
    # What torch makes of a parameter: a tensor of its own, and how to wrap it again.
    parameter = torch.nn.Parameter(torch.ones(4))
    make, (data, *rest) = parameter.__reduce_ex__(5)

    arrived = make(travel(OnGpu(data)), *rest)

    assert isinstance(arrived, torch.nn.Parameter)
    assert torch.equal(arrived, parameter)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.view(4, 6, 10, 300).to(memory_format=torch.channels_last),
        lambda x: x.view(240, 300).t(),
        lambda x: x.view(4, 6, 3000).permute(2, 0, 1),
        lambda x: x.view(240, 300)[::2, 5:-5],
        lambda x: x[:300].expand(240, 300),
        lambda x: x.view(240, 300).t().bfloat16().requires_grad_(),
        lambda x: x[:0].view(0, 3).t(),
        lambda x: torch.view_as_complex(x.view(-1, 2)).conj().view(60, 600).t(),
    ],
    ids=["channels", "transposed", "permuted", "cut", "expanded", "grad", "empty", "conj"],
)
def test_a_tensor_is_the_same_however_it_lies_in_memory(make: Any) -> None:
    tensor = make(torch.arange(72_000, dtype=torch.float32))

    arrived = travel(tensor)

    assert torch.equal(arrived, tensor)
    assert (arrived.dtype, arrived.requires_grad) == (tensor.dtype, tensor.requires_grad)
    assert arrived.is_leaf
    if tensor.numel() and torch.ops.aten.is_non_overlapping_and_dense(tensor):
        assert arrived.stride() == tensor.stride()


def test_a_dense_tensor_is_not_copied_to_be_sent_whatever_its_order() -> None:
    tensor = torch.zeros(300, 200).t()
    encoded = encode(tensor, "a value")

    tensor.fill_(1)

    assert decode(encoded.body, encoded.buffers).sum() == tensor.numel()


def test_what_was_set_on_a_tensor_travels_with_it() -> None:
    tensor = torch.zeros(70_000)
    tensor.tag = {"layer": 3}

    assert travel([tensor, tensor])[1].tag == {"layer": 3}


@pytest.mark.filterwarnings("ignore")  # torch has something to say of each of these
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones(5).untyped_storage(),
    ],
    ids=["sparse", "csr", "quantized", "nested", "storage"],
)
def test_other_kinds_travel_too(make: Any) -> None:
    value = make()

    arrived = travel(value)

    assert type(arrived) is type(value)
    if isinstance(value, torch.UntypedStorage):
        assert arrived.tolist() == value.tolist()
        return
    parts = (each.unbind() if value.is_nested else [each] for each in (arrived, value))
    for one, other in zip(*parts, strict=True):
        dense = [x.dequantize() if x.is_quantized else x.to_dense() for x in (one, other)]
        assert torch.equal(*dense)


def test_what_is_sent_once_and_kept_travels_in_the_same_way() -> None:
    arrived = pickle.loads(encode_by_value((OnGpu(torch.ones(4)), torch.ones(70_000)), "arguments"))

    assert [tensor.device.type for tensor in arrived] == ["cpu", "cpu"]


def test_a_process_without_torch_reads_and_writes_without_it() -> None:
    code = (
        "import sys; from phalanx.runtime.wire.codec import decode, encode\n"
        "print(decode(encode({'a': 1}, 'x').body), 'torch' in sys.modules)"
    )

    assert run_python("-c", code).stdout == "{'a': 1} False\n"
