"""The cases of conformance.json, which are the same for every binding."""

import ctypes
import json
import os
import select
import tempfile
import threading
import time
import unittest
from pathlib import Path

import tenmil
from tenmil import _library as library
from tenmil.device import address_of
from tenmil.queue import class_of

BLOCK = 512
MEMORY = 64 << 10
CASES = Path(os.environ.get("TENMIL_CASES", Path(__file__).parents[2] / "conformance.json"))
OPERATIONS = {name: number for number, name in enumerate(library.OPERATIONS)}
OPERATIONS["operation-77"] = 77
COPIES = {"read": 1, "write": 1, "compare": 1, "compare-and-write": 2, "operation-77": 1}
FLAGS = {None: 0, "fua": library.FUA, "deallocate": library.MAY_DEALLOCATE, "unknown": 0x80}


class Case:
    """Objects of a case while its steps run."""

    def __init__(self, case, directory):
        self.file = Path(directory) / "disk"
        self.file.write_bytes(b"")
        os.truncate(self.file, 1 << 20)
        self.context = tenmil.Context(1 << 20)
        self.device = self.context.open(
            case["device"].replace("TEMP", str(self.file)),
            read_only=case.get("read_only", False),
            direct=case.get("direct", False),
        )
        self.queue = self.device.queue(case.get("depth", 8))
        address = ctypes.c_void_p()
        library.check(library.functions.buffer_alloc(self.context.handle, MEMORY, address))
        self.buffer_at = address.value
        self.buffer = memoryview((ctypes.c_ubyte * MEMORY).from_address(self.buffer_at)).cast("B")
        self.registered = bytearray(MEMORY)
        self.foreign = bytearray(MEMORY)
        self.registration = self.context.register(self.registered)

    def end(self):
        for close in (self.queue.close, self.device.close):
            try:
                close()
            except tenmil.TenmilError:
                pass  # A step has closed it.
        self.context.close()

    def memory(self, step):
        """Memory of a step, and its address."""
        name = step.get("memory", "buffer")
        if name in ("buffer", "freed", "segments"):
            return self.buffer, self.buffer_at
        if name == "none":
            return None, 0
        memory = self.registered if name == "registered" else self.foreign
        return memoryview(memory), address_of(memory)

    def run(self, step):
        """Runs a step; returns the class of its completion."""
        action = step["do"]
        if action in OPERATIONS:
            return self.run_operation(step, action)
        return getattr(self, action.replace("-", "_"))(step) or "success"

    def run_operation(self, step, action):
        copies = COPIES.get(action, 0)
        len_bytes = step.get("blocks", 0) * BLOCK * copies
        kind = step.get("memory")
        io = tenmil.Io(
            token=4711,
            lba=step.get("lba", 0),
            source_lba=step.get("source", 0),
            blocks=step.get("blocks", 0),
            operation=OPERATIONS[action],
            flags=FLAGS[step.get("flags")],
        )
        fill = bytes([step.get("fill", 0xEE)])
        if kind != "freed":
            self.buffer[:] = fill * MEMORY
        self.registered[:] = fill * MEMORY
        view, address = self.memory(step)
        head = min(len_bytes, 3 * BLOCK)
        segments = (library.Segment * 2)(
            (self.buffer_at, head), (address_of(self.registered), len_bytes - head)
        )
        if kind == "segments":
            io.segments, io.segment_count = ctypes.addressof(segments), 2
        elif copies > 0 or kind == "foreign":
            io.data = address
            if copies == 2:
                view[len_bytes // 2 : len_bytes] = bytes([step["fill2"]]) * (len_bytes // 2)
        assert self.queue.submit([io]) == 1
        token, _, found = self.wait_one()
        assert token == 4711
        if "check" in step:
            byte = bytes([step["check"]])
            if kind == "segments":
                content = bytes(self.buffer[:head]) + bytes(self.registered[: len_bytes - head])
            else:
                content = bytes(view[:len_bytes])
            assert content == byte * len_bytes, f"{content[:8]!r}, expected {byte!r}"
        return found

    def wait_one(self):
        end = time.monotonic() + 20
        while True:
            found = self.queue.poll(1)
            if found:
                return found[0]
            assert time.monotonic() < end, "no completion in 20 s"

    def read_io(self, token=0):
        return tenmil.Io(token=token, blocks=1, data=self.buffer_at, operation=library.READ)

    def fill_queue(self, step):
        taken = self.queue.submit([self.read_io(number) for number in range(16)])
        assert taken == step["accepted"], taken

    def equal_tokens(self, step):
        assert self.queue.submit([self.read_io(7)] * 16) == step["accepted"]

    def drain_queue(self, step):
        count = 0
        while self.queue.in_flight() > 0:
            assert self.wait_one()[2] == "success"
            count += 1
        assert count == step["completions"]

    def elsewhere(self, work):
        raised = []

        def run():
            try:
                work()
            except tenmil.TenmilError as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    def submit_elsewhere(self, step):
        self.elsewhere(lambda: self.queue.submit([self.read_io()]))

    def poll_elsewhere(self, step):
        self.elsewhere(lambda: self.queue.poll(1))

    def destroy_elsewhere(self, step):
        self.elsewhere(self.queue.close)

    def read_elsewhere(self, step):
        def work():
            self.queue.attach()
            assert self.queue.submit([self.read_io()]) == 1
            assert self.wait_one()[2] == "success"
            self.queue.detach()

        self.elsewhere(work)

    def poll(self, step):
        self.queue.poll(1)

    def detach(self, step):
        self.queue.detach()

    def attach(self, step):
        self.queue.attach()

    def destroy_queue(self, step):
        self.queue.close()

    def close_device(self, step):
        self.device.close()

    def destroy_context(self, step):
        self.context.close()

    def free_buffer(self, step):
        library.check(library.functions.buffer_free(self.context.handle, self.buffer_at))

    def unregister(self, step):
        self.registration.close()

    def start_read(self, step):
        io = self.read_io()
        io.data = self.memory(step)[1]
        assert self.queue.submit([io]) == 1

    def sleep_until_read_completes(self, step):
        descriptor = self.queue.event_fd()
        assert descriptor >= 0
        readable = select.poll()
        readable.register(descriptor, select.POLLIN)
        for _ in range(100):
            assert self.queue.submit([self.read_io()]) == 1
            while not self.queue.poll(1):
                if self.queue.arm() is not None:
                    assert readable.poll(10000), "a completion does not wake the thread"
        assert self.queue.arm() == float("inf"), "nothing is in flight"

    def grow_file(self, step):
        os.truncate(self.file, step["to"])
        self.device.refresh()

    def event(self, step):
        found = next(self.device.events(), None)
        if step["kind"] == "none":
            assert found is None
        else:
            assert (found["kind"], found["value"]) == (step["kind"], step["value"])

    def open(self, step):
        self.context.open(step["uri"]).close()


class Conformance(unittest.TestCase):
    def test_every_case(self):
        cases = json.loads(CASES.read_text())["cases"]
        self.assertGreater(len(cases), 20)
        for case in cases:
            with self.subTest(case["name"]), tempfile.TemporaryDirectory() as directory:
                running = Case(case, directory)
                for step in case["steps"]:
                    self.run_step(running, step)
                running.end()

    def run_step(self, case, step):
        expected = step.get("expect", "success")
        try:
            found = case.run(step)
        except tenmil.TenmilError as error:
            found = f"refused {error.code}"
            if expected == "refused any":
                found = expected
            self.assertIn(step.get("text", ""), error.text, step)
        self.assertEqual(found, expected, step)

    def test_classes_have_the_names_of_the_cases(self):
        self.assertEqual([class_of(0), class_of(3), class_of(99)], ["success", "compare", "other"])


if __name__ == "__main__":
    unittest.main()
