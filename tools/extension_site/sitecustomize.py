# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH, this makes every Python process load the extension that ORTRAIN_CORE names."""

import importlib.util
import os
import sys


class _OtherCore:
    @staticmethod
    def find_spec(name, path=None, target=None):
        del path, target
        if name != "ortrain._core":
            return None
        return importlib.util.spec_from_file_location(name, os.environ["ORTRAIN_CORE"])


sys.meta_path.insert(0, _OtherCore)
