"""Which requests may share their blocks."""

from __future__ import annotations

from typing import Any

from kvshm.config import Share


def may_share(request: Any, share: Share) -> bool:
    """Whether this request may share, in either direction."""
    if request.lora_request is not None:
        return False  # an adapter's name does not identify its contents
    if request.mm_features:
        return False  # an image's name may be chosen by the client
    if share is Share.SALTED_ONLY and request.cache_salt is None:
        return False
    params = request.kv_transfer_params
    return params is None or _asked_to_share(params)


def _asked_to_share(params: object) -> bool:
    """Whether ``kv_transfer_params={"kvshm": {"share": false}}`` keeps the request out.  Clients
    choose this value: anything but true keeps the request out."""
    own = params.get("kvshm", {}) if isinstance(params, dict) else {}
    return isinstance(own, dict) and own.get("share", True) is True
