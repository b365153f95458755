"""The weights' witness: what samples of tensors notice, and when they are not looked at."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise, product

import pytest

pytest.importorskip("torch")

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import (
    YaRNScalingRotaryEmbedding,
)

from kvshm.hooks.samples import EQUAL_WRITES, LOOKS, PER_LOOK, Samples, _rows_of
from kvshm.hooks.vllm.identity.weights import weight_places, weights_digest
from kvshm.hooks.witness import WeightWitness

from .test_weights import Packed

DTYPES = [
    torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8, torch.uint8,
    torch.int64, torch.bool, torch.complex64,
]  # fmt: skip


def layer(width: int = 96, dtype: torch.dtype = torch.bfloat16, seed: int = 3) -> torch.nn.Module:
    made = torch.nn.Module()
    torch.manual_seed(seed)
    weight = (torch.randn(2 * width, width) * 3).to(dtype)
    made.weight = torch.nn.Parameter(weight, requires_grad=False)
    made.register_buffer("scale", torch.tensor(0.5))
    made.register_parameter("bias", None)
    return made


def sampled(model: torch.nn.Module, start: float = 0.3) -> Samples:
    samples = Samples(weight_places(model), lambda: start)
    digests: dict[object, bytes] = {}
    weights_digest(model, digests, torch.bfloat16)
    samples.digested(digests)
    return samples


def found(samples: Samples, looks: int = LOOKS) -> str:
    """What this many looks at all tensors find first."""
    return next(filter(None, (samples.look_at_all() for _ in range(looks))), "")


def test_nothing_is_found_and_nothing_changes_while_no_one_writes() -> None:
    model, untouched = layer(), layer()
    assert found(sampled(model), 3 * LOOKS) == ""
    assert torch.equal(model.weight, untouched.weight)


def test_a_full_write_past_torchs_counter_is_found_at_once(subtests: pytest.Subtests) -> None:
    for dtype in DTYPES:
        with subtests.test(dtype=dtype):
            model = layer(dtype=dtype)
            samples, version = sampled(model), model.weight._version
            other = (torch.randn(model.weight.shape) * 3).to(dtype)
            model.weight.data.copy_(~other if dtype is torch.bool else other)
            assert model.weight._version == version
            assert samples.look_at_all() == "weight"


def test_a_step_of_an_optimiser_in_low_precision_is_found_at_once() -> None:
    """It changes few elements of each tensor: most steps are smaller than half of the last bit."""
    model = torch.nn.Sequential(*(layer(128, seed=seed) for seed in range(24)))
    samples = sampled(model)
    before = [each.weight.clone() for each in model]
    for each in model:
        each.weight.data.add_(torch.randn(each.weight.shape).sign() * 1e-4)
    changed = sum((a.weight != b).sum().item() for a, b in zip(model, before, strict=True))
    assert 0 < changed < 0.02 * sum(b.numel() for b in before)
    assert samples.look_at_all()


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "with holes"])
def test_every_place_of_the_grid_is_compared_within_its_looks(kind: str) -> None:
    model = torch.nn.Module()
    plain = torch.zeros(700, 300)
    kinds = {"contiguous": plain, "transposed": plain.t(), "with holes": plain[::2, ::3]}
    model.weight = torch.nn.Parameter(kinds[kind], requires_grad=False)
    noticed, rows = 0, _rows_of(torch.arange(model.weight.numel()), 0.0)
    for place in range(int(rows[3][0])):  # before it come the first places of three rows only
        samples = sampled(model, start=0.0)
        where = divmod(place, model.weight.shape[1] if kind != "transposed" else 300)
        target = model.weight.data.t() if kind == "transposed" else model.weight.data
        target[where] = 1.0
        noticed += found(samples) == "weight"
        target[where] = 0.0
    assert noticed == 3


def test_a_run_longer_than_the_grid_is_wide_is_always_found() -> None:
    """As a row of a matrix, or an adapter merged into one of many layers."""
    model = layer(512)
    width = model.weight.numel() // (LOOKS * PER_LOOK)
    for first in range(0, 5 * width, 37):
        samples = sampled(model)
        model.weight.data.view(-1)[first + width : first + 2 * width] += 1
        assert found(samples) == "weight"
        model.weight.data.view(-1)[first + width : first + 2 * width] -= 1


def test_a_run_of_a_1024th_of_a_tensor_always_holds_a_place() -> None:
    for size, start in product(
        (*range(257, 2100, 41), 16_385, 262_144, 999_983), (0.0, 0.4, 0.999)
    ):
        rows = _rows_of(torch.arange(size), start)
        assert {len(row) >= PER_LOOK and len(row) == len(rows[0]) for row in rows} == {True}
        places = [-1, *torch.cat(list(rows)).unique().tolist(), size]
        assert max(b - a - 1 for a, b in pairwise(places)) < size / 1024, (size, start)


def test_small_tensors_are_compared_as_a_whole() -> None:
    model = layer()
    model.norm = torch.nn.Parameter(torch.zeros(4 * PER_LOOK), requires_grad=False)
    samples = sampled(model)
    model.norm.data[-1] = 1e-9
    assert samples.look_at_all() == "norm"


def test_a_single_element_is_found_at_once_if_torch_counts_the_write() -> None:
    model = layer(512)
    samples = sampled(model)
    model.weight[77, 5] += 1
    assert samples.look_at_all() == "weight"


def test_the_same_values_written_again_are_no_change() -> None:
    """And something that writes them in each step is not read as a whole for ever."""
    model = layer()
    samples = sampled(model)
    for _ in range(3 * EQUAL_WRITES):
        model.weight.copy_(model.weight.clone())
        assert samples.look_at_all() == ""
    model.weight.data.add_(1)
    assert samples.look_at_all() == "weight"


def test_after_the_same_values_another_write_is_found_within_the_looks() -> None:
    model = layer(512)
    samples = sampled(model)
    for _ in range(3 * EQUAL_WRITES):
        model.weight.copy_(model.weight.clone())
        samples.look_at_all()
    model.weight[77, 5] += 1
    assert found(samples) == "weight"


def replaced(model: torch.nn.Module) -> None:
    model.weight = torch.nn.Parameter(model.weight.clone(), requires_grad=False)


def other_memory(model: torch.nn.Module) -> None:
    model.weight.data = model.weight.clone()


def removed(model: torch.nn.Module) -> None:
    model.weight = None


def other_table(model: torch.nn.Module) -> None:
    model._parameters = {**layer(seed=4)._parameters}


def other_state(model: torch.nn.Module) -> None:
    model.__dict__.update(layer(seed=4).__dict__)


def another(model: torch.nn.Module) -> None:
    model.extra = torch.nn.Parameter(torch.ones(3), requires_grad=False)


def another_module(model: torch.nn.Module) -> None:
    model.adapter = layer(seed=4)


def test_exchanged_and_added_weights_are_found(subtests: pytest.Subtests) -> None:
    for exchange, name in [
        (replaced, "weight"),
        (other_memory, "weight"),
        (removed, "weight"),
        (other_table, "_parameters"),
        (other_state, "_parameters"),
        (another, "_parameters"),
        (another_module, "_modules"),
    ]:
        with subtests.test(exchange=exchange, name=name):
            model = layer()
            samples = sampled(model)
            exchange(model)
            assert samples.look_at_all() == name


def test_weights_that_two_modules_share_are_found_by_either_name() -> None:
    model = torch.nn.Sequential(layer(), layer())
    model[1].weight = model[0].weight
    samples = sampled(model)
    model[0].weight.copy_(model[0].weight.clone())  # counted, and without a change
    assert samples.look_at_all() == ""
    replaced(model[1])
    assert samples.look_at_all() == "1.weight"


def test_packed_weights_are_watched_where_the_kernel_has_them() -> None:
    """vLLM's kernels multiply by what a function holds; new weights come with a new function."""
    weight = torch.randn(64, 96, dtype=torch.bfloat16)
    model = torch.nn.Sequential(Packed(weight.clone()), Packed(weight))
    samples = sampled(model)
    assert found(samples) == ""
    weight.data[:, ::2] += 1
    assert samples.look_at_all() == "1.weight"
    samples = sampled(model)
    model[0].cpu_linear = Packed(weight).cpu_linear
    assert samples.look_at_all() == "0.weight"


def test_vllms_own_packing_is_watched() -> None:
    utils = pytest.importorskip("vllm.model_executor.layers.utils")
    model = torch.nn.Module()
    model.input_size_per_partition = 320
    model.weight = torch.nn.Parameter(torch.randn(96, 320).bfloat16(), requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(model, remove_weight=True)
    samples = sampled(model)
    assert samples.look_at_all() == ""
    model.weight = torch.nn.Parameter(torch.randn(96, 320).bfloat16(), requires_grad=False)
    utils.dispatch_cpu_unquantized_gemm(model, remove_weight=True)
    assert samples.look_at_all() == "weight"


# -- the thread

Told = queue.SimpleQueue[str]


@pytest.fixture
def writes() -> Told:
    return queue.SimpleQueue()


@pytest.fixture
def witness(writes: Told) -> Iterator[WeightWitness]:
    """Looks every ten milliseconds."""
    made = WeightWitness(0.01, writes.put)
    yield made
    made.close()


def watch(witness: WeightWitness, model: torch.nn.Module) -> None:
    digests: dict[object, bytes] = {}
    with torch.inference_mode():  # as in a step of vLLM's
        witness.prepare(weight_places(model))
        weights_digest(model, digests)
    witness.watch(digests)


def test_the_witness_tells_once_of_a_write_until_it_watches_again(
    witness: WeightWitness, writes: Told
) -> None:
    model = layer()
    for _ in range(2):
        watch(witness, model)
        model.weight.data.add_(1)
        assert writes.get(timeout=100) == "weight"
        assert witness.look() == ""
    assert writes.empty()


def test_a_write_while_the_digest_is_taken_is_found(witness: WeightWitness, writes: Told) -> None:
    """The digest may have read what was there before, or after: it is of neither."""
    model = layer()
    witness.prepare(weight_places(model))
    digests: dict[object, bytes] = {}
    model.weight.data.add_(1)
    weights_digest(model, digests)
    witness.watch(digests)
    assert writes.get(timeout=100) == "weight"


def test_who_opens_an_epoch_can_look_at_once(writes: Told) -> None:
    slow = WeightWitness(3600, writes.put)
    model = layer()
    watch(slow, model)
    assert slow.look() == ""
    model.weight.data.add_(1)
    assert slow.look() == "weight"
    slow.close()


def test_weights_that_cannot_be_read_any_more_count_as_written(
    witness: WeightWitness, writes: Told
) -> None:
    model = layer()
    watch(witness, model)
    model.weight.untyped_storage().resize_(0)
    assert writes.get(timeout=100)


UNMAPPED = """
import ctypes, mmap, sys, time
import torch
from kvshm.hooks.vllm.identity.weights import weight_places
from kvshm.hooks.witness import WeightWitness
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 4
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
size = 1 << 20
address = libc.mmap(None, size, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
memory = (ctypes.c_uint8 * size).from_address(address)
model = torch.nn.Module()
model.weight = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.uint8), requires_grad=False)
witness = WeightWitness(0.001, print)
witness.prepare(weight_places(model))
witness.watch({})
if sys.argv[1] == "stopped":
    witness.stop()
libc.munmap(address, size)
time.sleep(0.5)
print("lives")
"""


@pytest.mark.parametrize(("way", "code"), [("stopped", 0), ("watched", -11)])
def test_nothing_is_read_once_the_weights_may_be_unmapped(way: str, code: int) -> None:
    """As vLLM's sleep mode does; without ``stop`` the process dies, or this would show nothing."""
    done = subprocess.run([sys.executable, "-c", UNMAPPED, way], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "lives\n" if way == "stopped" else "")


def rotary() -> torch.nn.Module:
    """vLLM's own rotary embedding in float32, as gpt-oss makes it."""
    with set_current_vllm_config(VllmConfig()):
        made = YaRNScalingRotaryEmbedding(64, 64, 64, 10_000.0, True, 4.0, torch.float32)
    return torch.nn.Sequential(made, layer())


def run(model: torch.nn.Module) -> None:
    query, key = torch.randn(2, 3, 128, dtype=torch.bfloat16)
    model[0].forward_native(torch.arange(3), query, key)


def test_a_rotary_cache_that_vllm_converts_in_its_first_step_was_not_written() -> None:
    model = rotary()
    samples, before = sampled(model), weights_digest(model, dtype=torch.bfloat16)
    run(model)
    assert model[0].cos_sin_cache.dtype is torch.bfloat16  # else this shows nothing
    assert found(samples) == ""
    assert weights_digest(model, dtype=torch.bfloat16) == before
    model[0].cos_sin_cache.data.view(-1)[100:140] += 0.5
    assert found(samples) == "0.cos_sin_cache"
    assert weights_digest(model, dtype=torch.bfloat16) != before


def test_a_rotary_cache_that_is_written_before_it_is_converted_was_written() -> None:
    model = rotary()
    samples = sampled(model)
    model[0].cos_sin_cache.data[7, 3] += 0.5
    run(model)
    assert samples.look_at_all() == "0.cos_sin_cache"


def test_the_same_values_written_into_a_rotary_cache_are_no_change() -> None:
    model = rotary()
    samples = sampled(model)
    for converts in (False, True):
        if converts:
            run(model)
        model[0].cos_sin_cache.copy_(model[0].cos_sin_cache.clone())
        assert samples.look_at_all() == ""


@pytest.mark.parametrize("other", ["numbers", "shape", "nothing"])
def test_a_rotary_cache_that_becomes_another_one_was_written(other: str) -> None:
    model = rotary()
    samples, cache = sampled(model), model[0].cos_sin_cache
    model[0].cos_sin_cache = {
        "numbers": cache.to(torch.bfloat16) * 1.5,
        "shape": cache[:-1].to(torch.bfloat16),
        "nothing": None,
    }[other]
    assert found(samples) == "0.cos_sin_cache"


def test_another_buffer_that_is_converted_was_written() -> None:
    model = layer()
    samples = sampled(model)
    model.scale = model.scale.to(torch.bfloat16)
    assert found(samples) == "scale"
