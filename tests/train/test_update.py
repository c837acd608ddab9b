"""One update: what λ, m^T and the teacher change, and what they must not."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from tiny import THINK, recorded, workshop

from memopd.config import RunConfig, load_config
from memopd.score import Target, decision_states, divergence_of, head_of, score, teacher_target
from memopd.train.batch import compile_batches, mini_batch
from memopd.train.learner import Learner, build
from memopd.train.scoring import exact_states, persistent_states, score_batches, teacher_mask
from memopd.train.terms import make_terms
from memopd.train.update import learning_rate, update, update_actor
from memopd.verify.audit import persistent_states as audited_states

CPU = torch.device("cpu")


def decode(ids):
    return "".join("</think>" if i == THINK else "x" for i in ids)


def configured(**overrides: str) -> RunConfig:
    return load_config(workshop() / "config.toml", overrides)


@cache
def one_update(config: RunConfig, empty_mask: bool = False):
    """A learner after one training step on eight episodes, and the metrics."""
    learner = build(config, CPU)
    batches = compile_batches(recorded(episodes=8), config.optimise, 0, 0)
    scored, guides = score_batches(learner, batches, decode)
    if empty_mask:
        guides = [replace(g, mask=torch.zeros_like(g.mask)) for g in guides]
    terms, summary = make_terms(batches, scored, learner.algorithm)
    return learner, summary | update(learner, batches, terms, guides, step=0)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return learner.student.weights


def same(a: Learner, b: Learner) -> bool:
    return all(torch.equal(weights(a)[n], weights(b)[n]) for n in weights(a))


def test_lambda_zero_is_ppo_to_the_bit():
    ppo, metrics = one_update(configured(**{"teacher.state": "none"}))
    for state in ("aligned", "persistent"):
        other, others = one_update(configured(**{"teacher.weight": "0", "teacher.state": state}))
        assert others == metrics
        assert same(ppo, other)
    guided, _ = one_update(configured())
    assert not same(ppo, guided)


def test_an_empty_teacher_mask_is_ppo_to_the_bit():
    ppo, metrics = one_update(configured(**{"teacher.state": "none"}))
    other, others = one_update(configured(), empty_mask=True)
    assert same(ppo, other)
    assert {name: others[name] for name in metrics} == metrics
    assert others["loss_opd"] == 0.0
    for part in ("teacher_kl_think", "teacher_kl_action"):  # measured all the same
        assert others[part] == one_update(configured())[1][part] > 0


def test_a_teacher_that_is_the_student_teaches_nothing():
    """Loss and gradient are zero to the bit: d KL / dz = p (log p − log p_T − KL), and each of the three is zero."""
    student = {"model.teacher": str(workshop() / "student")}
    norms = {}
    for state in ("aligned", "persistent"):
        learner, batch, guide = guided(configured(**student, **{"teacher.state": state}))
        for work in batch.work:
            divergence = learner.student(work.packed, 1.0, guide.target(work))[2]
            assert bool((divergence == 0).all()) == (state == "aligned")  # a flattened history is another state
            divergence.sum().backward()
        norms[state] = torch.nn.utils.get_total_norm([w.grad for w in weights(learner).values()])
    assert norms["aligned"] == 0
    assert norms["persistent"] > 0.1
    assert one_update(configured(**student))[1]["loss_opd"] == 0.0


def guided(config: RunConfig):
    learner = build(config, CPU)
    (batch,) = batches = compile_batches(recorded(episodes=8), config.optimise, 0, 0)
    return learner, batch, score_batches(learner, batches, decode)[1][0]


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("share", ["false", "true"])
def test_before_the_first_step_every_ratio_is_one(checkpointing, share):
    """π_old is scored by the packs, kernels and chunks that π_θ runs in."""
    _, metrics = one_update(configured(**{"model.checkpointing": checkpointing, "optimise.share": share}))
    assert metrics["first_ratio_error"] == 0.0


def test_the_first_ratio_error_can_be_seen():
    config = configured()
    learner = build(config, CPU)
    batches = compile_batches(recorded(episodes=8), config.optimise, 0, 0)
    scored, guides = score_batches(learner, batches, decode)
    terms, _ = make_terms(batches, scored, learner.algorithm)
    terms[0].logp_old[5] += 0.1
    assert update(learner, batches, terms, guides, step=0)["first_ratio_error"] == pytest.approx(1 - np.exp(-0.1))


def test_epochs_go_over_the_same_packs_again():
    """In the first nothing has moved; in the second the policy is compared with the one that sampled."""
    once, first = one_update(configured())
    twice, second = one_update(configured(**{"optimise.epochs": "2"}))
    assert first["approx_kl"] == first["clip_fraction"] == first["first_ratio_error"] == 0.0
    assert second["approx_kl"] > 0
    assert second["first_ratio_error"] == 0.0
    assert second["loss_opd"] < first["loss_opd"]  # the mean over both epochs
    assert not same(once, twice)


def test_the_arms_differ_in_the_teachers_states_alone():
    """At λ → 0 aligned and persistent are one run; at λ = 0.1 they are not."""
    tiny = {"teacher.weight": "1e-30"}
    aligned, a = one_update(configured(**tiny))
    persistent, b = one_update(configured(**tiny, **{"teacher.state": "persistent"}))
    assert same(aligned, persistent)
    of_the_teacher = {"loss_opd", "teacher_kl_think", "teacher_kl_action"}
    assert {n: a[n] for n in a.keys() - of_the_teacher} == {n: b[n] for n in b.keys() - of_the_teacher}
    assert all(a[n] != b[n] for n in of_the_teacher)
    assert not same(one_update(configured())[0], one_update(configured(**{"teacher.state": "persistent"}))[0])


def test_teacher_masks():
    """L_OPD is the mean over m^T: over the tokens up to </think>, those after it, or all."""
    _, over_all = one_update(configured())
    _, think = one_update(configured(**{"teacher.mask": "think"}))
    _, action = one_update(configured(**{"teacher.mask": "action"}))
    assert think["loss_opd"] == pytest.approx(think["teacher_kl_think"])
    assert action["loss_opd"] == pytest.approx(action["teacher_kl_action"])
    batch = mini_batch(recorded(episodes=8), 2048)
    thinking = np.concatenate([_thinks(c.completion) for c in batch.calls])
    share = thinking.mean()
    assert 0.05 < share < 0.95
    assert over_all["loss_opd"] == pytest.approx(share * think["loss_opd"] + (1 - share) * action["loss_opd"])
    assert teacher_mask(thinking, "think").tolist() == thinking.tolist()
    assert teacher_mask(thinking, "action").tolist() == (~thinking).tolist()
    assert teacher_mask(thinking, "all").all()


def _thinks(completion):
    at = np.flatnonzero(completion == THINK)
    return np.arange(len(completion)) <= (at[0] if len(at) else len(completion))


def test_states_of_the_teacher():
    """Exact ones are those of `score`; persistent ones are the audit's, up to rounding (another attention kernel)."""
    config = configured()
    learner = build(config, CPU)
    batch = mini_batch(recorded(episodes=4), 600)
    assert len(batch.work) > 1
    exact, flat = exact_states(learner.teacher, batch), persistent_states(learner.teacher, batch)
    expected = torch.cat([audited_states(learner.teacher.model, e) for e in batch.episodes])
    for work in batch.work:
        place = int(work.place[0])
        assert torch.equal(exact[place], teacher_target(learner.teacher.model, [work.packed]).states)
        torch.testing.assert_close(flat[place], expected[work.place], rtol=1e-4, atol=1e-4)
        assert (flat[place] - exact[place]).abs().max() > 0.1


def test_the_loss_is_the_equation():
    """update_actor's gradient against equation (actor) written out in one go for the whole mini-batch."""
    config = configured(**{"optimise.budget": "700", "optimise.entropy": "0.01", "teacher.weight": "0.3"})
    o, learner = config.optimise, build(config, CPU)
    batches = compile_batches(recorded(episodes=8), o, 0, 0)
    scored, guides = score_batches(learner, batches, decode)
    terms, _ = make_terms(batches, scored, learner.algorithm)
    (batch,), (known,), (guide,) = batches, terms, guides
    torch.manual_seed(0)
    known = replace(known, logp_old=known.logp_old + 0.3 * torch.randn(len(batch)))  # some ratios are clipped
    guide = replace(guide, mask=torch.rand(len(batch)) < 0.5)

    whole, place = mini_batch(batch.episodes, 100_000), torch.as_tensor(np.concatenate([w.place for w in batch.work]))
    states = torch.empty(len(batch), learner.head.weight.shape[1])
    states[place] = torch.cat([guide.states[int(w.place[0])] for w in batch.work])
    scores = score(learner.student.model, [w.packed for w in whole.work], teacher=Target(guide.head, states))
    ratio = (scores.logprob - known.logp_old).exp()
    A, m = known.advantage, guide.mask
    ppo = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A).mean()
    loss = ppo - 0.01 * scores.entropy.mean() + 0.3 * (scores.divergence * m).sum() / m.sum()
    expected = torch.autograd.grad(loss, list(weights(learner).values()))

    taken = {}

    class Taken(torch.optim.SGD):
        def step(self, closure=None):
            taken.update({n: w.grad.clone() for n, w in weights(learner).items()})

    config = replace(config, optimise=replace(o, max_grad_norm=1e9))
    learner = replace(learner, config=config, actor_optimiser=Taken(learner.student.parameters()))
    measured = update_actor(learner, batch, known, guide)
    assert measured["loss_ppo"] == pytest.approx(ppo.item(), rel=1e-4)
    assert 0 < measured["clip_fraction"] < 1
    for (name, got), want in zip(taken.items(), expected, strict=True):
        assert (got - want).norm() <= 1e-4 * want.norm() + 1e-8, name


def test_the_loss_of_gspo_is_a_mean_over_the_calls():
    """Spread over several packs: update_actor's gradient against the objective written out call by call."""
    settings = {"optimise.algorithm": "gspo", "optimise.clip": "0.02", "optimise.clip_high": "0.05"}
    off = {"optimise.entropy": "0", "teacher.state": "none", "optimise.max_grad_norm": "1e9"}
    config = configured(**settings, **off, **{"optimise.budget": "400"})
    learner = build(config, CPU)
    (batch,) = batches = compile_batches(recorded(episodes=8), config.optimise, 0, 0)
    assert len(batch.work) > 2
    scored, _ = score_batches(learner, batches, decode)
    (known,), _ = make_terms(batches, scored, learner.algorithm)
    torch.manual_seed(0)
    known = replace(known, logp_old=known.logp_old + 0.2 * torch.randn(len(batch)))

    (whole,) = mini_batch(batch.episodes, 100_000).work
    logp = torch.empty(len(batch)).index_put(
        (torch.as_tensor(whole.place),), score(learner.student.model, [whole.packed]).logprob
    )
    losses, clipped = [], 0
    for c, call in enumerate(batch.calls):
        mine = torch.as_tensor(batch.call == c)
        s = (logp - known.logp_old)[mine].mean().exp()
        A = known.advantage[mine].mean()
        losses.append(-torch.minimum(s * A, s.clamp(0.98, 1.05) * A))
        clipped += len(call.completion) * bool(s < 0.98 or s > 1.05)
    loss = torch.stack(losses).mean()
    expected = torch.autograd.grad(loss, list(weights(learner).values()))

    taken = {}

    class Taken(torch.optim.SGD):
        def step(self, closure=None):
            taken.update({n: w.grad.clone() for n, w in weights(learner).items()})

    learner = replace(learner, actor_optimiser=Taken(learner.student.parameters()))
    measured = update_actor(learner, batch, known)
    size = torch.stack(losses).abs().mean().item()  # the terms have both signs, and their sum may be near 0
    assert measured["loss_ppo"] == pytest.approx(loss.item(), rel=0, abs=1e-5 * size)
    assert 0 < measured["clip_fraction"] < 1
    assert measured["clip_fraction"] == pytest.approx(clipped / len(batch))
    for (name, got), want in zip(taken.items(), expected, strict=True):
        assert (got - want).norm() <= 1e-4 * want.norm() + 1e-8, name


class Wrong:
    """An algorithm whose loss is not one number."""

    needs_critic = False

    def __init__(self, loss):
        self.loss = loss

    def credit(self, experience): ...


@pytest.mark.parametrize(("loss", "got"), [(lambda t: t.logp, "got shape"), (lambda t: 0.5, "got float")])
def test_a_loss_that_is_not_one_number_is_named(loss, got):
    learner, batch, _ = guided(configured())
    scored, _ = score_batches(learner, [batch], decode)
    (known,), _ = make_terms([batch], scored, learner.algorithm)
    with pytest.raises(ValueError, match=f"optimise.algorithm: loss of Wrong must return one number, a sum, {got}"):
        update_actor(replace(learner, algorithm=Wrong(loss)), batch, known)


def test_a_loss_without_a_gradient_is_an_error():
    learner, batch, _ = guided(configured(**{"teacher.state": "none"}))
    scored, _ = score_batches(learner, [batch], decode)
    (known,), _ = make_terms([batch], scored, learner.algorithm)
    detached = Wrong(lambda t: -(t.logp.detach() * t.advantage).sum())
    with pytest.raises(ValueError, match=r"optimise.algorithm: loss of Wrong has no gradient, .* without detach"):
        update_actor(replace(learner, algorithm=detached), batch, known)
    none = Wrong(lambda t: 0 * t.logp.sum())  # the way to train on the other terms alone
    assert update_actor(replace(learner, algorithm=none), batch, known)["loss_ppo"] == 0


def test_a_unit_is_what_the_loss_is_divided_by():
    learner, batch, _ = guided(configured(**{"teacher.state": "none"}))
    scored, _ = score_batches(learner, [batch], decode)
    (known,), _ = make_terms([batch], scored, learner.algorithm)
    still = replace(learner, config=replace(learner.config, optimise=replace(learner.config.optimise, lr=0.0)))
    losses = {}
    for unit in ("token", "call", "episode"):
        one = Wrong(lambda t: t.logp.sum() * 0 + 1)  # one per pack
        one.unit = unit
        losses[unit] = update_actor(replace(still, algorithm=one), batch, known)["loss_ppo"]
    packs = len(batch.work)
    assert losses["token"] == pytest.approx(packs / len(batch))
    assert losses["call"] == pytest.approx(packs / len(batch.calls))
    assert losses["episode"] == pytest.approx(packs / 8)


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd:0.3", "top_k:5"])
@pytest.mark.parametrize("state", ["aligned", "persistent"])
def test_every_divergence_in_every_state_of_the_teacher(divergence, state):
    """L_OPD and what the traces keep are this divergence, in the states that the teacher was in."""
    config = configured(**{"teacher.divergence": divergence, "teacher.state": state})
    learner, batch, guide = guided(config)
    scored, _ = score_batches(learner, [batch], decode)
    (known,), _ = make_terms([batch], scored, learner.algorithm)
    expected = torch.empty(len(batch))
    with torch.no_grad():
        for work in batch.work:
            student = head_of(learner.student.model).logits(decision_states(learner.student.model, work.packed))
            teacher = guide.head.logits(guide.states[int(work.place[0])])
            expected[torch.as_tensor(work.place)] = divergence_of(divergence)(student, teacher)
    measured = update_actor(learner, batch, known, guide, keep=True)
    torch.testing.assert_close(guide.divergence, expected, rtol=1e-4, atol=1e-6)
    assert measured["loss_opd"] == pytest.approx(expected.mean().item(), rel=1e-4)


def test_group_advantages_leave_penalties_out_of_the_comparison():
    """All episodes of a group earn the same: nothing is learnt but the penalty, at its own small size."""
    episodes = [replace(e, reward=1.0, calls=[replace(c, reward=0.0) for c in e.calls]) for e in recorded(episodes=8)]
    config = configured(**{"optimise.algorithm": "grpo", "optimise.samples": "4", "optimise.reference": "0.01"})
    learner = build(config, CPU)
    batches = compile_batches(episodes, config.optimise, 0, 0)
    scored, _ = score_batches(learner, batches, decode)
    scored = [replace(s, logp_ref=s.logp_ref - 0.5) for s in scored]
    terms, summary = make_terms(batches, scored, learner.algorithm)
    assert terms[0].advantage.tolist() == pytest.approx([-0.005] * len(batches[0]))
    assert "explained_variance" not in summary
    varied = compile_batches(recorded(episodes=8), config.optimise, 0, 0)
    terms, _ = make_terms(varied, scored, learner.algorithm)
    assert terms[0].advantage.abs().max() > 0.5


def test_schedules():
    constant = [learning_rate(1.0, s, 10, 0.2, "constant") for s in range(10)]
    assert constant == [0.5] + [1.0] * 9
    assert [learning_rate(1.0, s, 10, 0.0, "constant") for s in (0, 9)] == [1.0, 1.0]
    cosine = [learning_rate(1.0, s, 102, 0.01, "cosine") for s in range(102)]
    assert cosine[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert cosine[52] == pytest.approx(0.55)
    assert cosine[-1] == pytest.approx(0.1, abs=1e-3)
