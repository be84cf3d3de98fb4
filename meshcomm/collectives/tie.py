"""Saying that a value counts as used: tie."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from meshcomm import _torch
from meshcomm.errors import fail, shape_text
from meshcomm.runtime.ops import Op
from meshcomm.watch import here

__all__ = ["tie"]

Tree = TypeVar("Tree")


@Op("tie", "as ``x``", communicates=False)
def tie(x: Tree, *others: Any) -> Tree:
    """``x``, to whose gradient ``others`` belong from now on: they get zeros, so that their backward runs.

    ::

        forward                 backward
        x      ->  [x]          x      [g]  <-  [g]
        other                   other  [0]

    A rank that does not use what a collective gave it has no backward of that collective, and its peers wait for it::

        y = mc.shift(h, "pp")
        loss = mc.tie(own_loss, y) if mesh.coordinate["pp"] == 0 else loss_of(y)

    Type: as ``x``. No pvary is made, and nothing is said of the types of the others.

    Args:
        x: a floating or complex tensor, or a pytree of such; any dtype where none of the others requires grad.
        others: tensors and pytrees that count as used; what is no tensor in them is passed over.

    Returns: the values of ``x``, bit for bit, new storage; it requires grad if ``x`` or any of the others does.

    Backward: the gradient to ``x``, zeros to the others.

    Cost: a copy of ``x``; nothing is sent.

    Raises:
        MeshError: not a tensor; an integer or bool ``x``, which carries no gradient, tied to what requires grad; a
            :class:`Work` among the others.

    Example:
        >>> import torch, meshcomm as mc
        >>> def main():
        ...     mesh = mc.make_mesh({"pp": 2})
        ...     w = torch.ones((), requires_grad=True)
        ...     y = mc.shift(2 * w, "pp", mesh=mesh)
        ...     loss = mc.tie(w, y) if mesh.rank == 0 else 3 * y
        ...     return torch.autograd.grad(loss, w)[0].item()
        >>> mc.launch(main, ranks=2)
        [7.0, 0.0]
    """
    if here.watcher is not None:
        return here.watcher.tied(tie, x, others)  # type: ignore[no-any-return]
    used = [other for other in _torch.tree_flatten(others)[0] if _counts(other)]
    if isinstance(x, Tensor):
        return _tied(x, used)  # type: ignore[return-value]
    leaves, form = _torch.tree_flatten(x)
    for leaf, (path, _) in zip(leaves, _torch.tree_leaves_with_path(x), strict=True):
        if not isinstance(leaf, Tensor):
            what = f"x{path} is not a tensor but {type(leaf).__name__}."
            fail("tie", what, fix="tie(x, *others): x is what is used, a tensor or a pytree of tensors")
    return _torch.tree_unflatten([_tied(leaf, used) for leaf in leaves], form)  # type: ignore[no-any-return]


def _counts(other: object) -> bool:
    """Whether this is a tensor that can carry a gradient."""
    if isinstance(other, Tensor):
        return other.is_floating_point() or other.is_complex()
    if hasattr(other, "wait"):
        fail("tie", "a Work among the others.", got=repr(other), fix="wait for it: mc.tie(x, work.wait())")
    return False


def _tied(x: Tensor, used: list[Tensor]) -> Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        if torch.is_grad_enabled() and any(other.requires_grad for other in used):
            what = "an x of integers or bools carries no gradient, and one of the others requires grad."
            fail(
                "tie",
                what,
                got=f"x {shape_text(x.dtype, x.shape)}",
                fix="tie a floating tensor, such as the loss",
            )
        return x.clone(memory_format=torch.contiguous_format)
    # Nothing of each stands behind the values: exact for every value of both, and torch knows all of its derivatives.
    return torch.cat([x.reshape(-1), *(_nothing_of(other, x) for other in used)]).view(x.shape)


def _nothing_of(other: Tensor, x: Tensor) -> Tensor:
    """No element of it, as ``x`` has them."""
    none = (other.narrow(0, 0, 0) if other.ndim else other.reshape(1).narrow(0, 0, 0)).reshape(-1)
    if none.is_complex() and not x.is_complex():
        none = torch.view_as_real(none.resolve_conj()).reshape(-1)
    return none.to(device=x.device, dtype=x.dtype)
