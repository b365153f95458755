"""What vLLM lacks on a CPU for layers with states, for tests: Mamba 1's kernels in torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any


def without_prefill_checkpoints() -> None:
    """Have layers of Mamba 2 save no state within a step, as other layers with a state: vLLM's CPU
    kernel returns none but the last, and the engine ends with the first long prompt."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    layer: Any = MambaMixer2
    layer.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def with_mamba_1() -> None:
    """vLLM's scan needs CUDA; its CPU kernel of a single step wants heads, as Mamba 2 has them; and
    the layer expects a convolution's weights as CUDA has them."""
    from vllm.model_executor.layers.mamba import mamba_mixer

    layer: Any = mamba_mixer.MambaMixer
    forward = layer.forward_impl

    def forward_impl(self: Any, **given: Any) -> None:
        weight = self.conv1d.weight
        if weight.dim() == 2:  # in the profile run
            weight.data = weight.data.unsqueeze(1)
        forward(self, **given)

    layer.forward_impl = forward_impl
    mamba_mixer.selective_scan_fn = _scan
    mamba_mixer.selective_state_update = _update


def _steps(state: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any]:
    """Tokens of one request, (dim, tokens), and (state, tokens) for ``b`` and ``c``; returns what
    they give, and the state behind them."""
    import torch

    decay = torch.exp(dt[:, :, None] * a[:, None]).unbind(1)
    added = ((dt * x)[:, :, None] * b.T[None]).unbind(1)
    states = []
    for factor, summand in zip(decay, added, strict=True):
        state = torch.addcmul(summand, factor, state)
        states.append(state)
    return torch.einsum("dtn,nt->dt", torch.stack(states, 1), c) + d[:, None] * x, state


def _scan(
    u: Any,
    ssm_states: Any,
    delta: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    z: Any,
    bias: Any,
    *,
    cache_indices: Any,
    has_initial_state: Any,
    query_start_loc: Any,
    **_: Any,
) -> Any:
    import torch
    from torch.nn.functional import silu, softplus

    out, places = torch.empty_like(u), query_start_loc.tolist()
    for i, (begin, end) in enumerate(pairwise(places)):
        of, kept = slice(begin, end), ssm_states[int(cache_indices[i])]
        state = kept.float() if has_initial_state[i] else torch.zeros_like(kept).float()
        dt = softplus(delta[:, of].float() + bias.float()[:, None])
        y, state = _steps(state, u[:, of].float(), dt, a, b[:, of].float(), c[:, of].float(), d)
        out[:, of] = y * silu(z[:, of].float())
        kept.copy_(state)
    return out


def _update(
    state: Any,
    x: Any,
    dt: Any,
    a: Any,
    b: Any,
    c: Any,
    d: Any,
    bias: Any,
    *,
    z: Any,
    state_batch_indices: Any,
    out: Any,
    **_: Any,
) -> None:
    from torch.nn.functional import silu, softplus

    for i, block in enumerate(state_batch_indices.flatten().tolist()[: len(x)]):
        step, one = softplus(dt[i].float() + bias.float())[:, None], slice(i, i + 1)
        y, kept = _steps(
            state[block].float(), x[one].T.float(), step, a, b[one].T.float(), c[one].T.float(), d
        )
        state[block] = kept
        out[i] = y[:, 0] * silu(z[i].float())
