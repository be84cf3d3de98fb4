"""context_attention: ring, Ulysses, and both.

Two axes of 2, ring r and heads h, a sequence of four parts, four heads::

    before              all_to_all h          around r              all_to_all h
    r0 h0  part 0       parts 0 1, heads 0 1  heads 0 1 of all      part 0
    r0 h1  part 1  -->  parts 0 1, heads 2 3  heads 2 3 of all -->  part 1
    r1 h0  part 2       parts 2 3, heads 0 1  heads 0 1 of all      part 2
    r1 h1  part 3       parts 2 3, heads 2 3  heads 2 3 of all      part 3
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from meshcomm.axis import Axis, AxisName, axes_in
from meshcomm.collectives import check
from meshcomm.collectives.exchange.all_to_all import all_to_all
from meshcomm.collectives.gather import all_gather
from meshcomm.collectives.messages import tie
from meshcomm.errors import fail, shape_text
from meshcomm.mesh import Mesh
from meshcomm.parallel.context.blocks import Mask, Seen
from meshcomm.parallel.context.order import ORDERS, places
from meshcomm.parallel.context.ring import Ring, attend
from meshcomm.runtime.ops import Op
from meshcomm.watch import here

_WHERE = "context_attention"
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@Op(_WHERE, "V -> V", composed=True)
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    axis: AxisName | None = None,
    heads_axis: AxisName | None = None,
    causal: bool = True,
    order: str | None = None,
    documents: Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    regather: bool = True,
    return_lse: bool = False,
    mesh: Mesh | None = None,
) -> Any:
    """Attention of a sequence that is cut along an axis: each rank has its queries, keys and values, and gets its rows.

    ::

        "b h (cp s) e, b k (cp t) e, b k (cp t) e -> b h (cp s) e"

    Over ``axis`` keys and values go around (ring attention): what a rank has grows with s/n, never with s. Over
    ``heads_axis`` heads are exchanged for places (Ulysses), which sends less where there are enough heads. With both
    the sequence is cut along ``axis`` first: ``"b h (cp heads s) e"``. Projections, norms and MLPs need nothing:
    weights are replicated along both, which are data axes to them.

    Type: varying -> varying.

    Args:
        q: ``[b, h, s/n, e]``, floating point.
        k: ``[b, k, s/n, e]``; k divides h (GQA), and may be less than the size of ``heads_axis``.
        v: ``[b, k, s/n, e']``.
        axis: a name, or a tuple of names, around which keys and values go.
        heads_axis: a name, or a tuple of names, along which heads are exchanged for places.
        causal: whether each place attends to those up to it alone.
        order: which places each index along ``axis`` has, "zigzag" (the default where it is causal) or "contiguous"
            (else): :func:`context_order` puts a sequence so.
        documents: integers ``[s/n]`` or ``[b, s/n]``, of this rank's places in q's order; a place attends to those of
            its own document alone.
        mask: ``mask(i, j)`` of places in the whole sequence before it was put in order, int64 ``[s, 1]`` and
            ``[1, t]``, gives bool ``[s, t]``; True attends. The same on all ranks.
        scale: of the products; ``e ** -0.5`` by default.
        regather: whether keys go around again in backward; else each rank keeps those of all.
        return_lse: whether to give the log of the sum of exponentials as well.
        mesh: the current mesh by default.

    Returns: ``[b, h, s/n, e']`` of q's dtype, new storage; with ``return_lse`` a pair of it and ``[b, h, s/n]``,
    float32, of float64 float64. Where a place attends to nothing: 0, -inf, and no gradient.

    Backward: around once more, with the gradients of keys and values; the gradient of a gradient gathers them all.

    Cost: n-1 times the bytes of a rank's k and v sent forward; backward 2n-1 times, of which the n-1 of gradients that
        are not complete yet are in float32 for half precision (rounded at each step they would be wrong by 1.4 times as
        much on 8 ranks, 1.8 on 16; in float32 by as much as one rank's); without ``regather`` n-1 times each way, the
        gradients in float32, and n times kept. Over ``heads_axis`` all_to_alls of q, k, v and of the result. Shifts are
        the same on all ranks; what a causal mask rules out is not computed. Blocks are computed by torch's kernels: on
        the CPU, and on CUDA flash or cuDNN's (half precision without documents and mask) or the memory-efficient one,
        as ``torch.nn.attention.sdpa_kernel`` allows. On other accelerators, in float64 on CUDA, and for the gradient of
        a gradient, the scores of a block are in memory.

    Raises:
        MeshError: shapes, dtypes or heads that do not fit; an odd length in zigzag, or zigzag that is not causal;
            documents of another length; a mask that gives no bool ``[s, t]``; no such axis.
        CommError: not every rank came in time; the transport failed. Where ranks compare calls: none of q, k and v
            requires grad on one rank, and any on another. All ranks use a result, or :func:`tie` it to what they use.

    Example:
        >>> import torch, meshcomm as mc
        >>> from meshcomm import parallel
        >>> mesh = mc.make_mesh({"cp": 2})
        >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
        >>> order = parallel.context_order(8, "cp", mesh=mesh)
        >>> def main():
        ...     mine = (x[:, :, order].chunk(2, 2)[mesh.rank] for x in (q, k, v))
        ...     return parallel.context_attention(*mine, axis="cp", mesh=mesh)
        >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(torch.cat(mc.launch(main, ranks=2), 2), expected[:, :, order], atol=1e-6)
        True

    Source: Ring Attention (Liu et al., 2023), DeepSpeed Ulysses (Jacobs et al., 2023), USP (Fang and Zhao, 2024).
    """
    ring = None if axis is None else check.axis_of(_WHERE, axis, mesh)
    if ring is not None and heads_axis is not None:
        check.apart(_WHERE, ring, heads_axis, "heads_axis")
    heads = None if heads_axis is None else check.axis_of(_WHERE, heads_axis, mesh)
    said = _Checked(q, k, v, ring, heads)
    order = said.order(causal, order)
    said.mask(mask, causal, order)
    said.documents(documents)
    factor = said.scale(scale)
    said.flags(regather=regather, return_lse=return_lse)

    def run(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Any:
        seen = Seen(
            1 if ring is None else ring.size, 0 if ring is None else ring.index, causal, order, None, mask, factor
        )
        return _run(q, k, v, documents, ring, heads, seen, regather, return_lse)

    given = (q, k, v) if documents is None else (q, k, v, documents)
    if here.watcher is None:
        return run(*given)
    along = [each.name for each in (ring, heads) if each is not None]
    return here.watcher.joined(_WHERE, run, given, tuple(one for name in along for one in axes_in(name)), mesh)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    ring: Axis | None,
    heads: Axis | None,
    seen: Seen,
    regather: bool,
    return_lse: bool,
) -> Any:
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        narrow = torch.get_autocast_dtype(kind)
        q, k, v = (x if x.dtype == torch.float64 else x.to(narrow) for x in (q, k, v))  # as torch's own
    with torch.autocast(kind, enabled=False):
        if heads is not None:
            times = math.lcm(k.shape[1], heads.size) // k.shape[1]
            k, v = (x if times == 1 else x.repeat_interleave(times, 1) for x in (k, v))
            if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
                # one graph on all ranks, whichever of them each has
                q, k, v = (x if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v))
            q, k, v = all_to_all((q, k, v), heads.name, 1, 2, mesh=heads.mesh)
            documents = None if documents is None else all_gather(documents, heads.name, -1, mesh=heads.mesh)
        if documents is not None:
            all_ = documents if ring is None else all_gather(documents.unsqueeze(0), ring.name, 0, mesh=ring.mesh)
            seen = seen._replace(documents=all_.unsqueeze(0) if ring is None else all_)
        out, lse = attend(q, k, v, Ring(ring, seen, regather))
        if heads is not None:
            out = all_to_all(out, heads.name, 2, 1, mesh=heads.mesh)
            if return_lse:
                lse = all_to_all(lse, heads.name, 2, 1, mesh=heads.mesh)
                out, lse = tie(out, lse), tie(lse, out)  # backward goes both ways, whichever of them is used
    return (out, lse) if return_lse else out


class _Checked:
    """What can be wrong, said before anything is sent."""

    def __init__(self, q: Any, k: Any, v: Any, ring: Axis | None, heads: Axis | None) -> None:
        self.q, self.axis, self.ring = q, ring or heads, ring
        self.along = None if ring is None else ring.name
        for name, x in (("q", q), ("k", k), ("v", v)):
            if self.axis is not None:
                check.tensor(_WHERE, x, self.axis, name)
            elif not isinstance(x, Tensor):
                fail(_WHERE, f"{name} is not a tensor but {type(x).__name__}.", fix="[b, h, s, e]")
            if x.dim() != 4 or not x.is_floating_point():
                self.wrong(
                    f"{name} is {shape_text(x.dtype, x.shape)}.", "floats [b, h, s, e], the heads before the sequence"
                )
        cast = torch.is_autocast_enabled(q.device.type) and torch.float64 not in (q.dtype, k.dtype, v.dtype)
        if not (q.dtype == k.dtype == v.dtype or cast):
            self.wrong(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}.", "cast them to one, or use autocast")
        if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3] and q.shape[3] == k.shape[3]):
            fit = "[b, h, s, e], [b, k, t, e] and [b, k, t, e']"
            self.wrong(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit.", fit)
        if not k.shape[1] or q.shape[1] % k.shape[1]:
            self.wrong(f"{k.shape[1]} heads of k do not divide {q.shape[1]} of q.", "each serves as many heads of q")
        if heads is not None and q.shape[1] % heads.size:
            what = f"heads_axis {heads.name!r} (size {heads.size}) does not divide {q.shape[1]} heads."
            self.wrong(what, "axis=, around which keys go whatever the heads, or fewer ranks along it")
        self.keys = k.shape[2]
        self.length = q.shape[2] * (1 if heads is None else heads.size)

    def wrong(self, what: str, fix: str) -> NoReturn:
        if self.axis is not None:
            check.explain(_WHERE, what, self.axis, x=None, fix=fix)
        fail(_WHERE, what, fix=fix)

    def order(self, causal: bool, order: str | None) -> str:
        """The order that holds."""
        q, n = self.q, 1 if self.ring is None else self.ring.size
        if not isinstance(causal, bool):
            self.wrong(f"causal={causal!r} is not a bool.", "True or False")
        if causal and self.keys != q.shape[2]:
            self.wrong(f"{q.shape[2]} queries and {self.keys} keys, and causal.", "as many of both, or causal=False")
        if order not in (None, *ORDERS):
            self.wrong(f"order={order!r} is no order.", '"zigzag" or "contiguous"')
        if order == "zigzag" and not causal:
            self.wrong(
                'order="zigzag" without causal.', "leave it out: without a causal mask all have as much to compute"
            )
        order = order or ("zigzag" if causal else "contiguous")
        if order == "zigzag" and n > 1 and self.length % 2:
            what = (
                f"{self.length} places of each index along {self.ring.name!r} are not two chunks as long as each other."  # type: ignore[union-attr]
            )
            self.wrong(what, 'a sequence that 2n divides: pad it; or order="contiguous"')
        return order if n > 1 else "contiguous"

    def documents(self, documents: Any) -> None:
        if documents is None:
            return
        q = self.q
        if self.keys != q.shape[2]:
            self.wrong(f"documents, and {q.shape[2]} queries and {self.keys} keys.", "as many of both, or a mask")
        if self.axis is not None:
            check.tensor(_WHERE, documents, self.axis, "documents")
        elif not isinstance(documents, Tensor):
            fail(_WHERE, f"documents is not a tensor but {type(documents).__name__}.", fix="integers [s/n] or [b, s/n]")
        if documents.dtype not in _INTEGERS or tuple(documents.shape) not in ((q.shape[2],), (q.shape[0], q.shape[2])):
            what = f"documents is {shape_text(documents.dtype, documents.shape)}."
            self.wrong(
                what, f"integers [{q.shape[2]}] or [{q.shape[0]}, {q.shape[2]}]: of this rank's places, in q's order"
            )

    def mask(self, mask: Any, causal: bool, order: str) -> None:
        """Asked of the first places: a mask that fails does so on every rank."""
        if mask is None:
            return
        if not callable(mask):
            self.wrong(
                f"mask is not a function but {type(mask).__name__}.", "mask(i, j) of places gives bool, True attends"
            )
        n = 1 if self.ring is None else self.ring.size
        first = places(self.length, n, 0, order).to(self.q.device)
        i, j = first[:2, None], first[None, :3]
        found = mask(i, j)
        if not isinstance(found, Tensor) or found.dtype != torch.bool or found.dim() > 2 or _expands(found, i, j):
            what = shape_text(found.dtype, found.shape) if isinstance(found, Tensor) else type(found).__name__
            got = f"mask(i, j) of [{i.shape[0]}, 1] and [1, {j.shape[1]}] gives {what}."
            self.wrong(got, f"bool [{i.shape[0]}, {j.shape[1]}], True attends: lambda i, j: i - j < 128")

    def scale(self, scale: Any) -> float:
        if scale is None:
            return float(self.q.shape[3] ** -0.5) if self.q.shape[3] else 1.0
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
            self.wrong(f"scale={scale!r} is not a number.", "a float, or None for e ** -0.5")
        return float(scale)

    def flags(self, **flags: object) -> None:
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                self.wrong(f"{name}={flag!r} is not a bool.", "True or False")


def _expands(found: Tensor, i: Tensor, j: Tensor) -> bool:
    """Whether it is no mask of these."""
    try:
        found.expand(i.shape[0], j.shape[1])
    except RuntimeError:
        return True
    return False
