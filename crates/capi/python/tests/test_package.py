"""Devices, batches, asyncio and servers, as the documentation has them."""

import array
import asyncio
import contextlib
import gc
import io
import json
import os
import threading
import unittest
from pathlib import Path
from unittest import mock

import tenmil

try:
    import numpy
except ImportError:
    numpy = None
try:
    import matplotlib
except ImportError:
    matplotlib = None


class Devices(unittest.TestCase):
    def test_data_of_any_length_are_read_as_written(self):
        with tenmil.open("ram:64m") as device:
            data = os.urandom((2 << 20) + 512)
            device.write(4096, data)
            self.assertEqual(device.read(4096, len(data)), data)
            self.assertEqual(device.size, 64 << 20)

    def test_operations(self):
        with tenmil.open("ram:1m") as device:
            device.write(0, b"a" * 1024, fua=True)
            self.assertTrue(device.compare(0, b"a" * 1024))
            self.assertFalse(device.compare(0, b"b" * 1024))
            device.write_zeroes(0, 512)
            self.assertEqual(device.read(0, 1024), bytes(512) + b"a" * 512)
            device.deallocate(512, 512)
            device.flush()

    def test_errors_have_class_and_text(self):
        with tenmil.open("ram:1m") as device:
            with self.assertRaises(tenmil.StatusError) as raised:
                device.read(1 << 20, 512)
            self.assertEqual(raised.exception.status_class, "invalid")
            self.assertIn("LBA Out of Range", str(raised.exception))
            with self.assertRaisesRegex(ValueError, "multiples of the block size, 512"):
                device.read(1, 512)
            self.assertEqual(device.statistics()["read"], {"ios": 1, "bytes": 512, "errors": 1})
        with self.assertRaisesRegex(tenmil.TenmilError, "no devices of kind `tape`") as raised:
            tenmil.open("tape:0")
        self.assertEqual(raised.exception.code, "usage")

    def test_buffers_and_registered_memory_are_not_copied(self):
        with tenmil.open("ram:1m") as device:
            device.write(0, b"x" * 4096)
            buffer = device.context.buffer(8192)
            own = bytearray(4096)
            with device.context.register(own):
                for memory in (buffer[4096:], own):
                    # Memory that is used in place needs no piece of a queue's own buffer.
                    self.assertIsNotNone(device._address_of_own(memoryview(memory)))
                    device.read_into(0, memory)
                    self.assertEqual(bytes(memory), b"x" * 4096)
            self.assertIsNone(device._address_of_own(memoryview(own)))

    def test_memory_of_a_buffer_is_freed_with_its_last_view(self):
        context = tenmil.Context(1 << 20)
        part = context.buffer(1 << 20)[4096:]
        gc.collect()
        with self.assertRaises(tenmil.TenmilError):
            context.buffer(4096)
        part[0] = 1
        del part
        gc.collect()
        context.buffer(1 << 20)

    def test_threads_share_a_device(self):
        with tenmil.open("ram:16m") as device:
            def work(number):
                for turn in range(100):
                    data = bytes([number]) * 512
                    device.write(number * 65536 + turn * 512, data)
                    self.assertEqual(device.read(number * 65536 + turn * 512, 512), data)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(device.statistics()["write"]["ios"], 800)

    def test_interrupted_calls_leave_nothing_in_flight(self):
        with tenmil.open("delay:[ram:1m]?read=50ms") as device:
            device.write(0, b"x" * 512)
            with mock.patch.object(tenmil.Queue, "sleep", side_effect=KeyboardInterrupt):
                with self.assertRaises(KeyboardInterrupt):
                    device.read(0, 512)
                with self.assertRaises(KeyboardInterrupt), tenmil.Batch(device, 4, 512) as batch:
                    batch.read(range(4))
            self.assertEqual(device.read(0, 512), b"x" * 512)
            self.assertEqual(device.read(512, 512), bytes(512))

    def test_other_threads_run_while_one_waits(self):
        with tenmil.open("delay:[ram:1m]?read=300ms") as device:
            waiting = threading.Thread(target=device.read, args=(0, 512))
            waiting.start()
            turns = 0
            while waiting.is_alive():
                turns += 1
            self.assertGreater(turns, 1000)


class Batches(unittest.TestCase):
    def test_batch_writes_and_reads_each_slot(self):
        with tenmil.open("emu:ram") as device, tenmil.Batch(device, 64, 1024) as batch:
            lbas = array.array("Q", [number * 10 for number in range(64)])
            for number in range(64):
                batch.slot(number)[:] = bytes([number]) * 1024
            batch.write(lbas)
            batch.buffer[:] = bytes(len(batch.buffer))
            batch.read(list(lbas))
            for number in range(64):
                self.assertEqual(bytes(batch.slot(number)), bytes([number]) * 1024)
            batch.read([630, 620])
            self.assertEqual([batch.slot(0)[0], batch.slot(1)[0]], [63, 62])
            self.assertEqual(device.statistics()["read"]["ios"], 66)

    def test_error_names_the_first_failed_io(self):
        uri = "fault:[ram:1m]?rule=error:read@7-8"
        with tenmil.open(uri) as device, tenmil.Batch(device, 16, 512) as batch:
            with self.assertRaises(tenmil.StatusError) as raised:
                batch.read(range(16))
            self.assertEqual((raised.exception.index, raised.exception.status_class), (7, "medium"))
            batch.read(range(6))

    def test_batch_may_be_larger_than_the_depth_of_the_device(self):
        with tenmil.open("emu:ram") as device, tenmil.Batch(device, 1000, 512) as batch:
            batch.read(range(1000))
            with self.assertRaisesRegex(ValueError, "at most 1000"):
                batch.read(range(1001))

    @unittest.skipIf(numpy is None, "numpy is not installed")
    def test_numpy_uses_the_memory_without_a_copy(self):
        with tenmil.open("ram:1m") as device, tenmil.Batch(device, 8, 512) as batch:
            table = numpy.frombuffer(batch.buffer, numpy.uint32).reshape(8, 128)
            table[:] = numpy.arange(8, dtype=numpy.uint32)[:, None]
            batch.write(numpy.arange(8, dtype=numpy.uint64))
            table[:] = 0
            batch.read(numpy.arange(7, -1, -1).astype(numpy.uint64))
            self.assertEqual(table[:, 5].tolist(), [7, 6, 5, 4, 3, 2, 1, 0])
            with self.assertRaisesRegex(ValueError, "integers of 64 bits"):
                batch.read(numpy.arange(8, dtype=numpy.uint32))


class Asyncio(unittest.TestCase):
    def test_many_reads_at_once(self):
        async def run(uri):
            async with tenmil.aio.open(uri, depth=16) as device:
                for number in range(100):
                    await device.write(number * 512, bytes([number]) * 512)
                reads = (device.read(number * 512, 512) for number in range(100))
                for number, data in enumerate(await asyncio.gather(*reads)):
                    self.assertEqual(data, bytes([number]) * 512)
                await device.flush()
                large = os.urandom(1 << 20)
                await device.write(0, large)
                self.assertEqual(await device.read(0, 1 << 20), large)

        with tenmil.Server(["ram:64m"]) as server:
            for uri in ("ram:64m", "emu:ram", "delay:[ram:2m]?read=1ms", server.uri):
                with self.subTest(uri):
                    asyncio.run(asyncio.wait_for(run(uri), 60))

    def test_other_tasks_run_while_one_waits(self):
        async def run():
            turns = 0
            async with tenmil.aio.open("delay:[ram:1m]?read=200ms") as device:
                read = asyncio.ensure_future(device.read(0, 512))
                while not read.done():
                    turns += 1
                    await asyncio.sleep(0.01)
                self.assertEqual(len(await read), 512)
            return turns

        self.assertGreater(asyncio.run(run()), 5)

    def test_canceled_read_keeps_its_memory_until_it_ends(self):
        async def run():
            async with tenmil.aio.open("delay:[ram:1m]?read=200ms") as device:
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(device.read(0, 512), 0.01)
                self.assertEqual(device.queue.in_flight(), 0)
                with self.assertRaises(tenmil.StatusError):
                    await device.read(1 << 20, 512)

        asyncio.run(run())


class Servers(unittest.TestCase):
    def test_clients_share_a_served_disk(self):
        with tenmil.Server(["ram:1m", "ram:2m"]) as server:
            with tenmil.open(server.uris[1]) as one, tenmil.open(server.uris[1]) as other:
                one.write(0, b"n" * 512)
                self.assertEqual(other.read(0, 512), b"n" * 512)
                self.assertEqual(other.size, 2 << 20)
        with self.assertRaisesRegex(ValueError, "protocol is 'iscsi'"):
            tenmil.Server(["ram:1m"], protocol="iscsi")


class Notebooks(unittest.TestCase):
    @unittest.skipIf(matplotlib is None or numpy is None, "matplotlib is not installed")
    def test_notebook_draws_a_histogram(self):
        matplotlib.use("svg")
        notebook = Path(__file__).parents[1] / "examples" / "latency.ipynb"
        cells = json.loads(notebook.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        names = {}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for cell in code:
                exec(cell, names)
        self.assertIn("p99.9: ", printed.getvalue())
        self.assertEqual(sum(patch.get_height() for patch in names["plot"].gca().patches), names["READS"])


if __name__ == "__main__":
    unittest.main()
