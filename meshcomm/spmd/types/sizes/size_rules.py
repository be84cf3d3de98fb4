"""Which functions of torch give tensors whose sizes depend on data, by name, and what of their arguments decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


def words(text: str) -> frozenset[str]:
    """Names that stand in a text."""
    return frozenset(text.split())


ASKS = frozenset(
    ["shape", "size", "numel", "nelement", "nbytes", "stride", "__len__", "sym_size", "sym_numel", "sym_stride"]
)
"""Ask for sizes."""

LIKE = words(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like view_as reshape_as expand_as sum_to_size
    resize_as_
    """
)
"""Take the shape of an operand of which they take nothing else."""

INDEXED = frozenset(["__getitem__", "index", "index_put", "index_put_", "_index_put_impl_"])
"""Take an index."""

_FACTORIES = words(
    """
    arange range zeros ones full empty eye rand randn randint randperm linspace logspace empty_strided tril_indices
    triu_indices hann_window hamming_window bartlett_window blackman_window kaiser_window scalar_tensor
    """
)
"""May take tensors of one element for sizes; those below behind the tensor that they are methods of."""

_METHODS = words(
    """
    new_zeros new_ones new_full new_empty view reshape expand broadcast_to repeat tile narrow narrow_copy split
    split_with_sizes unsafe_split unsafe_split_with_sizes topk unfold as_strided unflatten pad constant_pad_nd diag
    diagonal diag_embed one_hot interpolate adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d fold resize_ multinomial nonzero_static chunk
    unsafe_chunk tensor_split hsplit vsplit dsplit resize transpose swapaxes swapdims movedim moveaxis unsqueeze squeeze
    flatten permute avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d fft_fft fft_ifft
    fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn
    fft_irfftn rot90 glu pixel_shuffle vander
    """
)


_MASKS = (torch.bool, torch.uint8)


class Source(NamedTuple):
    """Sizes that the values of ``of`` decide."""

    of: Tensor
    dims: Callable[[int, Tensor], Sequence[int]]
    """Those of the n-th result."""


Find = Callable[[Sequence[Any], dict[str, Any]], Source | None]


def _arg(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _all(dim: int, place: int = 0, name: str = "input") -> Find:
    """Finds that the values of one argument decide this dim of all results."""

    def find(args: Sequence[Any], kwargs: dict[str, Any]) -> Source | None:
        of = _arg(args, kwargs, place, name)
        return Source(of, lambda i, y: (dim,)) if isinstance(of, Tensor) else None

    return find


def _where(args: Sequence[Any], kwargs: dict[str, Any]) -> Source | None:
    if len(args) + len(kwargs) != 1:
        return None
    return Source(_arg(args, kwargs, 0, "condition"), lambda i, y: (0,))


def _unique(args: Sequence[Any], kwargs: dict[str, Any]) -> Source | None:
    x = _arg(args, kwargs, 0, "input")
    consecutive = len(args) > 1 and isinstance(args[1], bool) and "sorted" not in kwargs
    inverse = kwargs.get("return_inverse", args[1] if consecutive else False) or (len(args) > 2 and args[2])
    dim = kwargs.get("dim", args[-1] if len(args) > 3 else None)

    def dims(i: int, y: Tensor) -> Sequence[int]:
        if i == 0:
            return (dim or 0,)
        return () if i == 1 and inverse and y.shape != () and y.numel() == x.numel() and dim is None else (0,)

    return Source(x, dims)


def _repeats(args: Sequence[Any], kwargs: dict[str, Any]) -> Source | None:
    if _arg(args, kwargs, 3, "output_size") is not None:
        return None
    repeats = _arg(args, kwargs, 1, "repeats", args[0] if len(args) == 1 else None)
    if not isinstance(repeats, Tensor):
        return None
    dim = _arg(args, kwargs, 2, "dim")
    return Source(repeats, lambda i, y: (dim or 0,))


def _bins(args: Sequence[Any], kwargs: dict[str, Any]) -> Source | None:
    """Told how many bins there are, it has as many wherever all values have one."""
    told = _arg(args, kwargs, 2, "minlength", 0)
    if isinstance(told, Tensor):
        return Source(told, lambda i, y: (0,))

    def dims(i: int, y: Tensor) -> Sequence[int]:
        return () if isinstance(told, int) and y.numel() == told else (0,)

    return Source(_arg(args, kwargs, 0, "input"), dims)


def _one_hot(args: Sequence[Any], kwargs: dict[str, Any]) -> Source | None:
    classes = _arg(args, kwargs, 1, "num_classes", -1)
    open_ended = isinstance(classes, int) and classes < 0
    return Source(_arg(args, kwargs, 0, "tensor"), lambda i, y: (-1,)) if open_ended else None


def _split_at(args: Sequence[Any], kwargs: dict[str, Any]) -> Source | None:
    where = _arg(args, kwargs, 1, "tensor_indices_or_sections")
    dim = _arg(args, kwargs, 2, "dim", 0)
    return Source(where, lambda i, y: (dim,)) if isinstance(where, Tensor) and where.dim() else None


def _padded(args: Sequence[Any], kwargs: dict[str, Any]) -> Source | None:
    return Source(args[1], lambda i, y: (0, 1) if i == 0 else (0,))


_FIND: dict[str, Find] = {
    "nonzero": _all(0), "nonzero_numpy": _all(0), "argwhere": _all(0), "where": _where,
    "masked_select": _all(0, 1, "mask"), "unique": _unique, "unique_consecutive": _unique, "_unique": _all(0),
    "_unique2": _all(0), "unique_dim": _all(0), "unique_dim_consecutive": _all(0), "bincount": _bins,
    "repeat_interleave": _repeats, "one_hot": _one_hot, "tensor_split": _split_at,
    "_pack_padded_sequence": _all(0, 1, "lengths"), "_pad_packed_sequence": _padded, "values": _all(0),
    "_values": _all(0), "indices": _all(1), "_indices": _all(1), "col_indices": _all(-1), "row_indices": _all(-1),
}  # fmt: skip

SIZED = (
    dict.fromkeys(_METHODS, 2)
    | dict.fromkeys(["__getitem__", "index"], 2)
    | dict.fromkeys(_FACTORIES, 1)
    | dict.fromkeys(_FIND, 1)
)
"""From how many tensors on each may give sizes that depend on data."""


def may_size(name: str, args: Sequence[Any]) -> bool:
    """Whether such a call is worth a closer look: an index of one tensor that is no mask is not, nor a choice between
    two.
    """
    if name == "where":
        return len(args) < 2
    index = args[1] if name == "__getitem__" else None
    return not isinstance(index, Tensor) or index.dtype in _MASKS


def source_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Source | None:
    """What gives other sizes wherever its data is other."""
    find = _FIND.get(name)
    return None if find is None else find(args, kwargs)


def takes_ints(name: str) -> int | None:
    """From which argument on tensors may stand for sizes."""
    return 0 if name in _FACTORIES else 1 if name in _METHODS else None


def counts_parts(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """The dim whose size decides how many results there are."""
    if name == "unbind":
        return int(_arg(args, kwargs, 1, "dim", 0))
    if name in ("chunk", "unsafe_chunk") and _arg(args, kwargs, 1, "chunks") != 1:
        return int(_arg(args, kwargs, 2, "dim", 0))
    if name in ("split", "unsafe_split") and isinstance(_arg(args, kwargs, 1, "split_size", args[-1]), int):
        return int(_arg(args, kwargs, 2, "dim", 0))
    return None
