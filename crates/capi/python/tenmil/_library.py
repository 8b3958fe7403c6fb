"""Functions and structures of the C library, by ctypes."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int32, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Dict, Tuple

from .errors import TenmilError

READ, WRITE, FLUSH, DEALLOCATE, WRITE_ZEROES, COMPARE = 0, 1, 2, 3, 4, 5
WRITE_UNCORRECTABLE, VERIFY, COPY, COMPARE_AND_WRITE = 6, 7, 8, 9
FUA, MAY_DEALLOCATE = 1, 2
OPEN_READ_ONLY, OPEN_DIRECT = 1, 2
SERVE = {"nvme-tcp": 1, "nbd": 2}
ALLOW_ANY_HOST = 1
EXPORT_READ_ONLY = 1

OPERATIONS = (
    "read",
    "write",
    "flush",
    "deallocate",
    "write-zeroes",
    "compare",
    "write-uncorrectable",
    "verify",
    "copy",
    "compare-and-write",
)
STATUS_CLASSES = (
    "success",
    "invalid",
    "medium",
    "compare",
    "conflict",
    "path",
    "retry",
    "aborted",
    "other",
)
DURABILITIES = ("persistent", "volatile-cache", "none")
EVENTS = ("", "resized", "removed", "medium-error", "medium-changed", "overflowed")


class ContextOptions(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("buffer_bytes", c_uint32)]


class DeviceInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("block_size", c_uint32),
        ("block_count", c_uint64),
        ("depth_max", c_uint32),
        ("queues_max", c_uint32),
        ("segments_max", c_uint32),
        ("atomic_write_blocks", c_uint32),
        ("operations", c_uint32),
        ("durability", c_uint32),
        ("request_blocks_max", c_uint32),
        ("reserved", c_uint32),
    ]


class Event(ctypes.Structure):
    _fields_ = [("size", c_uint32), ("kind", c_uint32), ("lba", c_uint64), ("value", c_uint64)]


class Segment(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("len", c_uint64)]


class Io(ctypes.Structure):
    _fields_ = [
        ("token", c_uint64),
        ("lba", c_uint64),
        ("source_lba", c_uint64),
        ("data", c_void_p),
        ("segments", c_void_p),
        ("blocks", c_uint32),
        ("segment_count", c_uint16),
        ("operation", c_uint8),
        ("flags", c_uint8),
    ]


class Completion(ctypes.Structure):
    _fields_ = [
        ("token", c_uint64),
        ("result", c_uint32),
        ("status", c_uint16),
        ("status_class", c_uint16),
    ]


class Export(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("uri", c_char_p),
        ("functions", c_void_p),
        ("properties", c_void_p),
        ("device", c_void_p),
        ("flags", c_uint32),
        ("reserved", c_uint32),
    ]


class ServerOptions(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("protocol", c_uint32),
        ("address", c_char_p),
        ("nqn", c_char_p),
        ("allowed_hosts", POINTER(c_char_p)),
        ("exports", POINTER(Export)),
        ("allowed_host_count", c_uint32),
        ("export_count", c_uint32),
        ("threads", c_uint32),
        ("flags", c_uint32),
    ]


class Handle(ctypes.Structure):
    """Handle of any object: all have this layout."""

    _fields_ = [("id", c_uint64)]


def _load() -> Tuple[ctypes.CDLL, ctypes.PyDLL]:
    path = os.environ.get("TENMIL_LIBRARY") or str(Path(__file__).with_name("libtenmil.so"))
    return ctypes.CDLL(path), ctypes.PyDLL(path)


# Calls that may block release the GIL; those that return at once keep it, which is faster.
_blocking, _brief = _load()

_FUNCTIONS: Dict[ctypes.CDLL, Dict[str, Tuple[Any, ...]]] = {
    _blocking: {
        "context_create": (POINTER(ContextOptions), POINTER(Handle)),
        "context_destroy": (Handle,),
        "open": (Handle, c_char_p, c_uint32, POINTER(Handle)),
        "close": (Handle,),
        "device_refresh": (Handle,),
        "queue_create": (Handle, c_uint32, POINTER(Handle)),
        "queue_destroy": (Handle,),
        "memory_register": (Handle, c_void_p, c_size_t),
        "memory_unregister": (Handle, c_void_p),
        "server_start": (POINTER(ServerOptions), POINTER(Handle)),
        "server_stop": (Handle,),
    },
    _brief: {
        "buffer_alloc": (Handle, c_uint64, POINTER(c_void_p)),
        "buffer_free": (Handle, c_void_p),
        "device_get_info": (Handle, POINTER(DeviceInfo)),
        "device_event_fd": (Handle, POINTER(c_int32)),
        "device_next_event": (Handle, POINTER(Event)),
        "submit": (Handle, c_void_p, c_uint32),
        "poll": (Handle, c_void_p, c_uint32),
        "queue_in_flight": (Handle, POINTER(c_uint32)),
        "queue_event_fd": (Handle, POINTER(c_int32)),
        "queue_arm": (Handle, POINTER(c_uint64)),
        "queue_detach": (Handle,),
        "queue_attach": (Handle,),
        "server_uri": (Handle, c_uint32, c_char_p, c_size_t),
    },
}


class Functions:
    """The functions of the library, without their prefix."""


functions: Any = Functions()
for _library, _table in _FUNCTIONS.items():
    for _name, _arguments in _table.items():
        _function = getattr(_library, f"tenmil_{_name}")
        _function.argtypes, _function.restype = _arguments, c_int32
        setattr(functions, _name, _function)
for _name, _arguments, _result in (
    ("last_error", (), c_char_p),
    ("last_hint", (), c_char_p),
    ("error_name", (c_int32,), c_char_p),
    ("version", (), c_char_p),
    ("status_text", (c_uint16, c_char_p, c_size_t), c_size_t),
):
    _function = getattr(_brief, f"tenmil_{_name}")
    _function.argtypes, _function.restype = _arguments, _result
    setattr(functions, _name, _function)


def check(code: int) -> int:
    """Returns the result of a function, or raises its error."""
    if code < 0:
        raise last_error(code)
    return code


def last_error(code: int) -> TenmilError:
    """The error that a function of this thread has returned."""
    text, hint = functions.last_error().decode(), functions.last_hint().decode()
    return TenmilError(functions.error_name(code).decode(), text, hint)


def status_text(status: int) -> str:
    text = ctypes.create_string_buffer(256)
    functions.status_text(status, text, len(text))
    return text.value.decode()
