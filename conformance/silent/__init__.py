# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Small programs on which graph capture was, or may be, silently wrong."""
