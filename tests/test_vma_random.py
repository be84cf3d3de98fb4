"""The checker knows every function that draws random numbers, and what each of them varies along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vma_checks import F64, I, N, V, kind, on_ranks, ones, zeros

import meshcomm as mc
from meshcomm import watch
from meshcomm.spmd.types.rules import torch_rules

# --------------------------------------------------------------------------------------------------------------- random


def known_as_random(func: Any) -> bool:
    kind = torch_rules.kind_of(func)
    return kind.random or kind.drops is not None


SEEDED = sorted(
    name
    for name in dir(torch.ops.aten)
    if hasattr(packet := getattr(torch.ops.aten, name), "overloads")
    and any(torch.Tag.nondeterministic_seeded in getattr(packet, each).tags for each in packet.overloads())
)


def test_every_random_operation_is_known() -> None:
    """A backward gets the random state of its forward."""
    assert len(SEEDED) > 40
    assert [
        name for name in SEEDED if not known_as_random(getattr(torch.ops.aten, name)) and not name.endswith("_backward")
    ] == []


def test_every_random_function_of_nn_is_known() -> None:
    written = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    settled = {"constant_", "ones_", "zeros_", "eye_", "dirac_"}
    assert settled < set(written)
    assert [name for name in written if not known_as_random(getattr(nn.init, name))] == sorted(settled)
    assert set(written) <= torch_rules.OVERWRITES
    drops = [name for name in dir(F) if "dropout" in name and callable(getattr(F, name)) and name != "Dropout"]
    assert len(drops) >= 6
    assert [
        name for name in [*drops, "gumbel_softmax", "rrelu", "rrelu_"] if not known_as_random(getattr(F, name))
    ] == []


@pytest.mark.parametrize(
    "table",
    ["HOST", "FRESH", "ALIKE", "EACH", "RANDOM", "SETTLES", "OVERWRITES", "_IN_PLACE", "DROPS", "STATISTICS"],
)
def test_the_rules_name_functions_that_exist(table: str) -> None:
    homes = (torch, Tensor, F, nn.init, torch.ops.aten, torch._C)
    assert {name for name in getattr(torch_rules, table) if not any(hasattr(home, name) for home in homes)} == set()


def lstm_by_name(x: Tensor, *, dropout: float, train: bool) -> Tensor:
    model = mc.mark_varying(nn.LSTM(6, 6, 2, dtype=F64), ())
    zero = zeros(2, 4, 6)
    told: dict[str, Any] = {"has_biases": True, "num_layers": 2, "bidirectional": False, "batch_first": False}
    weights = model._flat_weights
    y: Tensor = torch.lstm(x, hx=(zero, zero), params=weights, dropout=dropout, train=train, **told)[0].sum(0)
    return y


def lstm_of_packed(x: Tensor, *, train: bool) -> Tensor:
    model = mc.mark_varying(nn.LSTM(6, 6, 2, dropout=0.5, dtype=F64), ()).train(train)
    y: Tensor = model(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4]), batch_first=True))[0].data
    return y


ROWS, IMAGE, VOLUME = ones(4, 6), ones(1, 2, 8, 8), ones(1, 2, 8, 8, 8)
MIXES: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "dropout": (lambda x: F.dropout(x), ROWS),
    "dropout, by name": (lambda x: F.dropout(x, training=True, p=0.5), ROWS),
    "torch.dropout": (lambda x: torch.dropout(x, 0.5, True), ROWS),
    "torch.dropout_": (lambda x: torch.dropout_(x.clone(), 0.5, True), ROWS),
    "nn.Dropout": (lambda x: nn.Dropout()(x), ROWS),
    "nn.Dropout2d": (lambda x: nn.Dropout2d()(x), IMAGE),
    "alpha": (lambda x: nn.AlphaDropout()(x), ROWS),
    "feature alpha": (lambda x: nn.FeatureAlphaDropout()(x), IMAGE),
    "native": (lambda x: torch.native_dropout(x, 0.5, True), ROWS),
    "rrelu": (lambda x: F.rrelu(x, training=True), ROWS),
    "nn.RReLU": (lambda x: nn.RReLU()(x), ROWS),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x), ROWS),
    "fractional": (lambda x: F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5)), IMAGE),
    "fractional, indices": (lambda x: F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5), return_indices=True), IMAGE),
    "fractional in 3": (lambda x: F.fractional_max_pool3d(x, 2, output_ratio=(0.5, 0.5, 0.5)), VOLUME),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), ROWS[None]),
    "attention, placed": (lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5), ROWS[None]),
    "heads": (lambda x: mc.mark_varying(nn.MultiheadAttention(6, 2, 0.5, dtype=F64), ())(x, x, x), ROWS[None]),
    "lstm": (lambda x: mc.mark_varying(nn.LSTM(6, 6, 2, dropout=0.5, dtype=F64), ())(x), ROWS[None]),
    "gru": (lambda x: mc.mark_varying(nn.GRU(6, 6, 2, dropout=0.5, dtype=F64), ())(x), ROWS[None]),
    "rnn": (lambda x: mc.mark_varying(nn.RNN(6, 6, 2, dropout=0.5, dtype=F64), ())(x), ROWS[None]),
    "aten": (lambda x: torch.ops.aten.native_dropout(x, 0.5, True), ROWS),
    "lstm, by name": (lambda x: lstm_by_name(x, dropout=0.5, train=True), ROWS[None]),
    "lstm, packed": (lambda x: lstm_of_packed(x, train=True), ROWS[None]),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXES)
def test_drops_what_is_its_own_only(name: str) -> None:
    fn, like = MIXES[name]

    def run() -> None:
        x = mc.mark_varying(like.clone(), ())
        with pytest.raises(
            mc.VaryingError, match=r"test_vma_random.py:\d+ draws other numbers on each rank along 'dp'"
        ):
            fn(x)
        y = fn(mc.pvary(x, "dp"))
        assert kind(y[0] if isinstance(y, tuple) else y) == V
        watch.here.draws_along = frozenset()
        try:
            y = fn(x)
            assert kind(y[0] if isinstance(y, tuple) else y) <= V  # type: ignore[operator]
        finally:
            watch.here.draws_along = None

    on_ranks(run)


QUIET: dict[str, Callable[[Tensor], Any]] = {
    "no training": lambda x: F.dropout(x, training=False),
    "no training, placed": lambda x: F.dropout(x, 0.5, False),
    "p=0": lambda x: F.dropout(x, 0.0),
    "nn.Dropout": lambda x: nn.Dropout().eval()(x),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, False),
    "alpha": lambda x: F.alpha_dropout(x),
    "rrelu": lambda x: F.rrelu(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "heads": lambda x: mc.mark_varying(nn.MultiheadAttention(6, 2, 0.5, dtype=F64), ()).eval()(x, x, x)[0],
    "lstm": lambda x: mc.mark_varying(nn.LSTM(6, 6, 2, dropout=0.5, dtype=F64), ()).eval()(x)[0],
    "lstm, p=0": lambda x: mc.mark_varying(nn.LSTM(6, 6, 2, dtype=F64), ())(x)[0],
    "lstm, by name, no training": lambda x: lstm_by_name(x, dropout=0.5, train=False),
    "lstm, by name, p=0": lambda x: lstm_by_name(x, dropout=0.0, train=True),
    "lstm, packed, no training": lambda x: lstm_of_packed(x, train=False),
    "native": lambda x: torch.native_dropout(x, 0.5, False)[0],
    "native, by name": lambda x: torch.native_dropout(x, train=False, p=0.5)[0],
    "aten": lambda x: torch.ops.aten.native_dropout(x, 0.5, None)[0],
    "rrelu with noise": lambda x: torch.ops.aten.rrelu_with_noise(x, zeros(1, 4, 6)),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_drops_nothing_is_not_random(name: str) -> None:
    assert on_ranks(lambda: kind(QUIET[name](mc.mark_varying(ROWS[None].clone(), ())))) == [I] * N


def test_draws_along() -> None:
    """rng and fork_rng say along which axes random numbers differ."""

    def run() -> Any:
        found = []
        for axes in (None, frozenset[str](), frozenset(["tp"]), frozenset(["dp", "tp", "other"])):
            watch.here.draws_along = axes
            try:
                found.append(kind(torch.rand(3)))
                found.append(
                    kind(F.dropout(mc.pvary(zeros(3), tuple(sorted(axes & {"dp", "tp"})))) if axes else zeros(3))
                )
            finally:
                watch.here.draws_along = None
        return found

    every, tp = frozenset(["dp", "tp"]), frozenset(["tp"])
    expected = [every, I, I, I, tp, tp, every, every]
    assert on_ranks(run, axes={"dp": 2, "tp": 2}) == [expected] * 4
