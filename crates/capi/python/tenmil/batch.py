"""Batches: many I/Os of the same length in one call, without Python objects for each."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any, Sequence, Union

from . import _library as library
from ._library import Completion, Io
from .device import Device, address_of
from .queue import SPINS, status_error

#: Words of 8 bytes in the structures.
IO_WORDS = ctypes.sizeof(Io) // 8
COMPLETION_WORDS = ctypes.sizeof(Completion) // 8


class Batch:
    """Up to `depth` I/Os of `len_bytes` each. I/O number `i` has the memory `slot(i)`; that of all is `buffer`,
    which numpy uses without a copy: `numpy.frombuffer(batch.buffer, dtype)`.

    A batch belongs to the thread that has created it.
    """

    def __init__(self, device: Device, depth: int = 128, len_bytes: int = 4096) -> None:
        if len_bytes <= 0 or len_bytes % device.block_size:
            size = device.block_size
            raise ValueError(f"len_bytes is {len_bytes}, expected a multiple of the block size, {size}")
        self.depth = depth
        self.len_bytes = len_bytes
        self.buffer = device.context.buffer(depth * len_bytes)
        self.queue = device.queue(min(depth, device.info()["depth_max"]))
        self._ios = (Io * depth)()
        start = address_of(self.buffer)
        for number, io in enumerate(self._ios):
            io.token = number
            io.data = start + number * len_bytes
            io.blocks = len_bytes // device.block_size
        self._operation = library.READ
        self._completions = (Completion * depth)()
        self._io_bytes = memoryview(self._ios).cast("B")
        self._io_words = self._io_bytes.cast("Q")
        self._completion_words = memoryview(self._completions).cast("B").cast("Q")
        self._ios_at = ctypes.addressof(self._ios)
        self._completions_at = ctypes.addressof(self._completions)

    def slot(self, number: int) -> memoryview:
        """Memory of an I/O."""
        return self.buffer[number * self.len_bytes : (number + 1) * self.len_bytes]

    def read(self, lbas: "Union[Sequence[int], Any]") -> None:
        """Reads from each of these blocks on: a sequence of numbers, an array of type `Q`, or one of numpy's
        `uint64`. Raises a StatusError for the first I/O with an error, once all have completed."""
        self._run(library.READ, lbas)

    def write(self, lbas: "Union[Sequence[int], Any]") -> None:
        """Writes from each of these blocks on."""
        self._run(library.WRITE, lbas)

    def _run(self, operation: int, lbas: Any) -> None:
        words = _words(lbas)
        count = len(words)
        if count > self.depth:
            raise ValueError(f"the batch has {count} blocks, expected at most {self.depth}")
        if operation != self._operation:
            at = Io.operation.offset
            self._io_bytes[at :: ctypes.sizeof(Io)] = bytes([operation]) * self.depth
            self._operation = operation
        at = Io.lba.offset // 8
        self._io_words[at : at + count * IO_WORDS : IO_WORDS] = words
        try:
            self._complete(count)
        except BaseException:
            # Nobody would take the completions. This waits until the memory is not accessed.
            self.close()
            raise
        # The second word is the result, and the status with its class in the upper half.
        ended = self._completion_words[1 : count * COMPLETION_WORDS : COMPLETION_WORDS]
        failed = [index for index, word in enumerate(ended.tolist()) if word >> 32]
        self.queue.count(operation, count, count * self.len_bytes, len(failed))
        if failed:
            first = min((self._completions[index] for index in failed), key=lambda done: done.token)
            raise status_error(first.status, first.status_class, first.token)

    def _complete(self, count: int) -> None:
        """Submits the first I/Os and waits for all."""
        queue, size = self.queue, ctypes.sizeof(Io)
        submitted = done = turns = 0
        while done < count:
            if submitted < count:
                rest = count - submitted
                submitted += queue.submit_array(self._ios_at + submitted * size, rest)
            at = self._completions_at + done * ctypes.sizeof(Completion)
            found = queue.poll_array(at, count - done)
            done += found
            turns = 0 if found else turns + 1
            if turns > SPINS:
                queue.sleep()

    def close(self) -> None:
        """Ends it, which an error other than that of an I/O has done already."""
        if self.queue.handle is not None:
            self.queue.close()

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _words(lbas: Any) -> memoryview:
    """Block numbers as words of 8 bytes, without a copy if they are."""
    try:
        view = memoryview(lbas)
    except TypeError:
        return memoryview(array("Q", lbas))
    if view.itemsize != 8 or view.ndim != 1 or view.format not in ("Q", "L", "q", "l"):
        raise ValueError(f"blocks have the format {view.format!r}, expected integers of 64 bits")
    return view.cast("B").cast("Q")
