"""Documents say what the result files say: tables of numbers are made from one, or name the command that made them."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from benchmarks import __main__ as benchmarks
from benchmarks.output import markdown
from benchmarks.tables import load, tables_of
from memopd import cli
from memopd.config import SECTIONS
from memopd.evaluate import Estimate
from memopd.evaluate.tables import shown
from paper import __main__ as paper
from paper import refresh, single, trained

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "paper" / "world" / "results"


WRITTEN = [p for p in refresh.DOCUMENTS if p.name != "models.md"]  # by people
BENCHES = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
COMMAND = re.compile(r"\b(memopd [a-z]|make [a-z]|pytest |python |torchrun )")
MEASURED = re.compile(r"\d\.\d|\d ?%|\d×|\de-?\d|\d (?:ms|s|MB|GB|GiB)\b")


def named(path):
    return str(path.relative_to(ROOT))


def tables(text):
    """Every table, with the section that it stands in."""
    for section in re.split(r"(?m)^(?=##? )", text):
        for table in re.findall(r"(?m)(?:^ *\|.*\n?)+", section):
            yield table.strip(), section


# ---- blocks made from result files


@pytest.mark.parametrize("document", refresh.DOCUMENTS, ids=named)
def test_blocks_are_what_the_result_files_make(document):
    text = document.read_text()
    assert text.count("<!-- made by") == len(refresh.BLOCK.findall(text)), "a block is not closed, or misspelt"
    assert refresh.refreshed(text) == text, "run `python -m paper.refresh`"


def test_the_readme_has_no_number_of_its_own():
    outside = refresh.BLOCK.sub("", (ROOT / "README.md").read_text())
    outside = re.sub(r"Qwen2\.5-3B|Python 3\.11|Apache-2\.0|arxiv\.org/abs/[\d.]+", "", outside)
    assert MEASURED.findall(outside) == []


def test_a_changed_digit_in_a_block_is_noticed():
    texts = [document.read_text() for document in refresh.DOCUMENTS]
    for name in refresh.BLOCKS:
        text, block = next((t, m) for t in texts for m in refresh.BLOCK.finditer(t) if m.group(2) == name)
        inside = text[block.start() : block.end()]
        digit = re.search(r"(?<=\.)\d", inside)
        changed = inside[: digit.start()] + str((int(digit.group()) + 1) % 10) + inside[digit.end() :]
        assert refresh.refreshed(text.replace(inside, changed)) == text
        assert text.replace(inside, changed) != text


# ---- benchmarks


def bench_tables(path):
    return [markdown(made).partition("\n\n") for made in tables_of(load(path))]  # title, blank line, table


def wrong_bench_tables(documents, made):
    """Tables with the head of a benchmark's table that no result file makes, and made ones that no document shows."""
    heads = {table.splitlines()[0] for _, _, table in made}
    found = [table for text in documents for table, _ in tables(text) if table.splitlines()[0] in heads]
    shown_whole = [f"{title}\n\n{table}" for title, _, table in made]
    return [t for t in found if t not in {table for *_, table in made}] + [
        w for w in shown_whole if not any(w in text for text in documents)
    ]


def test_benchmark_tables_are_those_of_the_result_files():
    made = [table for path in BENCHES for table in bench_tables(path)]
    assert len(made) > 10
    assert wrong_bench_tables([p.read_text() for p in WRITTEN], made) == []


def test_a_wrong_or_a_missing_benchmark_table_is_noticed():
    made = [table for path in BENCHES for table in bench_tables(path)]
    documents = [p.read_text() for p in WRITTEN]
    row = next(line for line in made[0][2].splitlines() if line.startswith("| packed, flex"))
    wrong = [text.replace(row, row.replace("1", "2", 1)) for text in documents]
    # One more that nobody made, and one more that is not shown.
    assert len(wrong_bench_tables(wrong, made)) == len(wrong_bench_tables(documents, made)) + 2


# ---- tables that no result file makes


@pytest.mark.parametrize("document", WRITTEN, ids=named)
def test_tables_of_measurements_stand_in_a_section_that_names_a_command(document):
    for table, section in tables(document.read_text()):
        numbers = "---:" in table and MEASURED.search(table)  # a column of numbers, not settings
        assert not numbers or COMMAND.search(section), table


# ---- pages of the experiments


TRAINED = [name for name in ("main", "single", "control") if (RESULTS / f"{name}.json").exists()]


def rows_of(result, name):
    """What the page's table must say of one system and one number of questions."""
    columns = single.COLUMNS if name == "single" else trained.COLUMNS
    values = [(result["metrics"][metric], unit, digits) for _, metric, unit, digits in columns]
    return " | ".join(shown(v and Estimate(**v), unit, digits) for v, unit, digits in values)


def wrong_rows(name, page):
    """Results whose row is not in the page, and comparisons whose line is not."""
    made = json.loads((RESULTS / f"{name}.json").read_text())
    lines = page.partition("## The paper")[0].splitlines()
    wrong = [
        (r["system"], r["k"])
        for r in made["results"]
        if not any(line.startswith(f"| {r['system']} |") and rows_of(r, name) in line for line in lines)
    ]
    for c in made["comparisons"]:
        start = f"| {c['a']} − {c['b']} | Q{c['k']} {c['metric'].upper()} | {c['difference']:+.3f} |"
        tasks = f"| {c['over_tasks']['low']:+.3f} to {c['over_tasks']['high']:+.3f} |"
        if not any(line.startswith(start) and tasks in line for line in lines):
            wrong.append(start)
    return wrong


@pytest.mark.parametrize("name", TRAINED)
def test_pages_of_trained_systems_say_what_their_json_says(name):
    page = (RESULTS / f"{name}.md").read_text()
    assert wrong_rows(name, page) == []
    made = json.loads((RESULTS / f"{name}.json").read_text())
    assert f"`{made['command']}`" in page
    assert made["date"] in page
    first = rows_of(made["results"][0], name)
    assert wrong_rows(name, page.replace(first, first.replace("1", "2", 1))) != []  # and a wrong digit is noticed


# What the tables of the others must say, from their JSON.
RECORDED = {
    "state": lambda made: [
        *(
            f"| {r['representation']} | {r['p99_logprob']:.3g} | {100 * r['top1']:.2f} | {r['top1_changed']:,} | "
            f"{100 * r['false_clip']:.2f} |"
            for r in made["representations"]
        ),
        *(
            f"| {t['calls']} | {t['decisions']:,} | {100 * t['top1']:.2f} | {t['top1_changed']:,} | "
            f"{t['p99_logprob']:.3g} | {t['mean_kl']:.3g} |"
            for t in (*made["student"], *made["teacher"])
        ),
    ],
    "corruption": lambda made: [
        f"| {r['representation']} | {r['p99_logprob']:.3g} | {r['top1_changed']:,} | {100 * r['top1']:.2f} | "
        f"{100 * r['false_clip']:.2f} |"
        for r in made["rows"]
    ],
    "rules": lambda made: [
        f"| {rule} | {r['calls']} | {r['decisions']:,} | {r['p99_logprob_error']:.2e} | "
        f"{r['floor_p99_logprob_error']:.2e} | {r['own_p99_logprob_error']:.2e} | {100 * r['top1_agreement']:.2f} |"
        for rule, reports in made["rules"].items()
        for r in (reports["float32"], reports["bfloat16"])
    ],
    "domain": lambda made: [
        f"| {made['sampled'] + extra:,} | {extra:,} | {extra / made['sampled']:.2f} |"
        for extra in (0, made["trajectory_spurious"], made["response_spurious"])
    ],
    "packing": lambda made: [
        f"| {r['shape']} × {r['batch']} | {r['calls']} | {r['decisions']:,} | {base['name']} | "
        f"{1e3 * base['seconds']:.1f} |"
        for r in made["results"]
        for base in r["arms"]
        if base["name"] == r["baseline"]
    ],
}


@pytest.mark.parametrize("name", [name for name in RECORDED if (RESULTS / f"{name}.json").exists()])
def test_pages_of_recorded_trajectories_say_what_their_json_says(name):
    made, page = json.loads((RESULTS / f"{name}.json").read_text()), (RESULTS / f"{name}.md").read_text()
    rows = RECORDED[name](made)
    assert [row for row in rows if row not in page] == []
    wrong = page.replace(rows[0], re.sub(r"\d", lambda d: str((int(d.group()) + 1) % 10), rows[0], count=1))
    assert [row for row in rows if row not in wrong] == rows[:1]  # a wrong digit is noticed
    assert f"`{made['command']}`" in page
    assert made["date"] in page
    assert made["passed"] == ("NOT equivalent" not in page)


# ---- links, files and commands


EVERYWHERE = [
    *refresh.DOCUMENTS,
    *(p for folder in ("paper", "models", "tests", "examples") for p in (ROOT / folder).rglob("*.md")),
]
LINK = re.compile(r'\]\(([^()\s]+)\)|src="([^"]+)"')
FOLDERS = "src|tests|docs|paper|benchmarks|examples|configs"
FILE = re.compile(rf"(?:`|(?<![\w/])(?=(?:{FOLDERS})/))([\w./-]+/[\w./-]*\.(?:py|toml|sh|md|json|txt))\b(?!/)")


def anchors(text):
    """What a link to a heading of this document may end in."""
    headings = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text, folder):
    broken = []
    for target in (a or b for a, b in LINK.findall(text)):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        there = not name or (folder / name).exists()
        if not there or (anchor and anchor not in anchors((folder / name).read_text() if name else text)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("document", EVERYWHERE, ids=named)
def test_links_lead_somewhere(document):
    assert broken_links(document.read_text(), document.parent) == []


def test_a_broken_link_is_noticed():
    text = "# A heading, with `code`\n[a](README.md) [b](nowhere.md)\n[c](#a-heading-with-code) [d](#nowhere)\n"
    text += '<img src="docs/report.png"> <img src="docs/nothing.png"> ![e](https://example.org/x.png)'
    assert broken_links(text, ROOT) == ["nowhere.md", "#nowhere", "docs/nothing.png"]


def missing_files(text, folder):
    """Files of ours that are named, but are not there. A run's files (RUN/...) are not ours."""
    roots = (ROOT, ROOT / "src" / "memopd", folder)
    ours = [name for name in FILE.findall(text) if name == name.lower() and not name.startswith("runs/")]
    return [name for name in ours if not any((root / name).exists() for root in roots)]


@pytest.mark.parametrize("document", [p for p in WRITTEN if p.name != "CHANGELOG.md"], ids=named)
def test_files_named_in_documents_exist(document):
    assert missing_files(document.read_text(), document.parent) == []


def test_a_missing_file_is_noticed():
    text = "`compile/trie.py` `paper/world/plan.md` `compile/tire.py` `RUN/config.json` `runs/a/config.json` x/y.py\n"
    text += "    pytest tests/train/test_losses.py tests/train/test_gains.py::test_one"
    assert missing_files(text, ROOT) == ["compile/tire.py", "tests/train/test_gains.py"]


def test_the_layers_are_those_of_the_import_contract():
    """In its order: the architecture's list of folders, from `cli` down."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c.get("containers") == ["memopd"])
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.search(r"\n\n    cli\n(?:    [\w.]+\n)+", text).group().split()
    assert [name.removesuffix(".py") for name in listed if name.removesuffix(".py") in layers] == layers


PROGRAMS = {"memopd": cli.app, "python -m paper": paper.app, "python -m benchmarks": benchmarks.app}


def commands(text):
    """Every command of ours in a document or a script: in code blocks, between backticks, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", text)
    ours = "|".join([*PROGRAMS, "torchrun"])
    lines = re.findall(rf"(?m)^(?:    +|do_ |test .*\|\| do_ |#   +)(?:\w+=\S+ )*((?:{ours}) .*)$", text)
    return [
        line
        for line in lines + re.findall(rf"`((?:{ours}) [^`\n]+)`", text)
        if "..." not in line and " NAME" not in line
    ]


def unknown(line):
    """The first word that a command does not know; None where all is well."""
    line = re.sub(r"^torchrun .*? -m memopd\.cli", "memopd", line)
    program = next(name for name in PROGRAMS if line.startswith(f"{name} "))
    command = typer.main.get_command(PROGRAMS[program])
    words = shlex.split(line.removeprefix(program).partition(" > ")[0], comments=True)
    while words and hasattr(command, "commands"):
        name = words.pop(0)
        if name not in command.commands:
            return name
        command = command.commands[name]
    if program == "python -m paper" and not words[0].startswith("-") and words[0] not in list(paper.Name):
        return words[0]
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    for word in words:
        if word == "--":
            break
        option = word.partition("=")[0]
        if option.startswith("-") and option not in options:
            section, _, field = option.removeprefix("--").partition(".")
            if not (
                "ignore_unknown_options" in command.context_settings
                and section in SECTIONS
                and hasattr(SECTIONS[section](), field)
            ):
                return option
    return None


SETTINGS = [p for folder in ("configs", "paper/world", "paper/real") for p in (ROOT / folder).rglob("*.toml")]
SCRIPTS = [
    *(ROOT / "examples").glob("*.sh"),
    ROOT / "paper" / "student.sh",
    ROOT / "paper" / "real" / "prepare.sh",
    *SETTINGS,
]
CARDS = [p for folder in ("models", "paper/real/adapters") for p in sorted((ROOT / folder).rglob("*.md"))]
PLACES = [*(p for p in WRITTEN if p.name != "CHANGELOG.md"), *CARDS, *SCRIPTS]


@pytest.mark.parametrize("place", PLACES, ids=named)
def test_commands_in_documents_exist(place):
    for line in commands(place.read_text()):
        assert unknown(line) is None, line


def test_commands_are_found_and_wrong_ones_noticed():
    found = [line for place in PLACES for line in commands(place.read_text())]
    assert all(sum(line.startswith(program) for line in found) > 5 for program in PROGRAMS)
    assert len(found) > 60
    assert unknown("memopd train c.toml --output r --optimise.lr 1e-3 --teacher-state none") is None
    assert unknown("memopd train c.toml --optimise.rate 1e-3") == "--optimise.rate"
    assert unknown("memopd rollout t.parquet --modle m") == "--modle"
    assert unknown("memopd fly") == "fly"
    assert unknown("memopd experiment main") == "experiment"
    assert unknown("torchrun --nproc-per-node 2 -m memopd.cli trian c.toml") == "trian"
    assert unknown("python -m paper main control --collect") is None
    assert unknown("python -m paper mian") == "mian"
    assert unknown("python -m benchmarks actor --json > results/actor.jsonl") is None
    assert unknown("python -m benchmarks actor --batch 2") == "--batch"


def test_recorded_commands_are_shown_in_todays_words():
    """Result files keep the words of their day."""
    assert refresh.command({"command": "memopd experiment state domain"}) == "python -m paper state domain"
    assert refresh.command({"command": "python -m paper rules"}) == "python -m paper rules"
