"""How long one operation and one collective take on a machine that does nothing else.

An operation: the longest of

    operations / (flops x efficiency x waves)       of products and attention
    bytes / (memory_bandwidth x efficiency)

A collective over n ranks, which lie on m nodes with k of them on each; b bytes given, a and B latency and bandwidth,
w of links within a node and o of those to other nodes:

    ring steps     R = (n - m) a_w + (m - 1) a_o        once around
    tree steps     T = (k - 1) a_w + ceil(log2 m) a_o   to the root
    bandwidth      B = B_w where m = 1, else the smaller of B_w and k B_o: each rank of a node has a link to others

    all_gather      R + (n - 1) b / B
    reduce_scatter  R + (n - 1)/n b / B
    all_reduce      2 min(R, T) + 2 (n - 1)/n b / B     ring or double tree
    broadcast, reduce      T + b / B
    all_to_all      a + the longer of what goes within, over B_w, and to other nodes, over B_o
    permute, messages, gather, scatter   a + bytes / B_w or B_o
    barrier         2 T
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import torch

from meshcomm.dry.costs import ATTENTION, PRODUCT, Op
from meshcomm.dry.hardware import Hardware
from meshcomm.dry.log import Talk

__all__ = ["BETWEEN", "WITHIN", "Transfer", "seconds_of", "transfer_of"]

WITHIN, BETWEEN = "within", "between"
_TILE = 128
_LONG = 1024
"""So long each part of a product's sums is at least, where they are split to fill the machine."""


def seconds_of(op: Op, machine: Hardware) -> float:
    """Of an operation."""
    found = op.moved / (machine.memory_bandwidth * machine.memory_efficiency)
    if not op.work:
        return found
    rate = machine.flops.get(op.dtype) if op.dtype is not None else None
    if rate is None:
        rate = machine.flops.get(torch.float32, min(machine.flops.values()))
    share = machine.attention_efficiency if op.kind == ATTENTION else machine.product_efficiency
    if op.kind == PRODUCT and machine.units and op.shape[0]:
        share *= _filled(op.shape, machine.units)
    return max(found, op.work / (rate * share))


@lru_cache(4096)
def _filled(shape: tuple[int, int, int, int], units: int) -> float:
    """Which part of the machine computes what is wanted."""
    count, rows, columns, length = shape
    tiles = count * math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
    if tiles < units:
        tiles *= max(1, min(units // tiles, length // _LONG))
        parts = tiles / (count * math.ceil(rows / _TILE) * math.ceil(columns / _TILE))
    else:
        parts = 1.0
    return count * rows * columns * parts / _TILE**2 / (math.ceil(tiles / units) * units)


class Transfer(NamedTuple):
    """A collective, of one rank."""

    latency: float
    """Seconds in which no link is filled."""
    seconds: float
    """Seconds in which it fills its link, if it is alone there."""
    link: str
    """"within" or "between"."""


@lru_cache(65536)
def _lying(ranks: tuple[int, ...], ranks_per_node: int) -> tuple[int, int]:
    """On how many nodes they are, and how many on the one with most."""
    nodes = Counter(rank // ranks_per_node for rank in ranks)
    return len(nodes), max(nodes.values())


def transfer_of(talk: Talk, machine: Hardware) -> Transfer:
    """Of a collective, or of messages."""
    n = len(talk.ranks)
    m, k = _lying(talk.ranks, machine.ranks_per_node)
    inner, outer = machine.within, machine.between
    link, one = (WITHIN, inner) if m == 1 else (BETWEEN, outer)
    ring = (n - m) * inner.latency + (m - 1) * outer.latency
    tree = (k - 1) * inner.latency + math.ceil(math.log2(m)) * outer.latency
    if m == 1:
        tree = math.ceil(math.log2(n)) * inner.latency
    speed = inner.bandwidth if m == 1 else k * outer.bandwidth
    if k > 1:
        speed = min(speed, inner.bandwidth)
    name, wire = talk.name, talk.wire
    if name in ("all_gather", "reduce_scatter"):
        latency, seconds = ring, wire / speed
    elif name == "all_reduce":
        latency, seconds = 2 * min(ring, tree), wire / speed
    elif name in ("broadcast", "reduce"):
        latency, seconds = tree, wire / speed
    elif name in ("barrier", "barrier_within"):
        latency, seconds = 2 * tree, 0.0
    elif name == "all_to_all":
        outside = wire * (n - k) / max(1, n - 1)
        latency, seconds = one.latency, max(outside / outer.bandwidth, (wire - outside) / inner.bandwidth)
    else:
        if talk.posts or talk.wants:  # of these, only those that go to other nodes
            nodes = {rank // machine.ranks_per_node for letter, _ in (*talk.posts, *talk.wants) for rank in letter[1:3]}
            link, one = (WITHIN, inner) if len(nodes) == 1 else (BETWEEN, outer)
        latency, seconds = one.latency, wire / one.bandwidth
    return Transfer(machine.call + latency, seconds, link)
