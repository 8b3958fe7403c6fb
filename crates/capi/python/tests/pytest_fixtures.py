"""Fixtures of the plugin: run by pytest, which finds it by its entry point."""

import tenmil


def test_disk_over_nvme_tcp_is_empty(tenmil_nvme_tcp_uri):
    with tenmil.open(tenmil_nvme_tcp_uri) as device:
        assert device.read(0, 512) == bytes(512)
        device.write(0, b"x" * 512)


def test_next_disk_is_empty_too(tenmil_nvme_tcp_uri, tenmil_nbd_uri, tenmil_device):
    with tenmil.open(tenmil_nvme_tcp_uri) as device:
        assert device.read(0, 512) == bytes(512)
    assert tenmil_nbd_uri.startswith("nbd")
    assert tenmil_device.size == 64 << 20
