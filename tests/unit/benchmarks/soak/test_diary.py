"""What happened can be read while it happens."""

import json
from pathlib import Path

from benchmarks.soak.diary import Diary


def test_each_event_is_a_line_as_soon_as_it_is_noted(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "out" / "diary.jsonl")
    diary.note("strike", victim="ingest", pid=7)
    diary.note("whole again", after_s=1.5)
    events = [json.loads(line) for line in diary.path.read_text().splitlines()]
    assert [event["event"] for event in events] == ["strike", "whole again"]
    assert events[0]["victim"] == "ingest" and events[1]["at_s"] >= events[0]["at_s"] >= 0
    diary.close()
