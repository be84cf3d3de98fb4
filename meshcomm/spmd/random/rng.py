"""Random functions that draw this rank's part of a global tensor: any mesh draws the same one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection
from typing import Any

from meshcomm._torch import out_of_graphs
from meshcomm.collectives import check
from meshcomm.errors import fail
from meshcomm.layout.notation import as_text, parse
from meshcomm.mesh import Mesh
from meshcomm.runtime.axis_names import key_of, sizes_with_key
from meshcomm.runtime.transports.threads.random_state import mixed
from meshcomm.spmd.random.draws import WHERE, Cut, Draws
from meshcomm.spmd.random.functions import handler_of
from meshcomm.watch import drawing


class Numbers(contextlib.ContextDecorator, contextlib.AbstractContextManager[None]):
    """What :func:`rng` gives. Nothing is looked at before it is entered."""

    def __init__(self, layout: Any, seed: Any, mesh: Any) -> None:
        self._given = layout, seed, mesh
        self._open: list[tuple[drawing, Draws]] = []

    @out_of_graphs
    def __enter__(self) -> None:
        layout, seed, mesh = self._given
        over = check.mesh_of(WHERE, "", mesh)
        place = over.axis(over.axis_names[0], WHERE).own_coordinate
        text = as_text(layout)
        if not isinstance(text, str):
            parse(WHERE, text, over.shape)  # says what is wrong
        cut, axes = _cut(text, key_of(over.shape), tuple(place.items()))
        if over.reads is not None:
            for name in axes:
                over.reads.note(over.shape, (name,))
        along, draws = drawing(axes, over), Draws(cut, _key(seed), handler_of)
        along.__enter__()
        draws.__enter__()  # type: ignore[no-untyped-call]
        self._open.append((along, draws))

    @out_of_graphs
    def __exit__(self, *exc: object) -> None:
        along, draws = self._open.pop()
        try:
            draws.__exit__(*exc)
        finally:
            along.__exit__(*exc)

    def _recreate_cm(self) -> Numbers:
        return Numbers(*self._given)


def rng(layout: str | Collection[Any], *, seed: int | tuple[int, ...], mesh: Mesh | None = None) -> Numbers:
    """Inside, torch's random functions draw this rank's part of a global tensor that does not depend on the mesh.

    ::

        with rng("(dp b) d", seed=0):        dp=1            dp=2, index 0    index 1
            torch.rand(4 // dp, 1)        [0.31 0.87         [0.31 0.87]     [0.05 0.64]
                                           0.05 0.64]

    So a model is initialised alike on every mesh, and dropout drops the same elements. Each number is a function of the
    seed, of how many draws there were before in this context, and of where in the global tensor its element stands.
    Nothing is stored and nothing advances: entering again with the same seed draws the same again. Give each layer and
    each step a seed of its own: ``seed=(run, step, layer)``.

    **Under torch.utils.checkpoint the** ``with`` **must stand inside of the function that is checkpointed**, where
    computing it again enters again and draws the same. If it stands around the call, backward would compute again
    outside of it, and drop other elements than forward did: the draw raises.

    In a stage of :func:`meshcomm.parallel.pipelined` it stands inside of the layers, too: a microbatch draws what its
    rows would draw in the whole batch.

    A context is its thread's own: what :func:`launch` and :func:`shard_map` start must enter one itself. Under
    ``torch.compile`` it breaks the graph.

    What is drawn: ``torch.rand``, ``randn``, ``randint``, ``normal``, ``bernoulli`` and those ending in ``_like``; the
    methods ``uniform_``, ``normal_``, ``bernoulli_``, ``random_``, ``exponential_``; ``F.dropout`` and ``nn.Dropout``;
    what is made of these, such as ``nn.init``, which goes by the fans of the global tensor, ``reset_parameters`` and
    most of ``torch.distributions``. Every other random function of torch raises: attention that drops weights,
    ``randperm``, ``multinomial``, a ``generator=``. The random functions of numpy and Python are left alone.

    Type: what is drawn varies along the axes that the layout names, and is the same along all others.

    Args:
        layout: how the tensors that are drawn lie on the mesh, such as ``"(dp b) (tp s) d"``. It is fitted to the local
            shape of each; ``"(tp o) ..."`` fits a weight and its bias.
        seed: an int, or a tuple of ints; the same on every rank.
        mesh: the current mesh by default.

    Returns: a context manager, and a decorator.

    Backward: that of the functions themselves; dropout's gradient is dropped where its input was.

    Cost: nothing is communicated. A number takes some 22 operations on int64, a normal one 20 more on floats; a draw
        some 15 to 30 µs at least, and up to 40 µs where a small one is not like the one before.

    Raises:
        MeshError: a layout that is none, or that does not fit a tensor; a seed that is no int; called outside a rank; a
            random function that cannot draw a part of a global tensor; a draw in a function that is checkpointed
            inside of the context.

    Example:
        >>> import torch, meshcomm as mc
        >>> def draw(size):
        ...     with mc.use_mesh(mc.make_mesh({"dp": size})), mc.rng("(dp b)", seed=0):
        ...         return torch.rand(4 // size)
        >>> torch.equal(torch.cat(mc.launch(draw, ranks=2, args=(2,))), mc.launch(draw, ranks=1, args=(1,))[0])
        True

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; ``jax.random`` under
        ``jax_threefry_partitionable``; DTensor's random operations, which draw what depends on the mesh.
    """
    return Numbers(layout, seed, mesh)


@functools.lru_cache(maxsize=256)
def _cut(
    text: str, of_mesh: tuple[tuple[str, Any], ...], place: tuple[tuple[str, int], ...]
) -> tuple[Cut, frozenset[str]]:
    """How tensors are cut, which is the same for each layer and step, and along which axes."""
    sizes = sizes_with_key(of_mesh)
    parsed = parse(WHERE, text, sizes)
    return Cut(text, parsed, sizes, dict(place), {}), frozenset(parsed.axes)


def _key(seed: object) -> int:
    """64 bits, other ones for any other seed of that length."""
    if type(seed) is int:  # as below, for what is given most
        return mixed(seed, 0)
    parts = seed if isinstance(seed, tuple) else (seed,)
    if not parts or not all(check.whole_number(part) for part in parts):
        fail(WHERE, f"seed={seed!r} is not an int.", fix="an int, or a tuple of ints, that is the same on every rank")
    first, *rest = map(int, parts)
    return functools.reduce(mixed, [*rest, 0], first)
