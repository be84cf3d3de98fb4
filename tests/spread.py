"""Tests over workers of pytest-xdist by groups: one worker runs the tests of a group, one after the other.

``--dist loadgroup`` would do, but it writes the groups into names that pytest makes anew since 9.2. Workers know the
groups, for they have the tests; the one who deals them out reads them from a file that the first worker has written.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

__all__ = ["ByGroups", "Spread"]


class ByGroups(LoadScopeScheduling):
    """Groups in the order of their first tests."""

    def __init__(self, config: pytest.Config, log: Any, at: Path) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._at = at
        self._groups: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        if not self._groups:
            self._groups = json.loads(self._at.read_text())
        return self._groups[nodeid]


class Spread:
    """The plugin, in every process of a run: ``group_of`` a test is told where the tests are."""

    def __init__(self, group_of: Callable[[pytest.Item], str]) -> None:
        self.group_of = group_of
        self.folder: Path | None = None

    def pytest_configure_node(self, node: WorkerController) -> None:
        """Tell a worker where to write."""
        self.folder = self.folder or Path(tempfile.mkdtemp(prefix="meshcomm-tests-"))
        node.workerinput["groups"] = str(self.folder / "groups.json")

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> ByGroups | None:
        return ByGroups(config, log, self.folder / "groups.json") if self.folder is not None else None

    @pytest.hookimpl(tryfirst=True)  # before the names are sent
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        told: dict[str, Any] = getattr(session.config, "workerinput", {})
        if told.get("workerid") == "gw0":
            Path(told["groups"]).write_text(json.dumps({item.nodeid: self.group_of(item) for item in session.items}))

    def pytest_unconfigure(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
