# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Kills processes while they save checkpoints, and damages what they saved.

A training is killed over and over, each time at a random moment of a save. The next process goes on
from what it finds, which must be one of the states of a training that nobody disturbed; the last
one runs to the end and must arrive at the same weights, bit by bit.

    python -m ortrain.tools.checkpoint_torture --kills 200
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import onnx
import onnx.helper
import onnx.numpy_helper
import torch
from rich.console import Console
from rich.table import Table

from ortrain import optim
from ortrain.errors import FileError
from ortrain.trainer import ORTTrainer, ORTTrainerOptions

_SIZE = 384
_LAYERS = 4
_BATCH = 4
_DESCRIPTION = {
    "inputs": [("x", ["batch", _SIZE]), ("target", ["batch", _SIZE])],
    "outputs": [("loss", [], True)],
}
_FILES = ("manifest.json", "parameters.safetensors", "optimizer.safetensors")


def _model() -> onnx.ModelProto:
    """Return a network with dropout and its loss. An ONNX model: nothing has to be captured."""
    helper, generator = onnx.helper, torch.Generator().manual_seed(1)
    nodes, tensors, value = [], [], "x"
    for layer in range(_LAYERS):
        weight = torch.randn(_SIZE, _SIZE, generator=generator) / _SIZE**0.5
        tensors.append(onnx.numpy_helper.from_array(weight.numpy(), f"w{layer}"))
        tensors.append(onnx.numpy_helper.from_array(torch.zeros(_SIZE).numpy(), f"b{layer}"))
        names = [f"{kind}{layer}" for kind in ("product", "tanh", "kept")]
        nodes.append(helper.make_node("Gemm", [value, f"w{layer}", f"b{layer}"], names[:1]))
        nodes.append(helper.make_node("Tanh", names[:1], names[1:2]))
        nodes.append(helper.make_node("Dropout", [names[1], "ratio", "training"], names[2:]))
        value = names[2]
    tensors.append(helper.make_tensor("ratio", onnx.TensorProto.FLOAT, [], [0.1]))
    tensors.append(helper.make_tensor("training", onnx.TensorProto.BOOL, [], [True]))
    nodes.append(helper.make_node("Sub", [value, "target"], ["difference"]))
    nodes.append(helper.make_node("Mul", ["difference", "difference"], ["square"]))
    nodes.append(helper.make_node("ReduceMean", ["square"], ["loss"], keepdims=0))
    float_ = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info(n, float_, ["batch", _SIZE]) for n in ("x", "target")],
        [helper.make_tensor_value_info("loss", float_, [])],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def _trainer() -> ORTTrainer:
    torch.manual_seed(1)
    schedule = optim.lr_scheduler.LinearWarmupLRScheduler(10_000, warmup=0.1)
    options = ORTTrainerOptions(
        {"lr_scheduler": schedule, "batch": {"gradient_accumulation_steps": 2}}
    )
    return ORTTrainer(_model(), _DESCRIPTION, optim.AdamConfig(lr=1e-3), options=options)


def _train(trainer: ORTTrainer, batches: int) -> None:
    for _ in range(batches):
        generator = torch.Generator().manual_seed(trainer.train_step_info.step)
        x, target = (torch.randn(_BATCH, _SIZE, generator=generator) for _ in range(2))
        trainer.train_step(x, target)


def _digest(trainer: ORTTrainer) -> str:
    digest = hashlib.sha256()
    tensors = {**trainer.engine.tensors, **trainer.engine.state.optimizer}
    for name in sorted(tensors):
        if name.endswith(":grad") and trainer.engine.state.kept_batches == 0:
            continue  # the sum that the next batch starts anew
        digest.update(name.encode())
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


def _in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Run ``work(pipe)`` in a process of its own; return its id and the pipe's other end."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    status = 1
    try:
        os.close(ours)
        work(theirs)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _wait(child: int, pipe: int) -> str:
    """Return what a child wrote, once it has ended well."""
    with os.fdopen(pipe) as reader:
        text = reader.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(f"a process ended with status {status}")
    return text


def _undisturbed(batches: int, every: int) -> dict[int, str]:
    """Return the digest of each state at which a checkpoint is written."""

    def work(pipe: int) -> None:
        trainer = _trainer()
        lines = []
        for step in range(every, batches + 1, every):
            _train(trainer, every)
            lines.append(f"{step} {_digest(trainer)}")
        os.write(pipe, "\n".join(lines).encode())

    text = _wait(*_in_child(work))
    return {int(line.split()[0]): line.split()[1] for line in text.splitlines()}


def _go_on(folder: Path, expected: dict[int, str]) -> ORTTrainer:
    trainer = _trainer()
    if folder.exists() and any(p.name.startswith("checkpoint-") for p in folder.iterdir()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a kill leaves nothing that is damaged
            trainer.load_checkpoint(folder)
        step = trainer.train_step_info.step
        if _digest(trainer) != expected[step]:
            raise RuntimeError(f"the state after {step} batches is another one")
    return trainer


def _kill_in_a_save(folder: Path, every: int, expected: dict[int, str], longest: float) -> bool:
    """Train on, and be killed while saving. Returns whether the save had ended before."""

    def work(pipe: int) -> None:
        trainer = _go_on(folder, expected)
        _train(trainer, every)
        os.write(pipe, b"saving\n")
        trainer.save_checkpoint(folder)
        os.write(pipe, b"saved\n")
        time.sleep(60)

    child, pipe = _in_child(work)
    with os.fdopen(pipe) as reader:
        if reader.readline() != "saving\n":
            os.waitpid(child, 0)
            raise RuntimeError("a process ended before its save")
        time.sleep(random.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return reader.readline() == "saved\n"


def _time_of_a_save(folder: Path) -> float:
    def work(pipe: int) -> None:
        trainer = _trainer()
        _train(trainer, 2)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            trainer.save_checkpoint(folder)
            times.append(time.perf_counter() - start)
        os.write(pipe, str(sorted(times)[2]).encode())

    return float(_wait(*_in_child(work)))


def kill(kills: int, folder: Path, console: Console) -> None:
    """Kill ``kills`` saves; raise RuntimeError where a state is lost or another one."""
    every = 3
    duration = _time_of_a_save(folder / "timed")
    batches = every * (kills + 2)
    expected = _undisturbed(batches, every)
    finished = 0
    with console.status("killing") as status:
        for number in range(kills):
            # A third longer than a save takes: most kills hit the save, some come after it.
            finished += _kill_in_a_save(folder / "killed", every, expected, duration * 4 / 3)
            status.update(f"killed {number + 1} of {kills} saves")

    def work(pipe: int) -> None:
        trainer = _go_on(folder / "killed", expected)
        while trainer.train_step_info.step < batches:
            _train(trainer, every)
        os.write(pipe, _digest(trainer).encode())

    if _wait(*_in_child(work)) != expected[batches]:
        raise RuntimeError("the weights at the end differ from those of an undisturbed training")
    console.print(
        f"{kills} of {kills} resumed from a complete checkpoint ({kills - finished} killed inside of "
        f"a save of {duration * 1e3:.0f} ms, {finished} after it); the weights at the end are equal."
    )


@contextlib.contextmanager
def _small_disk(limit: int) -> Iterator[None]:
    """Let no file grow beyond a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def _damages(path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    whole = path.read_bytes()

    def flip() -> None:
        at = random.randrange(len(whole))
        flipped = bytes([whole[at] ^ (1 << random.randrange(8))])
        path.write_bytes(whole[:at] + flipped + whole[at + 1 :])

    yield f"{path.name}: a bit flipped", flip
    yield f"{path.name}: cut in half", lambda: path.write_bytes(whole[: len(whole) // 2])
    yield f"{path.name}: emptied", lambda: path.write_bytes(b"")
    yield f"{path.name}: removed", path.unlink


def damage(folder: Path, console: Console) -> None:
    """Damage the newest checkpoint in each way; raise RuntimeError where that stays unseen."""

    def work(pipe: int) -> None:
        table = Table("what was done", "what came of it")
        trainer = _trainer()
        _train(trainer, 4)
        digests = []
        for _ in range(2):
            _train(trainer, 2)
            digests.append(_digest(trainer))
            newest = trainer.save_checkpoint(folder)
        for name in _FILES:
            for what, apply in list(_damages(newest / name)):
                kept = (newest / name).read_bytes()
                apply()
                other = _trainer()
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    other.load_checkpoint(folder)
                if len(seen) != 1 or _digest(other) != digests[0]:
                    raise RuntimeError(f"{what}: {len(seen)} warnings, or another state")
                (newest / name).write_bytes(kept)
                table.add_row(what, "one warning, the checkpoint before it")
        with _small_disk(1 << 20):
            _expect_refusal(lambda: trainer.save_checkpoint(folder))
        table.add_row("disk full", "refused, nothing lost")
        _expect_refusal(lambda: trainer.save_checkpoint("/proc/ortrain"))
        table.add_row("read-only folder", "refused")
        other = _trainer()
        other.load_checkpoint(folder)
        if _digest(other) != digests[1] or len(list(folder.iterdir())) != 2:
            raise RuntimeError("a refused save has changed the folder")
        Console(file=os.fdopen(os.dup(1), "w"), markup=False).print(table)
        os.write(pipe, b"done")

    if _wait(*_in_child(work)) != "done":
        raise RuntimeError("the process did not end")
    console.print("12 damaged files, a full disk, a read-only folder: none silent, nothing lost.")


def _expect_refusal(save: Callable[[], object]) -> None:
    try:
        save()
    except FileError:
        return
    raise RuntimeError("a save that cannot work was not refused")


def main(argv: Sequence[str] | None = None) -> int:
    """Run both parts; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ortrain.tools.checkpoint_torture")
    parser.add_argument("--kills", type=int, default=200, help="saves to kill (200)")
    parser.add_argument("--seed", type=int, default=None, help="of the moments")
    arguments = parser.parse_args(argv)
    random.seed(arguments.seed)
    console = Console(markup=False)
    # Threads of OpenMP do not survive a fork, so this process computes nothing itself.
    folder = Path(tempfile.mkdtemp(prefix="ortrain-torture-"))
    try:
        kill(arguments.kills, folder, console)
        damage(folder / "damaged", console)
    except RuntimeError as error:
        console.print(f"failed: {error}", style="red")
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
