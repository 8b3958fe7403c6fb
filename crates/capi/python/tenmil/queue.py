"""Queues: I/Os of one device, submitted and polled by one thread."""

from __future__ import annotations

import ctypes
import select
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

from . import _library as library
from ._library import Io, check, functions
from .errors import StatusError

if TYPE_CHECKING:
    from .device import Device

__all__ = ["Io", "Queue"]

#: Polls without a completion before the thread sleeps.
SPINS = 100
NEVER = 2**64 - 1


class Queue:
    """Queue of a device. It belongs to the thread that has created or attached it."""

    def __init__(self, device: "Device", depth: int = 0) -> None:
        handle = library.Handle()
        check(functions.queue_create(device.handle, depth, handle))
        #: Numbers of I/Os, bytes and errors, by operation.
        self.counts: Dict[str, List[int]] = {}
        self.device = device
        self.handle: Optional[library.Handle] = handle
        self._completion = library.Completion()
        self._completion_at = ctypes.addressof(self._completion)
        self._timeout = ctypes.c_uint64()
        self._descriptor: Optional[int] = None
        self._readable: Optional[select.poll] = None
        device._queues.add(self)

    def submit(self, ios: Sequence[Io]) -> int:
        """Submits I/Os from the front, and returns how many were accepted."""
        array = (Io * len(ios))(*ios)
        return self.submit_array(ctypes.addressof(array), len(ios))

    def submit_array(self, address: int, count: int) -> int:
        """Submits an array of structures at an address."""
        return check(functions.submit(self._open(), address, count))

    def poll(self, most: int = 64) -> List[Tuple[int, int, str]]:
        """Completions that are available: token, status, and class of the status."""
        array = (library.Completion * most)()
        count = self.poll_array(ctypes.addressof(array), most)
        return [(done.token, done.status, class_of(done.status_class)) for done in array[:count]]

    def poll_array(self, address: int, most: int) -> int:
        """Writes completions to an array of structures at an address."""
        return check(functions.poll(self._open(), address, most))

    def in_flight(self) -> int:
        count = ctypes.c_uint32()
        check(functions.queue_in_flight(self._open(), count))
        return count.value

    def event_fd(self) -> int:
        """Descriptor that is readable when an armed queue has completions, or -1."""
        if self._descriptor is None:
            descriptor = ctypes.c_int32()
            check(functions.queue_event_fd(self._open(), descriptor))
            self._descriptor = descriptor.value
        return self._descriptor

    def arm(self) -> Optional[float]:
        """Prepares a sleep. Returns its longest time in seconds, infinity for no limit, or None if a completion
        may be available."""
        if check(functions.queue_arm(self._open(), self._timeout)) == 0:
            return None
        ns = self._timeout.value
        return float("inf") if ns == NEVER else ns / 1e9

    def detach(self) -> None:
        check(functions.queue_detach(self._open()))

    def attach(self) -> None:
        check(functions.queue_attach(self._open()))

    def close(self) -> None:
        """Destroys the queue. I/Os in flight are abandoned."""
        check(functions.queue_destroy(self._open()))
        self.handle = None
        self.device._retire(self)

    def run(self, io: Io, len_bytes: int) -> None:
        """Submits one I/O and waits for it."""
        while self.submit_array(ctypes.addressof(io), 1) == 0:
            self.sleep()
        done, turns = self._completion, 0
        while check(functions.poll(self.handle, self._completion_at, 1)) == 0:
            turns += 1
            if turns > SPINS:
                self.sleep()
        self.count(io.operation, 1, len_bytes, int(done.status_class != 0))
        if done.status_class != 0:
            raise status_error(done.status, done.status_class)

    def sleep(self) -> None:
        """Sleeps until a completion may be available, if the device has a descriptor for it."""
        seconds = self.arm()
        if seconds is None:
            return
        descriptor = self.event_fd()
        if descriptor < 0:
            time.sleep(min(seconds, 0.001))
            return
        if self._readable is None:
            self._readable = select.poll()
            self._readable.register(descriptor, select.POLLIN)
        self._readable.poll(None if seconds == float("inf") else seconds * 1000)

    def count(self, operation: int, ios: int, len_bytes: int, errors: int) -> None:
        counts = self.counts.setdefault(library.OPERATIONS[operation], [0, 0, 0])
        counts[0] += ios
        counts[1] += len_bytes
        counts[2] += errors

    def _open(self) -> Any:
        return self.handle or library.Handle()

    def __enter__(self) -> "Queue":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def class_of(number: int) -> str:
    return library.STATUS_CLASSES[min(number, len(library.STATUS_CLASSES) - 1)]


def status_error(status: int, status_class: int, index: int = 0) -> StatusError:
    return StatusError(library.status_text(status), status, class_of(status_class), index)
