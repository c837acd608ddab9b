"""Adapters that ship: bfloat16, loadable by PEFT and by us, with a card. What must not ship is refused in one line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from random_adapter import randomise
from safetensors.torch import load_file, save_file
from small import command, result

from memopd.config import RunConfig, from_tables, load_config
from memopd.files import check_digests, write_digests
from memopd.models.adapters import add_adapter, check_adapter, load_adapter, new_config, save_adapter
from memopd.models.load import load_causal_lm, load_tokenizer
from memopd.retrieval import Passage, build_index, write_corpus
from memopd.train.metrics import read_metrics
from paper import ship
from paper.bring import WEIGHTS
from paper.evaluation import fingerprint
from paper.settings import Suite, load
from paper.ship import Name, app, card

ROOT = Path(__file__).parents[2]
BASES = {name: str(ROOT / "models" / ("teacher" if name == Name.teacher else "student")) for name in Name}
SHIPPED = sorted((ROOT / "paper" / "real" / "adapters").glob("*/run.json"))


def write_run(work: Path, name: Name) -> Path:
    """A finished run of rank 2 with random weights, as `memopd sft` and `memopd train` leave one."""
    run, base = work / ship.RUNS[name], BASES[name]
    model = load_causal_lm(base, torch.float32)
    add_adapter(model, new_config(2, 4, ("all-linear",)), "student", trainable=True)
    randomise(model, seed=list(Name).index(name))
    save_adapter(run / "adapter", model, "student", base, load_tokenizer(base))
    config = RunConfig()
    config = replace(config, lora=replace(config.lora, rank=2, alpha=4))
    if name in (Name.student, Name.teacher):
        config = replace(config, sft=replace(config.sft, start=base, episodes=("a.parquet",), lr=1e-3))
        lines = [{"step": s, "loss": 1.0 - 0.1 * s} for s in range(6)]
    else:
        state = "none" if name == Name.ppo else "aligned"
        config = replace(config, model=replace(config.model, student=base, teacher=BASES[Name.teacher]),
                         teacher=replace(config.teacher, state=state, weight=0.25))  # fmt: skip
        lines = [{"step": s, "reward": 0.1 * s, "loss": 9.0} for s in range(6)]
        lines[5] |= {"dev_em": 0.25, "dev_f1": 0.375}
    (run / "config.json").write_text(config.as_json())
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def write_evaluation(
    work: Path, name: Name, seed: int = 0, f1: float = 0.5, dtype: str = "bfloat16", split: str = "test", **more
) -> Path:
    """A made-up evaluation of two tasks, of the weights that the run has now."""
    system = ship.SYSTEMS[name]
    settings = {"grading": "squad", "batch": 4, "dtype": dtype, "samples": 1, "temperature": 1.0, "max_tokens": 8,
                "max_context": 900}  # fmt: skip
    made = result(system, seed, 2, [(0.0, f1), (1.0, f1 + 1)], settings)
    weights = fingerprint(Path(BASES[name]), str(work / ship.RUNS[name] / "adapter"), dtype)
    file = work / "evaluations" / split / f"{system}-{seed}-nq-q2.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(made | {"data": "nq", "weights": weights} | more))
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    work = tmp_path_factory.mktemp("trained")
    for name in Name:
        write_run(work, name)
    return work


@pytest.fixture
def work(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def shipped(work, tmp_path):
    """Ship from `work`; the folder and what was said."""

    def make(*words):
        said = command(app, "--work", work, "-o", tmp_path / "out", "--suite", ROOT / ship.SUITE, *words)
        return tmp_path / "out", said

    return make


# ---- weights


def test_all_four_ship_in_bfloat16_and_fit_their_bases(work, shipped):
    out, said = shipped()
    assert [line.partition(":")[0] for line in said.splitlines()] == [f"{out}/{name}" for name in Name]
    for name in Name:
        assert check_adapter(str(out / name), BASES[name]).verified
        before = load_file(work / ship.RUNS[name] / "adapter" / WEIGHTS)
        after = load_file(out / name / WEIGHTS)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], before[key].to(torch.bfloat16)) for key in before)
        assert {file.name for file in (out / name).iterdir()} == {
            "README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "digests.json",
            "memopd.json", "run.json",
        }  # fmt: skip
    with pytest.raises(ValueError, match=r"was trained on other weights than those of .*models/student"):
        check_adapter(str(out / "teacher"), BASES[Name.student])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peft_and_our_loader_compute_with_the_rounded_weights(work, shipped, tmp_path, dtype):
    """Each loader, with the shipped folder, gives the logits of the float32 adapter that was rounded in float32."""
    out, _ = shipped("memopd")
    run, rounded = work / ship.RUNS[Name.memopd] / "adapter", tmp_path / "rounded"
    shutil.copytree(run, rounded)
    precise = {key: value.to(torch.bfloat16).float() for key, value in load_file(run / WEIGHTS).items()}
    save_file(precise, rounded / WEIGHTS, metadata={"format": "pt"})
    write_digests(rounded)

    def ours(folder):
        model = load_causal_lm(BASES[Name.memopd], dtype)
        load_adapter(model, str(folder))
        return logits(model)

    def peft(folder):
        return logits(PeftModel.from_pretrained(load_causal_lm(BASES[Name.memopd], dtype), folder))

    for loaded in (ours, peft):
        assert torch.equal(loaded(out / "memopd"), loaded(rounded))
    bare = logits(load_causal_lm(BASES[Name.memopd], dtype))
    assert (ours(rounded) - bare).abs().max() > 0.1
    if dtype == torch.float32:
        torch.testing.assert_close(ours(rounded), peft(rounded))
        assert not torch.equal(ours(run), ours(rounded))  # rounding can be seen
    else:
        assert torch.equal(ours(run), ours(rounded))  # we sample in the base's precision: nothing is lost


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(5, 69)[None]).logits.float()


def test_memopd_evaluates_it_against_its_base(call_main, shipped, tmp_path):
    out, _ = shipped("student")
    asked = [{"id": str(i), "question": f"where is town {i}?", "golden_answers": ["Tal"]} for i in range(2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(q) + "\n" for q in asked))
    write_corpus(tmp_path / "corpus.jsonl", [Passage("0", "Town 0", "It lies on the river Tal.")])
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index")
    playing = ("--index", tmp_path / "index", "--max-tokens", 8, "--max-context", 700, "--json", "--dtype", "bfloat16")
    adapted = ("--model", BASES[Name.student], "--adapter", out / "student")
    code, said, error = call_main("evaluate", tmp_path / "tasks.jsonl", *playing, *adapted)
    assert code == 0, error
    assert json.loads(said)["results"][0]["tasks"] == 2


# ---- cards


@pytest.mark.parametrize(("splits", "named"), [(["dev"], "dev"), (["dev", "test"], "test")])
def test_a_card_tells_how_to_repeat_the_numbers_that_it_shows(work, shipped, splits, named):
    for split in splits:
        write_evaluation(work, Name.student, split=split)
    out, _ = shipped("student")
    text = (out / "student" / "README.md").read_text()
    assert f"memopd evaluate runs/real/tasks/{named}-nq-q2.parquet" in text
    assert [f"`{split}`: seed 0" in text for split in ("dev", "test")] == [True, "test" in splits]


def test_a_card_without_evaluations_says_so(shipped):
    out, _ = shipped("student")
    text = (out / "student" / "README.md").read_text()
    assert "No evaluation was made yet" in text
    assert check_adapter(str(out / "student"), BASES[Name.student]).verified
    assert json.loads((out / "student" / "memopd.json").read_text())["base_digest"] in text
    assert "6 steps. The loss was 1.000 at first, and 0.750 on average over the last 6." in text
    assert "| sft.lr | 0.001 |" in text
    assert "optimise." not in text  # an SFT run did not use them
    assert f"--model {BASES[Name.student]} --adapter {out}/student" in text
    for licence in ("Apache-2.0", "CC BY-SA 3.0", "CC BY-SA 4.0"):
        assert f"| {licence} |" in text


def test_a_card_has_the_run_s_settings_and_the_evaluations_of_seed_0(work, shipped):
    write_evaluation(work, Name.memopd)
    write_evaluation(work, Name.memopd, seed=1, f1=7.0)
    out, _ = shipped("memopd", "ppo")
    text = (out / "memopd" / "README.md").read_text()
    # F1 of 0.5 and 1.5: mean 1, standard error 0.5; peaks of 400 and 500.
    row = "| nq | Q2 | 2 | 0.500 ± 0.500 | 1.000 ± 0.500 | 100.0 ± 0.0 | 4.50 ± 0.50 | 0.500 ± 0.000 |"
    assert row in text
    assert "7.500" not in text
    assert "`test`: seed 0, 1 episode per task, temperature 1, at most 8 tokens per response" in text.replace("\n", " ")
    assert "| teacher.weight | 0.25 |" in text
    assert "| 6 | 0.250 | 0.375 |" in text  # dev while training
    assert "6 updates. The reward was 0.000 at first, and 0.250 on average over the last 6." in text
    other = (out / "ppo" / "README.md").read_text()
    assert "No evaluation was made yet" in other
    assert "| teacher.state | none |" in other
    assert "teacher.weight" not in other


def test_the_base_of_the_experiment_is_named_as_what_it_is():
    made = {"base": {"base": "x/Qwen2.5-Coder-0.5B-Instruct", "base_digest": "abc"}, "template": True}
    text = "\n".join(ship.base_of(made, "Qwen2.5-Coder-0.5B-Instruct")).replace("\n", " ")
    assert "These are not the hub's bf16 weights of Qwen/Qwen2.5-Coder-0.5B-Instruct" in text
    assert "dequantised from a GGUF file (Q4_K_M, so 4 to 8 bits per weight)" in text
    assert "hub" not in ship.base_of(made, "another")[0]


def test_cards_can_be_written_again(shipped):
    out, _ = shipped("student")
    file = out / "student" / "README.md"
    before = file.read_text()
    file.write_text("damaged")
    check_digests(out / "student")  # the card is not loaded, so its words may change
    shipped("--cards")
    assert file.read_text() == before


def test_what_ships_can_be_put_back_as_runs(work, shipped, tmp_path):
    """Then they ship again as they are, and an arm with these settings counts as trained. What exists is kept."""
    out, _ = shipped()
    runs = tmp_path / "runs"
    (runs / ship.RUNS[Name.teacher]).mkdir(parents=True)
    said = command(app, "--restore", "--work", runs, "-o", out)
    assert "sft-teacher: exists, and is kept" in said
    assert not list((runs / ship.RUNS[Name.teacher]).iterdir())
    run, before = runs / ship.RUNS[Name.ppo], work / ship.RUNS[Name.ppo]
    assert json.loads((run / "config.json").read_text()) == json.loads((before / "config.json").read_text())
    assert [line["reward"] for line in read_metrics(run)] == [line["reward"] for line in read_metrics(before)]
    command(app, "ppo", "--work", runs, "-o", tmp_path / "again", "--suite", ROOT / ship.SUITE)
    for name in (WEIGHTS, "memopd.json", "digests.json"):
        assert (tmp_path / "again" / "ppo" / name).read_bytes() == (out / "ppo" / name).read_bytes()
    (out / "student" / WEIGHTS).write_bytes(b"")
    shutil.rmtree(runs)
    with pytest.raises(ValueError, match=r"damaged"):
        command(app, "student", "--restore", "--work", runs, "-o", out)
    with pytest.raises(ValueError, match="there is no such adapter"):
        command(app, "student", "--restore", "--work", runs, "-o", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no adapter to put back"):
        command(app, "--restore", "--work", runs, "-o", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="give one of them"):
        command(app, "--restore", "--cards", "--work", runs, "-o", out)
    (out / "ppo" / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json: "):
        command(app, "ppo", "--restore", "--work", runs, "-o", out)
    assert not runs.exists() or not list(runs.rglob("*.json*"))


@pytest.mark.skipif(not SHIPPED, reason="no adapter ships yet")
def test_the_arm_that_ships_is_trained():
    """Its settings are still those of the suite, so that nothing trains it again after it was put back."""
    suite = load(Suite, ROOT / ship.SUITE)
    for file in SHIPPED:
        if (name := Name(file.parent.name)) in (Name.ppo, Name.memopd):
            config = from_tables(json.loads(file.read_text())["config"], str(file))
            asked = load_config(ROOT / suite.training, {k: str(v) for k, v in suite.arms[name].items()})
            assert config == asked, name


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: f.parent.name)
def test_the_cards_of_the_repository_are_made_from_their_runs(file):
    made = json.loads(file.read_text())
    assert file.with_name("README.md").read_text() == card(made), "run `python -m paper.ship --cards`"
    changed = made | {"metrics": made["metrics"][:-1]}
    assert card(changed) != card(made)
    check_digests(file.parent)
    assert made["base"] == json.loads(file.with_name("memopd.json").read_text())
    assert {t.dtype for t in load_file(file.with_name(WEIGHTS)).values()} == {torch.bfloat16}


def test_the_adapters_of_the_repository_are_small_enough():
    folder = ROOT / "paper" / "real" / "adapters"
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) <= ship.LIMIT
    assert (folder / "student" / "run.json") in SHIPPED


# ---- what must not ship: each check fails on what it is for


def refused(shipped, tmp_path, match, *words):
    with pytest.raises(ValueError, match=match) as error:
        shipped(*words)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_an_unfinished_run(work, shipped, tmp_path):
    (work / "q2" / "ppo-0" / "adapter" / "adapter_config.json").unlink()
    refused(shipped, tmp_path, "q2/ppo-0: is not a finished run", "ppo")
    _, said = shipped()  # the others ship, and it is named
    assert f"not there yet: {tmp_path / 'out' / 'ppo'}, of {work / 'q2' / 'ppo-0'}" in said
    shutil.rmtree(tmp_path / "out")
    for name in Name:
        shutil.rmtree(work / ship.RUNS[name])
    refused(shipped, tmp_path, "has no finished run to ship")


def test_damaged_weights(work, shipped, tmp_path):
    weights = work / "sft-student" / "adapter" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    refused(shipped, tmp_path, "damaged", "student")


def change(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_an_adapter_of_another_or_no_base(work, shipped, tmp_path):
    adapter = work / "sft-student" / "adapter"
    change(adapter / "memopd.json", base_digest="0" * 64)
    write_digests(adapter)
    refused(shipped, tmp_path, "was trained on other weights", "student")
    change(adapter / "memopd.json", base=str(tmp_path / "nowhere"))
    write_digests(adapter)
    refused(shipped, tmp_path, "nowhere: the base of .* is not here: link or copy", "student")
    (adapter / "memopd.json").unlink()
    write_digests(adapter)
    refused(shipped, tmp_path, "does not say which weights it was trained on", "student")


def test_a_configuration_of_another_run(work, shipped, tmp_path):
    file = work / "sft-student" / "config.json"
    config = json.loads(file.read_text())
    change(file, lora=config["lora"] | {"rank": 8})
    refused(shipped, tmp_path, "rank 8, the adapter another", "student")
    change(file, lora=config["lora"], sft=config["sft"] | {"start": "another"})
    refused(shipped, tmp_path, "config.json has base another", "student")


def test_another_chat_template(work, shipped, tmp_path):
    adapter = work / "sft-student" / "adapter"
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    write_digests(adapter)
    refused(shipped, tmp_path, "has another chat template than .* was trained with: copy", "student")


def test_evaluations_of_other_weights_or_another_precision(work, shipped, tmp_path):
    write_evaluation(work, Name.student, weights="0")
    refused(shipped, tmp_path, "was measured with other weights than those of .*: evaluate again", "student")
    write_evaluation(work, Name.student, dtype="float32")
    refused(shipped, tmp_path, "was measured in float32", "student")
    write_evaluation(work, Name.student)
    shipped("student")


def test_more_than_the_limit_counting_what_stays(work, shipped, tmp_path, monkeypatch):
    out, _ = shipped("student")
    one = sum(file.stat().st_size for file in (out / "student").iterdir())
    before = (out / "student" / "README.md").read_bytes()
    monkeypatch.setattr(ship, "LIMIT", int(1.5 * one))
    with pytest.raises(ValueError, match=r"the adapters take \d\.\d MB \(ppo 0\.\d, student .*: lower the rank"):
        shipped("ppo")  # alone it would fit
    assert [f.name for f in out.iterdir()] == ["student"]
    assert (out / "student" / "README.md").read_bytes() == before
    shipped("student")  # it replaces itself
    assert ship.LIMIT < 64e6
    monkeypatch.undo()
    assert ship.LIMIT == 64e6
