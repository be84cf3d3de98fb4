"""shard_map: a function written for one rank's parts becomes a function of global tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar, overload

import torch
from torch import Tensor
from torch.nn import Module

from meshcomm._torch import tree_flatten, tree_unflatten
from meshcomm.collectives.check import mesh_of
from meshcomm.errors import fail, names
from meshcomm.layout.notation import Layout
from meshcomm.mesh import Mesh
from meshcomm.runtime.ops import Op
from meshcomm.runtime.transports.threads.scheduler import current_rank
from meshcomm.spmd.shard_map.assemble import Outputs
from meshcomm.spmd.shard_map.controller import Program, run_global
from meshcomm.spmd.shard_map.dtensors import as_dtensor, is_dtensor, part_of
from meshcomm.spmd.shard_map.rank_context import Modes, body_of, closed_over, not_in_a_body
from meshcomm.spmd.shard_map.specs import (
    WHERE,
    Laid,
    checked,
    in_strings,
    joined,
    laid_out,
    local_part,
    of_tensor,
    spec_of_each_leaf,
)
from meshcomm.spmd.types.check_vma import Mode, checked_mode
from meshcomm.spmd.types.checker import Checker
from meshcomm.spmd.types.grids import Grid, grid_of
from meshcomm.spmd.types.reachable import Reachable
from meshcomm.spmd.types.sizes.varying_numbers import made
from meshcomm.spmd.types.vma import INVARIANT, Origin, Type, marked
from meshcomm.watch import here, paused

P = ParamSpec("P")
R = TypeVar("R")


@overload
def shard_map(
    fn: None = None,
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    check_vma: Mode = True,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def shard_map(
    fn: Callable[P, R],
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    check_vma: Mode = True,
) -> Callable[P, R]: ...
@Op("shard_map", "I -> I", composed=True)
def shard_map(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    check_vma: Mode = True,
) -> Any:
    """Make of ``fn``, which works on one rank's parts of tensors, a function of the global tensors.

    ::

        global                     on each rank                        global
        x [a b]  "(dp n)"   ->   rank 0: fn([a])  rank 1: fn([b])   ->   [fn([a]) fn([b])]

    Outside of ranks, with an in-process mesh, the global function runs all ranks in this process. On a rank, of
    processes or of :func:`launch`, each rank passes the equal global tensors and gets the equal global result. While
    ``fn`` runs, the mesh is the current one.

    Type: invariant -> invariant. Within ``fn`` an input varies along the axes that its spec names and is invariant
    along all others; the tensors that ``fn`` closes over are invariant along all. An output may vary only along the
    axes that its spec names. ``fn`` is checked as by :func:`check_vma`.

    Args:
        fn: the function of one rank's parts; nothing for a decorator. Its effects, such as prints and statistics of
            batches, happen on each rank, and outside of ranks again in backward.
        mesh: the current mesh at the call by default.
        in_specs: one layout per parameter of ``fn``, such as ``("(dp b) d", "d (tp f)")``, whether it is passed by
            position or by name; those of ``*args`` one each, those of ``**kwargs`` together. A mapping gives them by
            name, a single layout is that of all arguments. ``""`` is a scalar, ``"..."`` is not cut, None is no tensor.
            For a pytree it is a tree of layouts, of which each stands for the whole subtree in its place. JAX's
            ``PartitionSpec`` is a layout, too.
        out_specs: the layouts of what ``fn`` returns, likewise.
        check_vma: True inserts a :func:`pvary` wherever an invariant value that requires grad meets one that varies,
            "error" refuses there, False looks at nothing and costs nothing. Outside of ranks values and gradients that
            should be equal along an axis are compared all the same. In compiled code only False works.

    Returns: a function with the parameters of ``fn``, of global tensors. On processes DTensors may stand for global
        inputs; if one does, the outputs are DTensors.

    Backward: along every axis values are global, so that the gradient of an input is the gradient of the global
    function, the same on every rank. Tensors that require grad and that ``fn`` reaches through closures, defaults,
    attributes, modules and globals are inputs too, invariant along every axis. Outside of ranks ``fn`` runs again on
    all of them for each order of derivative, with the same random numbers: those of a call start from one that is
    drawn from torch's generator. What it reads besides tensors must then be what it was. Forward mode works on ranks
    only.

    Cost: on ranks one all_gather_invariant per dim of an output that is cut, and in backward per dim of an input that
    is; otherwise what ``fn`` communicates.

    Raises:
        MeshError: specs of another number or structure than the arguments or the outputs; a layout that does not fit
            a tensor; a dim that its axes do not divide; a mesh of another world; ranks that return different things; a
            call inside of another shard_map's function.
        VaryingError: an output that varies along an axis that its spec does not name, with the line where that began;
            all that :func:`check_vma` refuses; outside of ranks, an output or a gradient that differs along an axis
            along which it is invariant.
        Exception: what ``fn`` raises, with a note of the rank.

    Example:
        >>> import torch, meshcomm as mc
        >>> mesh = mc.make_mesh({"tp": 2})
        >>> @mc.shard_map(mesh=mesh, in_specs=("b d", "d (tp f)", "(tp f) d"), out_specs="b d")
        ... def mlp(x, w1, w2):
        ...     return mc.all_reduce(torch.relu(x @ w1) @ w2, "tp")
        >>> mlp(torch.ones(1, 2), torch.ones(2, 4), torch.ones(4, 2))
        tensor([[8., 8.]])

    Source: ``jax.shard_map``.
    """
    mode = checked_mode(WHERE, check_vma)
    if mesh is not None:
        mesh_of(WHERE, "", mesh)
    if isinstance(in_specs, list):
        in_specs = tuple(in_specs)
    in_specs, out_specs = in_strings(in_specs), in_strings(out_specs)
    checked(in_specs, "in_specs", mesh)
    checked(out_specs, "out_specs", mesh)
    if fn is None:
        return lambda fn: _wrapped(fn, mesh, in_specs, out_specs, mode)
    return _wrapped(fn, mesh, in_specs, out_specs, mode)


def _wrapped(
    fn: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any, mode: bool | str
) -> Callable[..., Any]:
    if not callable(fn):
        fail(WHERE, f"fn is not callable but {type(fn).__name__}.", fix="a function of one rank's parts")
    signature = _signature(fn)
    in_order = _in_order(signature, in_specs)

    def run(*args: Any, **kwargs: Any) -> Any:
        if mode is not False and torch.compiler.is_compiling():
            fail(WHERE, f"check_vma={mode!r} cannot be compiled.", fix="check_vma=False, and mc.pvary where it is due")
        over = mesh_of(WHERE, "", mesh)
        if mesh is None:
            checked(in_specs, "in_specs", over)
            checked(out_specs, "out_specs", over)
        if in_order is None or kwargs or len(args) != len(in_order):
            return _Run(fn, over, out_specs, mode, *_matched(signature, in_specs, args, kwargs)).result()
        arguments = [(name, spec, value) for (name, spec), value in zip(in_order, args, strict=True)]
        return _Run(fn, over, out_specs, mode, arguments, args, kwargs).result()

    return functools.wraps(fn)(run) if inspect.isroutine(fn) else run


# ------------------------------------------------------------------------------------------- arguments and their specs


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn.forward if isinstance(fn, Module) else fn)
    except (TypeError, ValueError):  # of a builtin
        return inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])


_Argument = tuple[str, Any, Any]
"""One argument: its name, its spec and its value, before the last two are compared."""
_PLAIN = inspect.Parameter.POSITIONAL_OR_KEYWORD
_EACH, _NAMED = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def _in_order(signature: inspect.Signature, in_specs: Any) -> list[tuple[str, Any]] | None:
    """Each parameter with its spec, for arguments that are all given by their positions; None: that is not all."""
    parameters = signature.parameters
    if any(each.kind is not _PLAIN for each in parameters.values()) or isinstance(in_specs, Mapping):
        return None
    specs = in_specs if isinstance(in_specs, tuple) else (in_specs,) * len(parameters)
    return list(zip(parameters, specs, strict=True)) if len(specs) == len(parameters) else None


def _matched(
    signature: inspect.Signature, in_specs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[_Argument], tuple[Any, ...], dict[str, Any]]:
    """Each argument with its name and its spec, in the order of the parameters; and the arguments as they are bound."""
    bound = signature.bind(*args, **kwargs)
    specs = _Specs(in_specs, sum(len(_parts(parameter, bound)) for parameter in signature.parameters.values()))
    found: list[_Argument] = []
    for parameter in signature.parameters.values():
        parts = _parts(parameter, bound)
        if not parts:
            specs.skip(parameter)
        found += [(name, specs.take(name, parameter), value) for name, value in parts]
    specs.end()
    return found, bound.args, bound.kwargs


def _parts(parameter: inspect.Parameter, bound: inspect.BoundArguments) -> list[tuple[str, Any]]:
    """What was passed for a parameter, with names."""
    if parameter.name not in bound.arguments:
        return []
    value = bound.arguments[parameter.name]
    if parameter.kind is _EACH:
        return [(f"{parameter.name}[{i}]", part) for i, part in enumerate(value)]
    if parameter.kind is _NAMED:
        return list(value.items())
    return [(parameter.name, value)]


class _Specs:
    """in_specs, given out one by one."""

    def __init__(self, specs: Any, arguments: int) -> None:
        self.specs, self.arguments, self.next = specs, arguments, 0
        self.taken: set[str] = set()

    def take(self, name: str, parameter: inspect.Parameter) -> Any:
        """The spec of the next argument."""
        if isinstance(self.specs, Mapping):
            key = parameter.name if parameter.name in self.specs else name
            self.taken.add(key)
            if key not in self.specs:
                fix = "a mapping has a spec per parameter; write ({...},) for one argument that is a dict"
                fail(WHERE, f"in_specs has no spec for {key!r}.", got=f"specs for {names(self.specs)}", fix=fix)
            return self._named(self.specs[key], name, parameter)
        if not isinstance(self.specs, tuple):
            return self.specs
        if parameter.kind is _NAMED:  # one spec, or a dict of them, for all that have no parameter of their own
            spec = self.specs[self.next] if self.next < len(self.specs) else self._wrong_number()
            self.taken.add(_REST)
            return self._named(spec, name, parameter)
        self.next += 1
        return self.specs[self.next - 1] if self.next <= len(self.specs) else self._wrong_number()

    @staticmethod
    def _named(spec: Any, name: str, parameter: inspect.Parameter) -> Any:
        """The spec of one of ``**kwargs``, where these have a dict of specs."""
        inner = parameter.kind is _NAMED and isinstance(spec, Mapping) and name in spec
        return spec[name] if inner else spec

    def skip(self, parameter: inspect.Parameter) -> None:
        """Nothing was passed for it."""
        self.taken.add(parameter.name)
        self.next += parameter.kind is not _EACH

    def end(self) -> None:
        """There must be none left."""
        if isinstance(self.specs, Mapping):
            unknown = [name for name in self.specs if name not in self.taken]
            if unknown:
                fix = "a mapping has a spec per parameter; write ({...},) for one argument that is a dict"
                fail(WHERE, f"in_specs names {names(unknown)}, which are no parameters.", fix=fix)
        elif isinstance(self.specs, tuple) and self.next + (_REST in self.taken) < len(self.specs):
            self._wrong_number()

    def _wrong_number(self) -> NoReturn:
        fail(
            WHERE,
            f"in_specs has {len(self.specs)} specs for {self.arguments} arguments.",
            got=repr(self.specs),
            fix="one per parameter, or a single layout for all arguments",
        )


_REST = "**"


# ------------------------------------------------------------------------------------------------------ one call of it


class _Run:
    """One call: its arguments laid out, and the function on one rank's parts of them."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        out_specs: Any,
        mode: bool | str,
        arguments: list[_Argument],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.fn, self.mesh, self.out_specs, self.mode = fn, mesh, out_specs, mode
        self.leaves: list[Laid] = []
        for name, spec, value in arguments:
            if type(value) is Tensor and type(spec) is str:  # as a tree of one leaf, in a fifth of the time
                self.leaves.append(Laid(value, name, of_tensor(spec, value.shape, name, mesh, whole=True)))
                continue
            specs = spec_of_each_leaf(spec, value, name, f"the spec of {name}")
            self.leaves += laid_out(specs, value, name, mesh, whole=True)
        self.cut = [laid for laid in self.leaves if laid.layout is not None]
        plain = not kwargs and all([isinstance(x, Tensor) for x in args])  # noqa: C419  # a generator takes longer
        self.form = None if plain else tree_flatten((args, kwargs))[1]
        self.laid: tuple[torch.Size, Layout] | None = None
        self.types: list[tuple[Type, str]] = []
        if mode is not False:
            self.grid = grid_of(mesh)
            self.types = [_given(laid, self.grid) for laid in self.cut]

    def on_parts(
        self, parts: Sequence[Tensor], closed: Iterable[tuple[str, Tensor]], *, own: bool
    ) -> tuple[list[Laid], Any]:
        """Call the function with these in place of the global tensors: what it returns, laid out, and its form.
        ``own``: nobody else has them.
        """
        given = iter(parts)
        args: Sequence[Any] = [laid.value if laid.layout is None else next(given) for laid in self.leaves]
        kwargs: dict[str, Any] = {}
        if self.form is not None:
            args, kwargs = tree_unflatten(list(args), self.form)
        if self.mode is False:
            return self._outputs(self.fn(*args, **kwargs))
        checker = Checker(self.mesh, insert=self.mode is True, grid=self.grid)
        for name, x in closed:
            if marked(x) is None:
                checker.know(x, INVARIANT, f"{name or 'a tensor'}, closed over")
        know = checker.own if own else checker.know
        for part, (kind, what) in zip(parts, self.types, strict=True):
            know(part, kind, what)
        with checker:
            result = self.fn(*args, **kwargs)
            if type(result) is Tensor and type(self.out_specs) is str and not made.any:  # a size may be refused
                result, layout = checker.result(result, self._layout_of, "output")
                return [Laid(result, "output", layout)], tree_flatten(result)[1]
            laid_out, form = self._outputs(result)
            for each in laid_out:
                if each.layout is None:
                    checker.plain_result(each.value, each.label)
            return [_again(checker, each) for each in laid_out], form

    def _outputs(self, result: Any) -> tuple[list[Laid], Any]:
        """What the function has returned, compared with its specs."""
        if type(result) is Tensor and type(self.out_specs) is str:  # as a tree of one leaf, in a third of the time
            return [Laid(result, "output", self._layout_of(result))], tree_flatten(result)[1]
        form = tree_flatten(result)[1]
        specs = spec_of_each_leaf(self.out_specs, result, "output", "out_specs")
        return laid_out(specs, result, "output", self.mesh, whole=False), form

    def _layout_of(self, y: Tensor) -> Layout:
        """That of the only output: as a rule the same on all ranks."""
        shape = y.shape
        if self.laid is None or self.laid[0] != shape:
            self.laid = shape, of_tensor(self.out_specs, shape, "output", self.mesh, whole=False)
        return self.laid[1]

    def result(self) -> Any:
        """The global outputs."""
        if self.mesh.in_process and current_rank() is None:
            return self._outside()
        if here.watcher is None:
            return self._inside()
        not_in_a_body(self.mesh)
        for laid in self.cut:
            here.watcher.whole(WHERE, laid.value, laid.label, self.mesh)
        with paused():
            results = self._inside()
        for y in tree_flatten(results)[0]:
            if isinstance(y, Tensor):
                here.watcher.made_whole(y, WHERE, self.mesh)
        return results

    def _inside(self) -> Any:
        mesh = self.mesh
        mesh.own_index()  # a rank of another world: say so
        values = [laid.value for laid in self.leaves if laid.layout is None]
        closed = () if self.mode is False else Reachable(self.fn, *values).tensors.values()
        with body_of(mesh):
            with_dtensors = any(is_dtensor(x) for x, _, _ in self.cut)
            parts = [
                (part_of if is_dtensor(x) else local_part)(x, layout, mesh)
                for x, _, layout in self.cut
                if layout is not None
            ]
            laid, form = self.on_parts(parts, closed, own=False)
            whole = as_dtensor if with_dtensors else joined
            results = [x if layout is None else whole(x, layout, mesh) for x, _, layout in laid]
        return tree_unflatten(results, form)

    def _outside(self) -> Any:
        for x, label, _ in self.cut:
            if is_dtensor(x):
                fail(WHERE, f"{label} is a DTensor, and the mesh is in-process.", fix="pass x.full_tensor()")
        values = [laid.value for laid in self.leaves if laid.layout is None]
        reach = Reachable(self.fn, *values)
        inputs = closed_over(reach)
        names, replaced = [name for name, _ in inputs], {id(x) for _, x in inputs}
        others = [(name, x) for name, x in reach.tensors.values() if id(x) not in replaced]

        def local(parts: list[Tensor], shared: list[Tensor]) -> Outputs:
            """One rank's work."""
            laid, form = self.on_parts(parts, [*zip(names, shared, strict=True), *others], own=True)
            outputs = Outputs([], [], [], ([], form))
            for value, label, layout in laid:
                if layout is not None:
                    outputs.tensors.append(value)
                    outputs.layouts.append(layout)
                    outputs.labels.append(label)
                outputs.rest[0].append(value if layout is None else _TENSOR)
            return outputs

        program = Program(
            mesh=self.mesh,
            local=local,
            layouts=[laid.layout for laid in self.cut if laid.layout is not None],
            labels=[*(laid.label for laid in self.cut), *names],
            reach=reach,
            shared=[id(x) for _, x in inputs],
            modes=Modes(),
        )
        tensors, (rest, form) = run_global(program, [*(laid.value for laid in self.cut), *(x for _, x in inputs)])
        given = iter(tensors)
        return tree_unflatten([next(given) if value is _TENSOR else value for value in rest], form)


_TENSOR = object()


def _given(laid: Laid, grid: Grid) -> tuple[Type, str]:
    """The type of an argument's parts, the same object on all ranks, and whose it is."""
    assert laid.layout is not None
    what = f"{laid.label}, by its spec {str(laid.layout)!r}"
    return _type_given(what, laid.layout.axes, grid), what


@functools.lru_cache(maxsize=4096)
def _type_given(what: str, axes: tuple[str, ...], grid: Grid) -> Type:
    """The same object at each call: what was found of operations on values of this type is found again."""
    return Type(dict.fromkeys(axes, Origin(what, leaf=True)), grid=grid) if axes else INVARIANT


def _again(checker: Checker, laid: Laid) -> Laid:
    """One of several outputs, once it is known to vary along no other axes than its layout names."""
    if (layout := laid.layout) is None:
        return laid
    return laid._replace(value=checker.result(laid.value, lambda _: layout, laid.label)[0])
