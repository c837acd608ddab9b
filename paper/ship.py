"""Makes the adapters that ship with the repository, with their cards, from finished runs: `python -m paper.ship`.

    paper/real/adapters/student/   adapter_config.json   adapter_model.safetensors   memopd.json   chat_template.jinja
                                   digests.json   run.json   README.md

The weights are in bfloat16, the precision in which they are evaluated. Tokenizers stay with the base: MemOPD takes the
base's, and compares its digest with the one in memopd.json. Only the chat template is kept, because that digest does
not cover it. The card (README.md) is a function of run.json, which has the run's configuration and metrics, and the
evaluations of seed 0. digests.json covers the files that are loaded.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer

from benchmarks.output import markdown_table
from memopd.cli.options import run
from memopd.evaluate import Estimate, Measures, Setting, summarise
from memopd.evaluate.provenance import source
from memopd.evaluate.tables import COSTS, DEPENDENCY, EM, F1, PEAK, Column
from memopd.evaluate.tables import shown as cell
from memopd.files import check_digests, read_object, whole_folder, write_digests
from memopd.train.metrics import read_metrics
from paper.bring import CONFIG, WEIGHTS, in_half
from paper.evaluation import fingerprint
from paper.settings import Suite, load

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

LIMIT = 64_000_000  # bytes, of all adapters together
CARD, TEMPLATE, RUN = "memopd.json", "chat_template.jinja", "run.json"
ADAPTERS = Path("paper/real/adapters")
SUITE = Path("paper/real/suite.toml")
LOGGED = ("step", "loss", "reward", "em", "dev_em", "dev_f1", "loss_opd")
COLUMNS: tuple[Column, ...] = (EM, F1, COSTS[0], PEAK, DEPENDENCY)


class Name(StrEnum):
    student = "student"
    teacher = "teacher"
    ppo = "ppo"
    memopd = "memopd"


# The run of each adapter in the folder of the runs, and its name in the evaluations.
RUNS = {Name.student: "sft-student", Name.teacher: "sft-teacher", Name.ppo: "q2/ppo-0", Name.memopd: "q2/memopd-0"}
SYSTEMS = {Name.student: "student-mem1", Name.teacher: "teacher-mem1", Name.ppo: "ppo", Name.memopd: "memopd"}


@app.command()
def ship(
    names: Annotated[
        list[Name] | None,
        typer.Argument(metavar="[NAME]...", help=f"{', '.join(Name)}; by default those whose run is finished."),
    ] = None,
    work: Annotated[Path, typer.Option(help="The folder with the runs and evaluations.")] = Path("runs/real"),
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder for the adapters.")] = ADAPTERS,
    suite: Annotated[Path, typer.Option(help="The suite whose way to evaluate the cards name.")] = SUITE,
    cards: Annotated[bool, typer.Option("--cards", help="Only write the cards again, from each run.json.")] = False,
    restore: Annotated[
        bool,
        typer.Option(
            "--restore", help="The other way round: put them back as finished runs, which are not made again."
        ),
    ] = False,
) -> None:
    """Make the adapters that ship, in bfloat16, each with a card."""
    if cards and restore:
        raise ValueError("--cards and --restore: give one of them")
    if restore:
        there = names or [name for name in Name if (output / name).is_dir()]
        if not there:
            raise ValueError(f"{output}: has no adapter to put back")
        for name in there:
            put_back(name, output / name, work / RUNS[name])
        return
    if cards:
        for file in sorted(output.glob(f"*/{RUN}")):
            file.with_name("README.md").write_text(card(json.loads(file.read_text())))
            print(file.with_name("README.md"))
        return
    chosen = names or [name for name in Name if (work / RUNS[name] / "adapter" / CONFIG).is_file()]
    if not chosen:
        raise ValueError(f"{work}: has no finished run to ship; the first would be {work / RUNS[Name.student]}")
    made = {name: files_of(name, work, output, load(Suite, suite)) for name in chosen}
    check_size(made, output)
    for name, files in made.items():
        write(output / name, files)
        print(f"{output / name}: {sum(map(len, files.values())) / 1e6:.1f} MB")
    for name in Name:
        if not (output / name).is_dir():
            print(f"not there yet: {output / name}, of {work / RUNS[name]}")


def files_of(name: Name, work: Path, output: Path, suite: Suite) -> dict[str, bytes]:
    """The content of an adapter's folder, after its run was checked against its base and its evaluations."""
    folder = work / RUNS[name]
    adapter, config = folder / "adapter", check_run(folder)
    base = json.loads((adapter / CARD).read_text())
    template = adapter / TEMPLATE
    described = {
        "name": name, "adapter": f"{output}/{name}", "run": str(folder), "base": base,
        "template": template.is_file(), "config": config, **source(),
        "metrics": [{key: line[key] for key in LOGGED if line.get(key) is not None} for line in read_metrics(folder)],
        "evaluation": asdict(suite.evaluation), "evaluations": evaluations(name, work, base["base"], adapter),
    }  # fmt: skip
    kept = (CONFIG, CARD, *((TEMPLATE,) if template.is_file() else ()))
    return {file: (adapter / file).read_bytes() for file in kept} | {
        WEIGHTS: in_half(adapter / WEIGHTS),
        RUN: (json.dumps(described, indent=1, ensure_ascii=False) + "\n").encode(),
        "README.md": card(json.loads(json.dumps(described))).encode(),
    }


def check_run(folder: Path) -> dict[str, Any]:
    """The configuration of a run whose adapter is whole, says what it was trained on, and fits that base."""
    from memopd.models.adapters import check_adapter
    from memopd.models.load import load_tokenizer

    adapter = folder / "adapter"
    if not (adapter / CONFIG).is_file() or not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: is not a finished run (no {adapter / CONFIG}, or no config.json)")
    if not (adapter / CARD).is_file():
        raise ValueError(f"{adapter}: has no {CARD} and does not say which weights it was trained on: do not ship it")
    base = json.loads((adapter / CARD).read_text())["base"]
    if not Path(base).is_dir():
        raise ValueError(f"{base}: the base of {adapter} is not here: link or copy its folder to this path")
    info = check_adapter(str(adapter), base)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    asked = (config["model"]["student"] or config["sft"]["start"], config["lora"]["rank"])
    if asked != (base, info.rank):
        raise ValueError(f"{folder}: config.json has base {asked[0]} and rank {asked[1]}, the adapter another")
    template = adapter / TEMPLATE
    if template.is_file() and template.read_text() != load_tokenizer(base).chat_template:
        raise ValueError(f"{base}: has another chat template than {adapter} was trained with: copy {template} to it")
    return config


def evaluations(name: Name, work: Path, base: str, adapter: Path) -> list[dict[str, Any]]:
    """The results of seed 0 for each split, data set and horizon. They must be of these weights."""
    made = []
    for file in sorted(work.glob(f"evaluations/*/{SYSTEMS[name]}-0-*.json")):
        found = json.loads(file.read_text())
        if (found["system"], found["seed"]) != (SYSTEMS[name], 0):
            continue
        dtype = found["settings"]["dtype"]
        if found["weights"] != fingerprint(Path(base), str(adapter), dtype):
            raise ValueError(f"{file}: was measured with other weights than those of {adapter}: evaluate again")
        if dtype != "bfloat16":
            raise ValueError(f"{file}: was measured in {dtype}, and the adapter ships in bfloat16: evaluate again")
        setting = Setting(found["settings"]["grading"], found["engine"], found["settings"]["batch"])
        result = summarise(name, [[Measures(**m) for m in found["measures"]]], setting).as_dict()
        kept = {key: found.get(key) for key in ("data", "k", "settings", "machine", "commit")}
        made.append({"split": file.parent.name, **kept, "tasks": result["tasks"], "metrics": result["metrics"]})
    return sorted(made, key=lambda one: (one["split"], one["k"], one["data"] or ""))


def check_size(made: dict[Name, dict[str, bytes]], output: Path) -> None:
    """Refuse to ship more than the limit, counting the adapters that are there and stay."""
    sizes = {name: sum(map(len, files.values())) for name, files in made.items()} | {
        name: sum(file.stat().st_size for file in (output / name).rglob("*") if file.is_file())
        for name in Name
        if name not in made
    }
    if (total := sum(sizes.values())) > LIMIT:
        each = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in sizes.items())
        raise ValueError(f"the adapters take {total / 1e6:.1f} MB ({each}), more than {LIMIT / 1e6:g}: lower the rank")


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Replace the folder, if what was written loads against its base."""
    from memopd.models.adapters import check_adapter

    with whole_folder(folder) as partial:
        for name in (CONFIG, CARD, TEMPLATE, WEIGHTS):
            if name in files:
                (partial / name).write_bytes(files[name])
        write_digests(partial)
        for name in (RUN, "README.md"):
            (partial / name).write_bytes(files[name])
        check_adapter(str(partial), json.loads(files[CARD])["base"])


def put_back(name: Name, shipped: Path, run: Path) -> None:
    """A run directory with what ships of it: the adapter, the configuration, and the metrics that its card shows."""
    if not (shipped / RUN).is_file():
        raise ValueError(f"{shipped}: there is no such adapter; choose from those in {shipped.parent}")
    if run.exists():
        print(f"{run}: exists, and is kept")
        return
    check_digests(shipped)
    made = read_object(shipped / RUN)
    with whole_folder(run) as partial:
        shutil.copytree(shipped, partial / "adapter", ignore=shutil.ignore_patterns(RUN, "README.md"))
        (partial / "config.json").write_text(json.dumps(made["config"], indent=2) + "\n")
        (partial / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made["metrics"]))
    print(f"{run}: the adapter {name}, {len(made['metrics'])} lines of metrics")


# ---- the card -----------------------------------------------------------------------------------------------------

WHAT = {
    Name.student: "The student: a LoRA adapter with which {base} keeps to MEM1's protocol (search, rewrite the memory, "
    "answer). It was trained on scripted demonstrations, and is the start and the reference of every arm.",
    Name.teacher: "The teacher: a LoRA adapter of {base}, trained on scripted demonstrations of more questions than "
    "the student's, among them those that the arms are trained on. It stays frozen when they are trained.",
    Name.ppo: "The arm `ppo`, seed 0: the student after reinforcement learning without a teacher.",
    Name.memopd: "The arm `memopd`, seed 0: the student after reinforcement learning with the teacher's divergence.",
}
GGUF = {  # the files that the bases were dequantised from
    "Qwen2.5-Coder-0.5B-Instruct": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "Qwen2.5-Coder-1.5B-Instruct": "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
}
LICENCES = (
    ("the base, Qwen2.5-Coder-Instruct", "Apache-2.0"),
    ("questions and passages of NQ-open", "CC BY-SA 3.0"),
    ("questions and passages of HotpotQA", "CC BY-SA 4.0"),
    ("questions and passages of SQuAD 1.1", "CC BY-SA 4.0"),
)


def card(made: dict[str, Any]) -> str:
    """The README of an adapter, from its run.json."""
    name, config, base = Name(made["name"]), made["config"], made["base"]
    called = Path(base["base"]).name
    parts = [
        f"# Adapter: {name}",
        words(WHAT[name].format(base=called) + f" Rank {config['lora']['rank']}, bfloat16, PEFT's format."),
        "## Base", *base_of(made, called),
        "## Evaluate it", *evaluate(made),
        "## Results", *results(made),
        "## Training", markdown_table(["setting", "value"], settings(config)), *learned(made),
        "## Data and licences", *data(config),
        "## Limits", *limits(name),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def words(text: str) -> str:
    return fill(text, 120, break_long_words=False, break_on_hyphens=False)


def code(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def base_of(made: dict[str, Any], called: str) -> list[str]:
    digest = f"`{made['base']['base_digest']}`"
    text = f"`{made['base']['base']}`. The digest of its weights (`memopd.models.adapters.base_digest`) is {digest}. "
    text += "MemOPD refuses another base."
    if (sha := GGUF.get(called)) is None:
        return [words(text)]
    origin = (
        f"These are not the hub's bf16 weights of Qwen/{called}: they are dequantised from a GGUF file (Q4_K_M, so 4 "
        "to 8 bits per weight) and saved in bfloat16. The embedding, which is tied, is the file's output matrix. To "
        f"make the base, you need the file with SHA-256 `{sha}` and the package gguf:"
    )
    made_by = code([f"python -m paper.dequantise FILE.gguf runs/real/models/{called}"])
    also = "The adapter has no tokenizer, because the base's is used."
    if made["template"]:
        also += f" `{TEMPLATE}` is the chat template of the training, and the base must have the same."
    return [words(text), words(origin), made_by, words(also)]


def evaluate(made: dict[str, Any]) -> list[str]:
    e = made["evaluation"]
    sets = e["data"] or [""]
    measured = {one["split"] for one in made["evaluations"]}
    split = "dev" if measured == {"dev"} else "test"
    files = [e["tasks"].format(split=split, data=sets[0], k=k) for k in (2, 8, 16)]
    lines = [
        f"memopd evaluate {shlex.join(files)} \\",
        f"    --model {made['base']['base']} --adapter {made['adapter']} \\",
        f"    --index {e['index']} --temperature {e['temperature']:g} --max-tokens {e['max_tokens']} "
        f"--max-context {e['max_context']} --batch {e['batch']} --dtype {e['dtype']}",
    ]
    noise = "This gives the numbers below, up to the noise of sampling." if made["evaluations"] else ""
    others = f" The other data sets are {' and '.join(sets[1:])}." if len(sets) > 1 else ""
    return [
        words("From the root of the repository; paper/README.md says how tasks and index are made."),
        code(lines),
        words(f"{noise}{others}".strip()),
    ]


def results(made: dict[str, Any]) -> list[str]:
    if not made["evaluations"]:
        return ["No evaluation was made yet; below is what training measured."]
    text = []
    for split in dict.fromkeys(one["split"] for one in made["evaluations"]):
        found = [one for one in made["evaluations"] if one["split"] == split]
        rows = [
            [one["data"] or "all", f"Q{one['k']}", str(one["tasks"]),
             *(cell(estimate and Estimate(**estimate), unit, digits)
               for _, metric, unit, digits in COLUMNS for estimate in [one["metrics"][metric]])]
            for one in found
        ]  # fmt: skip
        s, machines = found[0]["settings"], sorted({one["machine"]["device"] for one in found})
        top_p = "" if s.get("top_p", 1) == 1 else f" and top-p {s['top_p']:g}"
        text += [
            markdown_table(["data", "horizon", "tasks", *(heading for heading, *_ in COLUMNS)], rows),
            words(
                f"`{split}`: seed 0, {s['samples']} episode per task, temperature {s['temperature']:g}{top_p}, "
                f"at most {s['max_tokens']} tokens per response and {s['max_context']} per prompt, {s['dtype']}, "
                f"{', '.join(machines)}. "
                "EM and F1 are sums over the questions of a task; ± standard error over tasks. "
                "`python -m paper main control --of real` has all seeds and the comparisons."
            ),
        ]
    return text


def settings(config: dict[str, Any]) -> list[list[str]]:
    """The settings that the run used, each with its name in the configuration."""
    lora, sft, o, t = (config[section] for section in ("lora", "sft", "optimise", "teacher"))
    rows = {
        "lora": f"rank {lora['rank']}, α {lora['alpha']}, {', '.join(lora['targets'])}",
        "model.dtype": config["model"]["dtype"], "run.seed": config["run"]["seed"],
    }  # fmt: skip
    if sft["start"]:
        rows |= {f"sft.{key}": sft[key] for key in ("episodes", "keep", "tokens", "batch", "lr", "short")}
    else:
        rows |= {"model.adapter": config["model"]["adapter"], "tasks.train": config["tasks"]["train"],
                 "tasks.reward": config["tasks"]["reward"], "tasks.max_context": config["tasks"]["max_context"],
                 "sampling.max_tokens": config["sampling"]["max_tokens"],
                 "sampling.temperature": config["sampling"]["temperature"]}  # fmt: skip
        named = ("algorithm", "steps", "tasks", "samples", "mini_batch", "epochs", "lr", "critic_lr", "clip",
                 "entropy", "reference")  # fmt: skip
        rows |= {f"optimise.{key}": o[key] for key in named}
        rows["teacher.state"] = t["state"]
        if t["state"] != "none":
            rows |= {f"teacher.{key}": t[key] for key in ("divergence", "weight")}
            rows |= {f"model.{key}": config["model"][key] for key in ("teacher", "teacher_adapter")}
    return [[name, _value(value)] for name, value in rows.items()]


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else f"{value}"


def learned(made: dict[str, Any]) -> list[str]:
    """The run's own metrics."""
    lines, config = made["metrics"], made["config"]
    if not lines:
        return ["The run has no metrics."]
    last = lines[-10:]
    counted, name = ("steps", "loss") if config["sft"]["start"] else ("updates", "reward")
    text = f"{len(lines)} {counted}."
    if all(name in line for line in (lines[0], *last)):
        mean = sum(line[name] for line in last) / len(last)
        text += f" The {name} was {lines[0][name]:.3f} at first, and {mean:.3f} on average over the last {len(last)}."
    dev = [line for line in lines if "dev_f1" in line]
    said = [words(text)]
    if dev:
        rows = [[str(line["step"] + 1), f"{line['dev_em']:.3f}", f"{line['dev_f1']:.3f}"] for line in dev]
        counted = f"Sampled in training on the first {config['run']['dev_tasks']} tasks of `{config['tasks']['dev']}`."
        said += [markdown_table(["step", "dev EM", "dev F1"], rows), words(counted)]
    return said


def data(config: dict[str, Any]) -> list[str]:
    made = (
        "The demonstrations were made by `memopd demonstrate`, without a model, from questions of NQ-open, HotpotQA "
        "and SQuAD and the Wikipedia passages that come with them. Only correct ones were kept."
        if config["sft"]["start"]
        else "The tasks are questions of NQ-open, HotpotQA and SQuAD; the search is over the Wikipedia passages that "
        "come with them. Demonstrations were used only for the adapters of the student and the teacher."
    )
    return [
        words(made + " paper/real/plan.md says which part of the questions is used for what."),
        markdown_table(["what", "licence"], [list(row) for row in LICENCES]),
    ]


def limits(name: Name) -> list[str]:
    said = [
        "It knows one protocol, in English, with BM25 over 43,675 passages, in which every question has its gold "
        "passage. Scores do not compare with those on all of Wikipedia.",
        "It is often wrong and does not say when it is unsure. Nothing was done for safety. Use it to reproduce and "
        "measure, not to answer questions.",
        "It was trained on dequantised weights, and was not measured on the hub's bf16 weights.",
    ]
    if name == Name.teacher:
        said.insert(
            1, "It has seen the answers to the questions that the arms are trained on, but not those of dev and test."
        )
    return ["\n".join(fill(f"- {line}", 120, subsequent_indent="  ", break_on_hyphens=False) for line in said)]


if __name__ == "__main__":
    run(app)
