"""Build backend of the package `tenmil`: a wheel of the Python files and the C library, without other tools.

The library is the file that TENMIL_LIBRARY names. It is called through ctypes, so that one wheel works with every
version of Python on the same kind of machine.
"""

import base64
import hashlib
import os
import platform
import re
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "TENMIL_LIBRARY"
LICENSES = ("LICENSE-MIT", "LICENSE-APACHE")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Writes the wheel, and returns its name."""
    library = _library()
    name, version = _field("name"), _field("version")
    tag = f"py3-none-{_platform()}"
    files = {
        f"tenmil/{path.name}": path.read_bytes() for path in sorted((ROOT / "tenmil").glob("*.py"))
    }
    files["tenmil/py.typed"] = b""
    files["tenmil/libtenmil.so"] = library.read_bytes()
    files.update(_metadata(name, version, tag))
    record = f"{name}-{version}.dist-info/RECORD"
    lines = [f"{path},{_digest(content)},{len(content)}" for path, content in files.items()]
    files[record] = ("\n".join([*lines, f"{record},,"]) + "\n").encode()
    wheel = f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(Path(wheel_directory) / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            # The same files make the same bytes.
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit("a source distribution has no library: build a wheel")


def _library():
    path = os.environ.get(LIBRARY)
    if not path or not Path(path).exists():
        found = f"{path!r} does not exist" if path else "it is not set"
        raise SystemExit(f"{LIBRARY}: {found}, expected the path of libtenmil.so; fix: cargo xtask python")
    return Path(path)


def _field(key):
    found = re.search(rf'^{key} = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return found.group(1)


def _platform():
    """The platform of pip for the oldest glibc that has every symbol of the library."""
    machine = platform.machine()
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", _library().read_bytes())
    major, minor = max((int(major), int(minor)) for major, minor in versions)
    return f"manylinux_{major}_{minor}_{machine}"


def _metadata(name, version, tag):
    directory = f"{name}-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {_field('description')}\n"
        f"License: MIT OR Apache-2.0\nRequires-Python: {_field('requires-python')}\n"
    )
    wheel = f"Wheel-Version: 1.0\nGenerator: tenmil\nRoot-Is-Purelib: false\nTag: {tag}\n"
    entry_points = "[pytest11]\ntenmil = tenmil.pytest_plugin\n"
    files = {
        f"{directory}/METADATA": metadata.encode(),
        f"{directory}/WHEEL": wheel.encode(),
        f"{directory}/entry_points.txt": entry_points.encode(),
    }
    for license in LICENSES:
        path = ROOT.parents[2] / license
        if path.exists():
            files[f"{directory}/{license}"] = path.read_bytes()
    return files


def _digest(content):
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return "sha256=" + digest.rstrip(b"=").decode()
