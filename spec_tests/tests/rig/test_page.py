"""The report's page, in a real browser: what it shows, in light and dark, on paper, by keyboard."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spec_tests import museum
from spec_tests.rig import ledger
from spec_tests.rig.outcomes import Event, Outcome
from spec_tests.rig.report import causes, render_page
from spec_tests.rig.report.diagnosis import FEW_JUDGED, Dictionary, Families
from spec_tests.rig.report.symptom import symptom
from spec_tests.tests.rig.browser import Visit, require_decent
from spec_tests.tests.rig.logs import STORY, TOLD, log, profile, result

EVIDENCE: dict[str, Any] = {
    "wrong": {
        "name": "first.weight",
        "shape": [64, 64],
        "ranks": {str(rank): ["10" * 128, 16, 16] for rank in range(4)},
    },
    "lanes": [
        {
            "rank": rank,
            "state": "in the body",
            "waits": True,
            "calls": [[f"all_reduce [[{rank}]]", number, "0"] for number in range(3, 9)],
        }
        for rank in range(4)
    ],
    "memory": {
        "rank": 0,
        "points": [[f"after step {step}", 1000 * step] for step in range(64)],
        "judged": 40,
        "allowed": 30_000,
    },
    "source": {"file": "mine.py", "line": 12, "first": 10, "lines": ["a", " b", "  c", "d"]},
}
"""As much of each kind as is ever kept."""
MESSAGE = (
    "[{id}]  It MUST.\nrank 0, 'first.weight' (5, 6): got 2.000 x the mean\n"
    "likely: summed and not divided by the world size\n<script>alert(1)</script>\n"
    "again: python -m spec_tests --impl mine.py --clause {id}"
)
NAMES = ["mine.py", "solution", "torch"]
MEAN = "ddp.gradients.mean"


def outcome_of(number: int, name: str) -> Outcome:
    """Every outcome somewhere in the column of mine.py, passes elsewhere."""
    others = [outcome for outcome in Outcome if outcome is not Outcome.PASSED]
    is_odd_one = name == "mine.py" and number % 3 == 0
    return others[number // 3 % len(others)] if is_odd_one else Outcome.PASSED


def every_clause() -> list[Event]:
    """A log with all clauses on three implementations, and something of every outcome."""
    stories = museum.stories()
    events: list[Event] = []
    for number, clause in enumerate(ledger.load_all()):
        told = ledger.told(clause, stories.get(clause.id, []))
        events.append({"event": "clause", "clause": clause.id, **told})
        for name in NAMES:
            outcome = outcome_of(number, name)
            fields: dict[str, Any] = {"strength": str(clause.strength), "level": clause.level}
            if clause.id == MEAN and name == "mine.py":
                outcome = Outcome.FAILED
            if outcome is not Outcome.PASSED:
                fields["message"] = MESSAGE.format(id=clause.id)
                if outcome is not Outcome.FAILED:  # a cause of its own
                    fields["message"] = fields["message"].replace("summed", f"{outcome}: summed")
                fields["rerun"] = f"python -m spec_tests --impl {name} --clause {clause.id}"
                fields["evidence"] = EVIDENCE
            ran = {"clause": clause.id, "implementation": name, **fields}
            events += [result(str(outcome), case="w2", **ran), result(case="w3", **ran)]
    points = profile({"name": "Mean", "points": 2, "clauses": [MEAN]})
    return log(*events, implementations=NAMES, points=points)


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of that log."""
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(render_page(every_clause()), encoding="utf-8")
    return path


def test_the_page_is_one_file_and_quick_with_names_and_headings(file: Path, browser):
    visit = require_decent(browser, file)
    assert file.stat().st_size < 3_000_000
    rows = visit.page.locator("tr.clause")
    assert rows.count() == len(ledger.load_all())
    # In milliseconds of the page's own clock; a tenth of it on an idle machine.
    took = visit.page.evaluate("performance.getEntriesByType('navigation')[0].domComplete")
    assert took < 20_000
    assert visit.page.evaluate("document.documentElement.lang") == "en"
    assert visit.page.locator("main").count() == visit.page.locator("h1").count() == 1
    assert visit.page.locator("td:empty").count() == 0, "a cell says why it is empty"
    visit.page.goto(f"{file.as_uri()}#{MEAN}")
    assert visit.page.locator(f"[id='about-{MEAN}']").is_visible(), "a link to a clause opens it"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(file: Path, browser, scheme: str):
    visit = Visit(browser, file, color_scheme=scheme)
    visit.page.locator("#expand").click()
    assert visit.faint() == {}
    paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(253, 253, 251)") == (scheme == "light")


def test_the_filters_leave_what_was_asked_for(file: Path, browser):
    page = Visit(browser, file).page
    shown = page.locator("tr.clause:not([hidden])")
    total = shown.count()
    page.get_by_label("Chapter").select_option("ddp")
    page.get_by_label("Level").select_option("course")
    ids = shown.evaluate_all("rows => rows.map(row => row.id)")
    course = [c.id for c in ledger.load_all() if c.chapter == "ddp" and c.level == "course"]
    assert sorted(ids) == sorted(course)
    assert page.locator("output").inner_text() == f"{len(course)} of {total} clauses"
    page.get_by_label("Outcome").select_option("failed")
    failed = shown.evaluate_all("rows => rows.map(row => row.dataset.outcomes)")
    assert MEAN in shown.evaluate_all("rows => rows.map(row => row.id)")
    assert all("failed" in outcomes.split() for outcomes in failed)
    page.get_by_role("button", name="Reset").click()
    # Not by a function in the page: its policy forbids to evaluate one.
    page.locator("output").filter(has_text=re.compile(rf"^{total} ")).wait_for()
    page.get_by_label("Words").fill("mean GRADIENTS")
    assert 0 < shown.count() < total
    assert page.locator("tbody:not([hidden]) tr.group").count() >= 1
    assert (
        page.locator("tbody:not([hidden])").filter(has=shown).count()
        == page.locator(".clauses tbody:not([hidden])").count()
    ), "no heading without a row"


def test_what_fails_comes_first_and_what_holds_is_folded(file: Path, browser):
    page = Visit(browser, file).page
    groups = page.locator(".clauses tbody").evaluate_all(
        "all => all.map(body => [...body.querySelectorAll('tr.clause')]"
        ".map(row => [row.dataset.level, row.classList.contains('holds'), row.offsetHeight > 0]))"
    )
    assert any(holds for group in groups for _, holds, _ in group)
    for group in groups:
        assert group == sorted(group, key=lambda row: row[1]), "failures first in each group"
        assert all(is_shown is not holds for _, holds, is_shown in group)
    places = [
        (group[0][1], ["course", "correct", "production"].index(group[0][0])) for group in groups
    ]
    assert places == sorted(places), "groups with a failure first, then what the course asks"
    folded = page.locator("tr.clause.holds").first
    page.locator(".rest").first.click()
    assert folded.is_visible()
    page.locator(".rest").first.click()
    assert not folded.is_visible()
    page.get_by_label("Outcome").select_option("passed")
    assert folded.is_visible(), "what is asked for is not folded"
    other = page.locator("tr.clause.holds").last.get_attribute("id")
    page.goto(f"{file.as_uri()}#{other}")
    assert page.locator(f"[id='about-{other}']").is_visible(), "nor what a link leads to"


CUT = """
() => [...document.querySelectorAll("main *, header *, footer *")]
  .filter((node) => node.getBoundingClientRect().right > innerWidth + 1 ||
    (node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).overflowX === "auto"))
  .map((node) => node.outerHTML.slice(0, 80))
"""


@pytest.mark.parametrize("width", [1280, 420])
def test_nothing_is_cut_and_no_card_fills_the_screen(tmp_path: Path, browser, width: int):
    lanes = [{**EVIDENCE["lanes"][0], "rank": rank} for rank in range(4)]
    source = {
        **EVIDENCE["source"],
        "lines": ["        if a_name:", "            b = a.call(of=what)"] * 2,
    }
    story = {**STORY, "seen": "A course's solution. " * 9, "unseen": "Adam does not feel it. " * 9}
    name = "cs336:courses/of-somebody/assignments/assignment2-systems"
    events = [
        {**TOLD, "clause": f"ddp.a-clause.of-kind-{kind}", "stories": [story]} for kind in EVIDENCE
    ]
    for kind, of in {**EVIDENCE, "lanes": lanes}.items():
        about = {"clause": f"ddp.a-clause.of-kind-{kind}", "implementation": name}
        about["rerun"] = f"python -m spec_tests --impl {name} --clause ddp.a-clause.of-kind-{kind}"
        evidence = {kind: of, "source": source}
        message = MESSAGE.format(id=about["clause"]).replace("summed", f"{kind}: summed")
        events.append(result("failed", message=message, evidence=evidence, **about))
    found = log(
        *events,
        implementations=[name],
        points=profile({"name": "Mean", "points": 2, "clauses": [MEAN]}),
    )
    (tmp_path / "index.html").write_text(render_page(found), encoding="utf-8")
    page = Visit(browser, tmp_path / "index.html", viewport={"width": width, "height": 900}).page
    for card in page.locator("details.card").all():
        if card.get_attribute("open") is None:
            card.locator("summary").first.click()
        assert card.bounding_box()["height"] < 0.8 * 900
    assert page.evaluate(CUT) == []


def test_a_row_opens_by_keyboard_and_tells_the_whole_story(file: Path, browser):
    visit = Visit(browser, file)
    button = visit.page.get_by_role("button", name=MEAN, exact=True)
    detail = visit.page.locator(f"[id='about-{MEAN}']")
    assert not detail.is_visible()
    button.focus()
    visit.page.keyboard.press("Enter")
    assert detail.is_visible()
    assert button.get_attribute("aria-expanded") == "true"
    text = detail.inner_text()
    card = detail.locator("a[href^='#cause']")
    if card.count():  # the first clause of a cause: its finding is there
        text += str(visit.page.locator(f"[id='{card.get_attribute('href')[1:]}']").text_content())
    for said in (
        "mine.py: FAIL (1 of 2 cases)",
        "Likely summed and not divided by the world size",
        "<script>alert(1)</script>",
        f"python -m spec_tests --impl mine.py --clause {MEAN}",
        "ddp.sum-for-mean",
        "Source: ",
        "spec_tests/chapters/ddp/test_gradients.py:",
    ):
        assert said in text, f"{said!r} is missing in:\n{text}"
    visit.page.keyboard.press("Enter")
    assert not detail.is_visible()
    assert visit.complaints == [], "markup in a message did nothing"


def test_without_its_script_the_page_is_whole(file: Path, browser):
    visit = Visit(browser, file, java_script_enabled=False)
    assert visit.page.locator(f"[id='about-{MEAN}']").is_visible()
    assert not visit.page.locator(".filters").is_visible(), "no control that does nothing"


def test_on_paper_failures_are_open_and_filters_gone(file: Path, browser):
    visit = Visit(browser, file, color_scheme="dark")
    visit.page.emulate_media(media="print")
    assert visit.page.locator(f"[id='about-{MEAN}']").is_visible()
    assert visit.page.locator("details.card details pre").last.is_visible(), "nor can one open it"
    assert visit.page.locator("tr.detail:not(.alarm)").first.is_hidden()
    assert not visit.page.locator(".filters").is_visible()
    assert visit.page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert visit.faint() == {}


def test_points_and_verdict_stand_at_the_top(file: Path, browser):
    page = Visit(browser, file).page
    assert "no verdict: the run is broken" in page.locator(".verdict").inner_text()
    assert "Points of mine.py: 0 of 2" in page.locator("main").inner_text()
    assert "Points of torch: 2 of 2" in page.locator("main").inner_text()


def test_a_card_opens_by_keyboard_and_shows_line_pictures_and_finding(file: Path, browser):
    visit = Visit(browser, file)
    card = visit.page.locator("details.card").nth(3)
    assert card.get_attribute("open") is None, "the first one alone is open"
    card.locator("summary").first.focus()
    visit.page.keyboard.press("Enter")
    assert card.locator(".hit").inner_text() == "→  12    c"
    pictures = card.get_by_role("img").evaluate_all("all => all.map(one => one.textContent)")
    starts = [*["Which elements of first.weight are wrong"] * 4, "Bytes that rank 0"]
    assert [text.startswith(start) for text, start in zip(pictures, starts, strict=True)]
    assert card.get_by_role("table").locator("thead th").all_inner_texts() == [
        "#",
        *(f"rank {rank} is blocked" for rank in range(4)),
    ]
    finding = card.locator("details pre")
    assert not finding.is_visible()
    for _ in range(2):  # past the link to its first clause
        visit.page.keyboard.press("Tab")
    visit.page.keyboard.press("Enter")
    assert "<script>alert(1)</script>" in finding.inner_text()


# ---------------------------------------------------------------------------- without a browser


def test_a_card_tells_the_story_of_the_near_miss_that_it_is_like(monkeypatch):
    passed = [result("passed", clause=f"ddp.z.n{number}") for number in range(FEW_JUDGED)]
    other = result("failed", message=MESSAGE, clause="ddp.gradients.other")
    events = log(TOLD, result("failed", message=MESSAGE), other, *passed)
    shown = dict.fromkeys((TOLD["clause"], other["clause"]), symptom("failed", MESSAGE))
    monkeypatch.setattr(causes, "dictionary", lambda: Dictionary({}))
    assert "like impostor:" not in render_page(events)
    monkeypatch.setattr(causes, "dictionary", lambda: Dictionary({STORY["impostor"]: shown}))
    monkeypatch.setattr(causes, "family_of", lambda: {STORY["impostor"]: "stale"})
    monkeypatch.setattr(Families, "named", lambda *_, **__: ("stale",))
    speaks = Families({"stale": "an old value"}, dict.fromkeys(shown, "stale"), {})
    monkeypatch.setattr(causes, "families", lambda: speaks)
    page = render_page(events)
    assert page.count(STORY["does"]) == 1
    assert f"like impostor:{STORY['impostor']}" in page


def test_a_card_shows_the_case_of_its_own_function():
    events = log(
        TOLD,
        *(
            result("failed", message=f"[x]  It MUST.\nof {of}", subject=of, case=of, rerun=of)
            for of in ("ddp", "ddp_bucketed")
        ),
    )
    page = render_page(events)
    for of in ("ddp", "ddp_bucketed"):
        assert f"{of}: of {of}</strong>" in page
        assert f"<pre>{of}</pre>" in page


def test_markup_in_what_an_implementation_says_is_text():
    page = render_page(log(result("failed", message="<img src=x onerror=alert(1)>", case="<b>")))
    assert "<img" not in page
    assert "<b>" not in page


def test_what_stands_in_back_ticks_is_code():
    said = result("failed", message="likely: `a < b`\n`again` and a lone `")
    told = {"event": "clause", "clause": said["clause"], "source": "`x`", "where": "x.py:1"}
    told |= {"sentence": "`x` MUST.", "stories": [dict.fromkeys(STORY, "`<zeros>`")]}
    page = render_page(log(told, said))
    assert page.count("<code>a &lt; b</code>") == 3  # as a cause, as what is likely, in full
    assert "<code>again</code> and a lone `" in page
    assert page.count("<code>&lt;zeros&gt;</code>") == 3
    assert '<p class="norm"><code>x</code> MUST.</p>' in page
    assert "Source: <code>x</code>" in page


@pytest.mark.parametrize(
    ("outcomes", "kind"),
    [
        (["passed", "passed"], "good"),
        (["failed", "failed"], "bad"),
        (["unexpected_pass", "passed"], "bad"),
        (["expected_failure", "passed"], "warn"),
        (["error", "passed"], "warn"),
    ],
)
def test_a_ratio_is_red_where_a_clause_does_not_hold(outcomes: list[str], kind: str):
    page = render_page(log(*(result(each, clause=f"a.{i}") for i, each in enumerate(outcomes))))
    assert f'<span class="mark {kind}">{outcomes.count("passed")} of 2</span>' in page
