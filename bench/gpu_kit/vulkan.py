"""Lists the devices that Vulkan shows: `python -m bench.gpu_kit.vulkan` prints them as JSON."""

import ctypes
import json
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: Folders into which packages and containers put the descriptions of drivers.
FOLDERS = (
    "/usr/share/vulkan/icd.d",
    "/etc/vulkan/icd.d",
    "/usr/local/share/vulkan/icd.d",
    "/usr/local/nvidia/share/vulkan/icd.d",
)
LOADER = "libvulkan.so.1"
_TYPES = ("other", "integrated GPU", "discrete GPU", "virtual GPU", "CPU")
#: The start of VkPhysicalDeviceProperties: apiVersion, driverVersion, vendorID, deviceID, deviceType, deviceName.
_PROPERTIES = struct.Struct("<5I256s")
#: Bytes for the whole structure, which has 824.
_ROOM = 4096


def descriptions(folders: Iterable[str] = FOLDERS) -> list[Path]:
    """Returns the description files of Vulkan drivers, in the order of the folders."""
    return [file for folder in folders for file in sorted(Path(folder).glob("*.json"))]


def nvidia_description(files: Iterable[Path]) -> Path | None:
    """Returns the description of NVIDIA's driver among these files; None without one."""
    return next((file for file in files if "nvidia" in file.name.lower()), None)


def devices() -> list[dict[str, Any]]:
    """Returns the physical devices with name, type and versions.

    Raises OSError without a loader, and RuntimeError with the status of a call that fails.
    """
    loader = ctypes.CDLL(LOADER)
    # VkInstanceCreateInfo with nothing but its type: sType, pNext, flags, pApplicationInfo, two counts and names.
    create_info = struct.pack("@iPIPIPIP", 1, 0, 0, 0, 0, 0, 0, 0)
    instance, count = ctypes.c_void_p(), ctypes.c_uint32()
    _succeed("vkCreateInstance", loader.vkCreateInstance(create_info, None, ctypes.byref(instance)))
    _succeed("vkEnumeratePhysicalDevices", loader.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None))
    handles = (ctypes.c_void_p * count.value)()
    _succeed("vkEnumeratePhysicalDevices", loader.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles))
    shown: list[dict[str, Any]] = []
    for handle in handles:
        properties = ctypes.create_string_buffer(_ROOM)
        loader.vkGetPhysicalDeviceProperties(ctypes.c_void_p(handle), properties)
        api, driver, vendor, device, kind, name = _PROPERTIES.unpack_from(properties)
        shown.append(
            {
                "name": name.split(b"\0")[0].decode(errors="replace"),
                "type": _TYPES[kind] if kind < len(_TYPES) else str(kind),
                "api": f"{api >> 22 & 0x7F}.{api >> 12 & 0x3FF}.{api & 0xFFF}",
                "driver": f"{driver >> 22}.{driver >> 14 & 0xFF}" if vendor == 0x10DE else hex(driver),
                "id": f"{vendor:04x}:{device:04x}",
            }
        )
    return shown


def _succeed(call: str, status: int) -> None:
    if status < 0:
        raise RuntimeError(f"{call} gave {status}: no driver that this loader can open")


def main() -> int:
    """Prints the devices, or the problem, as one JSON object; returns 0."""
    try:
        print(json.dumps({"devices": devices(), "problem": ""}))
    except (OSError, RuntimeError, AttributeError) as error:
        print(json.dumps({"devices": [], "problem": str(error)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
