"""A function of global values that runs on any mesh, each rank on its own parts.

::

    global values ── cut by in_specs ──► rank 0: job(parts)  rank 1: job(parts) ──► what the job gives on each

Outside of ranks all of them run in this process; in a running group, of threads or processes, the first ranks of it
are those of the mesh, and all ranks of the group learn what came.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshcomm._torch import tree_flatten, tree_leaves_with_path, tree_unflatten
from meshcomm.collectives.check import differentiable
from meshcomm.errors import MeshError, fail, held, raise_alone
from meshcomm.layout.notation import Layout
from meshcomm.make_mesh import make_mesh
from meshcomm.mesh import Mesh
from meshcomm.objects.objects import all_gather_object
from meshcomm.runtime.start import world as processes
from meshcomm.runtime.transports.threads.orders import world_of
from meshcomm.runtime.transports.threads.random_state import mixed
from meshcomm.runtime.transports.threads.scheduler import current_rank
from meshcomm.spmd.shard_map.assemble import coordinates
from meshcomm.spmd.shard_map.rank_context import OwnState, begin_body, body_of
from meshcomm.spmd.shard_map.specs import in_strings, of_leaf, own_part, spec_of_each_leaf
from meshcomm.spmd.types.reachable import Reachable, in_place_of

WHERE = "verify"
_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


class Leaf(NamedTuple):
    """A leaf of the inputs or of the outputs, as a global value."""

    label: str
    value: Any
    spec: str | None


@contextlib.contextmanager
def own_words() -> Iterator[None]:
    """What shard_map says of specs, said of verify: nothing has run yet."""
    try:
        with held():
            yield
    except MeshError as error:
        message = str(error).replace("meshcomm.shard_map", f"meshcomm.{WHERE}", 1)
    else:
        return
    raise_alone(MeshError(message))


def in_group() -> bool:
    """Whether there are ranks already, of which this is one."""
    return current_rank() is not None or processes.under_launcher()


def leaves_of(tree: Any, specs: Any, label: str, spec_label: str) -> list[Leaf]:
    """Each leaf with its spec: the first part of its label is the position of the argument."""
    with own_words():
        found = spec_of_each_leaf(specs, tree, label, spec_label)
        named = [("", tree)] if isinstance(tree, Tensor) else tree_leaves_with_path(tree)
        return [Leaf(_called(label, path), x, spec) for spec, (path, x) in zip(found, named, strict=True)]


def _called(label: str, path: str) -> str:
    """``input 1['w']``, ``output``."""
    if label != "input":
        return label + path
    number, _, rest = path.removeprefix("[").partition("]")
    return f"input {number}{rest}"


class Program:
    """A function with global inputs, in one dtype."""

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: tuple[Any, ...],
        in_specs: Any,
        out_specs: Any,
        *,
        twin: Callable[..., Any] | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> None:
        self.fn, self.twin, self.dtype, self.seed = fn, twin, dtype, seed
        self.out_specs = in_strings(out_specs)
        leaves = leaves_of(inputs, in_specs, "input", "in_specs")
        self.form = tree_flatten(inputs)[1]
        self.leaves = [leaf._replace(value=self.cast(leaf.value)) for leaf in leaves]
        self.cut = [leaf for leaf in self.leaves if isinstance(leaf.value, Tensor)]
        others = [leaf.value for leaf in self.leaves if not isinstance(leaf.value, Tensor)]
        self.reach = Reachable(fn, *others, *([] if twin is None else [twin]))
        own = Reachable(fn, *others).tensors
        also = own if twin is None else Reachable(twin, *others).tensors
        given = {id(leaf.value) for leaf in leaves}
        held = [(key, named) for key, named in self.reach.tensors.items() if key not in given]
        self.closed = [(key, name or "a tensor", x) for key, (name, x) in held if differentiable(x) or x.is_leaf]
        asked = [leaf.value for leaf in leaves if isinstance(leaf.value, Tensor) and leaf.value.requires_grad]
        self.wanted = [
            i for i, (before, leaf) in enumerate(zip(_tensors(leaves), self.cut, strict=True))
            if differentiable(leaf.value) and (before.requires_grad or not asked)
        ]  # fmt: skip
        """Which of the cut inputs are differentiated: those that require grad; if none does, all that can be."""
        self.shared = [i for i, (key, _, x) in enumerate(self.closed) if x.requires_grad and key in own and key in also]
        """Which of the closed-over ones are."""

    def cast(self, x: Any) -> Any:
        """In this dtype, without a graph."""
        if not isinstance(x, Tensor):
            return x
        x = x.detach()
        if x.is_complex():
            return x.to(_COMPLEX.get(self.dtype, torch.complex64))
        return x.to(self.dtype) if x.is_floating_point() else x

    @property
    def targets(self) -> list[Leaf]:
        """What is differentiated: inputs, then closed-over tensors, which are invariant along every axis."""
        closed = [self.closed[i] for i in self.shared]
        return [
            *(self.cut[i] for i in self.wanted),
            *(Leaf(name, self.cast(x), "...") for _, name, x in closed),
        ]

    def on_leaves(self) -> Callable[..., Any]:
        """The function of the leaves of its inputs."""
        fn, form = self.fn, self.form

        def of_leaves(*leaves: Any) -> Any:
            return fn(*tree_unflatten(list(leaves), form))

        of_leaves.__module__ = getattr(fn, "__module__", __name__)  # what it reaches is what a program of there does
        return of_leaves

    def layouts(self, mesh: Mesh, leaves: Sequence[Leaf]) -> list[Layout | None]:
        """How each of these lies on a mesh; MeshError where it does not."""
        with own_words():
            return [of_leaf(leaf.spec, leaf.value, leaf.label, mesh, True) for leaf in leaves]

    def parts(self, mesh: Mesh, leaves: Sequence[Leaf], place: Mapping[str, int]) -> list[Any]:
        """The part of each tensor at a place of the mesh; the rest as it is."""
        pairs = zip(leaves, self.layouts(mesh, leaves), strict=True)
        return [
            leaf.value if layout is None else own_part(leaf.value, layout, dict(place), mesh) for leaf, layout in pairs
        ]

    def mesh(self, shape: Mapping[str, int]) -> Mesh:
        """One of these sizes: in this process, or over the first ranks of the group."""
        size = torch.Size(shape.values()).numel()
        if not in_group():
            return make_mesh(shape)
        here = make_mesh({"every": -1})
        assert here.rank is not None
        return make_mesh(shape, ranks=[here.rank] if size == 1 else range(size))

    def run(self, mesh: Mesh, job: Callable[[OnRank], Any]) -> list[Any]:
        """What ``job`` gives on each rank of the mesh."""
        if in_group():
            return self._in_group(mesh, job)
        places = coordinates(mesh)
        slots = self.reach.slots
        world = world_of(mesh.world_size, None, share=True, state=partial(OwnState, slots, self.seed))

        def body() -> Any:
            begin_body(mesh)  # the thread ends with it
            place = mesh.own_index()
            return job(OnRank(self, mesh, places[place]))

        found = world.run(body)
        return [found[rank] for rank in mesh.ranks]

    def _in_group(self, mesh: Mesh, job: Callable[[OnRank], Any]) -> list[Any]:
        result, error = None, None
        every = make_mesh({"every": -1})
        rank = every.rank
        if rank in mesh.ranks:
            with torch.random.fork_rng(), body_of(mesh):
                torch.manual_seed(mixed(self.seed, 0 if mesh.size == 1 else rank or 0) >> 1)
                try:
                    result = job(OnRank(self, mesh, coordinates(mesh)[mesh.own_index()]))
                except Exception as raised:
                    error = raised
        if mesh.size == 1:
            if error is not None:
                raise error
            return [result]
        found = all_gather_object((result, error), "every", mesh=every)
        failed = next((each for _, each in found if each is not None), None)
        if failed is not None:
            raise failed
        return [found[rank][0] for rank in mesh.ranks]


def _tensors(leaves: Sequence[Leaf]) -> list[Tensor]:
    return [leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)]


class Result(NamedTuple):
    """What the function gives on one rank."""

    tensors: list[Tensor]
    labels: list[str]
    specs: list[str | None]
    rest: list[tuple[str, Any]]
    """What is no tensor, by its label."""

    @property
    def form(self) -> str:
        """Which outputs there are."""
        return ", ".join([*self.labels, *(f"{label} = {type(value).__name__}" for label, value in self.rest)])


class OnRank:
    """One rank that runs the program on its own parts."""

    def __init__(self, program: Program, mesh: Mesh, place: Mapping[str, int]) -> None:
        self.program, self.mesh, self.place = program, mesh, place
        self.inputs: list[Tensor] = program.parts(mesh, program.cut, place)
        self.closed = [program.cast(x).clone() for _, _, x in program.closed]

    @property
    def targets(self) -> list[Tensor]:
        """This rank's parts of what is differentiated."""
        program = self.program
        return [*(self.inputs[i] for i in program.wanted), *(self.closed[i] for i in program.shared)]

    def __call__(self, targets: Sequence[Tensor], *, twin: bool = False, within: Inside | None = None) -> Result:
        """Call the function, or its twin, with these in place of what is differentiated."""
        program = self.program
        given, closed = list(self.inputs), list(self.closed)
        places = [(given, i) for i in program.wanted] + [(closed, i) for i in program.shared]
        for (values, i), x in zip(places, targets, strict=True):
            values[i] = x
        given = [x.clone() for x in given]  # the function may change its own copy
        tensors = iter(given)
        values = [next(tensors) if isinstance(leaf.value, Tensor) else leaf.value for leaf in program.leaves]
        fn = program.twin if twin and program.twin is not None else program.fn
        instead = {key: x for (key, _, _), x in zip(program.closed, closed, strict=True)}
        with in_place_of(program.reach.slots, instead), within or contextlib.nullcontext():
            if within is not None:
                layouts = program.layouts(self.mesh, program.cut)
                for leaf, layout, x in zip(program.cut, layouts, given, strict=True):
                    within.given(leaf.label, x, frozenset() if layout is None else frozenset(layout.axes))
                for (_, name, _), x in zip(program.closed, closed, strict=True):
                    within.given(name, x, frozenset())
            result = fn(*tree_unflatten(values, program.form))
        return _laid_out(result, program.out_specs)


class Inside(Protocol):
    """What watches the function while it runs."""

    def given(self, label: str, x: Tensor, along: frozenset[str]) -> None:
        """An input, which is cut along these axes."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: Any) -> None: ...


def _laid_out(result: Any, out_specs: Any) -> Result:
    leaves = leaves_of(result, out_specs, "output", "out_specs")
    for label, value, spec in leaves:
        if isinstance(value, Tensor) and spec is None:
            fail(WHERE, f"the spec of {label} is None, but it is a tensor.", fix='"..." for one that is not cut')
        if not isinstance(value, Tensor) and value is not None and spec is not None:
            what = f"{label} is no tensor but {type(value).__name__}, and its spec is {spec!r}."
            fail(WHERE, what, fix="the spec None, or return a tensor")
    tensors = [leaf for leaf in leaves if isinstance(leaf.value, Tensor)]
    return Result(
        [leaf.value for leaf in tensors],
        [leaf.label for leaf in tensors],
        [leaf.spec for leaf in tensors],
        [(leaf.label, leaf.value) for leaf in leaves if not isinstance(leaf.value, Tensor)],
    )
