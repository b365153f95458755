"""What programs call of these hooks: a change of a name, parameter or default shows here, as it
does for the rest of the public surface (tests/unit/test_public_surface.py)."""

from __future__ import annotations

import inspect

from kvshm.hooks import transformers as hooks

SURFACE = {
    "node_of": "(manager: 'ContinuousBatchingManager') -> 'Node | None'",
    "share": (
        "(manager: 'ContinuousBatchingManager', *, salt: 'bytes' = b'', name: 'str | None' = None, "
        "wait_seconds: 'float' = 1.0, config: 'Config | None' = None) "
        "-> 'ContinuousBatchingManager'"
    ),
    "share_all": (
        "(*, salt: 'bytes' = b'', wait_seconds: 'float' = 1.0, config: 'Config | None' = None) "
        "-> 'None'"
    ),
    "stats_of": "(manager: 'ContinuousBatchingManager') -> 'dict[str, int]'",
}


def test_what_programs_call_stays_as_it_is() -> None:
    found = {name: str(inspect.signature(getattr(hooks, name))) for name in hooks.__all__}
    assert found == SURFACE
