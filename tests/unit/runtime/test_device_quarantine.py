"""A device that is not well is leased to nobody, and everybody who listens is told once."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from tests.support.device_pools import quarantined, release

from phalanx.runtime.devices.gpu import Fault
from phalanx.runtime.devices.pool import DevicePool
from phalanx.supervision import NoDevice, SpecError
from phalanx.testing import FakeGpus


@pytest.mark.parametrize(
    ("fault", "fatal"),
    [
        (Fault("lost", "GPU is lost", fatal=True), True),
        (Fault("xid", "Xid 79", fatal=True), True),
        (Fault("xid", "Xid 94"), False),
        (Fault("ecc", "2 uncorrected ECC error(s)", count=2), False),
        (Fault("recovery", "it asks for a reset", fatal=True), True),
        (Fault("unknown", "NVML: Unknown Error"), False),
    ],
)
def test_a_device_with_a_fault_is_not_leased_and_one_that_is_leased_says_so(
    fault: Fault, fatal: bool
) -> None:
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 2, gpus, {})
    held = pool.acquire(0, holder="a/0")

    gpus.fail(gpus.uuid(0), fault)
    gpus.fail(gpus.uuid(1), fault)
    broken = pool.look()

    assert broken == ({held: f"device {gpus.uuid(0)}: {fault}"} if fatal else {})
    with pytest.raises(NoDevice, match="1: Fake 1 is in quarantine"):
        pool.acquire(1)


def test_a_device_that_recovers_from_its_fault_is_leased_again() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {})
    gpus.lose(gpus.uuid(0))
    with pytest.raises(NoDevice):
        pool.acquire(0)

    gpus.heal(gpus.uuid(0))

    assert pool.acquire(0)


def test_what_is_found_while_a_lease_is_refused_is_told() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {})
    told: list[Any] = []
    pool.subscribe(told.append)
    gpus.lose(gpus.uuid(0))

    with pytest.raises(NoDevice):
        pool.acquire(0)

    assert [(event.event, event.fatal) for event in told] == [("phalanx.device_quarantined", True)]


def test_a_fault_that_the_user_accepts_counts_no_more_and_the_next_one_does() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {})
    gpus.report_xid(gpus.uuid(0), 94)
    with pytest.raises(NoDevice):
        pool.acquire(0)

    pool.restore(gpus.uuid(0))
    lease = pool.acquire(0)
    release(pool, lease)
    gpus.report_xid(gpus.uuid(0), 94)

    with pytest.raises(NoDevice, match="Xid 94"):
        pool.acquire(0)


def test_a_fault_may_be_tolerated_from_the_start() -> None:
    gpus = FakeGpus(1)
    gpus.fail(gpus.uuid(0), Fault("ecc", "1 uncorrected ECC error(s)"))
    pool = DevicePool.of("auto", 1, gpus, {}, tolerate=lambda fault: fault.kind == "ecc")

    assert pool.acquire(0)


def test_the_user_may_put_a_device_aside() -> None:
    pool = DevicePool.of("auto", 2, FakeGpus(2), {})
    pool.quarantine("cuda:0", "its fan rattles")

    lease = pool.acquire(0)

    assert str(lease) == "GPU-00000001-fake"
    assert quarantined(pool) == {"GPU-00000000-fake": "its fan rattles"}
    pool.look()
    assert quarantined(pool)  # nothing but the user's word takes it up again
    pool.restore(0)
    assert pool.acquire(0)
    with pytest.raises(SpecError, match="device='GPU-7'"):
        pool.restore("GPU-7")


def test_what_keeps_a_device_is_told_and_survives_pickling() -> None:
    pool = DevicePool.of("auto", 1, FakeGpus(1), {})
    pool.acquire(0, holder="embed/0")
    with pytest.raises(NoDevice) as refused:
        pool.acquire(0, holder="rank/0")

    copy = pickle.loads(pickle.dumps(refused.value))

    assert str(copy) == "no room for rank/0, which wants a device: 0: Fake 0 is leased to embed/0"
    assert copy.leased == {"0: Fake 0": ("embed/0",)}
    assert not copy.soon


def test_one_log_of_several_groups_hears_of_a_device_once() -> None:
    pool = DevicePool.of("auto", 1, FakeGpus(1), {})
    heard: list[Any] = []
    logged: list[Any] = []
    forget = [pool.subscribe(heard.append, logged.append) for _ in range(2)]

    pool.quarantine(0, "test")
    forget[0]()
    pool.restore(0)

    assert [event.event for event in heard] == [
        "phalanx.device_quarantined",
        "phalanx.device_quarantined",
        "phalanx.device_restored",
    ]
    assert len(logged) == 2
