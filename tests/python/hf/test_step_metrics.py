# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What an ORTTrainer tells the targets of report_to."""

from __future__ import annotations

from pathlib import Path

from differential import sides
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer_models import classification_data, classifier


def test_scalars_reach_tensorboard_and_not_the_history(tmp_path: Path) -> None:
    trainer = sides(tmp_path)[1].make(
        classifier(), classification_data(), max_steps=3, report_to=["tensorboard"]
    )
    trainer.train()
    (folder,) = {p.parent for p in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    names = {tag for tag in events.Tags()["scalars"] if "ortrain" in tag}
    for name in ("step_time", "tokens_per_second", "peak_memory_mib", "captures", "escapes"):
        assert any(tag.endswith(f"ortrain/{name}") for tag in names), names
        (tag,) = (t for t in names if t.endswith(f"ortrain/{name}"))
        assert [e.step for e in events.Scalars(tag)] == [1, 2, 3]
    (captures,) = (t for t in names if t.endswith("ortrain/captures"))
    assert events.Scalars(captures)[-1].value == 1
    assert not any("ortrain" in key for entry in trainer.state.log_history for key in entry)


def test_nothing_is_installed_where_nobody_listens(tmp_path: Path) -> None:
    trainer = sides(tmp_path)[1].make(classifier(), classification_data(), max_steps=3)
    kinds = [type(c).__name__ for c in trainer.callback_handler.callbacks]
    assert "StepMetricsCallback" not in kinds
