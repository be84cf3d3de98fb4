"""Something that a model can be given, where nobody says what: a few tokens, a few rows, a small picture."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshcomm.errors import fail

BATCH, LENGTH = 3, 7
"""Numbers that heads and widths seldom have."""

Given = tuple[tuple[Any, ...], dict[str, Any]]
_CALLED_WITH = "_meshcomm_called_with"


def examples_of(module: nn.Module, said: Any, where: str, length: int = LENGTH) -> Iterator[Given]:
    """What is tried in turn: what the user says, or what the signature of forward and the first layers suggest;
    ``length``: of the sequence, if it is one."""
    if said is not None:
        if isinstance(said, Tensor):
            yield (said,), {}
        elif isinstance(said, Mapping) and all(isinstance(name, str) for name in said):
            yield (), dict(said)
        elif isinstance(said, tuple):
            yield said, {}
        else:
            fail(where, f"example is of type {type(said).__name__}.", fix="a tensor, a tuple of arguments, or a dict")
        return
    if _CALLED_WITH in vars(module):
        yield (vars(module)[_CALLED_WITH],), {}
    params = inspect.signature(module.forward).parameters
    if "config" in vars(module) or any(name in params for name in _MADE):
        yield from _by_names(module, params, length)
    elif any(p.kind is p.VAR_KEYWORD for p in params.values()):  # what passes on what it is given, as peft's
        inside = ((part, inspect.signature(part.forward).parameters) for part in module.modules() if part is not module)
        for part, own in inside:
            if any(name in own for name in _MADE):
                yield from _by_names(part, own, length)
                break
    yield from _by_layers(module, params, length)


def remember(module: nn.Module, x: Any) -> None:
    """Who looks at this module later may call it with ``x``, as nothing in its signature tells: a stage of a model."""
    vars(module)[_CALLED_WITH] = x


def remembered(module: nn.Module) -> Any:
    """What :func:`remember` was told, or None."""
    return vars(module).get(_CALLED_WITH)


def _ids(module: nn.Module, length: int) -> Tensor:
    """Tokens of the vocabulary whose length the configuration has, else of the longest table."""
    tables = {part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)}
    said = _config(module, "vocab_size")
    most = said if said in tables else max(tables, default=2)
    return _ids_of(most, length)


def _ids_of(most: int, length: int) -> Tensor:
    low = 3 if most > 8 else 0
    return torch.randint(low, max(low + 1, min(most, 200)), (BATCH, length), generator=_draws(), device="cpu")


def _draws() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(7)


def _config(module: nn.Module, *names: str) -> Any:
    """A number that a configuration has, its own or that of a tower."""
    config = getattr(module, "config", None)
    towers = [config, *(getattr(config, f"{each}_config", None) for each in ("vision", "text", "audio", "encoder"))]
    for each in towers:
        for name in names:
            value = getattr(each, name, None)
            if value is not None:
                return value
    return None


def _picture(module: nn.Module, length: int, most: int = 1 << 30) -> Tensor:
    size = _config(module, "image_size") or 32
    size = min(size, most) if isinstance(size, int) else size
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    first = next((part for part in module.modules() if isinstance(part, nn.Conv2d)), None)
    channels = _config(module, "num_channels") or (first.in_channels * first.groups if first is not None else 3)
    return torch.randn(BATCH, channels, height, width, generator=_draws(), device="cpu")


def _spectrum(module: nn.Module, length: int) -> Tensor:
    positions = _config(module, "max_source_positions")
    frames = 2 * positions if isinstance(positions, int) else 64
    bins = _config(module, "num_mel_bins", "input_feat_per_channel") or 80
    return torch.randn(BATCH, bins, frames, generator=_draws(), device="cpu")


def _sound(module: nn.Module, length: int) -> Tensor:
    frames, bins = _config(module, "max_length"), _config(module, "num_mel_bins")
    if isinstance(frames, int) and isinstance(bins, int):
        return torch.randn(BATCH, frames, bins, generator=_draws(), device="cpu")
    return torch.randn(BATCH, 800, generator=_draws(), device="cpu")


_MADE = {
    "input_ids": _ids,
    "decoder_input_ids": _ids,
    "pixel_values": _picture,
    "input_values": _sound,
    "input_features": _spectrum,
}


def _by_names(module: nn.Module, params: Mapping[str, inspect.Parameter], length: int) -> Iterator[Given]:
    """As models of transformers call their arguments."""
    main = getattr(module, "main_input_name", None)
    both = bool(_config(module, "is_encoder_decoder"))
    rest: dict[str, Any] = {"use_cache": False} if "use_cache" in params else {}
    towers = getattr(getattr(module, "config", None), "vision_config", None) is not None
    first = [name for name in _MADE if name == main] or [name for name in _MADE if name in params][:1]
    chosen = [*first, *(["decoder_input_ids"] if both and "decoder_input_ids" in params else [])]
    if towers:
        chosen += [name for name in ("input_ids", "pixel_values") if name in params and name not in chosen]
    seen = [*chosen, "pixel_values"] if "pixel_values" in params and "pixel_values" not in chosen else []
    for names in ([chosen] if chosen else []) + ([first] if first != chosen else []) + ([seen] if seen else []):
        given = {name: _MADE[name](module, length) for name in names}
        if "pixel_values" in given and given["pixel_values"].shape[-1] > 32:
            yield (), {**given, "pixel_values": _picture(module, length, 32)}  # what only convolves takes any size
        if "input_features" in given:  # frames may come first
            turned = {**given, "input_features": given["input_features"].transpose(1, 2)}
            yield (), turned
            yield (), {**turned, **rest}
        yield (), given
        yield (), {**given, **rest}


def _by_layers(module: nn.Module, params: Mapping[str, inspect.Parameter], length: int) -> Iterator[Given]:
    """What the first layers take, once per argument that is wanted."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = sum(p.kind in kinds and p.default is p.empty for p in params.values())
    varied = any(p.kind is p.VAR_POSITIONAL for p in params.values())
    for x in _first_inputs(module, length):
        for count in dict.fromkeys((max(wanted, 1), *((2,) if varied else ()))):
            yield (x,) * count, {}


def _first_inputs(module: nn.Module, length: int) -> Iterator[Tensor]:
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            yield _ids(module, length)
            yield _ids_of(part.num_embeddings, length)
            break
        convolved = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
        dims = next((n for kind, n in convolved.items() if isinstance(part, kind)), 0)
        if dims:
            made: Any = part
            channels = made.in_channels
            for size in (32, 64, 224, 16, 8):
                yield torch.randn(BATCH, channels, *(size,) * dims, generator=_draws(), device="cpu")
            break
        width = _width(part)
        if width:
            yield torch.randn(BATCH, length, width, generator=_draws(), device="cpu")
            yield torch.randn(BATCH, width, generator=_draws(), device="cpu")
            break


def _width(part: nn.Module) -> int:
    """Of what a layer takes along the last dim; 0: it is no layer that is known."""
    if isinstance(part, nn.Linear):
        return int(part.in_features)
    if isinstance(part, nn.MultiheadAttention):
        return int(part.embed_dim)
    if isinstance(part, nn.RNNBase):
        return int(part.input_size)
    if isinstance(part, nn.LayerNorm):
        return int(part.normalized_shape[-1])
    weight = vars(part)["_parameters"].get("weight")
    if isinstance(part, nn.Module) and type(part).__name__ == "Conv1D" and weight is not None:
        return int(weight.shape[0])
    return 0
