"""Errors."""

from __future__ import annotations


class TenmilError(OSError):
    """A call was refused, or an object could not be made.

    `code` is `usage`, `environment`, `remote`, `busy`, `handle`, `thread` or `internal`.
    """

    def __init__(self, code: str, text: str, hint: str = "") -> None:
        super().__init__(f"{text} ({hint})" if hint else text)
        self.code = code
        self.text = text
        self.hint = hint


class StatusError(TenmilError):
    """The device has completed an I/O with an error.

    `status_class` is `invalid`, `medium`, `compare`, `conflict`, `path`, `retry`, `aborted` or `other`; `status` is
    the NVMe status field. `index` is the number of the I/O in a batch.
    """

    def __init__(self, text: str, status: int, status_class: str, index: int = 0) -> None:
        super().__init__("remote", text)
        self.status = status
        self.status_class = status_class
        self.index = index
