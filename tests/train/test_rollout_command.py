"""`memopd rollout` with a policy of several calls an episode: reproducible from its seed, killed and gone on with."""

import json

import pytest
from command import Command, memopd
from live import policy, world
from rich.console import Console

from memopd.cli import rollout as verb
from memopd.record import read_episodes

EPISODES = 40


def arguments(output, *more):
    settings = ("--max-tokens", 40, "--max-context", 900, "--batch", 8, "--limit", 20, "--samples", 2)
    where = ("--model", policy() / "model", "--index", world() / "world" / "index", "--memory", "mem1", "-o", output)
    return ("rollout", world() / "world" / "tasks" / "train-q1.parquet", *where, *settings, *more)


def small_parts():
    """In the process that is killed: a part for every few episodes."""
    verb.PART = 5


def sampled(store):
    return {e.id: (e.reward, e.calls) for e in read_episodes(store)}


def ids_of(episode):
    return [(c.prompt.tolist(), c.completion.tolist()) for c in episode.calls]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    output = tmp_path_factory.mktemp("rollout") / "whole"
    ended = memopd(*arguments(output), environment={})
    assert ended.code == 0, ended.err
    assert ended.out.startswith(f"{output}: {EPISODES} episodes, ")
    return output, ended.seconds


def test_a_seed_gives_the_same_episodes(whole, tmp_path):
    episodes = sampled(whole[0])
    assert len(episodes) == EPISODES
    assert max(len(calls) for _, calls in episodes.values()) > 1
    assert all(c.logprobs is not None and c.segments for _, calls in episodes.values() for c in calls)
    assert memopd(*arguments(tmp_path / "again")).code == 0
    assert sampled(tmp_path / "again") == episodes  # log-probabilities bit for bit
    other = memopd(*arguments(tmp_path / "other", "--seed", 1, "--limit", 4))
    assert other.code == 0, other.err
    assert all(made != episodes[id] for id, made in sampled(tmp_path / "other").items())


def test_killed_and_gone_on_with(whole, tmp_path):
    output, seconds = whole
    found = []
    for share in (0.6, 0.8):
        Command(*arguments(tmp_path / "e"), before=small_parts).kill_at(share * seconds)
        there = any((tmp_path / "e").glob("*.parquet"))  # killed early, it left nothing or an empty folder
        found.append(len(sampled(tmp_path / "e")) if there else 0)
    ended = memopd(*arguments(tmp_path / "e"))
    assert ended.code == 0, ended.err
    print(f"{found} episodes after each death")
    assert f"has {found[-1]} episodes already; {EPISODES - found[-1]} are missing" in ended.err or not found[-1]
    expected, made = {e.id: ids_of(e) for e in read_episodes(output)}, list(read_episodes(tmp_path / "e"))
    assert sorted(e.id for e in made) == sorted(expected)  # none lost, none twice
    differing = sum(ids_of(e) != expected[e.id] for e in made)
    assert differing <= 1  # others ran beside them: a draw within rounding of a boundary is allowed for


def test_a_store_of_other_settings_is_not_gone_on_with(whole):
    for more in (
        ("--seed", 3),
        ("--memory", "full_response"),
        ("--temperature", 0.5),
        ("--max-tokens", 7),
        ("--top-p", 0.5),
    ):
        line = memopd(*arguments(whole[0], *more)).line()
        assert f"has episodes sampled with {more[0]}" in line
        assert "choose another store" in line


def test_what_the_model_cannot_reach_is_said_in_the_words_of_the_command(tmp_path):
    line = memopd(*arguments(tmp_path / "e", "--max-context", 2000, "--max-tokens", 100)).line()
    assert "--max-context 2000 and --max-tokens 100 need 2100 positions" in line
    assert "has 2048: lower one of them" in line


def test_top_p_and_top_k_are_for_evaluation(tmp_path):
    """The likeliest token alone: every seed gives the same answers."""
    common = ("--model", policy() / "model", "--index", world() / "world" / "index", "--max-tokens", 40,
              "--max-context", 900, "--limit", 4, "--seeds", 2, "--json")  # fmt: skip
    ended = memopd("evaluate", world() / "world" / "tasks" / "dev-q1.parquet", *common, "--top-k", 1)
    assert ended.code == 0, ended.err
    one, other = json.loads(ended.out)["tasks"][0]
    assert [{**m, "seconds": 0} for m in one] == [{**m, "seconds": 0} for m in other]
    assert "top_p" in memopd("evaluate", world() / "world" / "tasks" / "dev-q1.parquet", *common, "--top-p", 1.5).line()


def test_progress_shows_rates_on_a_terminal(whole, monkeypatch, capsys):
    monkeypatch.setattr(verb, "err", Console(stderr=True, force_terminal=True, width=120))
    episodes = list(read_episodes(whole[0]))
    assert list(verb.progress(iter(episodes), len(episodes))) == episodes
    shown = capsys.readouterr().err
    assert "tokens/s" in shown
    assert f"{EPISODES}/{EPISODES}" in shown
    monkeypatch.setattr(verb, "err", Console(stderr=True, force_terminal=False))
    assert len(list(verb.progress(iter(episodes), len(episodes)))) == EPISODES
    assert "tokens" not in capsys.readouterr().err
