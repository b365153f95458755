"""tests/sessions.py: which segments a session of these tests answers for."""

from __future__ import annotations

from kvshm.segment import identity_of, list_segments
from kvshm.slots import SlotTable, TableSpec
from kvshm.terms import Epoch, Fingerprint

from ..sessions import MARK, new_and_nobodys, new_namespace


def test_what_a_killed_process_of_another_session_leaves_is_not_ours() -> None:
    here = identity_of()
    dead = here._replace(start_time=here.start_time - 1)
    ours, unmarked = new_namespace(), new_namespace().replace("-", "")
    other = f"t{int(MARK, 16) ^ 1:06x}-00000000"
    before = set(list_segments())
    spec = Fingerprint(bytes(32))
    tables = [
        SlotTable.create(TableSpec(namespace, "e", 8, 16, 1, spec), Epoch(1), dead)
        for namespace in (ours, unmarked, other)
    ]
    try:
        suspects = {segment.namespace for segment in new_and_nobodys(before)}
        assert suspects & {ours, unmarked, other} == {ours, unmarked}
    finally:
        for table in tables:
            table.unlink()
            table.close()
