"""The object of one request's import.  No engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from kvshm.hooks.vllm.imports.request_import import RequestImport, Stage


def test_an_import_never_goes_back() -> None:
    for reached in Stage:
        import_ = RequestImport(SimpleNamespace(request_id="r"))
        import_.move_to(reached)
        for earlier in list(Stage)[:reached]:
            with pytest.raises(ValueError, match=f"from {reached.name} to {earlier.name}"):
                import_.move_to(earlier)
        import_.move_to(reached)
        assert import_.has_load is (reached > Stage.MATCHING)
