"""The page in real Chromium: what it shows, that it asks nobody for anything, that text stays text."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from shutil import copytree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browser import Browser
from pages import HOSTILE, TOOLS, add_audits, instructed_run, run_of, run_with_notes, tool_run, workshop

from memopd.config import RunConfig
from memopd.record import read_episodes
from memopd.report import page as made
from memopd.report import write_report
from memopd.train.metrics import read_metrics
from memopd.train.traces import read_traces


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as found:
        yield found


@cache
def report() -> Path:
    write_report([run_of()], workshop() / "report.html")
    return workshop() / "report.html"


@cache
def comparison() -> Path:
    runs = [run_of("aligned", 0), run_of("aligned", 1), run_of("none", 0)]
    write_report(runs, workshop() / "comparison.html")
    return workshop() / "comparison.html"


def shows(browser: Browser, page: Path, fragment: str = "") -> None:
    """Open it: it draws itself, runs nothing but its own script, asks for nothing but itself."""
    before = len(browser.errors), len(browser.requests)
    browser.open(page, fragment)
    address = page.resolve().as_uri()
    assert browser.run("document.documentElement.dataset.ready") == "yes", "; ".join(browser.errors)  # uncut
    assert browser.errors[before[0] :] == []
    assert {r.partition("#")[0] for r in browser.requests[before[1] :]} <= {address}
    assert browser.run("window.pwned") is None
    assert browser.run("document.scripts.length") == 2
    assert browser.run("document.querySelectorAll('img, iframe, style, link, svg > svg, main b > b').length") == 1
    assert browser.run("document.querySelectorAll('style').length") == 1


def words(browser: Browser) -> list[str]:
    """All that a reader sees, whatever element it is in."""
    return browser.run("document.body.innerText + [...document.querySelectorAll('.text')].map(e => e.textContent)")


def test_the_viewer_shows_the_call_that_the_address_names(browser):
    shows(browser, report(), "#episode=5&call=2")
    episode = sorted(first_episodes(), key=lambda e: e[0])[5][1]
    trace = read_traces(run_of() / "traces" / "step-000001.parquet")[episode.id, 2]
    assert browser.texts(".walk h3") == ["Call 2 (0 to 3)"]
    assert browser.texts(".about code")[-1] == episode.id
    ids = browser.run("[...document.querySelectorAll('.chip')].map(e => e.dataset.k)")
    assert ids == [str(k) for k in range(len(episode.calls[2].completion))]
    browser.hover(".chip:nth-child(3)")
    tip = dict(zip(browser.texts("#tip dt"), browser.texts("#tip dd"), strict=True))
    assert float(tip["advantage"].replace("−", "-")) == pytest.approx(float(trace.advantage[2]), rel=1e-3)
    assert float(tip["value"].replace("−", "-")) == pytest.approx(float(trace.value[2]), rel=1e-3)
    assert float(tip["divergence"]) == pytest.approx(float(trace.divergence[2]), rel=1e-3)
    assert float(tip["log p"].partition(",")[0].replace("−", "-")) == pytest.approx(float(trace.logp_old[2]), rel=1e-3)
    assert tip["token id"] == str(episode.calls[2].completion[2])
    assert tip["position"] == str(len(episode.calls[2].prompt) + 2)


def first_episodes():
    """(step, episode) in the order of the page."""
    for file in sorted((run_of() / "episodes").iterdir()):
        yield from ((file.stem, e) for e in read_episodes(file))


def test_clicks_and_keys_walk_the_calls(browser):
    shows(browser, report(), "#episode=0&call=0")
    assert browser.texts(".column h4") == [
        "What this call read",
        "What it wrote",
        "What a flattened history would have contained",
    ]
    assert browser.texts(".drops .block") == []
    assert "nothing has been dropped yet" in browser.texts(".flattened .says")[0]
    browser.click(".map .row:nth-of-type(4)")
    assert browser.texts(".walk h3") == ["Call 3 (0 to 3)"]
    assert browser.run("location.hash") == "#run=0&episode=0&call=3&colour=advantage"
    assert len(browser.texts(".drops del")) == 2  # memory and observation of the call before
    assert len(browser.texts(".flattened .unseen")) == 4  # two turns that the agent no longer has
    (line,) = browser.texts(".flattened .unread > summary")  # one of them it had lost before
    assert "that call 2 did not read either" in line
    assert len(browser.texts(".flattened .unread .unseen")) == 2
    assert len(browser.texts(".flattened .moved")) == 2
    browser.key("ArrowLeft")
    assert browser.texts(".walk h3") == ["Call 2 (0 to 3)"]
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert browser.texts(".walk h3") == ["Call 3 (0 to 3)"]
    browser.key("ArrowRight", shift=True)
    assert browser.run("location.hash").startswith("#run=0&episode=1&call=0")
    advantage = browser.run("[...document.querySelectorAll('.chip')].map(e => e.className).join()")
    assert "chip raise" in advantage or "chip lower" in advantage
    browser.click(".choice button:nth-child(2)")
    assert browser.texts(".choice [aria-pressed=true]") == ["Teacher divergence"]
    assert browser.run("document.querySelector('.chip').className") == "chip divergence"


def test_the_columns_are_what_was_read(browser):
    """The blocks of the prompt, folded or not, are the decoded ids of the call."""
    shows(browser, report(), "#episode=0&call=2")
    data = json.loads(browser.run("document.getElementById('data').textContent"))["runs"][0]
    call = sorted(first_episodes(), key=lambda e: e[0])[0][1].calls[2]
    words = data["vocabulary"]
    text = "".join(words["texts"][words["ids"].index(i)] for i in call.prompt.tolist())
    assert "".join(browser.texts(".read .block:not(.gone) .text")) == text
    assert len(browser.texts(".drops .text")) == 2


def test_unchanged_text_is_one_line_that_opens(browser, tmp_path):
    write_report([tool_run(tmp_path)], tmp_path / "page.html")
    shows(browser, tmp_path / "page.html", "#episode=0&call=0")
    assert browser.texts(".read .kept") == []
    browser.key("ArrowRight")
    (line,) = browser.texts(".read .kept > summary")
    assert line.startswith("44 tokens as before")
    assert browser.run("document.querySelector('.read .kept').open") is False
    shown = "[...document.querySelectorAll('.read .text')].filter(e => e.checkVisibility())"
    visible = f"{shown}.map(e => e.textContent).join()"
    assert "How long is the Velm?" not in browser.run(visible)
    assert "49 km" in browser.run(visible)
    browser.run("document.querySelector('.read .kept > summary').focus()")
    browser.send(
        "Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13
    )
    assert "How long is the Velm?" in browser.run(visible)


def test_tools_are_set_off(browser, tmp_path):
    write_report([tool_run(tmp_path)], tmp_path / "page.html")
    shows(browser, tmp_path / "page.html", "#episode=0&call=0")
    assert browser.texts(".asked") == ["How long is the Velm?"]
    assert browser.texts(".map .name small") == [
        'length_of {"river": "Velm"}',
        "length_of (not valid JSON) ",
        "It is 90 km long.",
    ]
    assert browser.texts(".read .text .tool > *:first-child") == ["Tool definitions: length_of"]
    assert browser.run("document.querySelector('.read details.definitions').open") is False
    assert set(browser.texts(".read .text .special")) >= {"<|im_start|>", "<|im_end|>"}
    assert browser.texts(".wrote .says")[0].startswith("No numbers per token")
    assert browser.texts(".choice, .ramp, .strip") == []
    assert browser.texts(".chips .tool .label") == ["Tool call: length_of"]
    assert browser.texts(".chips .tool .chip") == ["<tool_call>", "↵\n" + TOOLS[8].strip() + "↵\n", "</tool_call>"]
    browser.key("ArrowRight")
    assert browser.texts(".read > .block .tool .label") == ["Tool result"]
    assert len(browser.texts(".read > .block .tool .said.folded")) == 1  # it is long
    browser.click(".read > .block .tool .more")
    assert browser.texts(".read > .block .tool .said.folded") == []
    assert browser.texts(".chips .tool .label") == ["Tool call: length_of (not valid JSON)"]
    browser.key("ArrowRight")
    assert browser.texts(".read > .block .tool .said.folded") == []
    assert browser.texts(".chips .tool") == []


def test_instructions_that_all_episodes_share_are_left_out(browser, tmp_path):
    """Without a file of tasks, the page takes what was asked from the prompts."""
    write_report([instructed_run(tmp_path)], tmp_path / "page.html")
    shows(browser, tmp_path / "page.html")
    assert browser.texts(".asked") == ["… How long is the Velm?"]
    assert browser.texts(".picker option")[1].endswith(": … How long is the Draza?")


def test_the_first_colour_is_one_that_differs_between_tokens(browser, tmp_path):
    """Group advantages are one number for a whole episode, which no colour shows."""
    run = tmp_path / "run"
    copytree(run_of(), run)
    for file in (run / "traces").iterdir():
        table = pq.read_table(file)
        same = [np.full(len(row), 0.5, np.float32) for row in table["advantage"].to_pylist()]
        place = table.schema.get_field_index("advantage")
        pq.write_table(table.set_column(place, table.schema.field(place), pa.array(same, pa.list_(pa.float32()))), file)
    write_report([run], tmp_path / "page.html")
    shows(browser, tmp_path / "page.html")
    assert browser.texts(".choice [aria-pressed=true]") == ["Teacher divergence"]
    shows(browser, tmp_path / "page.html", "#episode=0&colour=advantage")
    assert browser.texts(".choice [aria-pressed=true]") == ["Advantage"]


def test_a_search_opens_the_first_match(browser):
    shows(browser, report(), "#episode=0&call=0")
    episodes = [e for _, e in sorted(first_episodes(), key=lambda e: e[0])]
    search(browser, episodes[7].id.upper())
    assert browser.texts(".search .hint") == [f"1 of {len(episodes)} episodes matches"]
    assert browser.run("location.hash").startswith("#run=0&episode=7&call=0")
    hostile = HOSTILE[3]
    search(browser, hostile.replace(" ", "  "))
    assert hostile in browser.texts(".results mark")
    assert set(browser.texts(".results mark")) == {hostile}
    assert len(browser.texts(".results button")) == int(browser.texts(".search .hint")[0].split()[0])
    assert browser.run("document.querySelectorAll('.columns mark, .chip.found').length") > 0
    assert browser.run("document.activeElement.type") == "search"  # one can go on typing
    search(browser, "no such words")
    assert browser.texts(".search .hint") == ["no episode matches"]
    search(browser, "")
    assert browser.texts(".search .hint") == [""]
    assert (
        browser.run("document.querySelectorAll('mark').length + document.querySelector('.results').checkVisibility()")
        == 0
    )
    assert browser.run("window.pwned") is None


def search(browser: Browser, text: str) -> None:
    before = browser.texts(".search .hint")
    field = "document.querySelector('.search input')"
    browser.run(f"{field}.focus(); {field}.value = {json.dumps(text)}; {field}.dispatchEvent(new Event('input'))")
    browser.until(f"document.querySelector('.search .hint').textContent !== {json.dumps(before[0])}")


def test_a_note_of_the_memory_is_labelled(browser, tmp_path):
    purpose = f"note {HOSTILE[3]}"
    write_report([run_with_notes(tmp_path, purpose)], tmp_path / "page.html")
    shows(browser, tmp_path / "page.html", "#episode=0&call=1")
    assert browser.texts(".map .purpose") == [purpose]
    assert browser.texts(".map .row:nth-of-type(2) .purpose") == [purpose]
    assert browser.texts(".walk .purpose") == [purpose]
    browser.key("ArrowRight")
    assert browser.texts(".walk .purpose") == []


def test_model_text_stays_text(browser):
    text_stays_text(browser, report())


def text_stays_text(browser: Browser, page: Path) -> None:
    shows(browser, page, "#episode=1&call=1")
    seen = words(browser)
    assert [text for text in HOSTILE if text.strip() and text not in seen] == []
    assert run_of().name in browser.texts("h1")[0]
    assert "before <b>system</b>" in browser.texts("#evaluation td small")[0]


def unescaped(data):
    return json.dumps(made._plain(data))


def parsed_as_html(name):
    """The script, were it to set HTML where it sets text."""
    text = PART(name)
    line = "node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));"
    assert name != "dom.js" or line in text
    bad = "c instanceof Node ? node.append(c) : node.insertAdjacentHTML('beforeend', c ?? '');"
    return text.replace(line, f"for (const c of children.flat(Infinity)) {bad}")


PART = made.part


@pytest.mark.parametrize(("name", "mutant"), [("embedded", unescaped), ("part", parsed_as_html)])
def test_the_check_of_text_can_fail(browser, tmp_path, monkeypatch, name, mutant):
    monkeypatch.setattr(made, name, mutant)
    write_report([run_of()], tmp_path / "page.html")
    with pytest.raises(AssertionError, match="Content Security Policy"):
        text_stays_text(browser, tmp_path / "page.html")


def test_without_any_wall_the_words_would_run(browser, tmp_path, monkeypatch):
    """They are no harmless words: unescaped and without the page's policy they do what they say."""
    monkeypatch.setattr(made, "embedded", unescaped)
    text = made.page(made.page_data(made.read_runs([run_of()])))
    (tmp_path / "page.html").write_text(text.replace("Content-Security-Policy", "Nothing"))
    browser.open(tmp_path / "page.html")
    assert browser.run("window.pwned") is not None


def test_the_page_opens_on_an_episode(browser):
    shows(browser, report())
    assert browser.run("[...document.querySelectorAll('main > section')].map(s => s.id)")[:2] == [
        "overview",
        "episodes",
    ]
    assert browser.texts(".walk h3") == ["Call 0 (0 to 3)"]


def test_curves(browser):
    shows(browser, report())
    titles = browser.texts("figure h4")
    assert {"Reward", "Entropy", "Gradient norm, policy", "… where it acts", "Rows saved by sharing"} <= set(titles)
    lines = read_metrics(run_of())
    value = f"document.querySelectorAll('figure .values')[{titles.index('Entropy')}].firstChild.textContent"
    assert float(browser.run(value)) == pytest.approx(lines[-1]["entropy"], rel=1e-2)
    browser.run(f"document.querySelectorAll('figure svg')[{titles.index('Reward')}].id = 'here'")
    x, y = browser.place("#here")
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x - 95, y=y)  # the first step, in all charts at once
    assert float(browser.run(value)) == pytest.approx(lines[0]["entropy"], rel=1e-2)


def test_evaluations_time_and_checks(browser):
    shows(browser, report())
    cells = browser.texts("#evaluation tbody tr:nth-child(2) td")
    assert cells[0].startswith("after")
    assert cells[-1].startswith("+")
    assert browser.texts("#equivalence .good") == ["✓ equal"]
    assert len(browser.texts("#time .part")) >= 4
    settings = sum(len(section) for section in asdict(RunConfig()).values())
    assert f"All {settings} settings" in browser.texts("#configuration summary")[0]


def test_audits_are_beside_each_other(browser, tmp_path):
    """bfloat16 comes before float32, as its file does; a teacher that only one of them has is a dash in the other."""
    run = run_with_notes(tmp_path / "run", "note")
    found = add_audits(run)
    write_report([run], tmp_path / "page.html")
    shows(browser, tmp_path / "page.html")
    first, rounding, student, teacher, *arms = browser.texts("#audit table")
    head = [f"{name}: {column}" for name in ("bfloat16", "float32") for column in ("p99", "top-1", "false")]
    places = [first.find(part) for part in head]
    assert -1 < places[0] < places[-1]
    assert places == sorted(places)
    assert "calls alone" in rounding
    assert "call 2" in student
    assert "–" in teacher
    assert len(arms) == 2
    rows = browser.texts("#audit div:nth-of-type(1) tbody tr")
    persistent = [found[dtype]["representations"][0] for dtype in ("bfloat16", "float32")]
    assert all(f"{100 * row['top1']:.2f}" in rows[0] for row in persistent)
    assert HOSTILE[0] in words(browser)


def test_several_runs(browser):
    shows(browser, comparison(), "#run=2&episode=0&call=1&colour=divergence")
    arms = browser.texts(".arm h3")
    assert len(arms) == 2
    assert "2 seeds" in browser.texts(".curves .legend button")[0]
    assert browser.texts(".choice [aria-pressed=true]") == ["Advantage"]  # there is no teacher in this run
    assert browser.texts("#configuration > .wide td:first-child") == ["teacher.state", "run.seed"]
    count = "document.querySelectorAll('figure:first-child svg')[0].querySelectorAll('.line').length"
    assert browser.run(count) == 2
    browser.hover("figure svg")
    assert len(browser.texts("#tip .key")) == 2
    browser.click(".curves .legend button")
    assert browser.run(count) == 1


def test_both_themes_and_a_narrow_window_hold_everything(browser, tmp_path):
    write_report([tool_run(tmp_path)], tmp_path / "page.html")
    for page, dark in ((tmp_path / "page.html", False), (report(), False), (report(), True)):
        browser.open(page, "#episode=1&call=3", width=390, height=800, dark=dark)
        browser.run("document.querySelectorAll('details').forEach(e => e.open = true)")
        assert browser.run("document.documentElement.scrollWidth") <= 390
        background = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(17, 19, 24)") == dark
    browser.click(".theme")
    assert browser.run("getComputedStyle(document.body).backgroundColor") != background


def test_the_page_names_no_other_place():
    text = report().read_text()
    outside = text.replace("http://www.w3.org/2000/svg", "")
    head, data = outside.split('<script type="application/json" id="data">')
    data, script = data.split("</script>", 1)
    for part in (head, script):
        assert "http:" not in part
        assert "https:" not in part
        assert "innerHTML" not in part
    assert "<" not in data
    assert "default-src 'none'; script-src 'sha256-" in head
    assert len(text.encode()) < 3e6
