"""The arguments of torch's functions by their names, as torch itself tells them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx.operator_schemas import get_signature_for_torch_op

_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Form(NamedTuple):
    """One way to call a function."""

    names: tuple[str, ...]
    flags: tuple[bool, ...]
    """Which of them are bools: that tells forms apart where they are called by position."""
    defaults: dict[str, Any]

    def fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call can be one of this form."""
        if len(args) > len(self.names) or not kwargs.keys() <= set(self.names):
            return False
        return all(arg is None or isinstance(arg, bool) == flag for arg, flag in zip(args, self.flags, strict=False))


def forms_of(func: Any) -> list[Form]:
    """All ways to call a function of torch."""
    overloads = [getattr(func, each) for each in func.overloads()] if hasattr(func, "overloads") else [func]
    return [_form(signature) for each in overloads for signature in _signatures(each)]


def _signatures(func: Any) -> Sequence[inspect.Signature]:
    if isinstance(func, types.FunctionType):
        return [inspect.signature(func)]
    return _told(func)[0]


def _form(signature: inspect.Signature) -> Form:
    parameters = [each for each in signature.parameters.values() if each.kind not in _SEVERAL]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    flags = tuple("bool" in str(each.annotation) for each in parameters)
    return Form(tuple(each.name for each in parameters), flags, defaults)


def by_name(forms: Sequence[Form], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call, and the defaults of the others; only what was given by name where no form fits."""
    for form in forms:
        if len(forms) == 1 or form.fits(args, kwargs):
            return {**form.defaults, **dict(zip(form.names, args, strict=False)), **kwargs}
    return kwargs


def is_seeded(func: Any) -> bool:
    """Whether a function of torch, or an operation of its name, uses a generator."""
    return any(torch.Tag.nondeterministic_seeded in getattr(each, "tags", ()) for each in _operations(func))


def only_reads(func: Any) -> bool:
    """Whether a function is one of torch in C++ that, by all its schemas, writes into nothing but an ``out=``."""
    if func is torch.Tensor.__getitem__:  # it has no schema
        return True
    if isinstance(func, types.FunctionType) or not (known := _operations(func)):
        return False
    return bool(schemas := _schemas(known)) and not any(
        arg.alias_info is not None and arg.alias_info.is_write and not arg.kwarg_only
        for schema in schemas
        for arg in schema.arguments
    )


def takes_rows(func: Any) -> bool:
    """Whether the first argument of a function of torch in C++ may be a list of tensors."""
    first = [schema.arguments[0].type for schema in _schemas(_operations(func)) if schema.arguments]
    return any(str(each) == "List[Tensor]" for each in first)


def _schemas(operations: Sequence[Any]) -> list[Any]:
    return [schema for each in operations for schema in _told(each)[1]]


def _told(operation: Any) -> tuple[Sequence[inspect.Signature], Sequence[Any]]:
    """Signatures and schemas, as torch tells them; none where one is of a type that torch has no name for, as the
    stream of ``record_stream`` is.
    """
    try:
        signatures, schemas = get_signature_for_torch_op(operation, return_schemas=True)
    except NameError:
        return (), ()
    return signatures or (), schemas or ()


def _operations(func: Any) -> list[Any]:
    """The overloads of an operation, or of the one that has the name of a function of torch."""
    if not hasattr(func, "tags") and not hasattr(func, "overloads"):
        name = str(getattr(func, "__name__", ""))
        if name.startswith("__") or not str(getattr(func, "__module__", None) or "torch").startswith("torch"):
            return []
        func = getattr(torch.ops.aten, name, None)
    return [getattr(func, each) for each in func.overloads()] if hasattr(func, "overloads") else [func]
