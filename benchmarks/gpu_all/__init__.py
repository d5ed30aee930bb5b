# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Everything that is to be run on a machine with a GPU: ``make gpu-all``; see docs/gpu.md."""
