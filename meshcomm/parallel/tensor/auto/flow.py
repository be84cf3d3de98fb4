"""What flows where in a model, seen once while it runs: which layers take what other layers give.

    q_proj --.
    k_proj ---+--> softmax --> o_proj      o_proj takes what q_proj, k_proj and v_proj give, past a softmax of h heads
    v_proj --'

Read off the graph that autograd makes, from the input of a layer back to the outputs of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshcomm.parallel.tensor.auto.example_inputs import Given
from meshcomm.parallel.tensor.kinds.products import Kind, kind_of

OPAQUE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
"""Layers of torch's that read their weights themselves."""


class Leaf:
    """A module with parameters, and none inside of it that has some."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module
        self.kind: Kind | None = kind_of(module)
        self.inputs: list[Any] = []  # nodes of the graph
        self.outputs: list[Any] = []
        self.shapes: list[torch.Size] = []
        self.sources: dict[Leaf, None] = {}
        self.users: dict[Leaf | None, None] = {}  # None: the result of the model
        self.heads: set[int] = set()  # of the softmaxes on the way to it
        self.direct: dict[int, Tensor] = {}  # parameters on the way that belong to no leaf
        self.hosts: dict[str, None] = {}  # the modules in which the softmaxes were computed

    @property
    def linear(self) -> bool:
        """Whether it is a product with a matrix."""
        return self.kind is not None and self.kind.inputs is not None

    @property
    def table(self) -> bool:
        """Whether rows are looked up in it."""
        return self.kind is not None and self.kind.inputs is None

    @property
    def norm(self) -> bool:
        """Whether it has at most numbers for single features."""
        return self.kind is None and all(p.ndim <= 1 for p in self.module.parameters())

    def scales_heads(self, features: int) -> bool:
        """Whether it has a number for each feature of each head, as norms of heads that differ have."""
        shapes = [p.shape for p in self.module.parameters()]
        return self.kind is None and all(
            len(shape) == 2 and shape.numel() == features and all(made[-2:] == shape for made in self.shapes)
            for shape in shapes
        )

    def length(self, outputs: bool) -> int:
        """How many features go in or come out."""
        weight: Any = self.module.weight
        assert self.kind is not None
        dim = self.kind.outputs if outputs else self.kind.inputs
        return int(weight.shape[dim if dim is not None else 0])

    def __repr__(self) -> str:
        return f"<{self.path}>"


class Flow(NamedTuple):
    """What was seen."""

    leaves: list[Leaf]
    """In the order in which they ran first; those that did not run come last."""
    given: dict[str, dict[str, Any]]
    """By the path of a module the arguments of its first call: tensors as they were, by name or number."""
    result: Any
    read: set[int]
    """The ids of parameters of leaves that somebody has read past their forward."""


_SOFTMAXES = ("softmax", "_softmax", "scaled_dot_product_attention")


class _Softmaxes(TorchFunctionMode):
    """Notes the nodes of the graph at which softmaxes were computed, with the shape of their scores."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.found: dict[Any, tuple[int, str]] = {}
        self._stack = stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _SOFTMAXES and isinstance(made, Tensor) and made.grad_fn is not None and made.ndim >= 4:
            self.found[made.grad_fn] = (made.shape[-3], self._stack[-1] if self._stack else "")
        return made


def flow_of(module: nn.Module, example: Given) -> Flow:
    """Run it once."""
    inner = {
        each for part in module.modules() if isinstance(part, OPAQUE) for each in part.modules() if each is not part
    }
    leaves = {part: Leaf(path, part) for path, part in module.named_modules() if _is_leaf(part) and part not in inner}
    stack: list[str] = []
    given: dict[str, dict[str, Any]] = {}
    handles = []
    owner: dict[Any, Leaf] = {}

    def before(path: str, part: nn.Module) -> Callable[..., None]:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            stack.append(path)
            given.setdefault(path, {**{str(at): x for at, x in enumerate(args)}, **kwargs})
            if part in leaves:
                leaves[part].inputs += _nodes((args, kwargs))

        return hook

    def after(path: str, part: nn.Module) -> Callable[..., None]:
        def hook(_: Any, args: Any, kwargs: Any, result: Any) -> None:
            while stack and stack.pop() != path:
                pass
            if part in leaves:
                leaves[part].outputs += _nodes(result)
                leaves[part].shapes += [x.shape for x in tensors(result)]
                _own(leaves[part], _nodes(result), set(_nodes((args, kwargs))), owner)

        return hook

    for path, part in module.named_modules():
        handles.append(part.register_forward_pre_hook(before(path, part), with_kwargs=True))
        handles.append(part.register_forward_hook(after(path, part), with_kwargs=True))
    kept = [(part, dict(vars(part))) for part in module.modules()]
    try:
        with _Softmaxes(stack) as softmaxes, torch.enable_grad():
            result = module(*example[0], **example[1])
    finally:
        for handle in handles:
            handle.remove()
        for part, held in kept:
            _take_back(part, held)
    params = {id(p): leaf for leaf in leaves.values() for p in leaf.module.parameters()}
    read: set[int] = set()
    order = list(dict.fromkeys(owner.values()))
    rest = [leaf for leaf in leaves.values() if leaf not in order]
    for leaf in order:
        _look_back(leaf, leaf.inputs, owner, softmaxes.found, params, read)
    end = Leaf("", module)
    _look_back(end, _nodes(result), owner, softmaxes.found, params, read)
    for leaf in order:
        for source in leaf.sources:
            source.users[leaf] = None
    for source in end.sources:
        source.users[None] = None
    return Flow(order + rest, given, result, read)


def _take_back(part: nn.Module, before: dict[str, Any]) -> None:
    """Attributes that a call has set to what it computed, as recurrent layers keep states, are what they were."""
    for name, x in list(vars(part).items()):
        if isinstance(x, Tensor) and x.grad_fn is not None and before.get(name) is not x:
            vars(part).pop(name)
            if name in before:
                vars(part)[name] = before[name]


def _is_leaf(part: nn.Module) -> bool:
    if isinstance(part, OPAQUE):
        return True
    has = any(p is not None for p in vars(part)["_parameters"].values())
    return has and not any(True for child in part.children() for _ in child.parameters())


def tensors(x: Any) -> Iterator[Tensor]:
    """Those in what a module takes or gives, in containers of Python's."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for each in x:
            yield from tensors(each)
    elif isinstance(x, dict):
        for each in x.values():
            yield from tensors(each)


def _nodes(x: Any) -> list[Any]:
    return [each.grad_fn for each in tensors(x) if each.grad_fn is not None]


def _own(leaf: Leaf, left: list[Any], inputs: set[Any], owner: dict[Any, Leaf]) -> None:
    """All nodes from what it gives back to what it was given are its: what is written in place later hides the last."""
    while left:
        node = left.pop()
        if node is None or node in inputs or node in owner or hasattr(node, "variable"):
            continue
        owner[node] = leaf
        left += [following for following, _ in node.next_functions]


def _look_back(
    leaf: Leaf, nodes: list[Any], owner: dict[Any, Leaf], softmaxes: dict[Any, tuple[int, str]],
    params: dict[int, Leaf], read: set[int],
) -> None:  # fmt: skip
    """From what a layer takes back to what others have given."""
    seen: set[Any] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in softmaxes:
            leaf.heads.add(softmaxes[node][0])
            leaf.hosts[softmaxes[node][1]] = None
        if node in owner:
            leaf.sources[owner[node]] = None
            continue
        value = getattr(node, "variable", None)
        if isinstance(value, Tensor):
            if id(value) in params:
                read.add(id(value))
            leaf.direct[id(value)] = value
        left += [following for following, _ in node.next_functions]
