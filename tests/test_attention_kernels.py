"""Kernels of attention that are elsewhere than on the CPU: what they are given, and what is made of what they give.

Each runs on fake tensors of CUDA by torch's own rules of shapes, and with its operations replaced by mathematics that
take and give what the schema says. On a GPU the operations themselves run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from meshcomm import _torch
from meshcomm._torch.kernels import _KERNELS, Attention, AttentionKernel

B, H, S, T, E = 2, 4, 6, 10, 8
ELSEWHERE = ("flash", "cudnn", "efficient")
SCALE = 0.3


def given(name: str, dtype: torch.dtype, masked: bool, square: bool) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v; and a mask in which one query sees nothing."""
    generator = torch.Generator().manual_seed(0)
    t = S if square else T
    values = [torch.randn(B, h, s, E, generator=generator).to(dtype) for h, s in ((H, S), (2, t), (2, t))]
    if not masked:
        return values, None
    seen = torch.rand(B, 1, S, t, generator=generator) < 0.6
    seen[:, :, 2] = False
    return values, seen


def products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """The result and the log, in float64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    z = q.double() @ k.mT * SCALE
    z = z if bias is None else z + bias
    z = z.masked_fill(torch.ones_like(z, dtype=torch.bool).triu(1), -torch.inf) if causal else z
    lse = z.logsumexp(-1)
    return (z - lse.unsqueeze(-1)).exp().nan_to_num(0) @ v, lse


def gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, causal: bool
) -> list[Tensor]:
    """As kernels have them: by the log that they are given."""
    times = q.shape[1] // k.shape[1]
    kk, vv = (x.double().repeat_interleave(times, 1) for x in (k, v))
    z = q.double() @ kk.mT * SCALE
    z = z if bias is None else z + bias
    z = z.masked_fill(torch.ones_like(z, dtype=torch.bool).triu(1), -torch.inf) if causal else z
    p = (z - lse.double().unsqueeze(-1)).exp()
    of_z = p * (g.double() @ vv.mT - (g.double() * out.double()).sum(-1, keepdim=True)) * SCALE
    found = [of_z @ kk, of_z.mT @ q.double(), p.mT @ g.double()]
    summed = [found[0], *(x.unflatten(1, (-1, times)).sum(2) for x in found[1:])]
    return [x.to(q.dtype) for x in summed]


def names_of(op: Any) -> list[str]:
    return [argument.name for argument in op.default._schema.arguments]


class Replaced:
    """The operations of a kernel, bound by the names of torch's schema, on what they demand."""

    def __init__(self, name: str, kernel: AttentionKernel) -> None:
        self.name, self.schemas = name, (names_of(kernel.ahead), names_of(kernel.back))

    def bound(self, which: int, args: Any, kwargs: Any) -> dict[str, Any]:
        found = dict(zip(self.schemas[which], args, strict=False)) | kwargs
        assert set(found) == set(self.schemas[which]), "each argument"
        assert found["dropout_p"] == 0
        assert found["scale"] == SCALE
        for key in ("query", "key", "value", "grad_out", "grad_out_", "out"):
            assert key not in found or found[key].stride(-1) == 1
        bias = found.get("attn_bias")
        if self.name == "efficient":
            assert found["key"].shape[1] == found["query"].shape[1], "it has no groups"
            assert bias is None or (bias.shape[:2] == (B, H) and bias.stride(-2) % 8 == 0)
        else:
            assert bias is None
        return found

    def ahead(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        a = self.bound(0, args, kwargs)
        out, lse = products(a["query"], a["key"], a["value"], a.get("attn_bias"), a["is_causal"])
        lse = lse.float()
        if self.name == "cudnn":
            lse = lse.unsqueeze(-1)
        elif self.name == "efficient":
            assert a["compute_log_sumexp"]
            lse = torch.nn.functional.pad(lse, (0, 32 - S), value=7.0)
            out = out.masked_fill(~lse[..., :S, None].isfinite(), torch.nan)  # nobody says what it is
        return out.to(a["query"].dtype), lse, None, None, S, T, None, None, None

    def back(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        a = self.bound(1, args, kwargs)
        g, lse = a.get("grad_out", a.get("grad_out_")), a["logsumexp"]
        if self.name == "cudnn":
            assert lse.shape == (B, H, S, 1)
            lse = lse.squeeze(-1)
        elif self.name == "efficient":
            assert lse.shape == (B, H, 32)
            assert a["grad_input_mask"] == [True, True, True, False]
            lse = lse[..., :S]
        if self.name != "efficient":
            assert (a["max_q"], a["max_k"]) == (S, a["key"].shape[2])
        bias, causal = a.get("attn_bias"), a["is_causal"]
        found = gradients(g, a["query"], a["key"], a["value"], a["out"], lse, bias, causal)
        return (*found, None) if self.name == "efficient" else tuple(found)


CASES = [(name, masked, causal) for name in ELSEWHERE for masked in (False, True) for causal in (False, True)]
CASES = [(name, masked, causal) for name, masked, causal in CASES if not masked or (name == "efficient" and not causal)]


@pytest.mark.parametrize(("name", "masked", "causal"), CASES)
def test_what_kernels_are_given(monkeypatch: pytest.MonkeyPatch, name: str, masked: bool, causal: bool) -> None:
    kernel = _KERNELS[name]
    replaced = Replaced(name, kernel)
    monkeypatch.setattr(kernel, "ahead", replaced.ahead)
    monkeypatch.setattr(kernel, "back", replaced.back)
    dtype = torch.float32  # so that the two agree closely; kernels are asked for their dtypes elsewhere
    (q, k, v), mask = given(name, dtype, masked, causal)
    equals_mathematics(kernel, q.mT.contiguous().mT, k, v, mask, causal, 1e-5)


def equals_mathematics(
    kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, tolerance: float
) -> None:
    """Forward, and backward by the log of keys of which these are half."""
    bias = None if mask is None else torch.zeros(mask.shape, device=q.device).masked_fill_(~mask, -torch.inf)
    of = Attention(q, k, v, mask, causal, SCALE)
    out, lse = kernel.forward(of)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert_close((out.double(), lse.double()), products(q, k, v, bias, causal), rtol=tolerance, atol=tolerance)
    twice = torch.logaddexp(lse, lse).masked_fill(lse == -torch.inf, torch.inf)
    g = torch.ones((), dtype=q.dtype, device=q.device).expand(out.shape)
    found = kernel.backward(of, g, out, twice)
    expected = gradients(g, q, k, v, out, twice, bias, causal)
    assert_close(found, tuple(expected), rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_torch_s_own_rules_take_it(name: str) -> None:
    """On fake tensors of CUDA: the arguments are of the types that the operation has, and the results of ours."""
    kernel, dtype = _KERNELS[name], torch.bfloat16
    with FakeTensorMode():
        q, k, v = (torch.empty(B, h, s, E, dtype=dtype, device="cuda") for h, s in ((H, S), (2, T), (2, T)))
        mask = torch.ones(S, T, dtype=torch.bool, device="cuda") if name == "efficient" else None
        of = Attention(q, k, v, mask, False, SCALE)
        out, lse = kernel.forward(of)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, dtype, (B, H, S), torch.float32)
        found = kernel.backward(of, out, out, lse)
        assert [(g.shape, g.dtype, g.device.type) for g in found] == [(x.shape, dtype, "cuda") for x in (q, k, v)]


def test_who_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By device, dtype, mask and widths, of a torch whose CUDA takes everything."""
    for can in ("flash", "cudnn", "efficient"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{can}_attention", lambda params: True)
    monkeypatch.setattr(_torch.kernels, "_asked", lambda *given: None)

    def chosen(dtype: torch.dtype, mask: bool = False, causal: bool = False, e: int = E, f: int = E) -> str | None:
        with FakeTensorMode():
            q, k, v = (torch.empty(B, H, s, w, dtype=dtype, device="cuda") for s, w in ((S, e), (T, e), (T, f)))
            seen = torch.ones(S, T, dtype=torch.bool, device="cuda") if mask else None
            found = _torch.kernels.attention_kernel(Attention(q, k, v, seen, causal, SCALE))
        return next((name for name, kernel in _KERNELS.items() if kernel is found), None)

    assert chosen(torch.bfloat16) == "flash"
    assert chosen(torch.float16, mask=True) == "efficient"
    assert chosen(torch.float32) == "efficient"
    assert chosen(torch.bfloat16, f=16) == "efficient"
    assert chosen(torch.bfloat16, e=200, f=200) == "cudnn"
    assert chosen(torch.float64) is None
    assert chosen(torch.bfloat16, e=6, f=6) is None
    assert chosen(torch.bfloat16, causal=True) is None, "whose corner it is"
    for kernel in _KERNELS.values():
        monkeypatch.setattr(kernel, "back", None)
    assert chosen(torch.bfloat16) is None, "then mathematics does"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "masked", "causal"), CASES)
def test_on_a_gpu(name: str, masked: bool, causal: bool) -> None:
    (q, k, v), mask = given(name, torch.bfloat16, masked, causal)
    q, k, v = (x.to("cuda") for x in (q, k, v))
    mask = None if mask is None else mask.to("cuda")
    kernel = _KERNELS[name]
    if not kernel.takes(Attention(q, k, v, mask, causal, SCALE)):
        pytest.skip(f"this GPU has no {name}")
    equals_mathematics(kernel, q, k, v, mask, causal, 2e-2)
