"""A device that is not well, or not released by a dead worker, is leased to none."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from typing import Any

import pytest
from tests.support.device_pools import GIB, lease_of, quarantined, release
from tests.support.processes import soon

from phalanx.runtime.devices.device import DeviceQuarantined, DeviceRestored
from phalanx.runtime.devices.inventory import Fault
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
    held = lease_of(pool, 0, holder="a/0")

    gpus.fail(gpus.uuid(0), fault)
    gpus.fail(gpus.uuid(1), fault)
    broken = pool.look()

    assert broken == ({held: f"device {gpus.uuid(0)}: {fault}"} if fatal else {})
    with pytest.raises(NoDevice, match="1: Fake 1 is in quarantine"):
        lease_of(pool, 1)


def test_a_device_that_recovers_from_its_fault_is_leased_again_and_both_are_told() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {})
    told: list[Any] = []
    pool.subscribe(told.append)
    gpus.lose(gpus.uuid(0))
    with pytest.raises(NoDevice):
        lease_of(pool, 0)

    gpus.heal(gpus.uuid(0))

    assert lease_of(pool, 0)
    assert [type(event) for event in told] == [DeviceQuarantined, DeviceRestored]
    assert told[0].fatal


def test_a_fault_that_the_user_accepts_counts_no_more_and_the_next_one_does() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {})
    gpus.report_xid(gpus.uuid(0), 94)
    with pytest.raises(NoDevice):
        lease_of(pool, 0)

    pool.restore(gpus.uuid(0))
    lease = lease_of(pool, 0)
    release(pool, lease)
    gpus.report_xid(gpus.uuid(0), 94)

    with pytest.raises(NoDevice, match="Xid 94"):
        lease_of(pool, 0)


def test_a_fault_may_be_tolerated_from_the_start() -> None:
    gpus = FakeGpus(1)
    gpus.fail(gpus.uuid(0), Fault("ecc", "1 uncorrected ECC error(s)"))
    pool = DevicePool.of("auto", 1, gpus, {}, tolerate=lambda fault: fault.kind == "ecc")

    assert lease_of(pool, 0)
    with pytest.raises(SpecError, match="tolerate='ecc'"):
        DevicePool.of("auto", 1, gpus, {}, tolerate="ecc")


def test_the_user_may_put_a_device_aside() -> None:
    pool = DevicePool.of("auto", 2, FakeGpus(2), {})
    pool.quarantine("cuda:0", "its fan rattles")

    lease = lease_of(pool, 0)

    assert str(lease) == "GPU-00000001-fake"
    assert quarantined(pool) == {"GPU-00000000-fake": "its fan rattles"}
    pool.look()
    assert quarantined(pool)  # nothing but the user's word takes it up again
    pool.restore(0)
    assert lease_of(pool, 0)
    with pytest.raises(SpecError, match="device='GPU-7'"):
        pool.restore("GPU-7")


def test_a_fault_that_passes_gives_back_no_device_that_the_user_has_put_aside() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {})
    pool.quarantine(0, "it is reset")
    gpus.lose(gpus.uuid(0))
    pool.look()
    gpus.heal(gpus.uuid(0))

    with pytest.raises(NoDevice):
        lease_of(pool, 0)

    pool.restore(0)
    assert lease_of(pool, 0)


def test_what_keeps_a_device_is_told_and_survives_pickling() -> None:
    pool = DevicePool.of("auto", 1, FakeGpus(1), {})
    lease_of(pool, 0, holder="embed/0")
    with pytest.raises(NoDevice) as refused:
        lease_of(pool, 0, holder="rank/0")

    copy = pickle.loads(pickle.dumps(refused.value))

    assert str(copy) == "no room for rank/0, which wants a device: 0: Fake 0 is leased to embed/0"
    assert copy.leased == {"0: Fake 0": ("embed/0",)}
    assert not copy.soon


def test_one_log_of_several_groups_hears_of_a_device_once() -> None:
    pool = DevicePool.of("auto", 1, FakeGpus(1), {})
    received: list[Any] = []
    logged: list[Any] = []
    forget = [
        pool.subscribe(partial(received.append), logged.append)  # one of its own each
        for _ in range(2)
    ]

    pool.quarantine(0, "test")
    forget[0]()
    pool.restore(0)

    assert [event.event for event in received] == [
        "phalanx.device_quarantined",
        "phalanx.device_quarantined",
        "phalanx.device_restored",
    ]
    assert len(logged) == 2


def test_a_subscriber_that_raises_costs_no_lease_and_no_other_subscriber_its_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 1, gpus, {})
    told: list[Any] = []

    def fail(_event: object) -> None:
        raise ValueError

    pool.subscribe(fail)
    pool.subscribe(told.append)
    gpus.lose(gpus.uuid(0))

    lease = lease_of(pool, 0)

    assert str(lease) == gpus.uuid(1)
    assert [type(event) for event in told] == [DeviceQuarantined]
    assert [each.exc_type for each in reported] == [ValueError]


def test_a_lease_is_taken_back_when_the_memory_is_released_which_shows_until_then() -> None:
    gpus = FakeGpus(1)
    uuid = gpus.uuid(0)
    gpus.use(uuid, 2 * GIB)  # another program's, there before
    pool = DevicePool.of("auto", 1, gpus, {})
    lease = lease_of(pool, 0)
    gpus.use(uuid, 40 * GIB)

    pool.give_back(lease)
    held = pool.status()[0].releasing_bytes
    gpus.use(uuid, 40 * GIB, 39 * GIB, 2 * GIB)

    assert pool.settle([lease], soon())
    assert gpus.used_bytes(uuid) == 2 * GIB  # all steps were waited for
    assert (held, pool.status()[0].releasing_bytes) == (38 * GIB, 0)


def test_a_device_that_stays_full_is_put_aside_and_another_is_leased() -> None:
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 2, gpus, {}, release_timeout=0.0)
    lease = lease_of(pool, 0, holder="embed/0")
    gpus.use(gpus.uuid(0), 40 * GIB)

    pool.give_back(lease, 4711)
    again = lease_of(pool, 0, again=lease.names)

    assert str(again) == gpus.uuid(1)
    reason = quarantined(pool)[gpus.uuid(0)]
    assert reason == (
        "40.0 GiB in use, 0.0 GiB before embed/0 (pid 4711, dead) held it: not released in time"
    )


def test_a_device_is_leased_again_when_its_memory_comes_back_late() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    told: list[Any] = []
    pool.subscribe(told.append)
    lease = lease_of(pool, 0)
    gpus.use(gpus.uuid(0), 40 * GIB)
    pool.give_back(lease)
    with pytest.raises(NoDevice) as refused:
        lease_of(pool, 0)
    held = pool.status()[0].releasing_bytes
    gpus.use(gpus.uuid(0), 0)

    again = lease_of(pool, 0)

    assert str(again) == gpus.uuid(0)
    assert (held, pool.status()[0].releasing_bytes) == (40 * GIB, 0)
    assert "not released" in refused.value.quarantined["0: Fake 0"]
    assert [type(event) for event in told] == [DeviceQuarantined, DeviceRestored]
    assert (told[0].cause, told[1].why) == ("memory", "recovered")


def test_memory_that_is_not_released_counts_beside_a_fault_that_passes() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    lease = lease_of(pool, 0)
    gpus.use(gpus.uuid(0), 40 * GIB)
    gpus.fail(gpus.uuid(0), Fault("ecc", "2 uncorrected ECC error(s)", count=2))
    pool.look()
    pool.give_back(lease)

    for _ in range(2):  # with the fault, and without
        with pytest.raises(NoDevice, match="in quarantine"):
            lease_of(pool, 0)
        gpus.fail(gpus.uuid(0))
    gpus.use(gpus.uuid(0), 0)

    assert lease_of(pool, 0)


def test_a_rank_waits_for_its_own_device_rather_than_taking_another() -> None:
    gpus = FakeGpus(2)
    pool = DevicePool.of("auto", 2, gpus, {})
    lease = lease_of(pool, 0)
    gpus.use(gpus.uuid(0), 40 * GIB, 40 * GIB, 0)
    pool.give_back(lease)

    with pytest.raises(NoDevice) as refused:
        lease_of(pool, 0, again=lease.names)
    again = lease_of(pool, 0, again=lease.names)

    assert refused.value.soon
    assert str(again) == gpus.uuid(0)


def test_what_other_programs_use_is_taken_out_of_the_sum() -> None:
    gpus = FakeGpus(1)
    uuid = gpus.uuid(0)
    gpus.hold(uuid, {1: 2 * GIB})  # somebody else, there before
    gpus.use(uuid, 2 * GIB)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    lease = lease_of(pool, 0)
    gpus.hold(uuid, {1: 20 * GIB})  # it has grown meanwhile
    gpus.use(uuid, 20 * GIB)

    assert release(pool, lease, 4711)


def test_memory_that_a_dead_process_is_still_listed_with_is_not_released() -> None:
    gpus = FakeGpus(1)
    uuid = gpus.uuid(0)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    lease = lease_of(pool, 0)
    gpus.hold(uuid, {4711: 30 * GIB})
    gpus.use(uuid, 30 * GIB)

    assert not release(pool, lease, 4711)


def test_an_nvml_that_fails_midway_is_not_taken_for_a_release() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    lease = lease_of(pool, 0)
    gpus.use(gpus.uuid(0), None)

    assert not release(pool, lease)

    assert "cannot be measured any more" in quarantined(pool)[gpus.uuid(0)]
    gpus.use(gpus.uuid(0), 0)
    assert lease_of(pool, 0)


def test_a_device_that_nobody_can_measure_is_leased_again_at_once() -> None:
    gpus = FakeGpus(1)
    gpus.use(gpus.uuid(0), None)
    pool = DevicePool.of("auto", 1, gpus, {}, release_timeout=0.0)
    lease = lease_of(pool, 0)

    assert release(pool, lease)
    assert lease_of(pool, 0)


def test_on_a_shared_device_a_dead_process_must_have_left_the_list() -> None:
    gpus = FakeGpus(1)
    uuid = gpus.uuid(0)
    pool = DevicePool.of("auto", 2, gpus, {}, devices_per_rank=0.5)
    first, _ = (lease_of(pool, rank, share=0.5) for rank in range(2))
    gpus.use(uuid, 30 * GIB)
    gpus.hold(uuid, {1: 10 * GIB, 2: 20 * GIB})

    pool.give_back(first, 1)
    with pytest.raises(NoDevice) as refused:
        lease_of(pool, 0, share=0.5, again=first.names)
    gpus.hold(uuid, {2: 20 * GIB})
    gpus.use(uuid, 20 * GIB)

    assert refused.value.soon
    assert pool.settle([first], soon())
    assert lease_of(pool, 0, share=0.5)
    assert pool.status()[0].leased == 1.0


def test_on_a_shared_device_the_rest_is_found_when_the_last_one_leaves() -> None:
    gpus = FakeGpus(1)
    pool = DevicePool.of("auto", 2, gpus, {}, devices_per_rank=0.5, release_timeout=0.0)
    first, second = (lease_of(pool, rank, share=0.5) for rank in range(2))
    gpus.use(gpus.uuid(0), 30 * GIB)

    assert release(pool, first)  # nothing shows whose those 30 GiB are
    assert not release(pool, second)

    assert quarantined(pool)
