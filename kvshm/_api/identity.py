"""Who an engine is: everything that must be equal for two engines to exchange raw blocks."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from kvshm._base import fingerprint as names
from kvshm._engine.groups import Group
from kvshm._node.protocol import MAX_FIELDS_CHARACTERS, abi
from kvshm.errors import MisuseError
from kvshm.interfaces import Region

from .prefix_keys import KEYS_VERSION

_CPU = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What an engine computes, and how.  Engines share only if all of it is equal; if not, both log
    the first field that differs.  A forgotten setting means wrong tokens: name too much rather than
    too little."""

    engine: str
    """The program that computes and lays out the blocks, with its version."""
    model: str
    """The model's name or architecture."""
    weights: str
    """A digest of every parameter and buffer."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """All else that changes a byte of a block, by name: number formats, the attention kernel,
    positions, a part of a parallel group."""

    def _fingerprint_fields(
        self, block_size: int, regions: Sequence[Region], groups: Sequence[Group], transport: str
    ) -> dict[str, str]:
        """Return the fingerprint's fields.  Raises MisuseError for a name or value that
        cannot be a field."""
        if not isinstance(self.settings, Mapping):
            raise MisuseError(f"settings are {self.settings!r}; give a mapping of names to text")
        own = {
            names.ENGINE: self.engine,
            names.MODEL: self.model,
            names.WEIGHTS: self.weights,
        }
        ours = {
            names.KVSHM_ABI: abi(),
            names.BLOCK_SIZE: str(block_size),
            names.LAYERS: _layers(regions, groups),
            names.HASH_ALGORITHM: KEYS_VERSION,
            names.HARDWARE: _hardware(),
            names.TRANSPORT: transport,
        }
        if taken := sorted((own | ours).keys() & self.settings.keys()):
            raise MisuseError(f"settings {taken} are fields of kvshm's own; use other names")
        fields = own | dict(self.settings)
        for name, value in fields.items():
            if not _is_text(name) or not _is_text(value):
                raise MisuseError(f"{name!r} of the identity is {value!r}; give text, not empty")
        fields |= ours
        if (length := sum(map(len, [*fields, *fields.values()]))) > MAX_FIELDS_CHARACTERS:
            raise MisuseError(
                f"the identity has {length} characters, kvshm's own fields included, and at most "
                f"{MAX_FIELDS_CHARACTERS} can be sent; give digests of long values"
            )
        return fields


def _is_text(value: object) -> bool:
    """Whether it is a string with characters, all of which can be sent."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:  # half of a character
        return False


def _layers(regions: Sequence[Region], groups: Sequence[Group]) -> str:
    """How many bytes a block has where, and which groups there are."""
    sizes = sha256(repr([region.block_bytes for region in regions]).encode()).hexdigest()[:16]
    kinds = [(g.block_size, g.window, g.chunk, g.ahead, g.state) for g in groups]
    return f"{len(regions)} regions {sizes}, groups {kinds}"


def _hardware() -> str:
    """The CPU's instruction set, by which kernels are chosen, and round."""
    try:
        text = _CPU.read_text(errors="replace")
    except OSError:
        text = ""
    about = [line for line in text.split("\n\n")[0].splitlines() if line.startswith(_INSTRUCTIONS)]
    return f"{platform.machine()} {sha256(repr(about).encode()).hexdigest()[:16]}"


_INSTRUCTIONS = ("flags", "Features", "isa", "vendor_id", "cpu family", "model\t", "CPU part")
