# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The package's loggers: the rank in every line, and ORTRAIN_LOG.

Lines go wherever the program sends those of ``logging.getLogger("ortrain")``. With ORTRAIN_LOG set
they go to stderr as well:

    ORTRAIN_LOG=info           stages, captures, what runs in PyTorch
    ORTRAIN_LOG=debug          everything that the Python side has to say
    ORTRAIN_LOG=json           as info, one JSON object a line; json,debug for more
    ORTRAIN_LOG=plan,dispatch  categories of the engine, at DEBUG, as ``ortrain.plan``
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from typing import Any

from ortrain.launchers import discover

__all__ = ["JsonFormatter", "RankFilter", "configure", "get_logger", "is_main_process", "rank"]

_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
_CATEGORIES = ("dispatch", "passes", "memory", "plan", "export")
_WORDS = (*_LEVELS, "json", "all", *_CATEGORIES)

# What the loggers' levels were before configure() set them.
_levels_before: dict[str, int] = {}


def rank() -> int | None:
    """Return this process's rank where several work together; None where it is alone.

    Several do where torch.distributed is initialized, or a launcher has started them: torchrun, MPI
    or Slurm, as ``ortrain.distributed.discover`` reads their variables.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    try:
        place = discover()
    except ValueError:  # of another launcher, which means something else by them
        return None
    return place.world_rank if place.world_size > 1 else None


def is_main_process() -> bool:
    """Tell whether this process speaks for all: rank 0, or alone."""
    return not rank()


class RankFilter(logging.Filter):
    """Puts "[rank 1] " in front of each message, and ``rank`` into each record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Mark the record; never drops one."""
        if hasattr(record, "rank"):  # of another process, which has sent it here
            return True
        record.rank = rank()
        if record.rank is not None:
            record.msg = f"{_prefix(record.rank)}{record.msg}"
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, rank (null alone), process, message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        number = getattr(record, "rank", None)
        message = record.getMessage()
        line: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname,
            "logger": record.name,
            "rank": number,
            "process": record.process,
            "message": message if number is None else message.removeprefix(_prefix(number)),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def get_logger(name: str) -> logging.Logger:
    """Return a logger of the package whose lines carry the rank.

    Args:
      name: "ortrain", or a name below it; filters are not handed down by their parent.
    """
    logger = logging.getLogger(name)
    if not any(isinstance(known, RankFilter) for known in logger.filters):
        logger.addFilter(RankFilter())
    return logger


def configure(words: str | None = None) -> None:
    """Send what ORTRAIN_LOG asks for to stderr. The package calls it when it is imported.

    Words that mean nothing are warned of. A second call takes the place of the first.

    Args:
      words: In place of the variable's value.
    """
    given = os.environ.get("ORTRAIN_LOG", "") if words is None else words
    wanted = [word.strip().lower() for word in given.split(",") if word.strip()]
    top = get_logger("ortrain")
    _undo(top)
    if not wanted:
        return
    handler = _ToStderr()
    if "json" in wanted:
        handler.setFormatter(JsonFormatter())
    else:
        layout = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(layout))
    top.addHandler(handler)
    levels = [_LEVELS[word] for word in wanted if word in _LEVELS]
    if levels or "json" in wanted or "all" in wanted:
        _set_level(top, min(levels, default=logging.INFO))
    categories = _CATEGORIES if "all" in wanted else [w for w in wanted if w in _CATEGORIES]
    if categories:
        _listen_to_core(categories)
    for word in wanted:
        if word not in _WORDS:
            top.warning("ORTRAIN_LOG: %r is none of %s", word, ", ".join(_WORDS))


class _ToStderr(logging.StreamHandler):
    """Writes to what is sys.stderr at the moment, which programs and tests replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


def _set_level(logger: logging.Logger, level: int) -> None:
    _levels_before.setdefault(logger.name, logger.level)
    logger.setLevel(level)


def _undo(top: logging.Logger) -> None:
    """Take back what an earlier configure() did."""
    for handler in [h for h in top.handlers if isinstance(h, _ToStderr)]:
        top.removeHandler(handler)
    for name, level in _levels_before.items():
        logging.getLogger(name).setLevel(level)
    _levels_before.clear()
    if "ortrain._core" in sys.modules:
        sys.modules["ortrain._core"].set_log_sink(None)


def _listen_to_core(categories: tuple[str, ...] | list[str]) -> None:
    for category in categories:
        _set_level(get_logger(f"ortrain.{category}"), logging.DEBUG)
    try:
        core = importlib.import_module("ortrain._core")
    except ImportError as error:
        get_logger("ortrain").warning("ORTRAIN_LOG: the engine cannot be loaded: %s", error)
        return
    core.set_log_sink(_tell)


def _tell(category: str, line: str) -> None:
    logging.getLogger(f"ortrain.{category}").debug("%s", line)


def _prefix(number: int) -> str:
    return f"[rank {number}] "
