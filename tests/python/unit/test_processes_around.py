# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Processes that fork, and first calls where little is left to begin with."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

FORKS = """
    import os, threading, time, warnings
    warnings.simplefilter("ignore")
    import torch
    from torch import nn
    from ortrain import ORTModule

    def model(width):
        return nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 2))

    ended = threading.Event()
    def others():
        width = 5
        while not ended.is_set():
            ORTModule(model(width))(torch.ones(2, 4)).sum().backward()
            width += 1

    # Nobody seeds in the thread: PyTorch holds a lock of its own meanwhile, which a child would never get.
    torch.manual_seed(0)
    plain = model(3)
    expected = plain(torch.ones(2, 4)).sum().item()
    thread = threading.Thread(target=others)
    thread.start()
    codes = []
    for _ in range(4):
        time.sleep(0.07)
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            wrapped = ORTModule(plain)
            result = wrapped(torch.ones(2, 4)).sum()
            right = abs(result.item() - expected) < 1e-4
            if torch.version.cuda is None:  # of which builds autograd refuses to run in a child
                result.backward()
                right = right and wrapped[0].weight.grad is not None
            os._exit(0 if right else 3)
        for _ in range(400):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.1)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            status = "hangs"
        codes.append(status)
    ended.set()
    thread.join()
    assert codes == [0] * 4, codes
"""
BEGINS = """
    import os, sys, tempfile, warnings
    warnings.simplefilter("ignore")
    import torch
    from torch import nn
    from ortrain import ORTModule

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    wrapped, x = ORTModule(model), torch.ones(4, 3)
    def deep(levels, run):
        return deep(levels - 1, run) if levels else run()
    def first():
        return wrapped(x)
    where = sys.argv[1]
    if where == "folder":
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        os.rmdir(folder)
        result = first()
        os.chdir("/")
    elif where == "depth":
        result = deep(900, first)
    else:
        import resource
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
        result = first()
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    torch.testing.assert_close(result, model(x))
    wrapped(x).sum().backward()
    assert model.weight.grad is not None
"""


def _run(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_child_of_a_process_whose_threads_capture_trains() -> None:
    """Locks that such a thread holds would never be released there."""
    _run(FORKS)


@pytest.mark.parametrize("where", ["folder", "depth", "files"])
def test_a_first_call_where_pytorch_works(where: str) -> None:
    """In a folder that is gone, far down in calls, and without a file to open, PyTorch runs it."""
    _run(BEGINS, where)
