"""The file of devices and links, and devices that people describe."""

import json
from typing import Any

import pytest

from blockrelay.errors import UsageError
from blockrelay.planning.devices import MAX_DEVICES, Device, Fleet, decode_fleet, parse_described

CPU = {"id": "cpu:0", "class": "CPU", "host": "a", "memory_bytes": 1000}
GPU = {"id": "gpu0", "class": "GPU", "host": "b", "speed": 2, "bytes_per_second": 9e11, "operations_per_second": 1e13}
LINK = {"between": ["a", "b"], "seconds": 0.001, "seconds_per_byte": 1e-9}


def decoded(**fields: Any) -> Fleet:
    return decode_fleet(json.dumps(fields).encode(), "d.json")


def test_what_a_file_says() -> None:
    fleet = decoded(devices=[CPU, GPU], links=[LINK])
    assert fleet.device("cpu:0") == Device(id="cpu:0", device_class="CPU", host="a", memory_bytes=1000)
    assert fleet.device("gpu0").is_described
    link = fleet.link("b", "a")
    assert link is not None and link.seconds == 0.001, "either way"
    assert fleet.link("a", "a") is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"devices": []}, "d.json: 0 devices; there must be 1 to 1024"),
        ({"devices": [CPU, CPU]}, "d.json: device cpu:0 is there twice"),
        ({"devices": [{**CPU, "id": "no spaces"}]}, r"devices\[0\]: id must be letters, digits"),
        ({"devices": [{**CPU, "memory_bytes": 0}]}, r"devices\[0\]: memory_bytes must be an integer of at least 1"),
        ({"devices": [{**CPU, "speed": 0}]}, r"devices\[0\]: speed must be above 0, not 0"),
        ({"devices": [{**CPU, "sped": 1}]}, r"devices\[0\]: unknown field 'sped'"),
        ({"devices": [CPU], "links": [LINK]}, r"links\[0\]: no device is on host b"),
        ({"devices": [CPU], "links": [{**LINK, "between": ["a"]}]}, "between must be a list of two hosts"),
        ({"devices": [CPU], "links": [{**LINK, "between": ["a", "a"]}]}, "between must be a list of two hosts"),
        ({"devices": [CPU], "hosts": []}, "unknown field 'hosts'"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        decoded(**fields)


def test_ten_thousand_devices_are_a_mistake() -> None:
    devices = [{**CPU, "id": f"cpu:{n}"} for n in range(10_000)]
    with pytest.raises(UsageError, match=f"10000 devices; there must be 1 to {MAX_DEVICES}"):
        decoded(devices=devices)


def test_a_described_device_gets_a_free_id_and_a_host_of_its_own() -> None:
    known = decoded(devices=[CPU, GPU]).devices
    found = parse_described("gpu:24GB:900GB/s:80T/s", known)
    assert found == Device(
        id="gpu1", device_class="GPU", host="new-gpu1", memory_bytes=24 * 10**9, bytes_per_second=9e11,
        operations_per_second=8e13,
    )  # fmt: skip
    assert parse_described("npu:1GB:10GB/s", known).device_class == "npu"


@pytest.mark.parametrize(
    "text", ["gpu", "gpu:24GB", ":24GB:900GB/s", "gpu:24:900GB/s", "gpu:24GB:0B/s", "gpu:1GB:1GB/s:x"]
)
def test_a_description_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--add"):
        parse_described(text, [])


def test_a_host_can_be_taken_away() -> None:
    fleet = decoded(devices=[CPU, GPU], links=[LINK])
    assert [device.id for device in fleet.without_host("b").devices] == ["cpu:0"]
    with pytest.raises(UsageError, match="there is no host c: there are a, b"):
        fleet.without_host("c")
    with pytest.raises(UsageError, match="without host a no device is left"):
        decoded(devices=[CPU]).without_host("a")
