"""What can be cut in a model: columns with the rows that take what they give, tables, experts; and how, in turn.

a region          candidates, each to be proved
q, k, v -> o      "column", "row"; a fused matrix in three, by lengths, or by heads; with the numbers that it reads
gate, up -> down  the same; or in two
any of them       Column(gather=True), Row(split=True): what is between them is whole on all ranks
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshcomm.parallel.tensor.auto.counts import Divide, divisions
from meshcomm.parallel.tensor.auto.example_inputs import BATCH
from meshcomm.parallel.tensor.auto.flow import Flow, Leaf, tensors
from meshcomm.parallel.tensor.plan import Block, Column, Cut, Row, Style

_MOST = 24
"""Candidates of a region."""


class Candidate(NamedTuple):
    """A way to cut a region."""

    styles: dict[str, Style]
    """By the paths of layers or parameters."""
    blocks: dict[str, Block]
    divide: Divide
    how: str
    """In a few words."""
    entering: frozenset[str] = frozenset()
    """Columns that are the first ones to take something that needs a gradient."""
    idle: frozenset[str] = frozenset()
    """Layers that did not run, such as a table that others call by names of their own."""


class Region:
    """Some layers that are cut together."""

    def __init__(self, key: Any, name: str, candidates: Sequence[Candidate], reason: str = "") -> None:
        self.key, self.name, self.candidates, self.reason = key, name, list(candidates), reason


class Pair(NamedTuple):
    """Columns, and the rows that take what they give."""

    columns: list[Leaf]
    rows: list[Leaf]
    norms: dict[Leaf, Leaf]
    """Norms of what a column gives."""
    shared: list[Leaf]
    """Layers that others use too."""
    tables: list[Leaf]
    """Tables with something for each head."""
    heads: int | None


def pairs_of(flow: Flow, taken: set[Leaf]) -> list[Pair]:
    """Attention first, then the others in the order in which they run; each layer is in one of them at most."""
    found: list[Pair] = []
    order = [leaf for leaf in flow.leaves if leaf.linear]
    for leaf in [*(each for each in order if each.heads), *(each for each in order if not each.heads)]:
        pair = None if leaf in taken else _pair(leaf, order, taken)
        if pair is not None:
            found.append(pair)
            taken.update(pair.columns, pair.rows, pair.norms, pair.shared, pair.tables)
    return found


def _through(leaf: Leaf) -> tuple[dict[Leaf, None], dict[Leaf, Leaf]]:
    """What a layer takes, with norms of what a single layer gives seen through; and those norms."""
    sources: dict[Leaf, None] = {}
    norms: dict[Leaf, Leaf] = {}
    for each in leaf.sources:
        source = next(iter(each.sources)) if len(each.sources) == 1 else None
        if source is not None and source.linear and (each.norm or each.scales_heads(source.length(outputs=True))):
            norms[each] = source
            sources[source] = None
        else:
            sources[each] = None
    return sources, norms


def _pair(row: Leaf, order: list[Leaf], taken: set[Leaf]) -> Pair | None:
    sources, norms = _through(row)
    heads = next(iter(row.heads)) if len(row.heads) == 1 else None
    tables = [each for each in sources if heads is not None and _per_head(each, heads)]
    if not sources or any(not each.linear and each not in tables for each in sources):
        return None
    linear = [each for each in sources if each.linear]
    rows = [each for each in order if each.linear and each not in sources and each not in taken
            and dict.fromkeys(_through(each)[0]) == sources]  # fmt: skip
    allowed: set[Leaf | None] = {*rows, *norms}
    columns = [each for each in linear if set(each.users) <= allowed and each not in taken]
    shared = [each for each in linear if each not in columns]
    if not columns or any(each in taken for each in shared) or (shared and heads is None):
        return None
    if any(not set(norm.users) <= {*rows} for norm in norms):
        return None
    return Pair(columns, rows, norms, shared, tables, heads)


def _per_head(leaf: Leaf, heads: int) -> bool:
    """Whether all that it has is something for each head."""
    if leaf.table:
        return leaf.length(outputs=True) == heads
    return leaf.kind is None and all(p.ndim > 1 and heads in p.shape for p in leaf.module.parameters())


def common(paths: Sequence[str]) -> str:
    """The path of the innermost module that has them all."""
    parts = [path.split(".")[:-1] for path in paths]
    same = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    return ".".join(names[0] for names in same)


def region_of(pair: Pair, flow: Flow, module: nn.Module, n: int) -> Region:
    """What can be done with it."""
    leaves = [*pair.columns, *pair.rows]
    around = common([leaf.path for leaf in [*leaves, *pair.shared]])
    inner = tuple(leaf.path[len(around) :] for leaf in leaves)
    key = (type(module.get_submodule(around)), inner, tuple(leaf.length(outputs=True) for leaf in leaves), pair.heads)
    name = ", ".join(leaf.path for leaf in leaves)
    candidates = list(itertools.islice(_cuts(pair, flow, module, n, around), _MOST))
    width = pair.rows[0].length(outputs=False)
    if width % n == 0 and all(c.length(outputs=True) % n == 0 for c in pair.columns):
        styles: dict[str, Style] = {c.path: Column(gather=True) for c in pair.columns}
        styles |= {r.path: Row(split=True) for r in pair.rows}
        candidates.append(Candidate(styles, {}, {}, "gathered between"))
    entering = frozenset(_entering(pair.columns))
    candidates = [each._replace(entering=entering) for each in candidates]
    reason = "" if candidates else f"the axis of {n} divides it not"
    if pair.heads is not None and pair.heads % n:
        reason = f"{pair.heads} heads over {n} ranks"
    return Region(key, name, candidates, reason)


def _entering(columns: Sequence[Leaf]) -> Iterator[str]:
    seen: set[Any] = set()
    for c in sorted(columns, key=lambda leaf: leaf.path):
        if c.inputs and c.inputs[0] not in seen:
            seen.add(c.inputs[0])
            yield c.path


def _cuts(pair: Pair, flow: Flow, module: nn.Module, n: int, around: str) -> Iterator[Candidate]:
    """With nothing gathered between columns and rows."""
    width, heads = pair.rows[0].length(outputs=False), pair.heads
    if width % n or (heads is not None and (heads % n or width % heads)):
        return
    options = [list(_columns(c, len(pair.columns), width, heads, n)) for c in pair.columns]
    host = next(iter(pair.rows[0].hosts), around)
    kv = min((kv for each in options for _, kv in each), default=heads or 1)
    counts: list[Divide] = [{}]
    if heads is not None:
        counts = divisions(host, module.get_submodule(host), heads, kv, width, n)
    for chosen, divides in itertools.product(itertools.product(*options), (True, False)):
        blocks = _blocks(pair, flow, module, host, around, divides)
        styles: dict[str, Style] = {c.path: style for c, (style, _) in zip(pair.columns, chosen, strict=True)}
        if around in blocks and blocks[around].before == "enter":
            inside = f"{around}." if around else ""
            styles |= {path: "summed" for path, _ in module.named_parameters()
                       if path.startswith(inside) and not any(path.startswith(f"{leaf.path}.") for leaf in
                                                             [*pair.columns, *pair.rows])}  # fmt: skip
        styles |= {r.path: "row" for r in pair.rows}
        for table in pair.tables:
            dims = {name: p.shape.index(heads) for name, p in table.module.named_parameters() if heads in p.shape}
            each: dict[str, Style] = {f"{table.path}.{name}": Cut(dim) for name, dim in dims.items()}
            styles |= {table.path: "column"} if table.table else each
        joined: dict[str, Block] = {}
        for norm, column in pair.norms.items():
            whole = max(p.numel() for p in norm.module.parameters()) == column.length(outputs=True)
            if column in pair.columns and not norm.norm:
                styles |= {f"{norm.path}.{name}": Cut(0) for name, _ in norm.module.named_parameters()}
            elif column in pair.columns:
                styles[norm.path] = "replicated" if whole else "summed"
                joined |= {norm.path: Block("join", "part")} if whole else {}
        styles |= _direct(pair, module, heads, width)
        for divide in counts:
            yield Candidate(styles, {**blocks, **joined}, divide, "cut")


def _columns(c: Leaf, among: int, width: int, heads: int | None, n: int) -> Iterator[tuple[Style, int]]:
    """How a column may lie, and of how many heads of keys it is then."""
    length, most = c.length(outputs=True), heads or 1
    if heads is None:
        if length != width and length % width == 0:
            yield Column(length // width), most
        if length % width == 0 and length % n == 0:
            yield "column", most
        return
    each = width // heads
    kv = length // each if length % each == 0 else 0
    if among == 1 and length > width:
        rest = length - width
        if rest == 2 * width and length % n == 0:
            yield Column(3), most
            yield "column", most
        elif rest % (2 * each) == 0:
            kv = rest // (2 * each)
            if kv % n == 0:
                yield Column((width, rest // 2, rest // 2)), kv
                yield "column", kv
            elif n % kv == 0:
                yield Column((width, rest // 2, rest // 2), kv_heads=kv), kv
        return
    if 0 < kv < heads and among > 1:
        if kv % n == 0:
            yield "column", kv
        elif n % kv == 0:
            yield Column(kv_heads=kv), kv
        return
    if length % n == 0:
        yield "column", most
        if length % (2 * width) == 0:
            yield Column(2), most


def named_arguments(module: nn.Module, given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of a call by name."""
    names = tuple(inspect.signature(module.forward).parameters)
    for name, x in given.items():
        if name.isdigit():
            if int(name) < len(names):
                yield names[int(name)], x
        else:
            yield name, x


def needs_grad(x: Any) -> bool:
    """Whether any tensor in it does."""
    return any(each.requires_grad for each in tensors(x))


def _blocks(pair: Pair, flow: Flow, module: nn.Module, host: str, around: str, divides: bool) -> dict[str, Block]:
    """What is done where attention begins: what comes for each head is divided; what all heads share enters."""
    found: dict[str, Block] = {}
    if pair.heads is None:
        return found
    divided: dict[str, tuple[int, int]] = {}
    attention = module.get_submodule(host)
    for name, x in named_arguments(attention, flow.given.get(host, {})):
        if divides and isinstance(x, Tensor) and x.ndim >= 3 and not x.requires_grad and pair.heads > 1:
            at = next((at for at, size in enumerate(x.shape[:-1]) if size in (pair.heads, BATCH * pair.heads)), None)
            if at is not None:
                divided[name] = (at, pair.heads)
    if divided:
        found[host] = Block(None, divided=divided)
    if pair.shared:
        outer = module.get_submodule(around)
        inputs = tuple(name for name, x in named_arguments(outer, flow.given.get(around, {})) if needs_grad(x))
        found[around] = Block("enter", None, inputs, divided=divided if around == host else {})
    return found


def _direct(pair: Pair, module: nn.Module, heads: int | None, width: int) -> dict[str, Style]:
    """Parameters of attention itself, such as sinks: those with something for each head are cut."""
    paths = {id(p): path for path, p in module.named_parameters()}
    found: dict[str, Style] = {}
    own = {id(p) for leaf in [*pair.columns, *pair.rows, *pair.tables, *pair.norms] for p in leaf.module.parameters()}
    for key, p in ((key, p) for row in pair.rows for key, p in row.direct.items()):
        if key not in paths or key in own:
            continue
        dim = next((dim for dim, size in enumerate(p.shape) if size == heads), None)
        if dim is None and p.ndim and p.shape[-1] == width:
            dim = p.ndim - 1
        found[paths[key]] = "summed" if dim is None else Cut(dim)
    return found


# ---------------------------------------------------------------------------------------------------- all the others


def tables_of(flow: Flow, module: nn.Module, n: int) -> tuple[Region | None, set[Leaf]]:
    """The tables of tokens, and the heads that are as long: along the rows, along the width, or whole."""
    tables = [leaf for leaf in flow.leaves if leaf.table and not any(id(p) in flow.read for p in
                                                                     leaf.module.parameters())]  # fmt: skip
    if not tables:
        return None, set()
    said = getattr(getattr(module, "config", None), "vocab_size", None)
    there = {leaf.length(outputs=False) for leaf in tables}
    ends = {leaf.length(outputs=True) for leaf in flow.leaves if leaf.linear and set(leaf.users) == {None}}
    # A table of positions may be longer than that of tokens.
    lengths = there & {said, *ends} or {max(there)}
    tables = [leaf for leaf in tables if leaf.length(outputs=False) in lengths]
    rows = {leaf.length(outputs=False) for leaf in tables}
    idle = frozenset(leaf.path for leaf in tables if not leaf.outputs)
    tied = {id(p) for leaf in tables for p in leaf.module.parameters()}
    heads = [
        leaf for leaf in flow.leaves if leaf.linear
        and (id(leaf.module.weight) in tied or (leaf.length(outputs=True) in rows and set(leaf.users) == {None}))
    ]  # fmt: skip
    candidates = []
    if all(count % n == 0 for count in rows):
        styles: dict[str, Style] = {leaf.path: "vocab" for leaf in tables}
        styles |= {leaf.path: Column(gather=True) for leaf in heads}
        candidates.append(Candidate(styles, {}, {}, "cut in rows", frozenset(_entering(heads))))
    if all(leaf.length(outputs=True) % n == 0 for leaf in tables) and all(
        leaf.length(outputs=False) % n == 0 for leaf in heads
    ):
        styles = {leaf.path: Column(gather=True) for leaf in tables}
        candidates.append(Candidate(styles | {leaf.path: Row(split=True) for leaf in heads}, {}, {}, "cut in width"))
    name = ", ".join(leaf.path for leaf in [*tables, *heads])
    reason = "" if candidates else f"{sorted(rows)} rows over {n} ranks"
    candidates = [each._replace(idle=idle) for each in candidates]
    return Region(("tables",), name, candidates, reason), {*tables, *heads}


def single_of(leaf: Leaf, n: int) -> Region:
    """A matrix with no other one to go with."""
    styles: dict[str, Style] = {leaf.path: Column(gather=True)}
    fits = leaf.length(outputs=True) % n == 0
    key = (type(leaf.module), leaf.path.rpartition(".")[2], tuple(leaf.module.weight.shape))  # type: ignore[arg-type]
    candidates = [Candidate(styles, {}, {}, "gathered after", frozenset(_entering([leaf])))]
    return Region(key, leaf.path, candidates if fits else [], "" if fits else f"the axis of {n} divides it not")


def heads_of(leaf: Leaf, n: int) -> Region:
    """Torch's attention, whose heads are cut."""
    attention: Any = leaf.module
    fits = attention.num_heads % n == 0
    key = (type(attention), attention.embed_dim, attention.num_heads, attention.kdim, attention.vdim)
    candidates = [Candidate({leaf.path: "heads"}, {}, {}, "heads cut", frozenset([leaf.path]))]
    return Region(key, leaf.path, candidates if fits else [], "" if fits else f"{key[2]} heads over {n} ranks")


def experts_of(leaf: Leaf, flow: Flow, n: int) -> Region | None:
    """Experts in single parameters: the first product in columns, the last one in rows, and a sum at the end."""
    params = dict(leaf.module.named_parameters())
    large = {name: p for name, p in params.items() if p.ndim == 3}
    if len(large) < 2 or "." in "".join(params):
        return None
    given = list(named_arguments(leaf.module, flow.given.get(leaf.path, {})))
    inputs = tuple(name for name, x in given if any(True for _ in tensors(x)))
    width = next((int(each.shape[-1]) for _, x in given for each in tensors(x) if each.is_floating_point()), 0)
    down = [name for name in large if any(word in name for word in ("down", "w2", "output", "wo"))] or list(large)[-1:]
    candidates = []
    for parts, firsts, lasts in itertools.product((2, 1), (1, 2), (2, 1)):
        styles: dict[str, Style] = {}
        good = True
        for name, p in params.items():
            last = any(name == each or name.startswith(f"{each}_") for each in down)
            if p.ndim == 3:
                dim = lasts if last else firsts
                good &= p.shape[3 - dim] == width and p.shape[dim] % (n if last else n * parts) == 0
                styles[f"{leaf.path}.{name}"] = Cut(dim) if last or parts == 1 else Cut(dim, parts)
            elif p.ndim == 2:
                styles[f"{leaf.path}.{name}"] = "once" if last else Cut(1) if parts == 1 else Cut(1, parts)
            else:
                good = False
        if good:
            candidates.append(Candidate(styles, {leaf.path: Block("enter", "leave", inputs)}, {}, "experts cut"))
    return Region((type(leaf.module), "experts"), leaf.path, candidates)


def past_forward(leaf: Leaf, flow: Flow, module: nn.Module) -> bool:
    """Whether somebody reads its weight otherwise than by calling it."""
    if any(id(p) in flow.read for p in leaf.module.parameters()):
        return True
    path, _, name = leaf.path.rpartition(".")
    around = module.get_submodule(path)
    if isinstance(around, nn.TransformerEncoderLayer):  # which tensor_parallel keeps from it
        return False
    try:
        text = inspect.getsource(type(around))
    except (OSError, TypeError):
        return False
    methods = [part for part in text.split("    def ")[1:] if not part.startswith(_NOT_READING)]
    given = re.compile(rf"(?<!isinstance\()self\.{re.escape(name)}\.weight\s*[,)]")
    return any(given.search(part) for part in methods)


_NOT_READING = ("__init__", "_init", "reset", "tie", "_tie", "get_", "set_", "load", "_load")
