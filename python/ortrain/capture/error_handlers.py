# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Code that handles errors: a trace, and Dynamo, raise some that PyTorch does not."""

from __future__ import annotations

import dis
import itertools
import types

# What C code takes for an answer: no such attribute, item or module, the end of a loop. As code_recorder.cpp has it.
ENDS_OF_A_SEARCH = (
    *(AttributeError, LookupError, ImportError, ModuleNotFoundError),
    *(StopIteration, StopAsyncIteration, GeneratorExit),
)
_RAISES = dis.opmap["RAISE_VARARGS"]
# Operators raise other errors.
_SEARCHES = frozenset({e.__name__ for e in (*ENDS_OF_A_SEARCH, KeyError, IndexError)})


def origin_of(error: BaseException) -> tuple[types.CodeType, bool] | None:
    """Return the code that an error comes from, and whether a ``raise`` in it has raised it; None where nothing tells."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return None
    code = trace.tb_frame.f_code
    return code, code.co_code[trace.tb_lasti] == _RAISES


def handles_errors(code: types.CodeType) -> bool:
    """Tell whether a function may go on after an error that an operator of PyTorch raises."""
    if "suppress" in code.co_names:
        return True
    steps = list(dis.get_instructions(code))
    for i, step in enumerate(steps):
        if step.opname == "PUSH_EXC_INFO" and steps[i + 1].opname == "POP_TOP":
            return True  # it handles any
        if step.opname in ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"):
            before = itertools.takewhile(
                lambda s: s.opname.startswith(("LOAD_", "BUILD_")), reversed(steps[:i])
            )
            if not _SEARCHES.issuperset(s.argval for s in before if isinstance(s.argval, str)):
                return True
    return False
