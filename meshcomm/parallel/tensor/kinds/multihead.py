"""torch's ``nn.MultiheadAttention``, of whose heads each rank has some: the style ``"heads"``.

    query, key, value -> [enter] -> q, k, v of own heads -> attention -> own part of out_proj -> [sum] + bias

``state``: what is known of the module that is tensor parallel (:class:`Parallel`).
b = batch, l and s = lengths of queries and of keys, h = heads, e = features of each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshcomm.collectives.gather import all_gather_invariant, shard
from meshcomm.collectives.reduce import all_reduce
from meshcomm.errors import fail
from meshcomm.parallel.cut_parameters import Dim
from meshcomm.parallel.tensor.plan import WHERE, Named, indivisible


def refuse_odd(module: nn.Module, path: str, state: Any) -> None:
    """MeshError for what is not torch's own, or has heads that the axis does not divide."""
    if type(module).forward is not nn.MultiheadAttention.forward or not isinstance(module, nn.MultiheadAttention):
        what = f"{path!r} is 'heads', but belongs to a {type(module).__name__}, not a MultiheadAttention of torch's."
        fail(WHERE, what, fix="columns and rows for its Linear layers, or 'replicated'")
    if module.num_heads % state.axis.size:
        indivisible(f"the number of heads of {path!r}, {module.num_heads},", state.axis)
    if state.sequence and not module.batch_first:
        what = f"{path!r} is 'heads', and has the sequence first, where rows of a batch are cut along the sequence."
        fail(WHERE, what, fix="batch_first=True, or 'replicated'")


def cut_of(p: Named, module: nn.MultiheadAttention) -> Dim | None:
    """How a parameter of it, or of its ``out_proj``, is cut."""
    width = module.embed_dim
    if p.owner is not module:
        return Dim(1, (width,)) if p.name == "weight" else None
    if p.name in ("in_proj_weight", "in_proj_bias"):
        return Dim(0, (width,) * 3)
    return Dim(2 if p.name in ("bias_k", "bias_v") else 0, (width,))


def attended(
    state: Any,
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """In place of its forward."""
    if query.is_nested:
        fail(WHERE, "a MultiheadAttention that is 'heads' takes no nested tensors.", fix="padded ones, with a mask")
    if is_causal and attn_mask is None:
        fail(WHERE, "is_causal=True without attn_mask.", fix="the mask too, as torch has it: is_causal is a hint")
    sequence = state.cuts_sequence()
    alone = query.ndim == 2
    first = module.batch_first or alone
    given = {id(x): x if first else x.transpose(0, 1) for x in (query, key, value)}
    entered = {at: state.enter(x, sequence) for at, x in given.items()}
    rows = [entered[id(x)].unsqueeze(0) if alone else entered[id(x)] for x in (query, key, value)]
    state.streams.cut()
    q, k, v = _projected(module, rows)
    _refuse_shapes(module.num_heads, q, k, v, alone, key_padding_mask, attn_mask)
    masks = _mask(state, module, q, k, key_padding_mask, attn_mask)
    if module.bias_k is not None:
        k = torch.cat([k, module.bias_k.expand(len(k), 1, -1)], 1)
        v = torch.cat([v, module.bias_v.expand(len(v), 1, -1)], 1)  # type: ignore[union-attr]
    q, k, v = (x.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for x in (q, k, v))  # [b, h, ., e]
    if module.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    if masks is not None and masks.shape[-1] < k.shape[-2]:
        masks = F.pad(masks, (0, k.shape[-2] - masks.shape[-1]))
    drop = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / module.head_dim)) @ k.transpose(-2, -1)
        weights = F.dropout((scores if masks is None else scores + masks).softmax(-1), drop, drop > 0)
        found = weights @ v
    else:
        found = F.scaled_dot_product_attention(q, k, v, masks, drop)
    out = module.out_proj
    y = state.leave(F.linear(found.transpose(1, 2).flatten(2), out.weight), sequence)
    if out.bias is not None:
        y = y + (state.vary([out.bias])[0] if sequence else out.bias)
    y = y[0] if alone else y if first else y.transpose(0, 1)
    return y, None if weights is None else _said(state, module, weights, average_attn_weights, alone)


def _projected(module: nn.MultiheadAttention, rows: list[Tensor]) -> list[Tensor]:
    """``[b, ., h/n * e]``: this rank's heads of queries, keys and values."""
    biases: Any = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if module.in_proj_weight is not None:
        weights: Any = module.in_proj_weight.chunk(3)
    else:
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    return [F.linear(x, weight, bias) for x, weight, bias in zip(rows, weights, biases, strict=True)]


def _refuse_shapes(
    heads: int, q: Tensor, k: Tensor, v: Tensor, alone: bool, padding: Tensor | None, mask: Tensor | None
) -> None:
    """MeshError for what torch's refuses, and would be broadcast, or added to the scores, here."""
    (b, length), s = q.shape[:2], k.shape[1]
    if k.shape[0] != b or k.shape[:2] != v.shape[:2]:
        found = ", ".join(
            f"{name} {tuple(x.shape[:2])}" for name, x in zip(("query", "key", "value"), (q, k, v), strict=True)
        )
        fail(WHERE, f"batch and length do not go together: {found}.", fix="one batch, and a value for each key")
    taken: dict[str, tuple[Tensor | None, list[tuple[int, ...]]]] = {
        "key_padding_mask": (padding, [(s,) if alone else (b, s)]),
        "attn_mask": (mask, [(length, s), (b * heads, length, s)]),
    }
    for name, (given, shapes) in taken.items():
        if given is None:
            continue
        if tuple(given.shape) not in shapes:
            fail(WHERE, f"{name} has shape {tuple(given.shape)}.", fix=f"shape {' or '.join(map(str, shapes))}")
        if given.dtype != torch.bool and not given.is_floating_point():
            what = f"{name} has dtype {given.dtype}."
            fail(WHERE, what, fix="torch.bool, True where nothing is to be seen, or floats that are added")


def _mask(
    state: Any, module: nn.MultiheadAttention, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """``[b or 1, h/n or 1, l or 1, s]``: what is added to the scores."""
    found = None
    if mask is not None:
        found = _added(mask, q)
        if found.ndim == 3:  # [b * h, l, s]
            found = shard(found.unflatten(0, (len(q), module.num_heads)), state.name, 1, mesh=state.mesh)
    if padding is not None:
        hidden = _added(padding, q).view(-1, 1, 1, k.shape[1])
        found = hidden if found is None else found + hidden
    return found


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(mask, -math.inf)
    return mask.to(like.dtype)


def _said(state: Any, module: nn.MultiheadAttention, weights: Tensor, average: bool, alone: bool) -> Tensor:
    """The weights of all heads, or their mean."""
    found: Tensor
    if average:
        found = all_reduce(weights.sum(1), state.name, mesh=state.mesh) / module.num_heads
    else:
        found = all_gather_invariant(weights, state.name, 1, mesh=state.mesh)
    return found[0] if alone else found
