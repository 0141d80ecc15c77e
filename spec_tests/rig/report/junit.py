"""The log as JUnit XML (the xunit1 family), for tools that read test reports.

One `testsuite` per implementation, one `testcase` per case. JUnit knows four results and we know
eleven outcomes, so each case bears its own outcome as a property and as the element's type:

    passed                                             nothing
    failed, hang, died, unexpected_pass                <failure type="...">
    error, blocked                                     <error type="...">
    expected_failure, not_offered, not_here, skipped   <skipped message="...">

A log without footer gets one more erroneous case, so that no tool takes it for a good one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from spec_tests.rig.outcomes import (
    BROKEN,
    REFUTED,
    Event,
    Outcome,
    header,
    is_complete,
    results,
)

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PROPERTIES = ("clause", "case", "implementation", "world_size", "transport", "strength", "level")


def render_junit(events: Sequence[Event]) -> str:
    """The whole file as text."""
    root = ET.Element("testsuites", name="trainspec")
    found = results(events)
    started = str(header(events).get("started", ""))
    for name in dict.fromkeys(event["implementation"] for event in found):
        own = [event for event in found if event["implementation"] == name]
        kinds = [_kind(Outcome(event["outcome"])) for event in own]
        seconds = f"{sum(float(event['duration_s']) for event in own):.3f}"
        suite = _suite(root, name, kinds, time=seconds, timestamp=started)
        for event, kind in zip(own, kinds, strict=True):
            _case(suite, event, kind)
    # What is wrong with the run itself, as erroneous cases of a suite of its own.
    faults = [event["message"] for event in events if event.get("event") == "problem"]
    if not is_complete(events):
        faults.append("INCOMPLETE: the log has no footer, the run did not reach its end")
    if faults:
        suite = _suite(root, "the run", ["error"] * len(faults))
    for position, fault in enumerate(faults, start=1):
        case = ET.SubElement(suite, "testcase", classname="run", name=f"problem {position}")
        ET.SubElement(case, "error", type="error", message=_clean(fault))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: ET.Element, name: str, kinds: Sequence[str], **more: str) -> ET.Element:
    about = {"name": name, "tests": str(len(kinds))}
    for kind, plural in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        about[plural] = str(kinds.count(kind))
    return ET.SubElement(root, "testsuite", about | more)


def _case(suite: ET.Element, event: Event, kind: str) -> None:
    where, _, fact = event["clause"].rpartition(".")
    case = ET.SubElement(
        suite,
        "testcase",
        classname=f"{event['implementation']}.{where}",
        name=f"{fact}[{event['case']}]" if event["case"] else fact,
        time=f"{float(event['duration_s']):.3f}",
    )
    properties = ET.SubElement(case, "properties")
    for key in (*_PROPERTIES, "outcome"):
        ET.SubElement(properties, "property", name=key, value=_clean(str(event[key])))
    if not kind:
        return
    message = _clean(event["message"])
    summary = f"{event['outcome']}: {message.strip().split(chr(10), 1)[0]}"
    mark = ET.SubElement(case, kind, type=event["outcome"], message=summary)
    mark.text = "\n".join(filter(None, [message, event["rerun"] and f"again: {event['rerun']}"]))


def _kind(outcome: Outcome) -> str:
    if outcome in REFUTED:
        return "failure"
    if outcome in BROKEN:
        return "error"
    return "" if outcome is Outcome.PASSED else "skipped"


def _clean(text: str) -> str:
    """XML 1.0 has no control characters, not even escaped; terminal colours would break it."""
    return _FORBIDDEN.sub("?", text)
