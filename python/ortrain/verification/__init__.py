# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Steps of an ORTModule held against PyTorch while a training runs (``verify=``).

A chosen call runs on the engine, and then again in PyTorch from the state in which it began: a
`Replay` sets back what the forward can reach, `RepeatedDraws` gives PyTorch the engine's random
numbers. Outputs, buffers and attributes are compared at once, gradients when they arrive. What
differs is looked for layer by layer (`locating`).
"""
