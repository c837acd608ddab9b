"""Where episodes come from: recorded ones, the policy itself, servers with its weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from command import memopd
from live import policy, world
from served import Servers
from tiny import recorded, workshop
from transformers import AutoTokenizer

from memopd.agent import Observation, Outcome
from memopd.cli.train import check_replay
from memopd.compile import persistent_history
from memopd.config import load_config
from memopd.engine.vllm.engine import StaleWeights
from memopd.models.support import length_limit
from memopd.record import read_episodes, write_episodes
from memopd.train import engines
from memopd.train.engines import check_positions
from memopd.train.learner import build
from memopd.train.metrics import read_metrics
from memopd.train.source import Replay, Sampler, open_source
from memopd.types import Sampling
from memopd.verify.families import tiny_model

CPU = torch.device("cpu")


def test_replay_goes_round(tmp_path):
    write_episodes(tmp_path / "store", recorded(episodes=8)[:5])
    source = Replay(str(tmp_path / "store"), 3)
    ids = [[e.id[-1] for e in source.episodes(step)] for step in range(3)]
    assert ids == [["0", "1", "2"], ["3", "4", "0"], ["1", "2", "3"]]
    assert len(Replay(str(tmp_path / "store"), 100).episodes(7)) == 5


def test_the_episodes_of_a_replay_that_goes_round_are_a_store_again(tmp_path):
    """Every lap has ids of its own, also if the store is that of a replay that went round."""
    write_episodes(tmp_path / "0" / "part.parquet", recorded(episodes=8)[:5])
    for folder, again in (("0", "1"), ("1", "2")):
        source = Replay(str(tmp_path / folder), 3)
        for step in range(5):
            write_episodes(tmp_path / again / f"step-{step:06d}.parquet", source.episodes(step))
        ids = [e.id for e in read_episodes(tmp_path / again)]
        assert len(set(ids)) == len(ids) == 15
    assert ids[:6] == [*(f"demo-0{i}" for i in range(5)), "lap-1/demo-00"]
    assert [e.id for e in source.episodes(5)] == ["lap-3/demo-00", "lap-3/demo-01", "lap-3/demo-02"]


def test_replay_keeps_the_episodes_of_a_task_together_for_who_compares_them(tmp_path, caplog):
    """Four tasks of two episodes each, in the order in which they ended."""
    ended = [replace(e, task_id=task) for e, task in zip(recorded(episodes=8), "abacbdcd", strict=True)]
    write_episodes(tmp_path / "store", ended)

    def tasks(algorithm: str, per_step: int) -> list[str]:
        overrides = {"sampling.replay": str(tmp_path / "store"), "optimise.algorithm": algorithm}
        config = load_config(workshop() / "config.toml", overrides | {"optimise.tasks": str(per_step)})
        source = open_source(config, None, None, tmp_path)
        return ["".join(e.task_id for e in source.episodes(step)) for step in range(2)]

    assert tasks("ppo", 4) == ["abac", "bdcd"]
    for algorithm in ("grpo", "rloo", "gspo"):
        assert tasks(algorithm, 4) == ["aabb", "ccdd"]
    assert not caplog.text
    assert tasks("grpo", 3) == ["aab", "bcc"]
    assert "2 of 8 episodes are compared with only a part of the episodes of their task" in caplog.text


def test_each_visit_of_a_task_is_a_group_of_its_own_in_replay(tmp_path):
    """A run that sampled has played task a in two steps."""
    ids = [f"step-00000{step}/0000-{n}/a" for step in (0, 1) for n in (0, 1)]
    store = [replace(e, id=id, task_id="a") for e, id in zip(recorded(episodes=8), ids, strict=False)]
    other = [replace(e, task_id="b") for e in recorded(episodes=8)[4:6]]
    write_episodes(tmp_path / "store", [*store[:2], other[0], *store[2:], other[1]])
    source = Replay(str(tmp_path / "store"), 2, grouped=True)
    assert [[e.id for e in source.episodes(s)] for s in range(3)] == [ids[:2], [e.id for e in other], ids[2:]]


def test_a_store_from_a_cut_distribution_is_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "c.toml").write_text(f'[model]\nstudent = "/nowhere"\n[sampling]\nreplay = "{tmp_path / "store"}"\n')
    episodes = recorded(episodes=8)[:2]
    write_episodes(tmp_path / "store", [replace(e, sampling=Sampling(top_p=0.95)) for e in episodes])
    config = load_config(tmp_path / "c.toml")
    with pytest.raises(ValueError, match=r"was sampled with top-p or top-k: .* sample from the whole distribution"):
        check_replay(config)
    write_episodes(tmp_path / "whole", episodes)
    check_replay(load_config(tmp_path / "c.toml", {"sampling.replay": str(tmp_path / "whole")}))
    check_replay(load_config(tmp_path / "c.toml", {"sampling.replay": ""}))


def test_the_same_episodes_are_left_out_in_all_three_arms(tmp_path):
    """One with a call over the budget. Another's calls all fit and its flattened history does not: it stays, in all."""
    episodes = list(recorded(episodes=8))
    long = replace(episodes[2], calls=[*episodes[2].calls, *(replace(c, segments=()) for c in episodes[3].calls * 3)])
    call = episodes[4].calls[-1]
    over = replace(call, prompt=np.resize(call.prompt, 700), segments=())
    over_long = replace(episodes[4], calls=[*episodes[4].calls[:-1], over])
    write_episodes(tmp_path / "store", [*episodes[:2], long, episodes[3], over_long, *episodes[5:]])
    assert len(persistent_history(long)) > 600
    metrics = {}
    for state in ("aligned", "persistent", "none"):
        arguments = ("--teacher-state", state, "--replay", tmp_path / "store", "--optimise.budget", "600")
        output = tmp_path / state
        ended = memopd("train", workshop() / "config.toml", "--output", output, *arguments, "--optimise.steps", "1")
        assert ended.code == 0, ended.err
        assert "left out: episode 'demo-04': a call needs" in ended.err
        (metrics[state],) = read_metrics(output)
    assert {m["left_out"] for m in metrics.values()} == {1.0}
    # Until the first step of the optimiser the arms differ in the teacher's opinion and in nothing else.
    same = ("reward", "entropy", "loss_ppo", "loss_value", "explained_variance", "rows_saved", "critic_grad_norm")
    assert all(metrics["aligned"][n] == metrics["persistent"][n] == metrics["none"][n] for n in same)
    assert metrics["aligned"]["loss_opd"] != metrics["persistent"]["loss_opd"]
    assert "loss_opd" not in metrics["none"]


def test_if_all_episodes_are_left_out_the_reasons_are_shown(tmp_path):
    """None of the calls is trainable, so no setting would help."""
    context = [replace(e, calls=[replace(c, trainable=False) for c in e.calls]) for e in recorded(episodes=8)]
    write_episodes(tmp_path / "store", context)
    ended = memopd("train", workshop() / "config.toml", "--output", tmp_path / "run", "--replay", tmp_path / "store")
    reason = "episode 'demo-00': none of its calls is trainable"
    assert ended.line() == f"memopd: step 0: every episode was left out: {reason}"
    assert f"left out: {reason}" in ended.err
    assert "left out: 5 more" in ended.err


@pytest.fixture
def sampler(tmp_path):
    policy()
    made = []

    def make(**overrides: str):
        config = load_config(world() / "train.toml", overrides)
        learner = build(config, CPU)
        made.append(Sampler(config, learner.student, AutoTokenizer.from_pretrained(config.model.student), tmp_path))
        return made[-1], learner

    yield make
    for source in made:
        source.close()


def test_a_task_that_does_not_fit_is_named_before_the_first_step(sampler):
    with pytest.raises(
        ValueError, match=r"task '.*': its prompt has \d+ tokens, and tasks.max_context is 64: raise it"
    ):
        sampler(**{"tasks.max_context": "64"})


def test_the_cache_of_the_engine_is_free_while_the_update_needs_the_memory(sampler):
    """Keys and values of 64 prompts of SmolLM2-135M are gigabytes."""
    source, _ = sampler()
    assert source.episodes(0)
    assert source.policy.engine.cache_bytes == 0


@pytest.mark.parametrize(
    ("setting", "name", "says"),
    [
        ("memory", "nowhere:Rule", "tasks.memory: 'nowhere:Rule': No module named 'nowhere'"),
        ("memory", "memopd.agent:SearchEnvironment", "must be a class with context; it has no context"),
        ("environment", "memopd.agent:World", "tasks.environment: 'memopd.agent:World': module 'memopd.agent' has no"),
        ("reward", "memopd.agent.agent:call_seed:3", "tasks.reward: 'memopd.agent.agent:call_seed:3': module"),
        ("index", "", "tasks.index: name an index folder"),
    ],
)
def test_a_wrong_name_is_one_line_before_a_model_is_loaded(setting, name, says, tmp_path):
    """There is no such model either; of the two mistakes the name is told, and no run directory is left."""
    for verb in ("train", "sft"):
        options = ("--model.student", "/nowhere", "--sft.start", "/nowhere", f"--tasks.{setting}={name}")
        line = memopd(verb, world() / f"{verb}.toml", "--output", tmp_path / verb, *options).line()
        assert says in line
        assert not (tmp_path / verb).exists()


@pytest.mark.parametrize(
    ("verbs", "setting", "says"),
    [
        ("train sft", "tasks.dev", "tasks.dev: /none: no such file"),
        ("train sft", "tasks.index", "/none: no such folder; make one with `memopd index build"),
        ("train", "tasks.train", "tasks.train: /none: no such file"),
        ("train", "sampling.replay", "/none: no such file or directory"),
        ("sft", "sft.episodes", "/none: no such file or directory"),
    ],
)
def test_a_missing_file_is_one_line_before_a_model_is_loaded(verbs, setting, says, tmp_path):
    for verb in verbs.split():
        options = ("--model.student", "/nowhere", "--sft.start", "/nowhere", f"--{setting}=/none")
        line = memopd(verb, world() / f"{verb}.toml", "--output", tmp_path / verb, *options).line()
        assert says in line
        assert not (tmp_path / verb).exists()


def test_sequences_that_pass_the_positions_of_the_model_are_one_line_before_it_is_loaded(tmp_path):
    """The shape has 2,048 positions. sft samples only to evaluate, and the weights of a shape need not be loaded."""
    for verb, model in (("train", "--model.student"), ("sft", "--sft.start")):
        options = (model, world() / "shape.json", "--model.teacher", "/nowhere", "--tasks.max_context", "100000")
        line = memopd(verb, world() / f"{verb}.toml", "--output", tmp_path / verb, *options).line()
        assert "tasks.max_context = 100000 and sampling.max_tokens = 40 need 100040 positions" in line
        assert line.endswith("shape.json has 2048: lower one of the two settings")
        assert not (tmp_path / verb).exists()


@pytest.mark.parametrize(("family", "limit"), [("qwen2", 512), ("phi3 (longrope)", 128)])
def test_the_positions_are_those_of_the_local_engine(family, limit, tmp_path):
    """Also where a rope changes its frequencies before the positions end."""
    model = tiny_model(family)
    model.config.save_pretrained(tmp_path)
    assert length_limit(model, limit) == limit
    settings = {"tasks.max_context": str(limit - 2), "sampling.max_tokens": "2"}
    check_positions(load_config(world() / "train.toml", settings), str(tmp_path))
    wrong = load_config(world() / "train.toml", settings | {"sampling.max_tokens": "3"})
    with pytest.raises(ValueError, match=f"need {limit + 1} positions, and .* has {limit}: lower one"):
        check_positions(wrong, str(tmp_path))
    check_positions(replace(wrong, sampling=replace(wrong.sampling, servers=("http://one",))), str(tmp_path))


class Echo:
    """A whole environment without an index: say anything; one answer per turn, two turns."""

    def start(self, task):
        return Observation(f"Say {task.id}")

    def step(self, live):
        return [Observation("Again." if len(p.responses) < 2 else None, reward=0.5) for p in live]

    def grade(self, task, responses):
        return Outcome(1.0, em=0.25, f1=0.75)


def test_an_environment_that_searches_nothing_needs_no_index(tmp_path):
    policy()
    ended = memopd("train", world() / "train.toml", "--output", tmp_path / "run", "--optimise.steps", "2",
                   "--tasks.index=", "--tasks.environment", "test_sources:Echo")  # fmt: skip
    assert ended.code == 0, ended.err
    for line in read_metrics(tmp_path / "run"):
        assert (line["reward"], line["em"], line["f1"]) == (1.0, 0.25, 0.75)
    assert line["dev_em"] == 0.25
    episodes = list(read_episodes(tmp_path / "run" / "episodes"))
    assert {tuple(c.reward for c in e.calls) for e in episodes} == {(0.5, 0.5)}


def test_dev_wants_tasks(tmp_path):
    config = load_config(world() / "train.toml", {"run.dev_every": "1", "tasks.dev": ""})
    with pytest.raises(ValueError, match=r"tasks\.dev, or set it to 0"):
        open_source(config, None, None, tmp_path)


def test_a_replay_says_once_that_dev_is_not_measured(tmp_path, caplog):
    """It is no error, because a configuration that samples may be used for a replay too."""
    for every in ("0", "1"):
        assert not caplog.messages
        config = load_config(workshop() / "config.toml", {"run.dev_every": every})
        source = open_source(config, None, None, tmp_path)
        source.episodes(0)
    (said,) = caplog.messages
    assert said == "run.dev_every: dev is not measured, because a run with sampling.replay does not sample"


def test_tasks_of_a_step(sampler):
    """Every task once a round, in a random order; so many samples of each; ids that never repeat."""
    source, _ = sampler(**{"optimise.tasks": "7", "optimise.samples": "2"})
    source.tasks = source.tasks[:5]
    asked = [source._task(i).id for i in range(15)]
    rounds = [asked[0:5], asked[5:10], asked[10:15]]
    assert all(sorted(r) == sorted(t.id for t in source.tasks) for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    episodes = source.episodes(0)
    assert [e.task_id for e in episodes] == [task for task in asked[:7] for _ in range(2)]
    assert len({e.id for e in episodes}) == 14
    assert {c.policy_version for e in episodes for c in e.calls} == {0}
    assert {c.policy_version for e in source.episodes(3) for c in e.calls} == {3}
    assert [e.task_id for e in source.dev(3)] == [t.id for t in source.dev_tasks]


def test_episodes_are_counted_as_they_end(sampler):
    source, _ = sampler()
    seen = []

    def count(what, items, total):
        for item in items:
            seen.append((what, total))
            yield item

    source.count = count
    episodes = source.episodes(0)
    assert seen == [("episodes", len(episodes))] * len(episodes)


def test_the_policy_samples_as_it_is_now(sampler):
    """An update shows in the very next episodes, and the trainer agrees with the sampler's log-probabilities."""
    source, learner = sampler()
    before = source.episodes(1)
    again = source.episodes(1)
    assert [e.calls for e in before] == [e.calls for e in again]
    with torch.no_grad():
        learner.student.model.model.norm.weight.mul_(0.5)
    after = source.episodes(1)
    assert [e.calls[0].prompt.tolist() for e in before] == [e.calls[0].prompt.tolist() for e in after]
    assert [e.calls for e in before] != [e.calls for e in after]


def test_servers_get_the_weights_of_every_update_and_are_verified(sampler, monkeypatch):
    monkeypatch.setattr(engines, "VllmEngine", Servers)
    source, learner = sampler(**{"sampling.servers": "http://one,http://two", "sampling.temperature": "1.5"})
    servers = source.policy.engine
    assert servers.urls == ("http://one", "http://two")
    source.episodes(0)
    with torch.no_grad():
        learner.student.model.model.norm.weight.mul_(0.5)
    source.episodes(1)
    source.episodes(1)
    assert servers.verified == 2
    assert torch.equal(servers.model.model.norm.weight, learner.student.model.model.norm.weight)
    with torch.no_grad():
        learner.student.model.model.norm.weight.mul_(2.0)
    servers.deaf = True
    with pytest.raises(StaleWeights, match="stale weights"):
        source.episodes(2)


def test_a_sharded_policy_samples_from_a_whole_copy(tmp_path):
    """bfloat16 on one process: the sampler's log-probabilities are those of the weights as they are now."""
    policy()
    ended = memopd("train", world() / "train.toml", "--output", tmp_path / "run", "--model.dtype", "bfloat16",
                   "--optimise.steps", "3", "--run.dev_every", "0")  # fmt: skip
    assert ended.code == 0, ended.err
    for line in read_metrics(tmp_path / "run"):
        assert line["first_ratio_error"] == 0
        assert line["sampler_gap"] < 0.02
