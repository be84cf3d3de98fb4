"""einsum over global tensors: local einsums, and the collectives that the layouts call for.

Along each mesh axis that is spoken of, the ranks divide the work by cutting one index, or all do the same. That index
is chosen so that few tensors have to be moved, of those choices the one that sends the fewest bytes forwards and
backwards. Then each operand is brought to where its ranks need it; what a rank computes is a part of a sum where the
index is summed over. All of it is made of differentiable collectives; their transposes are each operand's backward.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from string import ascii_letters
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshcomm import _torch, watch
from meshcomm.collectives import check
from meshcomm.collectives.exchange import shift
from meshcomm.collectives.gather import all_gather
from meshcomm.collectives.reduce import all_reduce, pvary, reduce_scatter
from meshcomm.errors import fail, names
from meshcomm.layout.notation import Dim, Layout, Pattern, parse_arrow
from meshcomm.layout.reshard import take
from meshcomm.layout.search import State, Step, cheapest
from meshcomm.layout.shapes import fit
from meshcomm.mesh import AxisName, Mesh, mesh_with_key
from meshcomm.runtime.ops import Op

__all__ = ["Recipe", "einsum", "recipe_of"]


class Move(NamedTuple):
    """What is done with one operand before the product."""

    alone: tuple[int, ...]
    """Dims that stand in this operand only, or have no name: summed here first."""
    alone_axes: tuple[str, ...]
    """Of the axes over which those are cut, the ones over which the sum is made before the product."""
    names: tuple[str, ...]
    """Of the dims that are left."""
    steps: tuple[Step, ...]
    varied: tuple[str, ...]
    """The axes along which it is the same and the others differ."""


class Recipe(NamedTuple):
    """How an einsum is computed."""

    moves: tuple[Move, ...]
    product: tuple[str, ...]
    """The names of the dims of the local product."""
    scattered: tuple[tuple[int, tuple[str, ...]], ...]
    """Dims along which the sums are scattered, and over which axes."""
    reduced: tuple[str, ...]
    """The axes over which the rest of the sums is made."""
    steps: tuple[Step, ...]
    """From there to the layout of the result."""
    ones: tuple[int, ...]
    """Where the result has dims of length 1 without a name."""


@Op("einsum", "as the string says", composed=True)
def einsum(layouts: str, *operands: Tensor, mesh: Mesh | None = None, ring: bool = False) -> Tensor:
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
            n products and n - 1 shifts; the backward goes round the other way. Not in compiled code.

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
    where = "einsum"
    here = check.mesh_of(where, "", mesh)
    some = here.axis(here.axis_names[0], where)
    for number, x in enumerate(operands):
        check.tensor(where, x, some, f"operand {number}")
        if x.dtype != operands[0].dtype:
            kinds = names(str(each.dtype) for each in operands)
            fail(where, "operands of different dtypes.", got=f"{layouts!r}; {kinds}", fix="cast them to one")
    if operands and operands[0].dtype == torch.bool:
        fail(where, "operands of torch.bool have no products and sums.", got=repr(layouts), fix="cast with x.int()")
    if not isinstance(ring, bool):
        fail(where, f"ring={ring!r} is neither True nor False.", fix="True or False")
    if not isinstance(layouts, str):
        parse_arrow(where, layouts, here.shape)  # says what it is
    shapes = tuple(tuple(x.shape) for x in operands)
    if torch.compiler.is_compiling():
        recipe = _dressed(_bare_recipe(layouts, shapes, here.key))
        ring = False  # each rank's pieces would come in another order
    else:
        recipe = _recipe(layouts, shapes, here.key)
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
        y = reduce_scatter(y, _axis(axes), dim, mesh=here)
    if recipe.reduced:
        y = all_reduce(y, _axis(recipe.reduced), mesh=here)
    y = take(y, recipe.steps, here)
    for place in recipe.ones:
        y = y.unsqueeze(place)
    return y


@lru_cache(1000)
def _recipe(layouts: str, shapes: tuple[tuple[int, ...], ...], mesh: int) -> Recipe:
    sizes = mesh_with_key(mesh).shape
    return recipe_of("einsum", parse_arrow("einsum", layouts, sizes, len(shapes)), shapes, tuple(sizes.items()))


@_torch.at_trace_time
def _bare_recipe(layouts: str, shapes: tuple[tuple[int, ...], ...], mesh: int) -> Any:
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


def _axis(axes: tuple[str, ...]) -> AxisName:
    return axes[0] if len(axes) == 1 else axes


def _moved(x: Tensor, move: Move, mesh: Mesh) -> Tensor:
    if not (move.alone or move.steps):
        return pvary(x, _axis(move.varied), mesh=mesh) if move.varied else x
    if move.alone:
        x = x.sum(move.alone, dtype=x.dtype)
        if move.alone_axes:
            x = all_reduce(x, _axis(move.alone_axes), mesh=mesh)
    varied = tuple(
        axis for axis in move.varied if not any(_gathers(step, axis, move, at) for at, step in enumerate(move.steps))
    )
    due = _smallest(move, mesh) if not any(axis in step.axes for step in move.steps for axis in varied) else None
    for at, step in enumerate(move.steps):
        if varied and at == due:
            x = pvary(x, _axis(varied), mesh=mesh)
        # What is gathered to be used in another way by each rank: its gradient is summed where it is scattered.
        if step.op == "all_gather_invariant" and _varies(step.axes, move, at):
            x = all_gather(x, _axis(step.axes), step.dim, mesh=mesh)
        else:
            x = take(x, [step], mesh)
    return pvary(x, _axis(varied), mesh=mesh) if varied and due in (None, len(move.steps)) else x


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


def _varies(axes: tuple[str, ...], move: Move, at: int) -> bool:
    """Whether what a step gathers stays whole and is varied along all these axes."""
    later = {axis for step in move.steps[at + 1 :] for axis in step.axes}
    return all(axis in move.varied and axis not in later for axis in axes)


def _gathers(step: Step, axis: str, move: Move, at: int) -> bool:
    return step.op == "all_gather_invariant" and axis in step.axes and _varies(step.axes, move, at)


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


def _gathered_once(recipe: Recipe) -> int | None:
    """The operand of which a gather is the whole and only move of the product."""
    found = [number for number, move in enumerate(recipe.moves) if any(step.elements for step in move.steps)]
    if len(found) != 1:
        return None
    move = recipe.moves[found[0]]
    (step, *more) = move.steps
    return found[0] if not more and _varies(step.axes, move, 0) and step.op == "all_gather_invariant" else None


def _gathered_in_a_ring(operands: Sequence[Tensor], recipe: Recipe, number: int, mesh: Mesh) -> Tensor:
    """The product with an operand of which each rank has a piece: the pieces go round."""
    step = recipe.moves[number].steps[0]
    axis = mesh.axis(_axis(step.axes), "einsum")
    moves = list(recipe.moves)
    varied = tuple(each for each in moves[number].varied if each not in step.axes)
    moves[number] = moves[number]._replace(steps=(), varied=varied)
    parts = [_moved(x, move, mesh) for x, move in zip(operands, moves, strict=True)]
    inputs = [move.names for move in moves]
    index = inputs[number][step.dim]
    pieces: list[Tensor | None] = [None] * axis.size
    total: Tensor | None = None
    mine, length = parts[number], parts[number].shape[step.dim]
    for turn in range(axis.size):
        coming = shift(mine, axis.name, mesh=mesh, async_op=True) if turn + 1 < axis.size else None
        at = (axis.index - turn) % axis.size
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
    axis = mesh.axis(_axis(axes), "einsum")
    inputs, index = [move.names for move in recipe.moves], recipe.product[dim]
    whole = next(part.shape[dims.index(index)] for part, dims in zip(parts, inputs, strict=True) if index in dims)
    length = whole // axis.size
    total: Tensor | None = None
    for turn in range(1, axis.size + 1):
        coming = None if total is None else shift(total, axis.name, mesh=mesh, async_op=True)
        at = (axis.index - turn) % axis.size
        now = [_cut(part, dims, index, at, length) for part, dims in zip(parts, inputs, strict=True)]
        piece = _product(now, inputs, recipe.product)
        total = piece if coming is None else coming.wait() + piece
    assert total is not None
    return total


def _cut(part: Tensor, dims: tuple[str, ...], index: str, at: int, length: int) -> Tensor:
    """The piece of an operand that goes with a piece of an index."""
    return part.narrow(dims.index(index), at * length, length) if index in dims else part


# -------------------------------------------------------------------------------------------------------- the recipe


@lru_cache(1000)
def recipe_of(
    where: str, pattern: Pattern, shapes: tuple[tuple[int, ...], ...], mesh: tuple[tuple[str, int], ...]
) -> Recipe:
    """How to compute it, for local shapes."""
    return _Cook(where, pattern, shapes, dict(mesh)).best()


class _Cook:
    def __init__(self, where: str, pattern: Pattern, shapes: Sequence[tuple[int, ...]], mesh: dict[str, int]) -> None:
        self.where, self.pattern, self.mesh = where, pattern, mesh
        self.sizes = {axis: mesh[axis] for axis in mesh if axis in pattern.spoken}
        self.spoken = tuple(self.sizes.items())
        layouts = [
            fit(where, layout, shape, mesh, pattern.text) for layout, shape in zip(pattern.inputs, shapes, strict=True)
        ]
        self.lengths = self._lengths(layouts, shapes)
        self.output, self.ones = self._output(layouts)
        self.inputs = layouts
        uses = [name for layout in layouts for name in layout.names]
        self.alone = {name for name in uses if uses.count(name) == 1 and name not in self.output.names}

    def _lengths(self, layouts: Sequence[Layout], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """The global length of each index."""
        lengths: dict[str, tuple[int, int]] = {}
        for number, (layout, shape) in enumerate(zip(layouts, shapes, strict=True)):
            for dim, local, parts in zip(layout, shape, layout.parts(self.mesh), strict=True):
                found, first = lengths.setdefault(dim.name, (local * parts, number))
                if dim.name != "1" and found != local * parts:
                    fail(
                        self.where,
                        f"dim {dim.name!r} has length {found} in operand {first}, {local * parts} in operand {number}.",
                        got=f"{self.pattern.text!r}; local shapes {tuple(shapes)}; mesh {self.mesh}",
                        fix="lengths of whole tensors: those of a part times the sizes of its axes",
                    )
        return {name: length for name, (length, _) in lengths.items()}

    def _output(self, layouts: Sequence[Layout]) -> tuple[Layout, tuple[int, ...]]:
        """The result's layout without dims called 1, and where those are."""
        dims: list[Dim] = []
        ones: list[int] = []
        dots = [name for name in self.lengths if name.startswith("...")]
        dots.sort(key=lambda name: -int(name[3:]))
        for dim in self.pattern.output:
            if dim.name == "...":
                dims += [Dim(name) for name in dots]
            elif dim.name == "1":
                ones.append(len(dims) + len(ones))
            elif dim.name not in self.lengths:
                text = self.pattern.text
                at = text.index("->") + text[text.index("->") :].index(dim.name)
                what = f"dim {dim.name!r} of the result stands in no operand.\n    {text}\n    {' ' * at}^"
                fail(self.where, what, got=f"mesh {self.mesh}", fix=f"one of {names(self.lengths)}")
            else:
                dims.append(dim)
        if dots and "..." not in self.pattern.output.names:
            what = "an ellipsis of an operand is not in the result."
            fail(self.where, what, got=repr(self.pattern.text), fix="name the dims to sum over them")
        output = Layout(dims)
        for dim, parts in zip(output, output.parts(self.mesh), strict=True):
            if self.lengths[dim.name] % parts:
                what = (
                    f"dim {dim.name!r} of length {self.lengths[dim.name]} is not divisible by {' * '.join(dim.axes)}."
                )
                fail(self.where, what, got=f"{self.pattern.text!r}; mesh {self.mesh}", fix="pad it")
        return output, tuple(ones)

    # ---------------------------------------------------------------------------------------------------- choices

    def best(self) -> Recipe:
        """Of all ways to divide the work, the one that moves the fewest tensors; then the fewest bytes."""
        choices = [self._indices(axis) for axis in self.sizes]
        found: tuple[tuple[int, int, int], Recipe] | None = None
        for chosen in itertools.product(*choices):
            by = dict(zip(self.sizes, chosen, strict=True))
            for cuts in self._orders(by):
                made = self._recipe(by, cuts)
                if made is not None and (found is None or made[0] < found[0]):
                    found = made
        assert found is not None  # cutting nothing is always possible
        return found[1]

    def _indices(self, axis: str) -> list[str | None]:
        """What an axis may cut: an index that it cuts somewhere, or nothing."""
        tensors = [*self.inputs, self.output]
        cut = [dim.name for layout in tensors for dim in layout if axis in dim.axes]
        return [*dict.fromkeys(cut), None]

    def _orders(self, by: Mapping[str, str | None]) -> list[dict[str, tuple[str, ...]]]:
        """Per index the axes that cut it, major first, in every order that stands somewhere, or as in the mesh."""
        found: dict[str, list[tuple[str, ...]]] = {}
        for index in {index for index in by.values() if index is not None}:
            axes = {axis for axis, each in by.items() if each == index}
            written = [dim.axes for layout in [self.output, *self.inputs] for dim in layout if dim.name == index]
            orders = [tuple(axis for axis in each if axis in axes) for each in written]
            whole = [order for order in orders if len(order) == len(axes)]
            found[index] = list(dict.fromkeys([*whole, tuple(axis for axis in self.sizes if axis in axes)]))
        return [dict(zip(found, each, strict=True)) for each in itertools.product(*found.values())]

    def _recipe(
        self, by: Mapping[str, str | None], cuts: Mapping[str, tuple[str, ...]]
    ) -> tuple[tuple[int, int, int], Recipe] | None:
        """The cost and the recipe, if lengths can be divided so."""
        for index, axes in cuts.items():
            if self.lengths[index] % math.prod(self.sizes[axis] for axis in axes):
                return None
        moves, moved, sent = [], 0, 0
        for layout in self.inputs:
            move, bytes_sent = self._move(layout, by, cuts)
            moves.append(move)
            moved += any(step.elements for step in move.steps) + bool(move.alone_axes)
            sent += bytes_sent
        product = self.output.names
        shape = tuple(self.lengths[name] for name in product)
        sums = [axis for axis, index in by.items() if index is not None and index not in product]
        state: State = tuple(cuts.get(name, ()) for name in product)
        scattered, state, rest, bytes_sent = self._scatter(sums, state, shape)
        steps = cheapest(state, tuple(dim.axes for dim in self.output), shape, self.spoken)
        sent += bytes_sent + sum(step.elements + self._backwards(step, shape) for step in steps)
        moved += len(scattered) + bool(rest) + any(step.elements for step in steps)
        idle = sum(index is None for index in by.values())
        ready = Recipe(tuple(moves), product, scattered, rest, steps, self.ones)
        return (moved, sent, idle), ready

    def _move(
        self, layout: Layout, by: Mapping[str, str | None], cuts: Mapping[str, tuple[str, ...]]
    ) -> tuple[Move, int]:
        """One operand's way to the product, and the elements that it sends, forwards and backwards."""
        alone = tuple(at for at, dim in enumerate(layout) if dim.name in self.alone or dim.name == "1")
        summed = [(axis, dim.name) for dim in layout if dim.name in self.alone for axis in dim.axes]
        alone_axes = tuple(axis for axis, name in summed if by[axis] != name)
        partial = {axis for axis, name in summed if by[axis] == name}
        kept = [dim for at, dim in enumerate(layout) if at not in alone]
        shape = tuple(self.lengths[dim.name] for dim in kept)
        target: State = tuple(cuts.get(dim.name, ()) for dim in kept)
        steps = cheapest(tuple(dim.axes for dim in kept), target, shape, self.spoken)
        cut = {axis for axes in target for axis in axes}
        varied = tuple(axis for axis, index in by.items() if index is not None and axis not in cut | partial)
        move = Move(alone, alone_axes, tuple(dim.name for dim in kept), steps, varied)
        local = self._local(shape, target)
        gathered = {axis for at, step in enumerate(steps) for axis in step.axes if _gathers(step, axis, move, at)}
        n = math.prod(self.sizes[axis] for axis in varied if axis not in gathered)
        back = 2 * (n - 1) * local // n
        for at, step in enumerate(steps):
            back += self._backwards(step, shape, summed=_varies(step.axes, move, at))
        first = self._local(shape, tuple(dim.axes for dim in kept))
        m = math.prod(self.sizes[axis] for axis in alone_axes)
        return move, sum(step.elements for step in steps) + back + 2 * (m - 1) * first // m

    def _backwards(self, step: Step, shape: tuple[int, ...], *, summed: bool = False) -> int:
        """What the transpose of a step sends; of all_gather if it is ``summed``."""
        if step.op == "all_gather_invariant":
            return step.elements if summed else 0
        if step.op == "shard":
            return (math.prod(self.sizes[axis] for axis in step.axes) - 1) * self._local(shape, step.after)
        return step.elements

    def _local(self, shape: tuple[int, ...], state: State) -> int:
        """Elements of a part."""
        return math.prod(shape) // math.prod(self.sizes[axis] for axes in state for axis in axes)

    def _scatter(
        self, sums: Sequence[str], state: State, shape: tuple[int, ...]
    ) -> tuple[tuple[tuple[int, tuple[str, ...]], ...], State, tuple[str, ...], int]:
        """Where sums end: scattered over a dim of the result that is cut so, the others on all ranks."""
        scattered, rest, sent = [], list(sums), 0
        for at, dim in enumerate(self.output):
            have = state[at]
            if dim.axes[: len(have)] == have:
                last = tuple(itertools.takewhile(lambda axis: axis in sums, dim.axes[len(have) :]))
                if last:
                    n = math.prod(self.sizes[axis] for axis in last)
                    local = self._local(shape, state)
                    sent += 2 * (n - 1) * local // n
                    scattered.append((at, last))
                    state = (*state[:at], have + last, *state[at + 1 :])
                    rest = [axis for axis in rest if axis not in last]
        local = self._local(shape, state)
        n = math.prod(self.sizes[axis] for axis in rest)
        return tuple(scattered), state, tuple(rest), sent + 2 * (n - 1) * local // n
