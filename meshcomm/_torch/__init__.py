"""Every private name of torch that meshcomm uses, each behind a function of its own.

A new torch that moves one of them fails ``tests/test_torch_private.py``, and this folder is where it is mended. Where a
name is missing its function takes a public way, slower or with less, or refuses the one feature that there is none for:
:mod:`meshcomm._versions` keeps the list.
"""

from __future__ import annotations

from meshcomm._torch import (
    autograd,
    backward,
    compiling,
    fake,
    forward_mode,
    groups,
    kernels,
    modules,
    random,
    settings,
    transforms,
    trees,
    views,
    watching,
)
from meshcomm._torch.autograd import *  # noqa: F403 -- all of it, as __all__ says below
from meshcomm._torch.backward import *  # noqa: F403
from meshcomm._torch.compiling import *  # noqa: F403
from meshcomm._torch.fake import *  # noqa: F403
from meshcomm._torch.forward_mode import *  # noqa: F403
from meshcomm._torch.groups import *  # noqa: F403
from meshcomm._torch.kernels import *  # noqa: F403
from meshcomm._torch.modules import *  # noqa: F403
from meshcomm._torch.random import *  # noqa: F403
from meshcomm._torch.settings import *  # noqa: F403
from meshcomm._torch.transforms import *  # noqa: F403
from meshcomm._torch.trees import *  # noqa: F403
from meshcomm._torch.views import *  # noqa: F403
from meshcomm._torch.watching import *  # noqa: F403

__all__: list[str] = []
__all__ += autograd.__all__
__all__ += backward.__all__
__all__ += compiling.__all__
__all__ += fake.__all__
__all__ += forward_mode.__all__
__all__ += groups.__all__
__all__ += kernels.__all__
__all__ += modules.__all__
__all__ += random.__all__
__all__ += settings.__all__
__all__ += transforms.__all__
__all__ += trees.__all__
__all__ += views.__all__
__all__ += watching.__all__
