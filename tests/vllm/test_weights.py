"""The weights digest: every word counts, at its place, and it is fast enough to wait for."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from kvshm.hooks import weights
from kvshm.hooks.vllm.identity import weights as weights_module
from kvshm.hooks.vllm.identity.weights import weight_places, weights_digest
from kvshm.hooks.weights import WeightsUnknown

CHUNK_WORDS = 3 << 13


@pytest.fixture(autouse=True, params=["hashed", "mixed"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds where weights are hashed in this process's memory, and where a device mixes
    them: here that device is a CPU, too."""
    if request.param == "mixed":
        monkeypatch.setattr(weights, "_HASHED_IN_PLACE", "")
        monkeypatch.setattr(weights, "_CHUNK_WORDS", CHUNK_WORDS)


MODEL = """
import torch
torch.manual_seed(7)
model = torch.nn.Module()
model.first = torch.nn.Linear(33, 17, dtype=torch.bfloat16)
model.second = torch.nn.Linear(17, 5, dtype=torch.float32)
model.tied = model.first
model.big = torch.nn.Parameter(torch.randn(3, 70_000))
model.register_buffer("scale", torch.tensor(0.5))
model.register_buffer("cache", torch.arange(13, dtype=torch.uint8), persistent=False)
"""


def small_model() -> torch.nn.Module:
    names: dict[str, torch.nn.Module] = {}
    exec(MODEL, names)
    return names["model"]


def edit(change: Callable[[torch.nn.Module], object]) -> str:
    model = small_model()
    with torch.no_grad():
        change(model)
    return weights_digest(model)


def swap(tensor: torch.Tensor, a: int, b: int) -> None:
    words = tensor.view(-1).view(torch.int64)
    words[a], words[b] = words[b].clone(), words[a].clone()


CHANGES: dict[str, Callable[[torch.nn.Module], object]] = {
    "one bit of one element": lambda m: m.first.weight.view(torch.int16)[3, 3].bitwise_xor_(1),
    "the last, odd bytes": lambda m: m.first.weight.view(torch.int16)[16, 32].bitwise_xor_(1),
    "neighbouring words swapped": lambda m: swap(m.big.data, 0, 1),
    "two highest bits, which cancel in a sum": lambda m: m.big.data.view(-1)[1:5:2].neg_(),
    "words of two chunks swapped": lambda m: swap(m.big.data, 5, CHUNK_WORDS + 5),
    "a buffer": lambda m: m.scale.add_(0.25),
    "a fraction": lambda m: setattr(m.first, "epsilon", 1e-5),
    "a class": lambda m: setattr(m.first, "__class__", torch.nn.Bilinear),
    "a buffer that is not saved": lambda m: m.cache[12].add_(1),
    "a name": lambda m: m.register_buffer("scale2", m._buffers.pop("scale")),
    "a shape": lambda m: m._parameters.__setitem__(
        "big", torch.nn.Parameter(m.big.data.view(70_000, 3))
    ),
    "a type": lambda m: m._buffers.__setitem__("cache", m.cache.view(torch.int8)),
    "one zero more": lambda m: m._buffers.__setitem__(
        "cache", torch.cat([m.cache, torch.zeros(1, dtype=torch.uint8)])
    ),
    "another parameter": lambda m: m.register_parameter("p", torch.nn.Parameter(torch.zeros(1))),
}


def test_equal_weights_have_equal_digests() -> None:
    assert weights_digest(small_model()) == weights_digest(small_model())


def test_every_change_shows(subtests: pytest.Subtests) -> None:
    for change in CHANGES:
        with subtests.test(change=change):
            assert edit(CHANGES[change]) != weights_digest(small_model())


@pytest.mark.parametrize("reader", ["hashed"], indirect=True)  # the other one takes no patch
def test_another_process_computes_the_same() -> None:
    code = (
        f"{MODEL}\nfrom kvshm.hooks.vllm.identity.weights import weights_digest\n"
        "torch.set_num_threads(1)\nprint(weights_digest(model))"
    )
    reported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert reported.stdout.strip() == weights_digest(small_model())


def test_reading_changes_nothing() -> None:
    model, untouched = small_model(), small_model()
    strided = torch.nn.Parameter(model.big.data.t()[::2])
    untouched.register_parameter("strided", torch.nn.Parameter(strided.clone()))
    model.register_parameter("strided", strided)
    before = strided.stride(), strided.data_ptr()
    weights_digest(model)
    assert (strided.stride(), strided.data_ptr()) == before
    for name, tensor in untouched.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.parametrize("index", [(0, 0), (1, 1), (34_999, 2)])
def test_what_does_not_lie_in_one_piece_counts_too(
    monkeypatch: pytest.MonkeyPatch, index: tuple[int, int]
) -> None:
    monkeypatch.setattr(weights, "_COPY_BYTES", 1000)  # many parts

    def digest(flip: bool) -> str:
        model = small_model()
        strided = model.big.data.t()[::2]
        if flip:
            strided[index] += 1
        other = torch.nn.Module()
        other.register_buffer("strided", strided)
        return weights_digest(other)

    assert digest(flip=True) != digest(flip=False)
    assert digest(flip=True) == digest(flip=True)


def test_a_weight_that_begins_at_an_odd_address_is_read() -> None:
    module = torch.nn.Module()
    module.register_buffer("odd", torch.arange(100, dtype=torch.uint8)[3:])
    shifted = torch.nn.Module()
    shifted.register_buffer("odd", torch.arange(3, 100, dtype=torch.uint8))
    assert weights_digest(module) == weights_digest(shifted)


def test_weights_without_contents_are_unknown() -> None:
    model = small_model()
    model.register_buffer("nowhere", torch.empty(3, device="meta"))
    with pytest.raises(WeightsUnknown):
        weights_digest(model)


@pytest.mark.parametrize("part", ["conj", "imag"])
def test_weights_that_are_not_what_their_memory_holds_are_unknown(part: str) -> None:
    model, pair = small_model(), torch.ones(3, dtype=torch.complex64).conj()
    model.register_buffer("lazy", pair if part == "conj" else pair.imag)
    with pytest.raises(WeightsUnknown, match="a conjugate or a negative view"):
        weights_digest(model)


class Packed(torch.nn.Module):
    """A linear layer as vLLM leaves it on a CPU: the kernel has the weight, the module none."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.input_size = weight.shape[1]
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        self.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_packed_weight_is_asked_for(dtype: str) -> None:
    weight = torch.randn(40, 600, dtype=getattr(torch, dtype))
    one_bit = weight.clone()
    one_bit.view(torch.int8)[39, -2] ^= 1
    swapped = weight[:, torch.arange(600).roll(1)]
    digests = [weights_digest(Packed(w)) for w in (weight, weight.clone(), one_bit, swapped)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vllms_own_packing_is_read(dtype: torch.dtype) -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.utils")
    wide = "AVX512" in torch.backends.cpu.get_cpu_capability()
    if not utils.ops._supports_onednn or (dtype is torch.bfloat16 and not wide):
        pytest.skip("vLLM has no kernel for this CPU that packs such weights")

    def packed(weight: torch.Tensor) -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.input_size_per_partition = weight.shape[1]
        layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        return layer

    torch.manual_seed(1)
    weight = torch.randn(96, 320, dtype=dtype)
    one_bit = weight.clone()
    one_bit.view(torch.int16)[95, -1] ^= 1
    assert packed(weight).weight.numel() == 0, "this vLLM no longer packs: test something else"
    assert weights_digest(packed(weight)) == weights_digest(packed(weight))
    assert weights_digest(packed(weight)) != weights_digest(packed(one_bit))


def test_what_cannot_be_asked_for_is_unknown() -> None:
    gone = torch.nn.Module()
    gone.w2_packed = torch.nn.Parameter(torch.empty(0))
    int8 = torch.nn.Module()
    int8.quant_method = object()
    int8.register_parameter("weight", None)
    for model in (gone, int8):
        with pytest.raises(WeightsUnknown, match="cannot be read"):
            weights_digest(model)


class LinearBase(torch.nn.Module):
    """A quantized layer, as some kernel has left it; known by the name of vLLM's class."""

    def __init__(self, *, packed: torch.Tensor, **left: torch.Tensor | None) -> None:
        super().__init__()
        self.input_size, self.output_size, self.packed = 32, 64, packed
        for name, tensor in left.items():
            kept = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, kept)


SCALES = torch.rand(64, 2, dtype=torch.bfloat16)  # one for every 16 numbers
NOTHING = torch.empty(0, dtype=torch.uint8)


@pytest.mark.parametrize(
    "left",
    [
        {"weight": NOTHING},
        {"weight": NOTHING.to("meta")},  # as on a GPU: not on the CPU
        {"weight": None},
        {},
    ],
    ids=["emptied", "emptied elsewhere", "none", "deleted"],
)
def test_a_weight_that_a_kernel_keeps_for_itself_is_unknown_on_any_device(left: Any) -> None:
    model = torch.nn.ModuleDict({"up": LinearBase(packed=torch.rand(64, 16), scale=SCALES, **left)})
    with pytest.raises(WeightsUnknown, match=r"vLLM keeps up\.weight where it cannot be read"):
        list(weights_module._packed_layers(model))


@pytest.mark.parametrize("method", ["quant_method", "scheme"])
def test_a_scale_that_a_method_of_quantization_keeps_counts_and_is_watched(method: str) -> None:
    model, held = torch.nn.Linear(8, 8), SimpleNamespace(_input_scale=torch.tensor([0.5]))
    plain = weights_digest(model)
    setattr(model, method, held)
    with_scale = weights_digest(model)
    (place,) = [each for each in weight_places(model) if each.value is held._input_scale]
    assert (place.holder, place.key) == (vars(held), "_input_scale")
    held._input_scale = torch.tensor([[0.5]])
    reshaped = weights_digest(model)
    held._input_scale = torch.tensor([0.25])
    assert len({plain, with_scale, reshaped, weights_digest(model)}) == 4


def test_what_a_quantized_layer_has_no_use_for_may_be_empty() -> None:
    """As the order of rows and the zeros that Marlin leaves behind."""
    words = torch.zeros(4, 64, dtype=torch.int32)  # of 4 bits
    left = {"qweight": words, "g_idx": NOTHING, "qzeros": NOTHING, "scales": SCALES}
    assert list(weights_module._packed_layers(LinearBase(packed=words, **left))) == []
    assert weights_digest(LinearBase(packed=words, **left))


def test_a_gigabyte_is_read_in_seconds(record_property: Callable[[str, object], None]) -> None:
    model = torch.nn.Module()
    model.register_buffer("gigabyte", torch.empty(1 << 29, dtype=torch.bfloat16).fill_(1.5))
    start = time.monotonic()
    weights_digest(model)
    speed = 2**30 / 1e9 / (time.monotonic() - start)
    record_property("gigabytes_per_second", speed)
    print(f"weights digest: {speed:.2f} GB/s on {torch.get_num_threads()} threads")
