"""One line of JSON for each thing that tools follow: `@sharding {"event": ...}` on standard output.

Ray forwards standard output of every process to the driver, where `verl-sharding demo` and tests read the lines.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

from verl_ext_sharding import envs

MARKER = "@sharding "
_START = re.compile(re.escape(MARKER) + r"(?=\{)")
_DECODER = json.JSONDecoder()


def enabled() -> bool:
    """Whether somebody asked for events."""
    return os.environ.get(envs.EVENTS) == "1"


def emit(event: str, **fields: Any) -> None:
    """Writes one event, if events are switched on.

    Args:
        event: Its name.
        fields: JSON-serialisable values.
    """
    if not enabled():
        return
    sys.stdout.write(f"{MARKER}{json.dumps({'event': event, **fields})}\n")
    sys.stdout.flush()


def parse(line: str) -> dict[str, Any] | None:
    """The event in a line of output, or None. A line that another process wrote into, or cut, holds no event."""
    match = _START.search(line)
    if match is None:
        return None
    try:
        event, _ = _DECODER.raw_decode(line, match.end())
    except json.JSONDecodeError:
        return None
    return event if isinstance(event.get("event"), str) else None
