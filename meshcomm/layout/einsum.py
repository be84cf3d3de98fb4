"""einsum over global tensors: local einsums, and the collectives that the layouts call for.

By its recipe each operand is brought to where its ranks need it; what a rank computes is a part of a sum where an index
is summed over that they divide. All of it is made of differentiable collectives; their transposes are each operand's
backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm import _torch, watch
from meshcomm.collectives import check
from meshcomm.collectives.exchange.permute import shift
from meshcomm.collectives.gather import all_gather
from meshcomm.collectives.reduce import all_reduce, pvary, reduce_scatter
from meshcomm.errors import fail, names
from meshcomm.layout.notation import parse_arrow
from meshcomm.layout.recipe import Move, Recipe, gathers, recipe_of, varies
from meshcomm.layout.reshard import take
from meshcomm.layout.search import Step
from meshcomm.layout.shapes import of_graph
from meshcomm.mesh import Mesh, mesh_with_key
from meshcomm.runtime.ops import Op


@Op("einsum", "as the string says", composed=True)
def einsum(layouts: str, *operands: Tensor, mesh: Mesh | None = None, ring: bool | None = None) -> Tensor:
    """Multiply and sum global tensors of which each rank has a part.

    ::

        "b s d, d (tp f) -> b s (tp f)"     column parallel: nothing is sent; backward all_reduce
        "b s (tp f), (tp f) d -> b s d"     row parallel: all_reduce
        "b (tp s) d, d (tp f) -> b s (tp f)"    with sequence parallelism: all_gather; backward reduce_scatter
        "b s (tp f), (tp f) d -> b (tp s) d"    and its other end: reduce_scatter; backward all_gather

    The notation is that of :func:`reshard`; dims have names of any length, and what is not in the result is summed.
    Along an axis that stands anywhere in the string, a tensor whose own part does not name it is invariant; axes that
    stand nowhere are left as they are.

    Type: as the string says. The gradient of each tensor has the layout of that tensor.

    Args:
        layouts: ``"a, b, ... -> result"``.
        operands: this rank's part of each, all of one dtype.
        mesh: the current mesh by default.
        ring: where one operand is gathered, or the sums are scattered, do it piece by piece round a ring, each piece
            under way while another one is multiplied (a collective matmul). The same values up to the order of sums, in
            n products and n - 1 shifts; the backward goes round the other way. Not in compiled code. None: where that
            pays, the same on all ranks: on devices that move bytes while they compute (NCCL), from 4 MiB a piece and
            256 products for each element that is moved on; never on the CPU, whose cores do both.

    Returns: this rank's part of the result.

    Backward: for each operand the einsum of the gradient with the other operands, conjugated, and the collectives
        turned round. An index that stands in one operand only is summed first, and its gradient expanded.

    Cost: what has to be moved, by the choice above: an operand is gathered where the other one is cut along another
        index, sums are made with one all_reduce, or one reduce_scatter where the result is cut.

    Raises:
        MeshError: layouts that are none; another number of operands or dims; an index of the result that stands in no
            operand; lengths that do not fit each other or are not divided by their axes; other dtypes; not a tensor.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> def row_parallel():
        ...     x, w = torch.tensor([[1.0 + mesh.rank]]), torch.tensor([[10.0]])
        ...     return mc.einsum("b (tp f), (tp f) d -> b d", x, w, mesh=mesh).tolist()
        >>> mc.launch(row_parallel, ranks=2)
        [[[30.0]], [[30.0]]]

    Source: einops; ``jnp.einsum`` under a sharding; tensor and sequence parallelism of Megatron-LM; SUMMA (van de Geijn
        and Watts, 1997).
    """
    if watch.here.watcher is not None:
        return watch.here.watcher.laid_out(einsum, layouts, *operands, mesh=mesh, ring=ring)  # type: ignore[no-any-return]
    here = check.mesh_of("einsum", "", mesh)
    _check(layouts, operands, ring, here)
    if torch.compiler.is_compiling():
        recipe = _dressed(_bare_recipe(layouts, tuple([of_graph(x.shape) for x in operands]), here.key))
        ring = False  # each rank's pieces would come in another order
    else:
        recipe = _recipe(layouts, tuple(tuple(x.shape) for x in operands), here.key)
        ring = _ring_pays(operands, recipe, here) if ring is None else ring
    gathered = _gathered_once(recipe) if ring else None
    scattered = recipe.scattered
    if gathered is not None:
        y = _gathered_in_a_ring(operands, recipe, gathered, here)
    else:
        parts = [_moved(x, move, here) for x, move in zip(operands, recipe.moves, strict=True)]
        if ring and len(scattered) == 1:
            y, scattered = _scattered_in_a_ring(parts, recipe, here), ()
        else:
            y = _product(parts, [move.names for move in recipe.moves], recipe.product)
    for dim, axes in scattered:
        y = reduce_scatter(y, axes, dim, mesh=here)
    if recipe.reduced:
        y = all_reduce(y, recipe.reduced, mesh=here)
    y = take(y, recipe.steps, here)
    for place in recipe.ones:
        y = y.unsqueeze(place)
    return y


def _check(layouts: str, operands: Sequence[Tensor], ring: bool | None, mesh: Mesh) -> None:
    """Refuse what is wrong whatever the layouts say."""
    where = "einsum"
    some = mesh.axis(mesh.axis_names[0], where)
    for number, x in enumerate(operands):
        check.tensor(where, x, some, f"operand {number}")
        if x.dtype != operands[0].dtype:
            kinds = names(str(each.dtype) for each in operands)
            fail(where, "operands of different dtypes.", got=f"{layouts!r}; {kinds}", fix="cast them to one")
    if operands and operands[0].dtype == torch.bool:
        fail(where, "operands of torch.bool have no products and sums.", got=repr(layouts), fix="cast with x.int()")
    if ring is not None and not isinstance(ring, bool):
        fail(where, f"ring={ring!r} is neither True nor False.", fix="True or False, or None where it is to be chosen")
    if not isinstance(layouts, str):
        parse_arrow(where, layouts, mesh.shape)  # says what it is


@lru_cache(1000)
def _recipe(layouts: str, shapes: tuple[tuple[int, ...], ...], mesh: str) -> Recipe:
    sizes = mesh_with_key(mesh).shape
    return recipe_of("einsum", parse_arrow("einsum", layouts, sizes, len(shapes)), shapes, tuple(sizes.items()))


@_torch.at_trace_time
def _bare_recipe(layouts: str, shapes: tuple[tuple[int, ...], ...], mesh: str) -> Any:
    """The recipe in types that a graph may hold."""
    moves, *rest, steps, ones = _recipe(layouts, shapes, mesh)
    bare = tuple((*move[:3], tuple(map(tuple, move.steps)), move.varied) for move in moves)
    return bare, *rest, tuple(map(tuple, steps)), ones


def _dressed(bare: Any) -> Recipe:
    moves, product, scattered, reduced, steps, ones = bare
    dressed = [
        Move(alone, axes, dims, tuple(Step(*step) for step in way), varied) for alone, axes, dims, way, varied in moves
    ]
    return Recipe(tuple(dressed), product, scattered, reduced, tuple(Step(*step) for step in steps), ones)


def _moved(x: Tensor, move: Move, mesh: Mesh) -> Tensor:
    if not (move.alone or move.steps):
        return pvary(x, move.varied, mesh=mesh) if move.varied else x
    if move.alone:
        x = x.sum(move.alone, dtype=x.dtype)
        if move.alone_axes:
            x = all_reduce(x, move.alone_axes, mesh=mesh)
    varied = tuple(
        axis for axis in move.varied if not any(gathers(step, axis, move, at) for at, step in enumerate(move.steps))
    )
    due = _smallest(move, mesh) if not any(axis in step.axes for step in move.steps for axis in varied) else None
    for at, step in enumerate(move.steps):
        if varied and at == due:
            x = pvary(x, varied, mesh=mesh)
        # What is gathered to be used in another way by each rank: its gradient is summed where it is scattered.
        if step.op == "all_gather_invariant" and varies(step.axes, move, at):
            x = all_gather(x, step.axes, step.dim, mesh=mesh)
        else:
            x = take(x, [step], mesh)
    return pvary(x, varied, mesh=mesh) if varied and due in (None, len(move.steps)) else x


def _smallest(move: Move, mesh: Mesh) -> int:
    """Before which step the operand has the fewest elements, the earliest of them: its gradient is summed there."""
    size, smallest, found = 1.0, 1.0, 0
    for at, step in enumerate(move.steps):
        for axis in step.axes:
            if step.op == "all_gather_invariant":
                size *= mesh.shape[axis]
            elif step.op == "shard":
                size /= mesh.shape[axis]
        if size < smallest:
            smallest, found = size, at + 1
    return found


def _product(parts: Sequence[Tensor], inputs: Sequence[Sequence[str]], output: Sequence[str]) -> Tensor:
    if not torch.compiler.is_compiling():
        form = _form(tuple(map(tuple, inputs)), tuple(output))
        if form is not None:
            product, *args = form
            return product(*args, *parts)  # type: ignore[no-any-return]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(itertools.chain(*inputs)))}
    args = []
    for part, dims in zip(parts, inputs, strict=True):
        args += [part, [numbers[name] for name in dims]]
    y: Tensor = torch.einsum(*args, [numbers[name] for name in output])
    return y


@lru_cache(1000)
def _form(inputs: tuple[tuple[str, ...], ...], output: tuple[str, ...]) -> tuple[Any, ...] | None:
    """The cheapest call for a product: for a matrix and what stands before it one of fewer operations, both ways."""
    if len(inputs) == 2 and len(inputs[1]) == 2 and inputs[0][-1:] and output[:-1] == inputs[0][:-1]:
        summed, *_ = reversed(inputs[0])
        if output and output[-1] not in inputs[0]:
            if inputs[1] == (output[-1], summed):
                return (F.linear,)
            if inputs[1] == (summed, output[-1]):
                return (torch.matmul,)
    indices = list(dict.fromkeys(itertools.chain(*inputs)))
    if len(indices) > len(ascii_letters):
        return None
    letters = dict(zip(indices, ascii_letters, strict=False))
    sides = ["".join(letters[name] for name in side) for side in (*inputs, output)]
    return torch.einsum, f"{','.join(sides[:-1])}->{sides[-1]}"


# ------------------------------------------------------------------------------------------------------- round a ring


_LEAST_BYTES = 4 << 20
"""Of a piece, that it takes longer to move and to multiply than to start both."""
_LEAST_WORK = 256
"""Multiplications for each element that is moved, that there is something to hide its way behind."""


def _ring_pays(operands: Sequence[Tensor], recipe: Recipe, mesh: Mesh) -> bool:
    """Whether pieces that go round are faster, by what is the same on all ranks: shapes, sizes and the transport."""
    gathered, scattered = _gathered_once(recipe), recipe.scattered
    if gathered is not None:
        axes, moved = recipe.moves[gathered].steps[0].axes, recipe.moves[gathered].names
    elif len(scattered) == 1:
        ((_, axes),), moved = scattered, recipe.product
    else:
        return False
    axis, first = mesh.axis(axes, "einsum"), operands[0]
    if not axis.link.moves_beside(first.device) or any(move.alone for move in recipe.moves):
        return False
    shapes = zip(operands, recipe.moves, strict=True)
    lengths = {name: n for x, move in shapes for name, n in zip(move.names, x.shape, strict=True)}
    piece = operands[gathered].numel() if gathered is not None else prod(lengths[name] for name in moved) // axis.size
    work = prod(n for name, n in lengths.items() if name not in moved)
    return piece * first.element_size() >= _LEAST_BYTES and work >= _LEAST_WORK


def _gathered_once(recipe: Recipe) -> int | None:
    """The operand of which a gather is the whole and only move of the product."""
    found = [number for number, move in enumerate(recipe.moves) if any(step.elements for step in move.steps)]
    if len(found) != 1:
        return None
    move = recipe.moves[found[0]]
    (step, *more) = move.steps
    return found[0] if not more and varies(step.axes, move, 0) and step.op == "all_gather_invariant" else None


def _gathered_in_a_ring(operands: Sequence[Tensor], recipe: Recipe, number: int, mesh: Mesh) -> Tensor:
    """The product with an operand of which each rank has a piece: the pieces go round."""
    step = recipe.moves[number].steps[0]
    axis = mesh.axis(step.axes, "einsum")
    moves = list(recipe.moves)
    varied = tuple(each for each in moves[number].varied if each not in step.axes)
    moves[number] = moves[number]._replace(steps=(), varied=varied)
    parts = [_moved(x, move, mesh) for x, move in zip(operands, moves, strict=True)]
    inputs = [move.names for move in moves]
    index = inputs[number][step.dim]
    pieces: list[Tensor | None] = [None] * axis.size
    total: Tensor | None = None
    mine, length = parts[number], parts[number].shape[step.dim]
    place = max(map(axis.own_place, parts))
    for turn in range(axis.size):
        coming = shift(mine, axis.name, mesh=mesh, async_op=True) if turn + 1 < axis.size else None
        at = (place - turn) % axis.size
        now = [mine if i == number else _cut(part, inputs[i], index, at, length) for i, part in enumerate(parts)]
        piece = _product(now, inputs, recipe.product)
        if index in recipe.product:
            pieces[at] = piece
        else:
            total = piece if total is None else total + piece
        mine = mine if coming is None else coming.wait()
    if total is not None:
        return total
    return torch.cat([piece for piece in pieces if piece is not None], recipe.product.index(index))


def _scattered_in_a_ring(parts: Sequence[Tensor], recipe: Recipe, mesh: Mesh) -> Tensor:
    """The sums of all ranks' products, each rank's own piece of them: sums go round and grow."""
    ((dim, axes),) = recipe.scattered
    axis = mesh.axis(axes, "einsum")
    inputs, index = [move.names for move in recipe.moves], recipe.product[dim]
    whole = next(part.shape[dims.index(index)] for part, dims in zip(parts, inputs, strict=True) if index in dims)
    length = whole // axis.size
    total: Tensor | None = None
    place = max(map(axis.own_place, parts))
    for turn in range(1, axis.size + 1):
        coming = None if total is None else shift(total, axis.name, mesh=mesh, async_op=True)
        at = (place - turn) % axis.size
        now = [_cut(part, dims, index, at, length) for part, dims in zip(parts, inputs, strict=True)]
        piece = _product(now, inputs, recipe.product)
        total = piece if coming is None else coming.wait() + piece
    assert total is not None
    return total


def _cut(part: Tensor, dims: tuple[str, ...], index: str, at: int, length: int) -> Tensor:
    """The piece of an operand that goes with a piece of an index."""
    return part.narrow(dims.index(index), at * length, length) if index in dims else part
