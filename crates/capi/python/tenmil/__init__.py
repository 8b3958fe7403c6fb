"""Block devices by URI: NVMe over TCP, SSDs, files, volumes.

    with tenmil.open("ram:64m") as device:
        device.write(0, b"x" * 4096)
        data = device.read(0, 4096)

`tenmil.aio` has the same for asyncio, `tenmil.Batch` many I/Os in one call, and `tenmil.Server` serves devices.
"""

from . import aio
from .batch import Batch
from .device import Context, Device, default_context
from .errors import StatusError, TenmilError
from .queue import Io, Queue
from .server import Server
from ._library import functions as _functions

__version__ = _functions.version().decode()
__all__ = [
    "Batch",
    "Context",
    "Device",
    "Io",
    "Queue",
    "Server",
    "StatusError",
    "TenmilError",
    "aio",
    "default_context",
    "open",
]


def open(uri: str, *, read_only: bool = False, direct: bool = False) -> Device:
    """Opens the device of a URI. `direct` opens it without the block layer, as TENMIL_OPEN_DIRECT does in C."""
    return default_context().open(uri, read_only=read_only, direct=direct)
