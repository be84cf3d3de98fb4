"""What is known of a tensor parallel module: how its parameters are cut, and what runs beside its layers."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from meshcomm import _torch, watch
from meshcomm._torch import dual_level_open, functorch_active, version_of
from meshcomm.axis import Axis
from meshcomm.collectives import check
from meshcomm.collectives.broadcast import broadcast, take_from
from meshcomm.collectives.gather import all_gather, all_gather_invariant, shard
from meshcomm.collectives.reduce import all_reduce, pvary, reduce_scatter
from meshcomm.errors import fail
from meshcomm.mesh import Mesh
from meshcomm.parallel.computed_later import refuse_later
from meshcomm.parallel.cut_parameters import Dim, know
from meshcomm.parallel.stand_ins import PLAIN_TABLES, Seen, Site, become, seen_as
from meshcomm.parallel.tensor.kept_equal import KeptEqual
from meshcomm.parallel.tensor.plan import WHERE
from meshcomm.parallel.tensor.shapes_in_forward import explain
from meshcomm.parallel.tensor.streams import Streams
from meshcomm.spmd.types.told import tell_again

HERE = "_meshcomm_tensor_parallel"
"""Where it stands among the attributes of its module."""
_KEEPING = ("init", "reset", "repr", "tie", "load", "save")
"""In names of methods that look after parameters, and compute nothing of them; nor do nn.Module's own."""


def known_of(module: nn.Module) -> Parallel | None:
    """What is known of a module that :func:`tensor_parallel` was given."""
    found = vars(module).get(HERE)
    return found if isinstance(found, Parallel) else None


class Parallel:
    """What is known of a module that is tensor parallel."""

    def __init__(self, module: nn.Module, axis: Axis, sequence: bool) -> None:
        self.mesh: Mesh = axis.mesh
        self.name, self.index, self.sequence = axis.name, axis.own_index, sequence
        self.module = module
        self.cuts: dict[str, Dim] = {}
        self.varied: list[tuple[nn.Module, str]] = []  # parameters that are whole and used in other ways by each rank
        self.once: set[tuple[nn.Module, str]] = set()  # of them, what one rank alone adds
        self.anywhere: list[tuple[nn.Module, str]] = []  # of them, those of modules that keep their forward
        self.inside: set[nn.Module] = set()  # modules inside of blocks that enter: what they are given has
        self.placed: dict[int, Tensor] | None = None  # what the module sees while it runs
        self.streams = Streams(module, self.mesh, self.name)
        self.equal = KeptEqual(WHERE, self.mesh, self.name)
        self.short = False  # this call is on a sequence that is not cut
        self._entered: tuple[Tensor, tuple[int, bool, bool], Tensor] | None = None
        self._forgets = False  # it when the backward pass that runs has ended

    def __getstate__(self) -> dict[str, Any]:
        """Of what has entered last a copy knows nothing: that may have a graph."""
        return vars(self) | {"_entered": None, "_forgets": False}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """Of a copy."""
        vars(self).update(kept)
        know(self.module, self.mesh)

    @property
    def axis(self) -> Axis:
        """As the rank that asks sees it."""
        return self.mesh.axis(self.name, WHERE)

    # -------------------------------------------------------------------------------------------------- at the start

    @torch.no_grad()
    def make_parts(self, module: nn.Module) -> None:
        """All values from index 0; of each parameter that is cut this rank's part."""
        here = dict(module.named_parameters())
        for name, p in here.items():
            if not p.is_meta:
                check.tensor(WHERE, p, self.axis, repr(name))
        for name, p in here.items():  # one by one: never more than one whole parameter more
            if p.is_meta:
                self._cut_shape(name, p)
                continue
            whole = broadcast(p.detach(), self.name, 0, mesh=self.mesh)
            if p.is_inference() != whole.is_inference():
                whole = whole.clone()  # of the mode that p is of, too
            if name in self.cuts:
                trains, part = p.requires_grad, self.part(name, whole)
                p.requires_grad_(False)  # a leaf that trains may not come to vary, and this one shall
                become(p, part)
                p.requires_grad_(trains)
            else:
                p.data = whole
            p.grad = None  # of this rank's own pass, and of what p was
        take_from(0, [x for x in module.buffers() if not x.is_meta], self.axis)
        self.streams.make_equal()

    def _cut_shape(self, name: str, p: Tensor) -> None:
        """Of a parameter on the meta device: values come later."""
        if name in self.cuts:
            shape = self.part(name, torch.zeros((), device=self.mesh.device).expand(p.shape)).shape
            p.data = torch.empty(shape, dtype=p.dtype, device=p.device)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter."""
        dim, lengths = self.cuts[name]
        pieces = [shard(piece, self.name, dim, mesh=self.mesh) for piece in whole.split(list(lengths), dim)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The inverse."""
        if name not in self.cuts:
            return part.clone()
        dim, lengths = self.cuts[name]
        pieces = part.split([length // self.axis.size for length in lengths], dim)
        return torch.cat([all_gather_invariant(piece, self.name, dim, mesh=self.mesh) for piece in pieces], dim)

    # -------------------------------------------------------------------------------------------------- at each step

    def call(self, method: Any, args: Any, kwargs: Any) -> Any:
        """Run the module; the gradients of what is varied go together."""
        if self.placed is not None:
            return method(*args, **kwargs)
        self.know_again()
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and self.mesh.device.type == "cpu":
            self.equal.look(self.module, self.cuts)
        begun = self.streams.begin(self.module.training)
        try:
            with self.shown():
                result = method(*args, **kwargs)
            refuse_later(WHERE, self.module, result, lambda: [site.value for site in self._sites(None)])
            return result
        except RuntimeError as error:
            explain(WHERE, self.module, self.axis, self.cuts, error)
            raise
        finally:
            self._forget_entered()
            self.short = False
            if begun:
                self.streams.end()

    def know_again(self) -> None:
        """Under a check parameters that stand where others have stood are parts too, whatever was declared of them."""
        if watch.here.watcher is not None and self.placed is None:
            tell_again(self.module)

    @contextlib.contextmanager
    def shown(self, among: Container[nn.Module] | None = None) -> Iterator[None]:
        """Modules, all or these, see varied parameters, also those that others read: unless the whole module runs."""
        if self.placed is not None:
            yield
            return
        sites = self._sites(among)
        values = {id(site.value): site.value for site in sites}
        once = {id(site.value) for site in sites if (site.module, site.name) in self.once}
        varied = self.vary(list(values.values()), [key in once for key in values])
        numbers = range(len(varied)) if torch.compiler.is_compiling() else map(id, varied)
        self.placed = dict(zip(numbers, varied, strict=True))
        try:
            with seen_as(sites, dict(zip(values, varied, strict=True))):
                yield
        finally:
            self.placed = None

    def _sites(self, among: Container[nn.Module] | None) -> list[Site]:
        """Where the parameters to vary stand; not those of which a rank has a slice: they are varied in their layer."""
        found = []
        for owner, name in self.varied:
            table = vars(owner)["_parameters"]
            p = dict.get(table, name) if type(table) in PLAIN_TABLES else None
            if p is not None and (among is None or owner in among):
                found.append(Site(owner, table, name, p))
        return found

    def see_anywhere(self) -> None:
        """Varied parameters of modules that keep their forward are seen so by whoever reads them to compute: another
        module that stands around them, a method, a part that a checkpoint computes again in backward.
        """
        for owner in {owner: None for owner, _ in self.anywhere}:
            names = [name for each, name in self.anywhere if each is owner]
            see = {name: functools.partial(self.seen, (owner, name) in self.once) for name in names}
            _torch.set_own_parameters(owner, Seen(_torch.own_parameters(owner), see))

    def seen(self, once: bool, p: Tensor) -> Tensor:
        """A parameter as this rank uses it, for who computes; as it is for who looks after it."""
        if torch.compiler.is_compiling():
            return p
        if self.placed is None and _torch.backward_pass() == -1 and not self._is_read_by_a_method():
            return p
        return self.vary([p], [once])[0]

    def _is_read_by_a_method(self) -> bool:
        """Whether it is looked up as an attribute in a method of the module's or of a part, one that computes."""
        frame = sys._getframe(3)  # who has looked into the table
        if frame.f_code is not nn.Module.__getattr__.__code__ or frame.f_back is None:
            return False
        code = frame.f_back.f_code
        keeps = code.co_filename == frame.f_code.co_filename or any(word in code.co_name for word in _KEEPING)
        if keeps or not code.co_argcount:
            return False
        reader = frame.f_back.f_locals.get(code.co_varnames[0])
        return isinstance(reader, nn.Module) and any(part is reader for part in self.module.modules())

    def vary(self, params: list[Tensor], once: Sequence[bool] = ()) -> list[Tensor]:
        """Parameters as each rank uses them in its own way; those that the module has varied are.

        ``once``: which of them count on one rank alone: on others they are zero, and so are their gradients.
        """
        rest = [at for at, p in enumerate(params) if not self._is_placed(p)]
        found = list(params)
        for at, x in (
            zip(rest, pvary([params[at] for at in rest], self.name, mesh=self.mesh), strict=True) if rest else ()
        ):
            # On all ranks, so that the order of backward is the same on all.
            found[at] = _on_one_rank(x, self.axis.own_place(x)) if once and once[at] else x
        return found

    def _is_placed(self, p: Tensor) -> bool:
        if not self.placed:
            return False
        if torch.compiler.is_compiling():  # torch 2.11 knows no id() of what was computed
            return any(p is x for x in self.placed.values())
        return id(p) in self.placed

    def cuts_sequence(self, said: bool | None = None) -> bool:
        """Whether activations are cut along the sequence, where the plan says so of a layer, or of all."""
        return (self.sequence if said is None else said) and not self.short

    def enter(self, x: Tensor, sequence: bool) -> Tensor:
        """As the function of that name; what several layers take in turn enters once."""
        if torch.compiler.is_compiling() or x.is_inference():  # of the latter nobody tells whether it was written to
            return self._enter(x, sequence)
        last, moment = self._entered, (version_of(x), torch.is_grad_enabled(), sequence)
        if last is not None and last[0] is x and last[1] == moment:
            return last[2]
        if not sequence and x.requires_grad and self.streams.has_drawn_apart():
            what = "a layer takes what is whole after random numbers, such as dropout's, that differ between ranks."
            fix = "Block() around the module in which they are drawn: what it is given enters before that"
            fail(WHERE, what, got=f"an input of shape {list(x.shape)}", fix=fix)
        y = self._enter(x, sequence)
        if not self._forgets and self.placed is None and _torch.backward_pass() != -1:
            self._forgets = _torch.after_backward(self._forget_entered)  # a checkpoint computes a part again
        self._entered = x, moment, y
        return y

    def _forget_entered(self) -> None:
        self._entered, self._forgets = None, False

    def _enter(self, x: Tensor, sequence: bool) -> Tensor:
        if not sequence:
            return pvary(x, self.name, mesh=self.mesh)
        return all_gather(x, self.name, self._sequence_dim(x), mesh=self.mesh)

    def leave(self, y: Tensor, sequence: bool) -> Tensor:
        """As the function of that name."""
        if sequence:
            y = reduce_scatter(y, self.name, self._sequence_dim(y), mesh=self.mesh)
        else:
            y = all_reduce(y, self.name, mesh=self.mesh)
        self.left(sequence)
        return y

    def _sequence_dim(self, x: Tensor) -> int:
        if x.ndim < 2:
            check.explain(WHERE, "there is no dim of the sequence.", self.axis, x=x, fix="[..., s, d]")
        return x.ndim - 2

    def left(self, sequence: bool) -> None:
        """What comes now is whole, or a part of the sequence."""
        if sequence:
            self.streams.cut()
        else:
            self.streams.whole()


def _on_one_rank(x: Tensor, index: int) -> Tensor:
    """``x``, and zeros on others."""
    if watch.here.watcher is None and not (torch.compiler.is_compiling() or functorch_active() or dual_level_open()):
        only: Tensor = _OnOneRank.apply(x, index == 0)  # type: ignore[no-untyped-call]
        return only
    return x.masked_fill(torch.full((), index > 0, device=x.device), 0)


class _OnOneRank(Function):
    """It saves nothing, which a checkpoint that computes a part again would count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, here: bool) -> Tensor:
        ctx.here = here
        return x.clone() if here else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g if ctx.here else torch.zeros_like(g), None
