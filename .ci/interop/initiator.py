"""What an initiator of another make does with our target: run by `run`, which says where it is."""

import time

import nvme

LBA_OUT_OF_RANGE = 0x80
COMPARE_FAILURE = 0x285


def main():
    place = nvme.Tcp("127.0.0.1", 4420)
    controller = nvme.Controller(place)
    namespace = nvme.Namespace(controller)
    model = controller.id_data(63, 24, str).strip()
    assert model == "tenmil target", model
    print("ok discovered, connected, identified:", model)

    commands(controller, namespace)
    load(namespace)
    several(namespace)

    # Its reset and its disconnect, which say that they fail by a line with ERROR.
    namespace.close()
    controller = nvme.Controller(nvme.Tcp("127.0.0.1", 4420))
    assert nvme.Namespace(controller).id_data(7, 0) == 524288
    print("ok connected again")


def commands(controller, namespace):
    """One command at a time, and what it ends with."""
    queue = nvme.Qpair(controller, 16)
    ended = []

    # A closure that is not kept is gone when it is called.
    def note(_, status):
        ended.append(status >> 1 & 0x7FF)

    def done(command):
        ended.clear()
        command.waitdone()
        return ended[0]

    for blocks in (1, 8, 16, 256):
        written, read = nvme.Buffer(blocks * 512), nvme.Buffer(blocks * 512)
        for at in range(0, blocks * 512):
            written[at] = (at * 7 + at // 512 + blocks) & 255
        assert done(namespace.write(queue, written, 1000, blocks, cb=note)) == 0
        assert done(namespace.read(queue, read, 1000, blocks, cb=note)) == 0
        assert read[:] == written[:], blocks
        assert done(namespace.compare(queue, written, 1000, blocks, cb=note)) == 0
    assert done(namespace.flush(queue, cb=note)) == 0
    assert done(namespace.write_zeroes(queue, 1000, 8, cb=note)) == 0
    other, read = nvme.Buffer(4096), nvme.Buffer(4096)
    other[0] = 1
    assert done(namespace.read(queue, read, 1000, 8, cb=note)) == 0
    assert not any(read[:])
    assert done(namespace.compare(queue, other, 1000, 8, cb=note)) == COMPARE_FAILURE
    assert done(namespace.read(queue, read, 1 << 40, 8, cb=note)) == LBA_OUT_OF_RANGE
    ranges = nvme.Buffer(4096)
    ranges.set_dsm_range(0, 2000, 8)
    assert done(namespace.dsm(queue, ranges, 1, cb=note)) == 0
    log = nvme.Buffer(4096)
    assert done(controller.getlogpage(1, log, 4096, cb=note)) == 0
    assert log.data(7, 0) > 0, "the refused commands are in the error log"
    assert done(controller.getlogpage(2, log, 512, cb=note)) == 0
    assert done(controller.getfeatures(7, cb=note)) == 0
    queue.delete()
    print("ok read, write, compare, flush, write zeroes, deallocate, logs, features")


def load(namespace):
    """Reads and writes whose contents it checks itself, from a process and connection of its own."""
    assert namespace.verify_enable(True)
    for blocks in (1, 8, 9, 64, 256):
        shape = {"io_size": blocks, "qdepth": 32, "region_end": 200_000}
        filled = namespace.ioworker(
            read_percentage=0, lba_random=False, io_count=50_000 // blocks, **shape
        )
        assert filled.start().close().error == 0
        mixed = namespace.ioworker(read_percentage=60, time=2, **shape).start().close()
        assert mixed.error == 0 and mixed.io_count_read > 0 and mixed.io_count_nonread > 0
        print(
            f"ok verified at {blocks * 512} bytes:",
            f"{mixed.io_count_read} reads, {mixed.io_count_nonread} writes",
        )


def several(namespace):
    """Three connections at once."""
    began = time.monotonic()
    shape = {"io_size": 8, "qdepth": 16, "read_percentage": 100, "region_end": 200_000}
    workers = [namespace.ioworker(time=12, **shape).start() for _ in range(3)]
    ended = [worker.close() for worker in workers]
    assert all(worker.error == 0 and worker.io_count_read > 0 for worker in ended)
    print(f"ok three at once for {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
