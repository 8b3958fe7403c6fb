"""Devices for asyncio: calls are awaited on the descriptor of a queue.

    async with tenmil.aio.open("tcp://127.0.0.1:4420/NQN?ns=1") as device:
        data = await device.read(0, 4096)
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any, Dict, List, Optional, Tuple

from . import _library as library
from ._library import Completion, Io, check, functions, last_error
from .device import Context, Device, address_of, default_context
from .errors import TenmilError
from .queue import Queue, status_error

#: Bytes of a buffer that I/Os share in turn; longer ones have one of their own.
BUFFER = 64 << 10
COMPLETIONS_MAX = 64


class AsyncDevice:
    """A device of one event loop, whose thread makes all calls."""

    def __init__(self, device: Device, depth: int) -> None:
        self.device = device
        self.queue: Queue = device.queue(min(depth, device.info()["depth_max"]))
        self._loop = asyncio.get_running_loop()
        self._handle = self.queue.handle
        self._waiting: Dict[int, asyncio.Future[Tuple[int, int]]] = {}
        self._next_token = 0
        self._io = Io()
        self._io_at = ctypes.addressof(self._io)
        self._completions = (Completion * COMPLETIONS_MAX)()
        self._completions_at = ctypes.addressof(self._completions)
        self._buffers: List[Tuple[memoryview, int]] = []
        self._timer: Optional[asyncio.TimerHandle] = None
        self._full: List[asyncio.Future[None]] = []
        self._descriptor = self.queue.event_fd()
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._progress)

    async def read(self, offset: int, len_bytes: int) -> bytes:
        buffer, address = self._take_buffer(len_bytes)
        try:
            await self._run(library.READ, offset, len_bytes, address)
            return bytes(buffer[:len_bytes])
        finally:
            self._give_back(buffer, address)

    async def read_into(self, offset: int, memory: Any) -> None:
        """Reads into writable memory, without a copy if it is a buffer of the context or registered."""
        view = memoryview(memory).cast("B")
        own = self.device._address_of_own(view)
        if own is not None:
            await self._run(library.READ, offset, len(view), own)
        else:
            view[:] = await self.read(offset, len(view))

    async def write(self, offset: int, data: Any, *, fua: bool = False) -> None:
        view = memoryview(data).cast("B")
        flags = library.FUA if fua else 0
        own = self.device._address_of_own(view)
        if own is not None:
            await self._run(library.WRITE, offset, len(view), own, flags)
            return
        buffer, address = self._take_buffer(len(view))
        try:
            buffer[: len(view)] = view
            await self._run(library.WRITE, offset, len(view), address, flags)
        finally:
            self._give_back(buffer, address)

    async def flush(self) -> None:
        await self._run(library.FLUSH, 0, 0, 0)

    async def deallocate(self, offset: int, len_bytes: int) -> None:
        await self._run(library.DEALLOCATE, offset, len_bytes, 0)

    async def _run(
        self, operation: int, offset: int, len_bytes: int, address: int, flags: int = 0
    ) -> None:
        size = self.device.block_size
        if offset % size or len_bytes % size:
            raise ValueError(f"{len_bytes} bytes at {offset}, expected multiples of the block size, {size}")
        token = self._next_token
        self._next_token += 1
        io = self._io
        while True:
            io.token, io.lba, io.blocks = token, offset // size, len_bytes // size
            io.data, io.operation, io.flags = address, operation, flags
            taken = functions.submit(self._handle, self._io_at, 1)
            if taken == 1:
                break
            if taken < 0:
                raise last_error(taken)
            room = self._loop.create_future()
            self._full.append(room)
            self._progress()
            await room
        done = self._poll(token)
        if done is None:
            future = self._waiting[token] = self._loop.create_future()
            self._arm()
            # Memory of an I/O in flight is not used otherwise, even if the caller is canceled.
            done = await _finish(future)
        status, status_class = done
        moved = len_bytes if address else 0
        self.queue.count(operation, 1, moved, int(status_class != 0))
        if status_class:
            raise status_error(status, status_class)

    def _poll(self, own: int = -1) -> Optional[Tuple[int, int]]:
        """Takes completions, and returns the status of `own` if it is among them."""
        found = None
        while True:
            count = check(functions.poll(self._handle, self._completions_at, COMPLETIONS_MAX))
            for index in range(count):
                done = self._completions[index]
                token, status = done.token, (done.status, done.status_class)
                if token == own:
                    found = status
                    continue
                future = self._waiting.pop(token)
                if not future.done():
                    future.set_result(status)
            if count > 0 and self._full:
                full, self._full = self._full, []
                for room in full:
                    if not room.done():
                        room.set_result(None)
            if count < COMPLETIONS_MAX:
                return found

    def _arm(self) -> None:
        """Lets the loop wait for the next completion."""
        seconds = self.queue.arm()
        while seconds is None and self._descriptor >= 0 and self._waiting:
            self._poll()
            seconds = self.queue.arm()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        if seconds is None:
            seconds = 0.0
        if seconds != float("inf"):
            self._timer = self._loop.call_later(seconds, self._progress)

    def _progress(self) -> None:
        try:
            self._poll()
            self._arm()
        except TenmilError as error:
            # The queue is not usable any more.
            if self._descriptor >= 0:
                self._loop.remove_reader(self._descriptor)
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)
            self._waiting.clear()

    def _take_buffer(self, len_bytes: int) -> Tuple[memoryview, int]:
        if len_bytes <= BUFFER and self._buffers:
            return self._buffers.pop()
        buffer = self.device.context.buffer(max(len_bytes, BUFFER))
        return buffer, address_of(buffer)

    def _give_back(self, buffer: memoryview, address: int) -> None:
        if len(buffer) == BUFFER:
            self._buffers.append((buffer, address))

    async def close(self) -> None:
        """Waits for I/Os in flight and closes the device."""
        while self._waiting:
            await asyncio.wait(list(self._waiting.values()))
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
        self.queue.close()
        self.device.close()


async def _finish(future: "asyncio.Future[Tuple[int, int]]") -> Tuple[int, int]:
    """Waits for a completion, and only then passes a cancellation on."""
    canceled: Optional[asyncio.CancelledError] = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            canceled = error
    if canceled is not None:
        raise canceled
    return future.result()


class _Opening:
    """Opens a device, which blocks, in a thread: awaited, or as `async with`."""

    def __init__(self, context: Context, uri: str, depth: int, options: Dict[str, Any]) -> None:
        self._arguments = (context, uri, depth, options)
        self._device: Optional[AsyncDevice] = None

    def __await__(self) -> Any:
        return self._open().__await__()

    async def _open(self) -> AsyncDevice:
        context, uri, depth, options = self._arguments
        loop = asyncio.get_running_loop()
        device = await loop.run_in_executor(None, lambda: Device(context, uri, **options))
        return AsyncDevice(device, depth)

    async def __aenter__(self) -> AsyncDevice:
        self._device = await self._open()
        return self._device

    async def __aexit__(self, *_: object) -> None:
        if self._device is not None:
            await self._device.close()


def open(
    uri: str, *, depth: int = 128, context: Optional[Context] = None, **options: bool
) -> _Opening:
    """Opens the device of a URI for the running event loop. Options are those of `tenmil.open`."""
    return _Opening(context or default_context(), uri, depth, options)
