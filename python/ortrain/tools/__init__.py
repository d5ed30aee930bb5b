# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Command line tools: ``python -m ortrain.tools.<name>``."""
