"""Makes the tables of the documents from the result files: `python -m paper.refresh` updates them.

A block in a document names its function:

    <!-- made by paper/refresh.py: actor -->
    ...
    <!-- end -->

Blocks about learning show the results on real questions (paper/real/results) first and those of the embedded world
second. As long as there are no results on real questions, they show the world's alone.
tests/test_documents.py fails if a document is out of date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.blocks import actor, drift, fast, peers, step
from benchmarks.output import markdown_table
from memopd.cli.options import policy_name
from memopd.evaluate.provenance import warn_changed
from memopd.evaluate.statistics import Estimate
from memopd.evaluate.tables import shown
from paper.comparisons import ORDER_HEADS, order_row
from paper.trained import sampled, trained_with

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "paper" / "world" / "results"
REAL = ROOT / "paper" / "real" / "results"
WORLD = "In the embedded world, the second evidence:"
BLOCK = re.compile(r"(<!-- made by paper/refresh\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def summary() -> str:
    """The table of the README: one line per question that MemOPD answers."""
    wrong, matters = "How wrong is a flattened history?", "Does it matter for learning?"
    f1 = {r["system"]: r["metrics"]["f1"]["mean"] for r in read("control")["results"] if r["k"] == 2}
    how = f"F1 on two questions; {briefly('control')}"
    learnt = [
        how,
        f"student {f1['SFT']:.2f}; + PPO {f1['PPO']:.2f}; + teacher in flattened states {f1['persistent OPD']:.2f}; "
        f"**+ teacher in exact states {f1['MemOPD']:.2f}**",
    ]
    rows = [[wrong, clipped(read("state"))]]
    if has_real("state"):
        rows = [[f"{wrong} Real questions", clipped(real("state"))],
                ["The same in the embedded world", clipped(read("state"))]]  # fmt: skip
    if has_real("control"):
        rows += [[f"{matters} Real questions: {asked}", found] for asked, found in learnt_on_real_questions()]
        rows += [[f"The same in the embedded world: {learnt[0]}", learnt[1].replace("**", "")]]
    else:
        rows += [[f"{matters} {learnt[0]}", learnt[1]]]
    return markdown_table(["Question", "Measured"], [*rows, fast()])


def clipped(state: dict[str, Any]) -> str:
    rows = {row["representation"]: row for row in state["representations"]}
    flat, packed = rows["persistent history"], rows["reconstructed packing"]
    return (
        f"PPO would clip {100 * flat['false_clip']:.1f} % of the sampled tokens although nothing changed; "
        f"packed, {100 * packed['false_clip']:.1f} %"
    )


def learnt_on_real_questions() -> list[tuple[str, str]]:
    """For every horizon, F1 of the arms of the control; the highest is bold, whichever it is."""
    found = {(r["system"], r["k"]): r["metrics"]["f1"]["mean"] for r in real("control")["results"]}
    made = []
    for k in sorted({k for _, k in found}):
        f1 = {name: found[system, k] for system, name in (
            ("SFT", "student"), ("PPO", "+ PPO"), ("persistent OPD", "+ teacher in flattened states"),
            ("MemOPD", "+ teacher in exact states")) if (system, k) in found}  # fmt: skip
        cells = [f"{name} {value:.2f}" for name, value in f1.items()]
        best = [f"**{c}**" if value == max(f1.values()) else c for c, value in zip(cells, f1.values(), strict=True)]
        how = f"; {few_words(real('control')['settings']['trained_with'])}" if k == 2 else ""
        made.append((f"F1 on {k} questions{how}", "; ".join(best)))
    return made


def state() -> str:
    """Table 3: the same sampled tokens, flattened and packed, against the calls run alone."""
    if has_real("state"):
        return "\n\n".join(["On real questions:", state_of(real("state")), WORLD, state_of(read("state"))])
    return state_of(read("state"))


def state_of(found: dict[str, Any]) -> str:
    rows = {row["representation"]: row for row in found["representations"]}
    names = {
        "persistent history": "flattened into one history",
        "batching floor": "calls in a padded batch: the floor",
        "reconstructed packing": "**packed**",
    }
    table = markdown_table(
        ["", "p99 |Δlog p|", "first choices changed", "PPO would clip (ε 0.2), though nothing changed"],
        [
            [name, f"{rows[key]['p99_logprob']:.2g}", f"{rows[key]['top1_changed']:,}",
             f"{100 * rows[key]['false_clip']:.2f} %"]
            for key, name in names.items()
        ],
    )  # fmt: skip
    e, after = found["equivalence"], {row["calls"]: row for row in found["teacher"]}["call 2 and later"]
    verdict = "equivalent" if e["passed"] else "**not** equivalent"
    return (
        f"{table}\n\n{found['trajectories']} episodes of `{policy(found['settings'])}`, {found['calls']} calls, "
        f"{e['decisions']:,} sampled tokens, {e['dtype']}. Packing is {verdict} (error {e['error']:.1e}, tolerance "
        f"{e['tolerance']:.1e}), in 1 / {e['tokens'] / e['rows']:.2f} of the rows. In flattened states the teacher "
        f"changes {100 * (1 - after['top1']):.1f} % of its first choices from call 2 on; before that nothing differs. "
        f"`{command(found)}`, {found['date']}; of your own calls, `memopd audit`."
    )


def policy(settings: dict[str, Any]) -> str:
    return policy_name(settings["model"], settings.get("adapter"))


def quality() -> str:
    """Table 1 and the control: on real questions where they were run, then in the world."""
    if has_real("main"):
        return "\n\n".join(["On real questions:", quality_on_real_questions(), WORLD, quality_in_the_world()])
    return quality_in_the_world()


SYSTEMS = {  # on real questions, in the order of the table
    "teacher, mem1": "teacher",
    "SFT": "SFT: the student",
    "PPO": "+ PPO",
    "persistent OPD": "+ PPO + teacher in flattened states",
    "teacher without reward": "+ teacher in exact states, no reward",
    "MemOPD, λ 0.02": "+ PPO + teacher in exact states, the paper's λ (MemOPD, λ 0.02)",
    "MemOPD": "**+ PPO + teacher in exact states (MemOPD)**",
}


def quality_on_real_questions() -> str:
    """All data sets together; the pages have each."""
    names = [name for name in ("control", "main") if has_real(name)]
    found = {(r["system"], r["k"]): r for name in names for r in real(name)["results"]}
    horizons = sorted({k for _, k in found})
    columns = [(k, metric) for k in horizons for metric in ("em", "f1")]
    rows = [
        [name, *(estimate(found[system, k]["metrics"][m]) if (system, k) in found else "–" for k, m in columns)]
        for system, name in SYSTEMS.items()
        if any((system, k) in found for k in horizons)
    ]
    made = real("main")
    tasks = {k: max(r["tasks"] for (_, at), r in found.items() if at == k) for k in horizons}
    asked = ", ".join(f"{n:,} tasks of {k} questions" for k, n in tasks.items())
    seeds = max(r["seeds"] for r in found.values())
    command = f"`python -m paper {' '.join(sorted(names, reverse=True))} --of real`"
    return "\n\n".join(
        [
            markdown_table(["", *(f"Q{k} {m.upper()}" for k, m in columns)], rows),
            f"Sums over the questions of a task; {', '.join(made.get('data', {}))}; {made['settings']['split']} split, "
            f"{asked}; {sampled(made['settings']['evaluation'])}; ± standard deviation over {seeds} seeds, or standard "
            f"error over tasks where there is one run. {trained_with(made['settings'])} {command}, {made['date']}, "
            f"{made['machines'][0]['device']}.{missing_of(names)}",
        ]
    )


def quality_in_the_world() -> str:
    """Table 1 and the control, under the memory rule that the models were trained with."""
    found = {(r["system"], r["k"]): r for name in ("control", "main") for r in read(name)["results"]}
    horizons = sorted({k for _, k in found})
    columns = [(k, metric) for k in horizons for metric in ("em", "f1")]
    rows = [
        [name, *(estimate(found[system, k]["metrics"][m]) if (system, k) in found else "–" for k, m in columns)]
        for system, name in (
            ("teacher, mem1", "teacher, 10 M"),
            ("SFT", "SFT: the student, 3 M"),
            ("PPO", "+ PPO"),
            ("persistent OPD", "+ PPO + teacher in flattened states"),
            ("MemOPD", "**+ PPO + teacher in exact states (MemOPD)**"),
        )
    ]
    trained = found["MemOPD", 2]
    asked = ", ".join(f"{found['MemOPD', k]['tasks']} tasks of {k} questions" for k in horizons)
    how = sampled(read("main")["settings"]["evaluation"])
    where = f"`python -m paper main control`, {read('main')['date']}, {read('main')['machines'][0]['device']}"
    return "\n\n".join(
        [
            markdown_table(["", *(f"Q{k} {m.upper()}" for k, m in columns)], rows),
            f"Sums over the questions of a task; test split, {asked}; {how}; ± standard deviation over "
            f"{trained['seeds']} seeds, or standard error over tasks where there is one run. "
            f"{trained_with(read('main')['settings'])} The paper runs its control on Q2 only, and so do we. {where}.",
        ]
    )


def claims() -> str:
    """The plan's claims on real questions, where they were tested, then the comparisons in the world."""
    if has_real("main"):
        return "\n\n".join(filter(None, [*verdicts(by_data=True), WORLD, claims_in_the_world()]))
    return claims_in_the_world()


def verdicts(by_data: bool) -> list[str]:
    """The orders that the plan asks for, on real questions; those that do not hold come first."""
    made = [o for name in ("main", "control") if has_real(name) for o in real(name).get("orders", [])]
    text = []
    for heading, holds in (("do **not** hold", False), ("hold", True)):
        rows = [order_row(o) for o in made if o["holds"] == holds and (by_data or not o["data"])]
        table = markdown_table(ORDER_HEADS, rows) if rows else "None."
        text += [f"These orders of the plan {heading} on real questions:", table]
    return [*text, missing_of(("main", "control")).strip()]


def missing_of(names: Sequence[str]) -> str:
    """A sentence on the results that are not there, so that a verdict on a part of the runs is not taken for more."""
    lost = dict.fromkeys(what for name in names if has_real(name) for what in real(name)["missing"])
    return f" Results that are missing: {len(lost)}, the first of them {next(iter(lost))}." if lost else ""


def claims_in_the_world() -> str:
    """The plan's comparisons, in F1: difference, 95 % over tasks, seeds that agree."""
    lines = {
        (c["a"], c["b"], c["k"]): c
        for name in ("control", "main")
        for c in read(name)["comparisons"]
        if c["metric"] == "f1"
    }
    horizons = sorted({k for *_, k in lines})

    def cell(a: str, b: str, k: int) -> str:
        if (c := lines.get((a, b, k))) is None:
            return "–"
        interval = f"{c['over_tasks']['low']:+.3f} to {c['over_tasks']['high']:+.3f}"
        return f"{c['difference']:+.3f} ({interval}), {c['over_seeds']['ahead']} of {len(c['seeds'])}"

    pairs = [("MemOPD", "persistent OPD"), ("MemOPD", "PPO"), ("MemOPD", "SFT")]
    rows = [[f"{a} − {b}", *(cell(a, b, k) for k in horizons)] for a, b in pairs]
    table = markdown_table(["F1: difference (95 % over tasks), seeds ahead", *(f"Q{k}" for k in horizons)], rows)
    return f"{table}\n\nTrained as above: {briefly('main')}."


def briefly(name: str) -> str:
    """Algorithm, λ, learning rate and temperature of the training, in a few words."""
    return few_words(read(name)["settings"]["trained_with"])


def few_words(trained: dict[str, Any]) -> str:
    o, weight = trained["optimise"], trained["teacher"]["weight"]
    temperature = trained["sampling"]["temperature"]
    return f"{o['algorithm']}, λ {weight:g}, learning rate {o['lr']:g}, temperature {temperature:g}"


Pair = tuple[float, float]


def orders() -> str:
    """The claims on real questions, where they were tested; then the orders of the paper that the world lacks."""
    if has_real("main"):
        second = "In the embedded world, the second evidence, these orders of the paper do not hold:"
        return "\n\n".join(filter(None, [*verdicts(by_data=False), second, missing_orders()]))
    return missing_orders()


def missing_orders() -> str:
    """The orders of the paper that do not hold in the world, with the numbers of both."""
    tables = {name: read(name)["paper"] for name in ("main", "single", "control")}
    ours = {(r["system"], r["k"]): r["metrics"] for name in tables for r in read(name)["results"]}

    def theirs(name: str, column: str, *rows: str) -> Any:
        """Numbers of one column of the paper's table, row by row."""
        at, lines = tables[name]["columns"].index(column), {line[0]: line for line in tables[name]["rows"]}
        return tuple(float(str(lines[row][at]).partition(" ")[0]) for row in rows)

    def here(k: int, metric: str, *systems: str, unit: float = 1) -> Any:
        return tuple(ours[system, k][metric]["mean"] / unit for system in systems)

    names, arms, long = ("MemOPD (3B)", "PPO (3B)"), ("MemOPD", "PPO"), (2, 8, 16)
    sft = ("Mixed-horizon SFT (3B)", "PPO (3B)")
    times = [theirs("main", "Q16 time", *names), theirs("single", "time", *names)]
    rows = [
        ["MemOPD's advantage over PPO grows with the questions: F1 on Q2, Q8, Q16",
         gains([theirs("main", f"Q{k} F1", *names) for k in long]), gains([here(k, "f1", *arms) for k in long])],
        ["MemOPD's contexts are shorter than PPO's: peak on Q16, 10² tokens",
         against([theirs("main", "Q16 peak", *names)]), against([here(16, "peak", *arms, unit=1e2)])],
        ["Its dependency is smaller: Q1, 10⁵",
         against([theirs("single", "dependency", *names)], 3), against([here(1, "dependency", *arms, unit=1e5)], 3)],
        ["It takes less time: seconds on Q16; on Q1", against(times),
         f"{against([here(k, 'seconds', *arms) for k in (16, 1)])}, of trajectories that waited for each other"],
        ["MemOPD has the highest F1 of all systems: Q2, Q8, Q16",
         ", ".join(f"{theirs('main', f'Q{k} F1', names[0])[0]:.2f}" for k in long),
         f"below its teacher: {against([here(k, 'f1', 'MemOPD', 'teacher, mem1') for k in long])}"],
        ["SFT is above PPO on long tasks: F1 on Q8; on Q16",
         against([theirs("main", f"Q{k} F1", *sft) for k in (8, 16)]),
         against([here(k, "f1", "SFT", "PPO") for k in (8, 16)])],
        ["A teacher in flattened states is better than none: F1 on Q2, against PPO",
         f"{theirs('control', 'F1', 'persistent OPD over PPO')[0]:+.0f} %",
         gains([here(2, "f1", "persistent OPD", "PPO")])],
    ]  # fmt: skip
    return markdown_table(["In the paper", "there", "here"], rows)


def gains(pairs: list[Pair]) -> str:
    return ", ".join(f"{100 * (a / b - 1):+.0f} %" for a, b in pairs)


def against(pairs: list[Pair], digits: int = 2) -> str:
    return "; ".join(f"{a:.{digits}f} against {b:.{digits}f}" for a, b in pairs)


def remedies() -> str:
    """The settings that were tried on dev for Q16, with the mean over seeds of each."""
    probe = read("dev-probe-4")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for arm, teacher in (("ppo", "none"), ("memopd", "λ 1, all")):  # the third round's own models
        found = [m["dev"] for m in probe["models"] if m["model"].startswith(f"third round, {arm},")]
        groups["student", 32, 24, teacher] = found
    for run in probe["runs"]:
        s = run["settings"]
        teacher = f"λ {s['weight']:g}, {s['mask']}" if "weight" in s else "none"
        groups.setdefault((s["student"], s["episodes_a_step"], s["steps"], teacher), []).append(run["dev"])
    columns = ["student", "episodes per update", "updates", "teacher", "seeds", *DEV_COLUMNS]
    rows = [[*map(str, key), str(len(found)), *dev_cells(found)] for key, found in sorted(groups.items())]
    rates = ", ".join(f"{lr:g}" for lr in sorted({run["settings"]["lr"] for run in probe["runs"]}))
    algorithm = read("main")["settings"]["trained_with"]["optimise"]["algorithm"]
    return f"{markdown_table(columns, rows)}\n\nAll by {algorithm}, learning rate {rates}, temperature 1."


def temperatures() -> str:
    """The third round's models on dev, at lower temperatures."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for line in read("dev-probe-4")["temperatures"]:
        system = line["model"].removeprefix("third round, ").partition(",")[0]
        groups.setdefault((system, line["temperature"]), []).append(line["dev"])
    rows = [[*map(str, key), str(len(found)), *dev_cells(found)] for key, found in groups.items()]
    table = markdown_table(["system", "temperature", "seeds", *DEV_COLUMNS], rows)
    return f"{table}\n\nOf the evaluation. The models are those of main.md, trained by {briefly('main')}."


DEV_COLUMNS = ["Q2 F1", "Q8 F1", "Q16 F1", "Q16 valid %"]


def dev_cells(found: list[dict[str, Any]]) -> list[str]:
    def mean(k: str, metric: str) -> float:
        return sum(dev[k][metric] for dev in found) / len(found)

    scores = [f"{mean(k, 'f1'):.2f}" if all(k in dev for dev in found) else "–" for k in ("q2", "q8", "q16")]
    return [*scores, f"{100 * mean('q16', 'valid'):.0f}"]


def lists() -> str:
    """How often a model copies its own or another model's notes into a complete answer of sixteen parts."""
    found = read("dev-probe-4")["lists"]
    rows = [
        [name.removeprefix("notes of "), f"{100 * notes['notes with digits']:.1f}", str(notes["answers"]),
         *(f"{100 * share:.1f}" for share in notes["valid"].values())]
        for name, notes in found.items() if name.startswith("notes of ")
    ]  # fmt: skip
    writers = [f"whole when {who} copies, %" for who in found["notes of student"]["valid"]]
    return markdown_table(["whose notes", "with digits, %", "answers", *writers], rows)


def learning() -> str:
    """Twenty updates on a CPU."""
    found = read("learning")
    mean = [f"{sum(part) / len(part):.2f}" for s in found["seeds"] for part in (s["reward"][:5], s["reward"][-5:])]
    rows = [
        [str(s["seed"]), mean[2 * i], mean[2 * i + 1], f"{s['gain']:+.2f} ± {s['standard_error']:.2f}",
         f"{s['teacher_kl'][0]:.2f} → {s['teacher_kl'][-1]:.2f}"]
        for i, s in enumerate(found["seeds"])
    ]  # fmt: skip
    columns = ["seed", "reward, first five updates", "last five", "gain", "divergence from the teacher"]
    return (
        f"{markdown_table(columns, rows)}\n\nTogether {found['gain']:+.2f} ± {found['standard_error']:.2f}. "
        f"By {found['what']}; {few_words(found['trained_with'])}. "
        f"`{command(found)}`, {found['date']}, {found['machine']}."
    )


RENAMED = {"memopd experiment ": "python -m paper ", "tests/optimise/": "tests/train/"}


def command(found: dict[str, Any]) -> str:
    """The recorded command with current names, since result files keep the names of their time."""
    text: str = found["command"]
    for before, after in RENAMED.items():
        text = text.replace(before, after)
    return text


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def real(name: str) -> Any:
    return json.loads((REAL / f"{name}.json").read_text())


def has_real(name: str) -> bool:
    """Whether there is a result on real questions. One on dev is for choosing settings and is not shown."""
    return (REAL / f"{name}.json").is_file() and real(name)["settings"].get("split", "test") == "test"


def estimate(values: dict[str, Any]) -> str:
    return shown(Estimate(**values))


def refreshed(text: str) -> str:
    def made(block: re.Match[str]) -> str:
        opening, name, end = block.groups()
        return f"{opening}\n{BLOCKS[name]()}\n\n{end}"

    return BLOCK.sub(made, text)


BLOCKS = {
    f.__name__: f
    for f in (
        summary,
        orders,
        state,
        quality,
        claims,
        remedies,
        temperatures,
        lists,
        actor,
        learning,
        peers,
        step,
        drift,
    )
}
DOCUMENTS = [
    p
    for folder in (".", "docs", "docs/guides", "paper", "paper/world", "paper/real", "benchmarks")
    for p in sorted((ROOT / folder).glob("*.md"))
]

if __name__ == "__main__":
    for result in sorted((ROOT / "paper").glob("*/results/*.json")):
        if isinstance(made := json.loads(result.read_text()), dict):
            warn_changed(result.relative_to(ROOT), made)
    for document in DOCUMENTS:
        before = document.read_text()
        if (after := refreshed(before)) != before:
            document.write_text(after)
            print(document.relative_to(ROOT))
