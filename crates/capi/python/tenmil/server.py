"""Servers: devices over NVMe/TCP or NBD, from this process."""

from __future__ import annotations

import ctypes
from typing import List, Optional, Sequence

from . import _library as library
from ._library import check, functions


class Server:
    """Serves devices until it is closed. `uris` is what clients open.

        with tenmil.Server(["ram:64m"]) as server:
            tenmil.open(server.uri)
    """

    def __init__(
        self,
        devices: Sequence[str],
        *,
        protocol: str = "nvme-tcp",
        address: str = "127.0.0.1:0",
        nqn: Optional[str] = None,
        allowed_hosts: Sequence[str] = (),
        allow_any_host: bool = False,
        read_only: bool = False,
        threads: int = 1,
    ) -> None:
        if protocol not in library.SERVE:
            raise ValueError(f"protocol is {protocol!r}, expected one of {sorted(library.SERVE)}")
        flags = library.EXPORT_READ_ONLY if read_only else 0
        exports = (library.Export * len(devices))(
            *(
                library.Export(name=f"disk{number}".encode(), uri=uri.encode(), flags=flags)
                for number, uri in enumerate(devices)
            )
        )
        hosts = (ctypes.c_char_p * len(allowed_hosts))(*(host.encode() for host in allowed_hosts))
        options = library.ServerOptions(
            size=ctypes.sizeof(library.ServerOptions),
            protocol=library.SERVE[protocol],
            address=address.encode(),
            nqn=nqn.encode() if nqn else None,
            allowed_hosts=hosts if allowed_hosts else None,
            exports=exports,
            allowed_host_count=len(allowed_hosts),
            export_count=len(devices),
            threads=threads,
            flags=library.ALLOW_ANY_HOST if allow_any_host else 0,
        )
        self._handle = library.Handle()
        check(functions.server_start(options, self._handle))
        #: URIs of the devices.
        self.uris: List[str] = [self._uri(number) for number in range(len(devices))]

    @property
    def uri(self) -> str:
        """URI of the first device."""
        return self.uris[0]

    def _uri(self, number: int) -> str:
        text = ctypes.create_string_buffer(1024)
        check(functions.server_uri(self._handle, number, text, len(text)))
        return text.value.decode()

    def close(self) -> None:
        """Stops it: requests in flight complete, and the devices are closed."""
        check(functions.server_stop(self._handle))

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
