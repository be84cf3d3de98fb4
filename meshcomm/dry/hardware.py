"""hardware: how fast a machine computes, reads memory and communicates."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from meshcomm.dry.sheets import SHEETS
from meshcomm.errors import MeshError, fail

__all__ = ["Hardware", "LinkSpeed", "hardware"]

_WHERE = "hardware"
_HERE = "this machine"
_FORMAT = "meshcomm hardware 1"
_LITTLE = 10_000
"""Bytes, or bytes and operations per second: less is another unit."""


@dataclass(frozen=True)
class LinkSpeed:
    """What one rank sends and receives at once over a kind of link.

    Args:
        latency: seconds of a step, in which each rank sends one message: alpha.
        bandwidth: bytes per second in one direction: beta.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Hardware:
    """A machine, as :func:`hardware` gives it. Rates are of one rank: one GPU, or one process on a CPU."""

    name: str
    flops: Mapping[torch.dtype, float]
    """The most operations per second of products, by dtype, dense."""
    memory_bandwidth: float
    """Bytes per second."""
    memory: float
    """Bytes."""
    within: LinkSpeed
    """Links between ranks of a node."""
    between: LinkSpeed
    """Links of a rank to other nodes."""
    ranks_per_node: int
    launch: float = 0.0
    """Seconds of the host for an operation."""
    call: float = 0.0
    """Seconds of a collective beside its steps."""
    product_efficiency: float = 1.0
    """What large products get of ``flops``."""
    attention_efficiency: float = 1.0
    """What kernels of attention get of it."""
    memory_efficiency: float = 1.0
    units: int = 0
    """Multiprocessors, over which a product's tiles go in waves; 0: no waves."""
    ahead: bool = False
    """Whether the host goes on while operations run, as with an accelerator."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure is from."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which ``mc.hardware(path)`` reads."""
        written: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        written["flops"] = {_dtype_name(dtype): rate for dtype, rate in self.flops.items()}
        written |= {name: [link.latency, link.bandwidth] for name, link in self._links().items()}
        written["sources"] = dict(self.sources)
        Path(path).write_text(json.dumps({"made by": _FORMAT, **written}, indent=1), encoding="utf-8")

    def _links(self) -> dict[str, LinkSpeed]:
        return {"within": self.within, "between": self.between}

    def __str__(self) -> str:
        rates = ", ".join(f"{_dtype_name(dtype)} {rate / 1e12:.4g}" for dtype, rate in self.flops.items())
        products, attention = f"{self.product_efficiency:.0%}", f"{self.attention_efficiency:.0%}"
        memory = f"{self.memory / 1e9:.4g} GB, {self.memory_bandwidth / 1e9:.4g} GB/s"
        lines = [
            f"{self.name}: {self.ranks_per_node} ranks on a node",
            f"  TFLOP/s    {rates}; products get {products}, attention {attention}",
            f"  memory     {memory}, of which streams get {self.memory_efficiency:.0%}",
        ]
        for name, link in self._links().items():
            lines.append(f"  {name:9s}  {1e6 * link.latency:.3g} us a step, {link.bandwidth / 1e9:.4g} GB/s")
        lines.append(f"  host       {1e6 * self.launch:.3g} us an operation, {1e6 * self.call:.3g} us a collective")
        return "\n".join([*lines, *(f"  {what}: {source}" for what, source in self.sources.items())])


def hardware(name: str | os.PathLike[str] = _HERE, **overrides: Any) -> Hardware:
    """How fast a machine is, for the times of :func:`dry_run`.

    ::

        mc.hardware("h100")                                  data sheets: "a100", "h100", "h200", "b200"
        mc.hardware("h100", memory_bandwidth=2.4e12)         one that differs
        mc.hardware("this machine")                          measured now: seconds
        mc.hardware("cluster.json")                          what `python -m meshcomm hardware cluster.json` measured

    Each constant has a source, ``print(mc.hardware("h100"))``: rates are those of data sheets, and what programs get of
    them (``product_efficiency``, ``attention_efficiency``, ``memory_efficiency``) is what others have published of
    single kernels. None was fitted to the time of a training step.

    Args:
        name: one of these; or the path of a file.
        overrides: fields of :class:`Hardware` that are otherwise: ``flops={"bfloat16": 8e14}`` changes these dtypes,
            ``within=(latency, bandwidth)`` a link, in seconds and bytes per second.

    Returns: a :class:`Hardware`.

    Cost: none; "this machine" starts two processes and takes some seconds.

    Raises:
        MeshError: a name that is none; a field that there is not; figures that are negative, zero or not numbers,
            efficiencies above 1, memory that is slower than a link.

    Example:
        >>> import meshcomm as mc
        >>> h100 = mc.hardware("h100", ranks_per_node=4)
        >>> h100.memory_bandwidth / 1e12, h100.ranks_per_node
        (3.35, 4)

    Source: data sheets of NVIDIA's; NCCL's tables of latencies and bandwidths.
    """
    if isinstance(name, str) and name.lower() in SHEETS:
        found = _made(name.lower(), SHEETS[name.lower()])
    elif name == _HERE:
        measure: Any = importlib.import_module("meshcomm.dry.measure")  # data sheets need no collectives
        found = _made(_HERE, measure.measured())
    else:
        found = _read(name)
    return _changed(found, overrides) if overrides else found


def _made(name: str, given: Mapping[str, Any]) -> Hardware:
    links = {which: LinkSpeed(*given[which]) for which in ("within", "between")}
    return checked(Hardware(**{**given, **links, "name": name}))


def _read(path: Any) -> Hardware:
    known = ", ".join(map(repr, (*SHEETS, _HERE)))
    fix = f"one of {known}; or the path of what `python -m meshcomm hardware FILE` has written"
    if not isinstance(path, (str, os.PathLike)):
        fail(_WHERE, f"{path!r} is no name.", fix=fix)
    if not os.path.exists(path):
        fail(_WHERE, f"no machine is called {os.fspath(path)!r}, and there is no such file.", fix=fix)
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
        if given.pop("made by") != _FORMAT:
            raise ValueError("made by another program")
        given["flops"] = {_dtype(dtype): rate for dtype, rate in given["flops"].items()}
        return _made(given.pop("name"), given)
    except MeshError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        fail(_WHERE, f"{os.fspath(path)!r} cannot be read: {type(error).__name__}: {error}.", fix=fix)


def _changed(found: Hardware, overrides: Mapping[str, Any]) -> Hardware:
    known = [each.name for each in fields(Hardware)]
    given = dict(overrides)
    for name, value in overrides.items():
        if name not in known:
            fail(_WHERE, f"there is no {name!r}.", fix=f"one of {', '.join(known)}")
        if name in ("within", "between") and not isinstance(value, LinkSpeed):
            if not isinstance(value, (tuple, list)) or len(value) != 2:
                fail(_WHERE, f"{name}={value!r} is no link.", fix="(latency in seconds, bandwidth in bytes per second)")
            given[name] = LinkSpeed(*value)
        if name == "flops":
            if not isinstance(value, Mapping):
                fail(_WHERE, f"flops={value!r} is no mapping.", fix='flops={"bfloat16": 9.9e14}')
            given[name] = {**found.flops, **{_dtype(dtype): rate for dtype, rate in value.items()}}
    said = {name: "given" for name in overrides if name not in ("name", "sources")}
    kept = {what: source for what, source in found.sources.items() if what.partition(".")[0] not in said}
    given.setdefault("sources", {**kept, **said})
    return checked(replace(found, **given))


def _dtype(given: Any) -> torch.dtype:
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        fail(_WHERE, f"{given!r} is no dtype.", fix='torch.bfloat16, or "bfloat16"')
    return found


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def checked(given: Hardware) -> Hardware:
    """The same, if its figures make sense."""
    rates = {f"flops[{_dtype_name(dtype)!r}]": rate for dtype, rate in given.flops.items()}
    links = {f"{name}.bandwidth": link.bandwidth for name, link in given._links().items()}
    positive = {**rates, **links, "memory_bandwidth": given.memory_bandwidth, "memory": given.memory}
    times = {f"{name}.latency": link.latency for name, link in given._links().items()}
    times |= {"launch": given.launch, "call": given.call}
    shares = {name: getattr(given, f"{name}_efficiency") for name in ("product", "attention", "memory")}
    if not rates:
        fail(_WHERE, "flops has no dtype.", fix='flops={"bfloat16": 9.9e14}')
    if not isinstance(given.ahead, bool):
        fail(_WHERE, f"ahead={given.ahead!r} is not a bool.", fix="whether the host goes on while operations run")
    if not isinstance(given.sources, Mapping):
        fail(_WHERE, f"sources={given.sources!r} is no mapping.", fix="names of figures to texts")
    for name, value in {**positive, **times, **{f"{name}_efficiency": share for name, share in shares.items()}}.items():
        number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and name not in times):
            wanted = "a number of seconds that is not negative" if name in times else "a positive number"
            fail(_WHERE, f"{name}={value!r} makes no sense.", fix=wanted)
    for name, size in {**links, "memory": given.memory}.items():
        if size < _LITTLE:
            fail(
                _WHERE,
                f"{name}={size!r} is less than any machine has.",
                fix="bytes, and bytes per second: 80e9, not 80",
            )
    for name, rate in rates.items():
        if rate < _LITTLE:
            fix = "operations per second: 9.9e14, not 989"
            fail(_WHERE, f"{name}={rate!r} is less than any machine does.", fix=fix)
    for name, share in shares.items():
        if share > 1:
            fail(_WHERE, f"{name}_efficiency={share!r} is more than all.", fix="a share, at most 1")
    for name, latency in times.items():
        if latency > 1:
            fail(_WHERE, f"{name}={latency!r} is more than a second.", fix="seconds: a microsecond is 1e-6")
    for name, count, least in (("ranks_per_node", given.ranks_per_node, 1), ("units", given.units, 0)):
        if not isinstance(count, Integral) or isinstance(count, bool) or count < least:
            fail(_WHERE, f"{name}={count!r} makes no sense.", fix=f"an int, at least {least}")
    for name, speed in links.items():
        if speed > given.memory_bandwidth:
            what = f"{name} = {speed:.4g} is more than memory_bandwidth = {given.memory_bandwidth:.4g}."
            fail(_WHERE, what, fix="bytes per second of one rank, in one direction: what is sent is read from memory")
    if given.memory_bandwidth > max(given.flops.values()):
        what = f"memory_bandwidth = {given.memory_bandwidth:.4g} is more than flops = {max(given.flops.values()):.4g}."
        fail(_WHERE, what, fix="operations per second (9.9e14, not 989) and bytes per second")
    return given
