# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the time of a training step goes, by operator and by layer.

``python -m ortrain.profile script.py --trace trace.json --html profile.html`` runs a script and
reports on every ORTModule in it. In a program:

    with ortrain.profile.profile(model) as measured:
        train_one_step(model)
    print(measured)
    measured.save_trace("trace.json")

``model.profile()`` gives the rows alone, of what ran under such a ``with`` or ORTRAIN_PROFILE=1.
"""

from ortrain.profile.record import Group, NodeTime, Profile, profile

__all__ = ["Group", "NodeTime", "Profile", "profile"]
