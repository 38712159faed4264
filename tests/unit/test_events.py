"""Events between a run and who follows it: written whole, found in any line, never a crash of the reader."""

import json

import pytest

from verl_ext_sharding import envs
from verl_ext_sharding.monitor import events


@pytest.fixture
def switched_on(monkeypatch):
    monkeypatch.setenv(envs.EVENTS, "1")


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": "ray"},
        {"rows": [{"role": "actor", "device": 0, "pid": None}]},
        {"text": 'a "quoted" } brace { and @sharding {"event": "x"}'},
        {"text": "line\nbreak"},
        {"text": "ümlaut"},
    ],
    ids=str,
)
def test_what_is_emitted_is_one_line_that_reads_back(fields, capsys):
    events.emit("stage", **fields)
    written = capsys.readouterr().out
    assert written.endswith("\n")
    assert written.count("\n") == 1
    assert events.parse(written) == {"event": "stage", **fields}


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_nothing_is_written_unless_events_are_switched_on(value, monkeypatch, capsys):
    if value is None:
        monkeypatch.delenv(envs.EVENTS, raising=False)
    else:
        monkeypatch.setenv(envs.EVENTS, value)
    events.emit("stage", name="ray")
    assert capsys.readouterr().out == ""


LINE = events.MARKER + json.dumps({"event": "stage", "name": "ray"})


@pytest.mark.parametrize(
    "line",
    [
        LINE,
        f"(TaskRunnerV1 pid=17) {LINE}",
        f"\x1b[36m(TaskRunnerV1 pid=17)\x1b[0m {LINE}\x1b[0m",
        f"{LINE} and {{more}}",
        f"{LINE}{LINE}",
        f"progress  50%|####{LINE}",
    ],
)
def test_an_event_is_found_wherever_it_stands_in_a_line(line):
    assert events.parse(line) == {"event": "stage", "name": "ray"}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step:1 - actor/loss:0.5",
        "@sharding",
        "@sharding {",
        '@sharding {"event": "sta',
        f"{LINE[:-5]}(other process) text",
        "@sharding {event: stage}",
        '@sharding ["event"]',
        "@sharding {}",
        '@sharding {"name": "ray"}',
        '@sharding {"event": 3}',
        'sharding {"event": "stage"}',
    ],
)
def test_a_line_without_a_whole_event_has_none(line):
    assert events.parse(line) is None
