"""A process of a host that has imported all there is to import, and forks ranks: a line of stdin is one of them, as JSON.

``environ``: how it is told what rank it is; ``out``: the file that it writes to, a line of JSON for what it sees;
``stop``: when there is such a file, the ranks end together; ``timeout``, ``guard``: mc.init's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

import meshcomm as mc


def main(given: dict[str, Any]) -> None:
    """Sums over all ranks, one after the other, until one says stop or fails."""
    os.environ.update(given["environ"])
    sink = os.open(given["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)

    def say(**what: Any) -> None:
        os.write(sink, (json.dumps({"at": time.time(), **what}) + "\n").encode())

    try:
        mc.init(timeout=given["timeout"], guard=given["guard"])
        mesh = mc.make_mesh({"all": -1})
        x, step, most = torch.arange(50_000.0), 0, 0.0
        total = mesh.size * x + sum(range(mesh.size))
        while True:
            began = time.time()
            assert torch.equal(mc.all_reduce(x + mesh.rank, "all", mesh=mesh), total)
            stop = torch.tensor(float(os.path.exists(given["stop"])))
            over = mc.all_reduce(stop, "all", "max", mesh=mesh).item()
            step, most = step + 1, max(most, time.time() - began)
            if over:
                break
            if step == 3:
                say(runs=True)
            time.sleep(0.02)
        say(done=step, longest=most)
    except Exception as error:
        say(error=type(error).__name__, text=str(error))
        raise


if __name__ == "__main__":
    for line in sys.stdin:
        if os.fork() == 0:
            os.setsid()
            main(json.loads(line))
            sys.exit(0)
