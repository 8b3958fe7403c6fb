"""Fixtures of pytest: a RAM disk that is served, for tests of other projects."""

from __future__ import annotations

from typing import Iterator

import pytest

import tenmil


@pytest.fixture
def tenmil_nvme_tcp_uri() -> Iterator[str]:
    """URI of an empty disk of 64 MiB over NVMe/TCP, on loopback."""
    with tenmil.Server(["ram:64m"]) as server:
        yield server.uri


@pytest.fixture
def tenmil_nbd_uri() -> Iterator[str]:
    """URI of an empty disk of 64 MiB over NBD, on loopback."""
    with tenmil.Server(["ram:64m"], protocol="nbd") as server:
        yield server.uri


@pytest.fixture
def tenmil_device() -> "Iterator[tenmil.Device]":
    """An empty device of 64 MiB in memory."""
    with tenmil.open("ram:64m") as device:
        yield device
