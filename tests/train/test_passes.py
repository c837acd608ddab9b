"""An update makes no pass that it does not need. Its results are those of one that makes them all, bit for bit."""

from collections import Counter
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from tiny import recorded, word_tokenizer, workshop

from memopd.attention.plan import KERNELS
from memopd.config import load_config
from memopd.score import states
from memopd.train.algorithms import ALGORITHMS, GRPO
from memopd.train.batch import compile_batches
from memopd.train.diagnostics import describe
from memopd.train.later import held, unknown
from memopd.train.learner import build
from memopd.train.scoring import score_batches
from memopd.train.terms import make_terms
from memopd.train.traces import make_traces
from memopd.train.train import train
from memopd.train.update import tokens_of, update, update_actor

CPU = torch.device("cpu")
BARE = {"optimise.reference": "0", "optimise.budget": "700"}


class ReadsOld(GRPO):
    """An algorithm of somebody else, whose credit depends on π_old."""

    def credit(self, experience):
        credit = super().credit(experience)
        return type(credit)(credit.advantage + experience.logp_old.exp() - experience.logp_ref.exp() / 2)


def one_step(settings, in_advance: bool):
    """Everything that one training step leaves behind, and the forward passes that each model made."""
    config = load_config(workshop() / "config.toml", BARE | settings)
    learner, passes = build(config, CPU), Counter()
    for name in ("student", "critic", "reference", "teacher"):
        if (root := getattr(learner, name)) is not None:
            root.register_forward_hook(lambda *_, name=name: passes.update([name]))
    batches = compile_batches(recorded(episodes=8), config.optimise, 0, 0)
    scored, guides = score_batches(learner, batches, word_tokenizer().decode)
    if in_advance:
        old = [s.logp_old for s in scored]
        assert all(len(o) == len(b) for o, b in zip(old, batches, strict=True))
    before = passes["student"]
    terms, metrics = make_terms(batches, scored, learner.algorithm)
    read = passes["student"] - before
    metrics |= update(learner, batches, terms, guides, 0)
    metrics |= describe(recorded(episodes=8), batches, scored)
    traces = make_traces(recorded(episodes=8), batches, terms, guides, learner.critic is not None)
    kept = [torch.as_tensor(t.logp_old) for t in traces] + [torch.as_tensor(t.advantage) for t in traces]
    weights = [w for group in learner.tensors().values() for w in group.values()]
    return metrics, [*weights, *kept], passes, [len(b.work) for b in batches], read


def assert_same(a, b) -> None:
    assert a[0] == b[0]
    assert a[0]["first_ratio_error"] == 0
    assert a[0]["sampler_gap"] < 0.1  # it was filled in: these episodes were sampled by the student at its start
    assert len(a[1]) == len(b[1]) > 20
    assert all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"optimise.algorithm": "ppo"},
        {"optimise.algorithm": "ppo", "optimise.mini_batch": "3", "optimise.epochs": "2"},
        {"optimise.algorithm": "grpo", "optimise.epochs": "2", "lora.rank": "4", "teacher.state": "none"},
        {"optimise.algorithm": "gspo", "optimise.mini_batch": "4", "teacher.state": "none"},
        {"optimise.algorithm": "grpo", "model.dtype": "bfloat16", "model.checkpointing": "true"},
    ],
)
def test_the_first_mini_batch_computes_its_own_old_policy(settings):
    """Without a reference: no scoring pass of the student for the mini-batch that is updated first."""
    now, then = one_step(settings, in_advance=False), one_step(settings, in_advance=True)
    assert_same(now, then)
    packs, epochs = now[3], int(settings.get("optimise.epochs", 1))
    assert len(packs) == -(-8 // int(settings.get("optimise.mini_batch", 8)))
    assert then[2]["student"] == (1 + epochs) * sum(packs)
    saved = then[2] - now[2]
    assert saved.keys() == {"student"}
    assert saved["student"] in packs  # those of one mini-batch
    assert sum(packs) > len(packs)  # several packs each, so that this is not one pass by chance


def not_detached(monkeypatch) -> None:
    """π_old is the pass itself, with its gradient: the ratio is always one, and the reward has no gradient."""

    def mutated(batch, work, known, logp, *more):
        tokens = tokens_of(batch, work, known, logp, *more)
        return tokens if unknown(known, "logp_old") is None else replace(tokens, logp_old=logp)

    monkeypatch.setattr(import_module("memopd.train.update"), "tokens_of", mutated)


def each_its_own(monkeypatch) -> None:
    """Every mini-batch takes its own pass for π_old, also after the weights have moved."""

    def mutated(learner, batch, terms, *more, **named):
        held(terms, "logp_old").value = None
        return update_actor(learner, batch, terms, *more, **named)

    monkeypatch.setattr(import_module("memopd.train.update"), "update_actor", mutated)


@pytest.mark.parametrize("mutate", [not_detached, each_its_own])
def test_a_wrong_old_policy_is_noticed(monkeypatch, mutate):
    settings = {"optimise.algorithm": "grpo", "optimise.mini_batch": "4", "teacher.state": "none"}
    then = one_step(settings, in_advance=True)
    mutate(monkeypatch)
    now = one_step(settings, in_advance=False)
    assert now[0]["first_ratio_error"] == 0  # which alone would not tell
    with pytest.raises(AssertionError):
        assert_same(now, then)


def test_with_a_reference_the_old_policy_is_scored_before_the_credit():
    now = one_step({"optimise.reference": "0.1", "optimise.algorithm": "grpo"}, in_advance=False)
    assert_same(now, one_step({"optimise.reference": "0.1", "optimise.algorithm": "grpo"}, in_advance=True))
    assert now[2]["student"] == 2 * sum(now[3])
    assert now[2]["reference"] == now[2]["teacher"] == sum(now[3])
    assert now[4] == 0  # the credit reads what was scored
    assert now[0]["reference_kl"] == 0  # the reference is the student at its start


@pytest.mark.parametrize("mini_batch", ["8", "4"])
def test_credit_that_reads_the_old_policy_gets_it(monkeypatch, mini_batch):
    """Your own algorithm need not declare anything: the pass is made when `credit` asks for it."""
    monkeypatch.setitem(ALGORITHMS, "mine", ReadsOld)
    settings = {"optimise.algorithm": "mine", "optimise.mini_batch": mini_batch}
    now, then = one_step(settings, in_advance=False), one_step(settings, in_advance=True)
    assert_same(now, then)
    assert now[2] == then[2]
    assert now[4] == sum(now[3])
    assert then[4] == 0


@pytest.mark.parametrize("attention", ["dense", "cascade"])
def test_all_models_and_passes_share_the_plan_of_a_pack(monkeypatch, attention):
    """The same plan object for student, reference, critic and teacher, in the scores and in both epochs."""
    kernel, built = KERNELS[attention], []

    class Counted(kernel):
        def __init__(self, packed, device, windowed=False):
            super().__init__(packed, device, **({"windowed": windowed} if attention == "cascade" else {}))
            built.append(packed)

    class Anew(Counted):
        keep = property(lambda _: False, lambda *_: None)

    settings = {"optimise.reference": "0.1", "optimise.epochs": "2", "model.attention": attention}
    monkeypatch.setitem(KERNELS, attention, Counted)
    shared = one_step(settings, in_advance=False)
    packs = sum(shared[3])
    assert len(built) == len({id(p) for p in built}) == packs > 2
    monkeypatch.setitem(KERNELS, attention, Anew)
    built.clear()
    again = one_step(settings, in_advance=False)
    assert_same(shared, again)
    assert len(built) == sum(again[2].values()) == 8 * packs  # four scores; two epochs of student and critic


def test_models_are_prepared_once_per_stage(monkeypatch, tmp_path):
    """However many mini-batches there are. To go through the modules of adapters takes longer than to start a pass."""
    prepared = Counter()
    monkeypatch.setattr(states, "check_dropout", lambda model: prepared.update([mini_batch]))
    settings = {"lora.rank": "4", "optimise.steps": "1", "run.check_every": "0"}
    for mini_batch in (8, 4, 1):
        train(
            load_config(workshop() / "config.toml", settings | {"optimise.mini_batch": str(mini_batch)}),
            tmp_path / str(mini_batch),
        )
    assert prepared[8] == prepared[4] == prepared[1] > 0
