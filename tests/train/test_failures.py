"""What goes wrong ends with one line that says what to do, a status, and the last good checkpoint intact."""

import resource
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from command import Ended, memopd
from saved import read_whole
from tiny import save_model, word_tokenizer, workshop
from transformers import AutoModelForCausalLM

from memopd.train.checkpoint import latest, read_state


def train(output: Path, *more: object, **options: object) -> Ended:
    return memopd("train", workshop() / "config.toml", "--output", output, *more, **options)


def in_the_second_step(disturb) -> None:
    """`disturb(learner)` before the second step is scored."""
    from memopd.train import train as loop

    score, calls = loop.score_batches, []

    def scored(learner, batches, decode):
        calls.append(None)
        if len(calls) == 2:
            disturb(learner)
        return score(learner, batches, decode)

    loop.score_batches = scored


def assert_goes_on_as_if_nothing_had_been(output: Path) -> None:
    """One step was saved; from there the run ends as an undisturbed one."""
    assert read_state(latest(output))["step"] == 1
    ended = train(output, "--resume")
    assert ended.code == 0, ended.err
    undisturbed = workshop() / "runs" / "undisturbed"
    if not undisturbed.exists():
        assert train(undisturbed).code == 0
    a, b = (read_whole(r / "checkpoints" / "step-000003", "student") for r in (output, undisturbed))
    assert all(torch.equal(a[n], b[n]) for n in b)


def poison() -> None:
    def disturb(learner):
        next(iter(learner.student.weights.values())).data[3] = float("nan")

    in_the_second_step(disturb)


def test_a_loss_that_is_not_a_number(tmp_path):
    line = train(tmp_path / "run", before=poison).line()
    assert "the actor's loss or gradient is not a number" in line
    assert "the last checkpoint is intact" in line
    assert_goes_on_as_if_nothing_had_been(tmp_path / "run")


def test_a_model_that_is_broken_from_the_start(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(workshop() / "student")
    model.model.norm.weight.data[0] = float("nan")
    model.save_pretrained(tmp_path / "student")
    word_tokenizer().save_pretrained(tmp_path / "student")
    line = train(tmp_path / "run", "--model.student", tmp_path / "student").line()
    assert "step 0: the policy's logits are not numbers" in line


def fill_the_disk() -> None:
    def disturb(learner):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # less than a checkpoint, more than metrics

    in_the_second_step(disturb)


def test_a_full_disk(tmp_path):
    line = train(tmp_path / "run", before=fill_the_disk).line()
    assert "student-00000-of-00001.safetensors: cannot be written" in line
    assert "the last checkpoint is intact" in line
    assert_goes_on_as_if_nothing_had_been(tmp_path / "run")


def lead_metrics_to_a_full_disk(output: Path) -> None:
    def disturb(learner):
        (output / "metrics.jsonl").rename(output / "metrics.kept")
        (output / "metrics.jsonl").symlink_to("/dev/full")  # every write to it says that the disk is full

    in_the_second_step(disturb)


def test_a_full_disk_for_what_is_no_checkpoint(tmp_path):
    line = train(tmp_path / "run", before=partial(lead_metrics_to_a_full_disk, tmp_path / "run")).line()
    assert f"{tmp_path / 'run'}: No space left on device: free some space and continue with --resume" in line
    (tmp_path / "run" / "metrics.kept").rename(tmp_path / "run" / "metrics.jsonl")
    assert_goes_on_as_if_nothing_had_been(tmp_path / "run")


def run_out_of_memory_on_a_gpu() -> None:
    def disturb(learner):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...\nmore")

    in_the_second_step(disturb)


def run_out_of_memory() -> None:
    def disturb(learner):
        torch.empty(1 << 50, dtype=torch.uint8)

    in_the_second_step(disturb)


def run_out_of_address_space() -> None:
    kept = []

    def disturb(learner):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), used + (2 << 20)))
        with suppress(RuntimeError):  # what the first step freed is still there and could do for the second
            while True:
                kept.append(torch.empty(4 << 20, dtype=torch.uint8))

    in_the_second_step(disturb)


@pytest.mark.parametrize("how", [run_out_of_memory_on_a_gpu, run_out_of_memory, run_out_of_address_space])
def test_out_of_memory(how, tmp_path):
    line = train(tmp_path / "run", before=how).line()
    assert "lower optimise.budget, set model.checkpointing = true, or use more ranks" in line
    assert read_state(latest(tmp_path / "run"))["step"] == 1


def test_a_teacher_with_another_tokenizer(tmp_path):
    teacher = save_model(tmp_path / "teacher", 1, word_tokenizer(120))
    line = train(tmp_path / "run", "--model.teacher", teacher).line()
    assert f"{workshop() / 'student'} and {teacher} have different tokenizers" in line


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("finished") / "run"
    assert train(output, "--optimise.steps", "2").code == 0
    return output


FILES = [
    *(f"{model}{part}-00000-of-00001.safetensors" for model in ("student", "critic") for part in ("", "-optimiser")),
    "state.json",
]


@pytest.mark.parametrize("name", [*FILES, "../latest"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_checkpoint_cut_short(name, share, finished, tmp_path):
    """Read without a command: every file, cut at three places, and gone."""
    checkpoints = shutil.copytree(finished / "checkpoints", tmp_path / "run" / "checkpoints")
    file = (checkpoints / "step-000002" / name).resolve()
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(ValueError, match=r"cut short or missing|not a complete checkpoint") as error:
        read_state(latest(tmp_path / "run"))
    assert "write step-000001 into" in str(error.value) or name == "../latest"
    file.unlink()
    if name != "../latest":
        with pytest.raises(ValueError, match=r"cut short or missing|not a complete checkpoint"):
            read_state(latest(tmp_path / "run"))


def test_what_the_advice_says_works(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    file = run / "checkpoints" / "step-000002" / FILES[0]
    file.write_bytes(file.read_bytes()[:1000])
    line = train(run, "--optimise.steps", "2", "--resume").line()
    assert f"{file}: cut short or missing; write step-000001 into {run / 'checkpoints' / 'latest'}" in line
    (run / "checkpoints" / "latest").write_text("step-000001")
    assert train(run, "--optimise.steps", "2", "--resume").code == 0
    a, b = (read_whole(r / "checkpoints" / "step-000002", "student") for r in (run, finished))
    assert all(torch.equal(a[n], b[n]) for n in b)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model.student", "/nowhere/at/all"], "/nowhere/at/all: there is no model here (no config.json)"),
        (["--model.student", ""], "model.student: name a model folder"),
        (["--model.teacher", ""], 'model.teacher: name one, or set teacher.state to "none"'),
        (["--sampling.temperature", "0.7"], "was sampled at temperature 1.0: set sampling.temperature to it"),
        (["--optimise.budget", "20"], "every episode was left out; raise optimise.budget"),
        (["--replay", ""], "tasks.index: name an index folder"),
        (["--replay", "/nowhere"], "/nowhere"),
        (["--optimise.lr", "fast"], '--optimise.lr: must be a number, got "fast"'),
        (["--optimise.speed", "1"], "--optimise.speed: no such setting"),
        (["--teacher-state", "wise"], 'teacher.state: "wise" is not one of aligned, persistent, none'),
        (["--lr", "1"], "'--lr': no such option; give settings as --section.field value"),
        (["--optimise.lr"], "--optimise.lr: needs a value"),
    ],
)
def test_what_a_user_got_wrong(arguments, complaint, tmp_path):
    assert complaint in train(tmp_path / "run", *arguments).line()
