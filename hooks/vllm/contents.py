"""What a request's prompt holds besides token ids, named by its contents before vLLM hashes it.

vLLM's block hashes hold the identifier of each image, video or audio ("item"), which a client may
have chosen, and which stands for what it stood for when vLLM first saw it: in the cache of
processed inputs, in that of encoder outputs, and in its prefix cache.  So an item is named by a
digest of what the model gets, the processor's output.  Then equal keys mean equal items, whoever
names them, however and from which files they were processed.

vLLM hashes the embeddings in a prompt without saying which positions take them and which take
their token id; here the hash of a block's embeddings says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from .adapters import Adapters
from .digests import UnknownContents, digest_of
from .identity.fields import adapter_kernels
from .ranks import Ranks

CONTENT, NAME = "kvshm-content:", "kvshm-name:"
"""What identifiers begin with: of a digest, and of one whose contents are not known.  No client can
choose the former: its choice gets the latter before it."""


class EmbedHashes(dict[tuple[int, int], bytes]):
    """vLLM's hashes of the embeddings of each block, by its first and end token.  These here cover
    the positions that take them."""


class Contents:
    """Names the inputs of one engine's requests.  EngineCore process."""

    def __init__(self, vllm_config: Any, block_size: int, trusts_ids: bool) -> None:
        """``block_size``: tokens per hash; ``trusts_ids``: take vLLM's identifiers for digests."""
        model, lora = vllm_config.model_config, vllm_config.lora_config
        self._block_size = block_size
        self._trusts_ids = trusts_ids
        # Other engines look for the outputs of an encoder by vLLM's identifiers.
        self._names_items = not trusts_ids and vllm_config.ec_transfer_config is None
        self._adapts_encoders = lora is not None and lora.enable_tower_connector_lora
        self.adapters: Adapters | None = None
        """Those of an engine with LoRA.  None for a mixture of experts on data-parallel ranks:
        each engine's ranks load what an adapter has for their own experts alone."""
        if lora is not None and vllm_config.parallel_config.data_parallel_size == 1:
            ranks = int(vllm_config.parallel_config.world_size)
            self.adapters = Adapters(ranks, adapter_kernels(lora))
        self.wanted = bool(model.is_multimodal_model or model.enable_prompt_embeds or lora)
        """Whether requests may need it."""
        self._watching = False

    def watch(self, core: Any) -> None:
        """Name the inputs of each request that vLLM's EngineCore gets, before any other use.  Its
        thread that receives requests does so, beside its steps.  Idempotent."""
        if self._watching:
            return
        original: Callable[..., Any] = core.preprocess_add_request

        @wraps(original)
        def preprocess_add_request(request: Any) -> Any:
            found = original(request)
            self.name(found[0])
            return found

        core.preprocess_add_request = preprocess_add_request
        if self.adapters is not None:
            self.adapters.watch(core.model_executor, Ranks(core.model_executor).adapters)
        self._watching = True

    def name(self, request: Any) -> None:
        """Name the inputs of a request, and hash it again if it has any.  Raises nothing; what
        cannot be digested is not covered."""
        changed = False
        if request.mm_features and self._names_items:
            adapted = self._adapts_encoders and request.lora_request is not None
            request.mm_features = [_named(item, adapted) for item in request.mm_features]
            changed = True
        embeds = request.prompt_embeds
        if embeds is not None and (hashes := _embed_hashes(request, self._block_size)):
            request._prompt_embeds_per_block_hashes = hashes
            changed = True
        if request.lora_request is not None and self.adapters is not None:
            self.adapters.rehash(request)
        elif changed:
            request.block_hashes.clear()
            request.update_block_hashes()

    def covered(self, request: Any) -> bool:
        """Whether a request's block hashes cover all that its blocks depend on."""
        if request.lora_request is not None and not self._covers_adapter(request):
            return False
        if request.mm_features and not self._covers_items(request):
            return False
        embeds = request.prompt_embeds
        return embeds is None or type(request._prompt_embeds_per_block_hashes) is EmbedHashes

    def _covers_adapter(self, request: Any) -> bool:
        return self.adapters is not None and self.adapters.covers(request)

    def _covers_items(self, request: Any) -> bool:
        if self._adapts_encoders and request.lora_request is not None:
            return False  # vLLM keeps an encoder's output by the adapter's name
        if self._trusts_ids:
            return True
        return (
            self._watching
            and self._names_items
            and all(item.identifier.startswith(CONTENT) for item in request.mm_features)
        )


def _named(item: Any, adapted: bool) -> Any:
    """An item with another identifier.  ``adapted``: an adapter takes part in its encoding."""
    try:
        if adapted:
            raise UnknownContents("an adapter's name is a part of the identifier")
        identifier = CONTENT + _item_digest(item)
    except Exception:  # any: its request is not shared
        identifier = NAME + item.identifier
    return replace(item, identifier=identifier)


def _item_digest(item: Any) -> str:
    """Of what the model gets, and of the positions that take it.  Raises what torch does, too."""
    data = item.data
    if data is None or "address" in data or any(part.data is None for part in data.values()):
        raise UnknownContents("the data is not here")  # perhaps where only the workers read it
    # A conversation sends its images with every turn; vLLM keeps the processed ones.
    digest = vars(data).get("kvshm_digest")
    if digest is None:
        digest = data.kvshm_digest = digest_of({key: _part(data[key]) for key in data})
    place = item.mm_position
    return digest_of([digest, item.modality, place.length, place.is_embed]).hex()


def _part(part: Any) -> list[Any]:
    """What the model gets of a part: its field decides how it is put together with those of other
    items, and whether the model gets it as one of a row."""
    return [type(part.field).__name__, getattr(part.field, "dim", 0), part.data]


def _embed_hashes(request: Any, block_size: int) -> EmbedHashes | None:
    """Of all blocks that begin in the prompt."""
    embeds, is_token = request.prompt_embeds, request.prompt_is_token_ids
    hashes = EmbedHashes()
    try:
        for start in range(0, request.num_prompt_tokens, block_size):
            end = start + block_size
            mask = None if is_token is None else is_token[start:end]
            by_token = request.prompt_token_ids is not None
            hashes[start, end] = digest_of([mask, by_token, embeds[start:end]])
    except Exception:  # any, as above
        return None
    return hashes
