"""A package that is not kvshm's and offers a transport, installed into a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

SOURCE = Path(__file__).with_name("other_transport.py")
NAME = "procfs"
METADATA = "Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n"


def install(folder: Path, *more: str) -> Path:
    """Install it into ``folder``, which becomes a part of Python's path; return the folder.

    ``more``: lines for the entry points, beside that of the transport.
    """
    shutil.copy(SOURCE, folder / "other_package_transport.py")
    about = folder / "other_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(METADATA)
    entries = [f"{NAME} = other_package_transport:ProcTransport", *more]
    (about / "entry_points.txt").write_text("\n".join(["[kvshm.transports]", *entries, ""]))
    return folder
