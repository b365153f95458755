"""Images, audio and embeddings in prompts are named by their contents before vLLM hashes prompts:
equal keys mean equal inputs, and what cannot be named is not shared.  Real schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import ECTransferConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import EngineCoreRequest

from kvshm.hooks.vllm import contents as contents_module
from kvshm.hooks.vllm import digests as digests_module
from kvshm.hooks.vllm.contents import CONTENT, NAME, Contents, EmbedHashes
from kvshm.hooks.vllm.identity import fields as fields_module
from kvshm.hooks.vllm.identity.fields import scheduler_fields
from kvshm.hooks.vllm.imports.at_once import AtOnce

from .played_core import started_core
from .scheduling import BLOCK_SIZE, Make, imagined_cache, prompt, vllm_config
from .vision import write_vision

BATCHED = MultiModalBatchedField()
PIXELS = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


def item(
    data: Any = PIXELS,
    identifier: str = "x",
    modality: str = "image",
    offset: int = 20,
    mask: torch.Tensor | None = None,
    field: BaseMultiModalField = BATCHED,
    **more: Any,
) -> MultiModalFeatureSpec:
    """An image of 10 tokens."""
    parts = {"pixel_values": data, "grid": torch.tensor([1, 2, 3]), **more}
    elems = {name: MultiModalFieldElem(data=part, field=field) for name, part in parts.items()}
    place = PlaceholderRange(offset=offset, length=10, is_embed=mask)
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem(elems),
        modality=modality,
        identifier=identifier,
        mm_position=place,
        mm_hash=identifier,
    )


def named(one: MultiModalFeatureSpec, adapted: bool = False) -> str:
    return str(contents_module._named(one, adapted).identifier)


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def seeing(engine: Make, vision: Path) -> Make:
    """Makes schedulers of a vision model."""

    def make(**arguments: Any) -> Any:
        return engine(model_path=vision, **arguments)

    return make


def test_equal_contents_have_equal_names() -> None:
    assert named(item()).startswith(CONTENT)
    assert named(item()) == named(item(PIXELS.clone(), "another", offset=3))
    apart = torch.stack([PIXELS, -PIXELS])[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert not apart.is_contiguous()
    assert named(item()) == named(item(apart))


OTHERS: dict[str, MultiModalFeatureSpec] = {
    "value": item(PIXELS + (PIXELS == 23) * 1e-6),
    "shape": item(PIXELS.reshape(3, 2, 4)),
    "dtype": item(PIXELS.view(torch.int32)),
    "one more": item(PIXELS, more=torch.zeros(0)),
    "a list": item([PIXELS]),
    "a list of two": item(list(PIXELS)),
    "a number": item(PIXELS, grid=1),
    "a text": item(PIXELS, grid="1"),
    "yes": item(PIXELS, grid=True),
    "modality": item(modality="video"),
    "mask": item(mask=torch.ones(10, dtype=torch.bool)),
    "another mask": item(mask=torch.arange(10) > 0),
    "length": replace(item(), mm_position=PlaceholderRange(offset=20, length=11)),
}


def flat(*ends: int, dim: int = 0) -> MultiModalFlatField:
    """The field of items that end at these places of one tensor."""
    return MultiModalFlatField(slices=[slice(0, end) for end in ends], dim=dim)


def test_how_the_parts_of_items_are_put_together_counts() -> None:
    """The model gets one item's part as one of a row, or as it is; several items' side by side, or
    one behind the other in some direction.  Where an item lay among others does not count."""
    shared = MultiModalSharedField(batch_size=2)
    alone = (f.reduce_data([MultiModalFieldElem(PIXELS, f)]).shape for f in (BATCHED, flat(2)))
    assert [*alone] == [(1, *PIXELS.shape), PIXELS.shape]
    fields = BATCHED, flat(2), flat(2, dim=1), shared
    assert len({named(item(field=field)) for field in fields}) == len(fields)
    assert named(item(field=flat(2))) == named(item(field=flat(1, 3)))
    assert named(item(field=shared)) == named(item(field=MultiModalSharedField(batch_size=1)))


def test_whatever_differs_makes_another_name() -> None:
    names = {what: named(one) for what, one in {"": item(), **OTHERS}.items()}
    assert all(name.startswith(CONTENT) for name in names.values())
    assert len(set(names.values())) == len(names), names


@pytest.mark.parametrize(
    "one",
    [
        replace(item(), data=None),
        item(None),
        item(torch.empty(2, device="meta")),
        item({1, 2}),
        item(PIXELS, address=4096),  # --mm-processor-cache-type shm
    ],
    ids=["no data", "an empty part", "elsewhere", "not known", "in shared memory"],
)
def test_what_cannot_be_digested_keeps_its_name_and_gets_no_other(one: Any) -> None:
    assert named(replace(one, identifier=f"{CONTENT}12")) == f"{NAME}{CONTENT}12"


def test_what_an_adapter_encodes_keeps_its_name() -> None:
    assert named(item(identifier="adapter:x"), adapted=True) == f"{NAME}adapter:x"


def test_a_processed_item_is_digested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps it, and a conversation sends its images with every turn."""
    one, read = item(), []
    digest = digests_module._bytes_of
    monkeypatch.setattr(digests_module, "_bytes_of", lambda t: read.append(t) or digest(t))
    first = named(one)
    assert read
    read.clear()
    assert named(replace(one, identifier="y")) == first
    assert not read


# -- schedulers


def ask(e: Any, name: str, *items: Any, **more: Any) -> Any:
    """Ask for two blocks and a tail, the second block with the ``items``."""
    return e.add(name, prompt(2), max_tokens=1, mm_features=list(items), **more)


def test_equal_images_have_equal_keys_and_others_other_ones(seeing: Make) -> None:
    e = seeing()
    one, same, other = (
        ask(e, str(i), item(data, id_))
        for i, (data, id_) in enumerate([(PIXELS, "x"), (PIXELS.clone(), "y"), (PIXELS + 1, "x")])
    )
    assert one.block_hashes == same.block_hashes
    assert one.block_hashes[0] == other.block_hashes[0]
    assert one.block_hashes[1] != other.block_hashes[1]
    assert [f.mm_hash for f in one.mm_features] == ["x"]
    for _ in range(3):
        e.step()
    assert len(e.ready()) == 3


@pytest.mark.parametrize("identifier", ["x", f"{CONTENT}ab"])
def test_an_image_without_contents_is_not_shared(seeing: Make, identifier: str) -> None:
    e = seeing()
    hidden = ask(e, "r", item(PIXELS, address=1, identifier=identifier))
    assert not e.connector._scheduler.importer.may_share(hidden)
    for _ in range(2):
        e.step()
    assert not e.ready()


def test_no_image_is_shared_before_the_core_is_found(seeing: Make) -> None:
    e = seeing()
    contents = e.connector._scheduler.importer.contents
    asked = ask(e, "r", item())
    assert contents.covered(asked)
    contents._watching = False
    assert not contents.covered(asked)


def test_identifiers_are_kept_where_other_engines_look_for_encoder_outputs(vision: Path) -> None:
    config = vllm_config(vision)
    config.ec_transfer_config = ECTransferConfig(ec_connector="X", ec_role="ec_both")
    contents = Contents(config, BLOCK_SIZE, trusts_ids=False)
    core = SimpleNamespace(preprocess_add_request=lambda request: (request, 0))
    contents.watch(core)
    chosen = item(identifier=f"{CONTENT}ab")
    asked = SimpleNamespace(mm_features=[chosen], prompt_embeds=None, lora_request=None)
    core.preprocess_add_request(asked)
    assert asked.mm_features == [chosen]
    assert not contents.covered(asked)


def test_trusted_identifiers_are_taken_for_contents(
    seeing: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSHM_TRUST_ITEM_IDS", "1")
    e = seeing()
    one, other = ask(e, "a", item()), ask(e, "b", item(PIXELS + 1))
    assert [f.identifier for f in (*one.mm_features, *other.mm_features)] == ["x", "x"]
    assert one.block_hashes == other.block_hashes
    for _ in range(2):
        e.step()
    assert len(e.ready()) == 2


def test_no_step_waits_for_an_import_with_an_image(seeing: Make) -> None:
    """vLLM sends its workers a request once, without the images in a prefix that is there: it could
    not compute the prefix if the import failed."""
    e = seeing()
    image, text = ask(e, "image", item()), e.add("text", prompt(2, first=900))
    assert AtOnce.can_undo(text)
    assert not AtOnce.can_undo(image)
    sent = NewRequestData.from_request(image, ([],), uses_mrope=True)
    assert [one.data is None for one in sent.mm_features] == [False]
    image.num_computed_tokens = 2 * BLOCK_SIZE
    stripped = NewRequestData.from_request(image, ([],), uses_mrope=True)
    assert "pixel_values" not in stripped.mm_features[0].data


def test_what_an_adapter_encodes_is_not_shared(seeing: Make, monkeypatch: Any) -> None:
    """Not even if identifiers are trusted: vLLM keeps an encoder's output by the adapter's name."""
    monkeypatch.setenv("KVSHM_TRUST_ITEM_IDS", "1")
    e = seeing()
    contents = e.connector._scheduler.importer.contents
    contents._adapts_encoders, contents.adapters = True, SimpleNamespace(covers=lambda _: True)
    asked = ask(e, "r", item())
    assert contents.covered(asked)
    asked.lora_request = object()
    assert not contents.covered(asked)
    asked.mm_features = []
    assert contents.covered(asked)
    contents.adapters = None


def test_an_input_of_a_session_is_named_like_any_other(seeing: Make) -> None:
    e = seeing()
    e.add("s", prompt(2), max_tokens=1, resumable=True)
    e.step()
    more = {"max_tokens": 1, "mm_features": [item(offset=3)]}
    e.continue_session("s", prompt(2, first=700), **more)
    for _ in range(3):
        e.step()
    (known,) = e.scheduler.requests["s"].mm_features
    assert known.identifier.startswith(CONTENT)
    assert len(e.ready()) == 4


# -- embeddings


def embedded(
    e: Any, name: str, embeds: Any, mask: Sequence[bool] | None, tokens: Any = None
) -> Any:
    """Ask for two blocks."""
    tokens = [0] * (2 * BLOCK_SIZE - 1) + [7] if tokens is None else tokens
    given = {"prompt_embeds": embeds, "prompt_is_token_ids": mask and [*mask]}
    return e.add(name, tokens or None, max_tokens=1, **given)


def unhashed(request: Any) -> Any:
    again = copy(request)
    again.block_hashes, again._prompt_embeds_per_block_hashes = [], {}
    return again


def test_embeddings_are_keyed_by_the_positions_that_take_them(engine: Make) -> None:
    """vLLM's own hashes of the first two are equal, though one takes its tokens as tokens."""
    e = engine(enable_prompt_embeds=True)
    length, embeds = 2 * BLOCK_SIZE, torch.zeros(2 * BLOCK_SIZE, 8)
    late = [False] * (length - 2) + [True] * 2
    asked = [
        embedded(e, "tokens", embeds, [True] * length),
        embedded(e, "embeddings", embeds, [False] * (length - 1) + [True]),
        embedded(e, "the same", embeds.clone(), [False] * (length - 1) + [True]),
        embedded(e, "in the second block", embeds, late),
        embedded(e, "others", embeds + 1, [False] * (length - 1) + [True]),
        embedded(e, "of another format", embeds.to(torch.bfloat16), late),
    ]
    keys = [one.block_hashes for one in asked]
    assert e.hasher(unhashed(asked[0])) == e.hasher(unhashed(asked[1]))
    assert keys[1] == keys[2]
    assert keys[1][0] == keys[3][0]
    assert len({key[0] for key in keys}) == 4
    assert len({key[1] for key in keys}) == 5
    for _ in range(4):
        e.step()
    assert len(e.ready()) == 4 + 5 + 1  # the same prompt's last block is computed again


def test_a_prompt_of_embeddings_only_is_none_of_tokens(engine: Make) -> None:
    e = engine(enable_prompt_embeds=True)
    embeds = torch.zeros(2 * BLOCK_SIZE, 8)
    only = embedded(e, "only", embeds, None, [])
    unmarked = embedded(e, "unmarked", embeds, None, [0] * 2 * BLOCK_SIZE)
    assert type(only._prompt_embeds_per_block_hashes) is EmbedHashes
    assert not {*only.block_hashes} & {*unmarked.block_hashes}


def test_embeddings_that_cannot_be_digested_are_not_shared(engine: Make) -> None:
    e = engine(enable_prompt_embeds=True)
    mask = [False] * 2 * BLOCK_SIZE
    contents = e.connector._scheduler.importer.contents
    elsewhere = SimpleNamespace(
        prompt_embeds=torch.zeros(2 * BLOCK_SIZE, 8, device="meta"),
        prompt_is_token_ids=mask,
        prompt_token_ids=None,
        num_prompt_tokens=2 * BLOCK_SIZE,
        mm_features=[],
        lora_request=None,
        _prompt_embeds_per_block_hashes={},
    )
    contents.name(elsewhere)
    assert not contents.covered(elsewhere)


def test_an_engine_without_such_inputs_is_left_alone(engine: Make) -> None:
    e = engine()
    assert "preprocess_add_request" not in vars(e)
    assert not e.connector._scheduler.importer.contents.wanted


# -- the real core


def test_the_core_names_inputs_before_it_hashes(model: Path, engine: Make) -> None:
    sampling = SamplingParams(max_tokens=1)
    given = EngineCoreRequest(
        "r", None, None, sampling, None, 0.0, None, None, None, torch.zeros(64, 8)
    )
    with started_core(vllm_config(model, enable_prompt_embeds=True)) as core:
        asked, _ = core.preprocess_add_request(given)
    assert type(asked._prompt_embeds_per_block_hashes) is EmbedHashes
    assert len(asked.block_hashes) == 64 // BLOCK_SIZE


def test_encoder_outputs_are_kept_by_identifier() -> None:
    kept = EncoderCacheManager(cache_size=100)
    first, second = (
        SimpleNamespace(request_id=name, mm_features=[item(data)])
        for name, data in (("a", PIXELS), ("b", PIXELS + 1))
    )
    first.get_num_encoder_embeds = second.get_num_encoder_embeds = lambda _: 10
    kept.allocate(first, 0)
    assert kept.check_and_update_cache(second, 0)
    second.mm_features = [item(identifier="y")]
    assert not kept.check_and_update_cache(second, 0)


# -- the fingerprint


def multimodal(directory: Path, trusts_ids: bool = False, **given: Any) -> str:
    config = vllm_config(directory, **given)
    fields = scheduler_fields(config, imagined_cache(4), [], trusts_ids)
    return fields["multimodal"]


def test_the_path_of_a_model_counts_only_for_identifiers(vision: Path, tmp_path: Path) -> None:
    elsewhere = write_vision(tmp_path)
    assert multimodal(vision) == multimodal(elsewhere)
    assert multimodal(vision) == multimodal(vision, mm_processor_cache_gb=1)
    assert multimodal(vision) != multimodal(vision, mm_processor_kwargs={"size": {}})
    assert multimodal(vision, True) == multimodal(vision, True)
    assert multimodal(vision, True) != multimodal(elsewhere, True)
    assert multimodal(vision, True) != multimodal(vision)


def test_what_is_left_out_is_a_setting_of_vllm() -> None:
    left_out = fields_module._LEFT_OUT["MultiModalConfig"]
    assert left_out.keys() <= MultiModalConfig.__dataclass_fields__.keys()
