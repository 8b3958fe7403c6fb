"""Contexts and devices, with calls that wait."""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple, Union

from . import _library as library
from ._library import Io, check, functions
from .queue import Queue

#: Bytes that one I/O of `read` and `write` has at most.
PIECE = 1 << 20
PAGE = 4096


class Context:
    """Memory that devices share. Programs need one of their own for more than 64 MiB of buffers."""

    def __init__(self, buffer_bytes: int = 0) -> None:
        self.handle = library.Handle()
        options = library.ContextOptions(ctypes.sizeof(library.ContextOptions), buffer_bytes)
        check(functions.context_create(options, self.handle))
        #: Lengths of memory that I/Os may use in place, by address.
        self._memory: Dict[int, int] = {}

    def open(self, uri: str, *, read_only: bool = False, direct: bool = False) -> "Device":
        return Device(self, uri, read_only=read_only, direct=direct)

    def buffer(self, len_bytes: int) -> memoryview:
        """Memory for the data of I/Os, which are not copied. It is freed with its last view."""
        found = ctypes.c_void_p()
        check(functions.buffer_alloc(self.handle, len_bytes, found))
        address = found.value or 0
        array = (ctypes.c_ubyte * len_bytes).from_address(address)
        self._memory[address] = len_bytes
        weakref.finalize(array, self._free, address)
        return memoryview(array).cast("B")

    def _free(self, address: int) -> None:
        del self._memory[address]
        functions.buffer_free(self.handle, address)

    def register(self, memory: Any) -> "Registration":
        """Registers writable memory, such as a numpy array, so that its I/Os are not copied."""
        return Registration(self, memory)

    def close(self) -> None:
        check(functions.context_destroy(self.handle))


class Registration:
    """Registered memory. It stays registered until `close`, or the end of a `with` block."""

    def __init__(self, context: Context, memory: Any) -> None:
        self.context = context
        self.view = memoryview(memory).cast("B")
        self.address = address_of(self.view)
        check(functions.memory_register(context.handle, self.address, len(self.view)))
        context._memory[self.address] = len(self.view)

    def close(self) -> None:
        check(functions.memory_unregister(self.context.handle, self.address))
        del self.context._memory[self.address]

    def __enter__(self) -> "Registration":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Device:
    """An open device. Any thread may call it; offsets and lengths are in bytes, multiples of `block_size`."""

    def __init__(
        self, context: Context, uri: str, *, read_only: bool = False, direct: bool = False
    ) -> None:
        flags = (library.OPEN_READ_ONLY if read_only else 0) | (library.OPEN_DIRECT if direct else 0)
        self.context = context
        self.uri = uri
        self.handle = library.Handle()
        self._queues: Set[Queue] = set()
        self._idle: List[Tuple[Queue, memoryview, int]] = []
        self._counts: Dict[str, List[int]] = {}
        self._lock = threading.Lock()
        check(functions.open(context.handle, uri.encode(), flags, self.handle))
        self.block_size = self.info()["block_size"]

    # Description

    def info(self) -> Dict[str, Any]:
        """Geometry and limits."""
        found = library.DeviceInfo(size=ctypes.sizeof(library.DeviceInfo))
        check(functions.device_get_info(self.handle, found))
        info: Dict[str, Any] = {
            name: getattr(found, name)
            for name in (field[0] for field in library.DeviceInfo._fields_)
            if name not in ("size", "reserved")
        }
        info["durability"] = library.DURABILITIES[found.durability]
        info["operations"] = [
            name for bit, name in enumerate(library.OPERATIONS) if found.operations >> bit & 1
        ]
        return info

    @property
    def size(self) -> int:
        """Bytes of the device."""
        return int(self.info()["block_count"]) * self.block_size

    def statistics(self) -> Dict[str, Dict[str, int]]:
        """Numbers of I/Os, bytes and errors since the device was opened, by operation."""
        sums: Dict[str, List[int]] = {}
        with self._lock:
            tables = [self._counts, *(queue.counts for queue in self._queues)]
            for table in tables:
                for name, counts in list(table.items()):
                    sums[name] = [sum(pair) for pair in zip(sums.get(name, [0, 0, 0]), counts)]
        return {
            name: dict(zip(("ios", "bytes", "errors"), counts)) for name, counts in sums.items()
        }

    def events(self) -> Iterator[Dict[str, Any]]:
        """Events that are pending: kind, first block, and value."""
        event = library.Event(size=ctypes.sizeof(library.Event))
        while check(functions.device_next_event(self.handle, event)) == 1:
            yield {
                "kind": library.EVENTS[event.kind],
                "lba": event.lba,
                "value": event.value,
            }

    def refresh(self) -> None:
        """Reads the size again."""
        check(functions.device_refresh(self.handle))

    # I/O

    def read(self, offset: int, len_bytes: int) -> bytes:
        into = bytearray(len_bytes)
        self.read_into(offset, into)
        return bytes(into)

    def read_into(self, offset: int, memory: Any) -> None:
        """Reads into writable memory, without a copy if it is a buffer of the context or registered."""
        view = memoryview(memory).cast("B")
        address = self._address_of_own(view)
        with _Call(self) as call:
            if address is not None:
                call.run(library.READ, offset, len(view), address)
                return
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                call.run(library.READ, offset + start, len(piece), call.address)
                piece[:] = call.buffer[: len(piece)]

    def write(self, offset: int, data: Any, *, fua: bool = False) -> None:
        """Writes bytes. With `fua` they are on stable media afterwards."""
        self._send(library.WRITE, offset, data, library.FUA if fua else 0)

    def compare(self, offset: int, data: Any) -> bool:
        """Whether the device has these bytes."""
        from .errors import StatusError

        try:
            self._send(library.COMPARE, offset, data, 0)
        except StatusError as error:
            if error.status_class == "compare":
                return False
            raise
        return True

    def flush(self) -> None:
        """Makes every write that has completed persistent."""
        with _Call(self) as call:
            call.run_without_data(library.FLUSH, 0, 0)

    def deallocate(self, offset: int, len_bytes: int) -> None:
        with _Call(self) as call:
            call.run_without_data(library.DEALLOCATE, offset, len_bytes)

    def write_zeroes(self, offset: int, len_bytes: int, *, deallocate: bool = False) -> None:
        flags = library.MAY_DEALLOCATE if deallocate else 0
        with _Call(self) as call:
            call.run_without_data(library.WRITE_ZEROES, offset, len_bytes, flags)

    def _send(self, operation: int, offset: int, data: Any, flags: int) -> None:
        view = memoryview(data).cast("B")
        address = self._address_of_own(view)
        with _Call(self) as call:
            if address is not None:
                call.run(operation, offset, len(view), address, flags)
                return
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                call.buffer[: len(piece)] = piece
                call.run(operation, offset + start, len(piece), call.address, flags)

    def _address_of_own(self, view: memoryview) -> Optional[int]:
        """Address of memory that I/Os may use in place."""
        if view.readonly:
            return None
        address = address_of(view)
        for start, len_bytes in list(self.context._memory.items()):
            if start <= address and address + len(view) <= start + len_bytes:
                return address
        return None

    # Queues

    def queue(self, depth: int = 0) -> Queue:
        """A queue of the calling thread."""
        return Queue(self, depth)

    def _retire(self, queue: Queue) -> None:
        with self._lock:
            self._queues.discard(queue)
            for name, counts in queue.counts.items():
                sums = self._counts.get(name, [0, 0, 0])
                self._counts[name] = [sum(pair) for pair in zip(sums, counts)]

    def close(self) -> None:
        """Closes the device. Data in a volatile cache are not flushed."""
        while self._idle:
            queue, _, _ = self._idle.pop()
            queue.attach()
            queue.close()
        check(functions.close(self.handle))

    def __enter__(self) -> "Device":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Call:
    """A queue and a buffer for the time of a call. They wait detached for the next one, of any thread."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def __enter__(self) -> "_Call":
        try:
            self.queue, self.buffer, self.address = self.device._idle.pop()
            self.queue.attach()
        except IndexError:
            self.queue = Queue(self.device, 1)
            self.buffer = self.device.context.buffer(PIECE)
            self.address = address_of(self.buffer)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self.queue.in_flight() > 0:
            # Interrupted: the completion would stay in the queue. This waits until the memory is not accessed.
            self.queue.close()
            return
        self.queue.detach()
        self.device._idle.append((self.queue, self.buffer, self.address))

    def run(
        self, operation: int, offset: int, len_bytes: int, address: int, flags: int = 0
    ) -> None:
        lba, blocks = _blocks(self.device, offset, len_bytes)
        io = Io(lba=lba, data=address, blocks=blocks, operation=operation, flags=flags)
        self.queue.run(io, len_bytes)

    def run_without_data(self, operation: int, offset: int, len_bytes: int, flags: int = 0) -> None:
        lba, blocks = _blocks(self.device, offset, len_bytes)
        io = Io(lba=lba, blocks=blocks, operation=operation, flags=flags)
        self.queue.run(io, 0)


def _blocks(device: Device, offset: int, len_bytes: int) -> Tuple[int, int]:
    """First block and number of blocks of a range of bytes."""
    size = device.block_size
    if offset % size or len_bytes % size:
        raise ValueError(
            f"{device.uri}: {len_bytes} bytes at {offset}, expected multiples of the block size, {size}"
        )
    return offset // size, len_bytes // size


def address_of(view: Union[memoryview, bytearray]) -> int:
    """Address of writable memory."""
    if len(view) == 0:
        return 0
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


_default: Optional[Context] = None
_default_lock = threading.Lock()


def default_context() -> Context:
    """The context of `tenmil.open`, created when it is first used."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Context()
        return _default
