# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""From an nn.Module to a graph: torch.export, functional ATen, ONNX-shaped nodes."""
