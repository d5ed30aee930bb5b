# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Truths to test the engine against: an eager executor of graphs and a list of small models."""
