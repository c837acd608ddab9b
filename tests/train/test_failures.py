"""What goes wrong ends with one line that says what to do, a status, and the last good checkpoint intact."""

import json
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
    file = tmp_path / "run" / "checkpoints" / "step-000002" / "student-00000-of-00001.safetensors"
    assert f"{file}: cannot be written" in line
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


def copied(finished: Path, to: Path) -> Path:
    """The checkpoint of step 2 in a copy of all checkpoints."""
    return shutil.copytree(finished / "checkpoints", to / "run" / "checkpoints") / "step-000002"


def refused(run: Path) -> str:
    """The one line with which a checkpoint is refused, read without a command."""
    with pytest.raises(ValueError, match=r".") as error:
        read_state(latest(run))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", [*FILES, "../latest"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_checkpoint_cut_short(name, share, finished, tmp_path):
    """Every file, cut at three places, and gone."""
    checkpoint = copied(finished, tmp_path)
    file = (checkpoint / name).resolve()
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    line = refused(tmp_path / "run")
    if name == "../latest":
        assert f"write step-000002 into {file}" in line
        return
    assert f"write step-000001 into {checkpoint.parent / 'latest'} to continue from there" in line
    file.unlink()
    assert "cut short or missing" in refused(tmp_path / "run") or name == "state.json"


@pytest.mark.parametrize("name", [*FILES, "../latest"])
def test_a_flipped_bit_in_a_checkpoint_is_noticed(name, finished, tmp_path):
    """Every 7th bit of the small files; of the large ones, bits that are spread over the whole file."""
    file = (copied(finished, tmp_path) / name).resolve()
    pointer = tmp_path / "run" / "checkpoints" / "latest"
    data, large = file.read_bytes(), name.endswith(".safetensors")
    for bit in range(0, 8 * len(data), 8 * len(data) // 29 if large else 7):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        assert f"into {pointer} to continue from there" in refused(tmp_path / "run")
        if name != "../latest":  # noticed without the digest in `latest` too, which a person may have written
            with pytest.raises(ValueError, match="to continue from there"):
                read_state(pointer.parent / "step-000002")
    file.write_bytes(data)
    assert read_state(latest(tmp_path / "run"))["step"] == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"step-000002/{FILES[0]}", f"step-000001/{FILES[0]}"),
        (f"step-000002/{FILES[1]}", f"step-000002/{FILES[3]}"),  # the optimisers of student and critic
        ("step-000002/state.json", "step-000001/state.json"),
        ("step-000002", "step-000001"),
    ],
)
def test_exchanged_files_are_noticed(one, other, finished, tmp_path):
    checkpoints = copied(finished, tmp_path).parent
    (checkpoints / one).rename(tmp_path / "kept")
    (checkpoints / other).rename(checkpoints / one)
    (tmp_path / "kept").rename(checkpoints / other)
    assert "step-000002" in refused(tmp_path / "run")


def test_a_file_of_another_checkpoint_is_noticed(finished, tmp_path):
    checkpoint = copied(finished, tmp_path)
    shutil.copy(checkpoint / FILES[0], checkpoint / "student-00001-of-00002.safetensors")
    assert "student-00001-of-00002.safetensors: not a file of this checkpoint; remove it" in refused(tmp_path / "run")


def test_a_checkpoint_of_another_run_is_noticed(finished, tmp_path):
    """It is complete by itself, but `latest` has the digest of the one that was there."""
    checkpoint = copied(finished, tmp_path)
    assert train(tmp_path / "other", "--optimise.steps", "2", "--optimise.lr", "2e-3").code == 0
    shutil.rmtree(checkpoint)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-000002", checkpoint)
    assert "latest: damaged, or not of this step-000002; write step-000002 into" in refused(tmp_path / "run")
    (checkpoint.parent / "latest").write_text("step-000002")  # on purpose
    assert read_state(latest(tmp_path / "run"))["step"] == 2


def test_a_checkpoint_without_digests_is_resumed(finished, tmp_path):
    """Older versions wrote the step and the sizes only."""
    run = shutil.copytree(finished, tmp_path / "run")
    for state in run.glob("checkpoints/*/state.json"):
        content = json.loads(state.read_text())
        state.write_text(json.dumps({name: content[name] for name in ("step", "files")}, indent=2) + "\n")
    (run / "checkpoints" / "latest").write_text("step-000001\n")
    assert train(run, "--optimise.steps", "2", "--resume").code == 0
    a, b = (read_whole(r / "checkpoints" / "step-000002", "student") for r in (run, finished))
    assert all(torch.equal(a[n], b[n]) for n in b)


def test_a_flipped_bit_through_the_command(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    for file, what in ((run / "checkpoints/step-000002" / FILES[0], "--resume"), (run / "model/model.safetensors", "")):
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
        new = (tmp_path / "new", "--model.student", run / "model")
        line = train(*((run, what) if what else new), "--optimise.steps", "2").line()
        assert f"{file}: damaged, its content does not match its digest" in line


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
        (["--optimise.budget", "20"], "rows and the budget is 20"),
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
