"""Rates of batches and of awaited reads, medians of several rounds in turn."""

import array
import asyncio
import os
import random
import statistics
import time

import tenmil

ROUNDS = 7
SECONDS = 0.5


def batches(uri):
    """I/Os per second of reads in batches of 128."""
    with tenmil.open(uri, direct=True) as device, tenmil.Batch(device, 128, 4096) as batch:
        places = device.info()["block_count"] // 8
        lbas = [array.array("Q", (random.randrange(places) * 8 for _ in range(128))) for _ in range(64)]
        start, count = time.perf_counter(), 0
        while time.perf_counter() < start + SECONDS:
            for one in lbas:
                batch.read(one)
            count += 128 * len(lbas)
        return count / (time.perf_counter() - start)


async def rate_of(work):
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + SECONDS:
        for _ in range(100):
            await work()
        count += 100
    return count / (time.perf_counter() - start)


async def reads(uri):
    async with tenmil.aio.open(uri) as device:
        return await rate_of(lambda: device.read(0, 4096))


async def descriptor():
    """Waits for a descriptor that is readable, and reads it."""
    loop = asyncio.get_running_loop()
    read, write = os.pipe()
    waiting = None

    def readable():
        os.read(read, 8)
        waiting.set_result(None)

    async def wait():
        nonlocal waiting
        waiting = loop.create_future()
        os.write(write, b"x")
        await waiting

    loop.add_reader(read, readable)
    try:
        return await rate_of(wait)
    finally:
        loop.remove_reader(read)
        os.close(read)
        os.close(write)


def main():
    with tenmil.Server(["ram:64m"]) as server:
        measured = {
            "batches of 128, null:": lambda: batches("null:"),
            "batches of 128, emu:null": lambda: batches("emu:null"),
            "await a descriptor": lambda: asyncio.run(descriptor()),
            "await a read, ram:": lambda: asyncio.run(reads("ram:64m")),
            "await a read, emu:null": lambda: asyncio.run(reads("emu:null")),
            "await a read, NVMe/TCP in the same process": lambda: asyncio.run(reads(server.uri)),
        }
        rates = {name: [] for name in measured}
        for _ in range(ROUNDS):
            for name, measure in measured.items():
                rates[name].append(measure())
    bare = rates["await a descriptor"]
    for name, found in rates.items():
        line = f"{name:44} {statistics.median(found):12,.0f}/s ({min(found):,.0f} to {max(found):,.0f})"
        if name.startswith("await a read"):
            ratio = statistics.median(own / other for own, other in zip(found, bare))
            line += f"   {ratio:.2f} of a descriptor"
        print(line)


if __name__ == "__main__":
    main()
