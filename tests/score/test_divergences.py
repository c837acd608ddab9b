"""Divergences against numbers worked out by hand, and their gradients against autograd of the plain definitions."""

import math
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd.score import Head, Target, divergence_of, vocabulary, vocabulary_scores
from memopd.score.divergences import DIVERGENCES, forward_kl, jsd, reverse_kl, top_k
from memopd.score.vocabulary import reference_scores

LOG = math.log
# p = (1/2, 1/4, 1/4) and p_T = (1/4, 1/2, 1/4).
STUDENT = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
TEACHER = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64).log()


def value(divergence, student=STUDENT, teacher=TEACHER):
    (found,) = divergence(student, teacher)
    return found.item()


def test_reverse_kl():
    # ½ log 2 + ¼ log ½ + 0 = ¼ log 2
    assert value(reverse_kl) == pytest.approx(0.25 * LOG(2))


def test_forward_kl():
    # ¼ log ½ + ½ log 2 + 0 = ¼ log 2; with p_T = (1/8, 3/4, 1/8): ⅛ log ¼ + ¾ log 3 + ⅛ log ½ = ¾ log 3 − ⅜ log 2
    assert value(forward_kl) == pytest.approx(0.25 * LOG(2))
    other = torch.tensor([[0.125, 0.75, 0.125]], dtype=torch.float64).log()
    assert value(forward_kl, teacher=other) == pytest.approx(0.75 * LOG(3) - 0.375 * LOG(2))
    # and the reverse is another number: ½ log 4 + ¼ log ⅓ + ¼ log 2 = 5/4 log 2 − ¼ log 3
    assert value(reverse_kl, teacher=other) == pytest.approx(1.25 * LOG(2) - 0.25 * LOG(3))


def test_jsd():
    # β = ½: m = (3/8, 3/8, 1/4). KL(p_T ‖ m) = ¼ log ⅔ + ½ log 4/3 + 0, KL(p ‖ m) is the same by symmetry.
    one_side = 0.25 * LOG(2 / 3) + 0.5 * LOG(4 / 3)
    assert value(jsd) == pytest.approx(one_side)
    # β = ¼: m = ¼ p_T + ¾ p = (7/16, 5/16, 1/4).
    # ¼ [¼ log 4/7 + ½ log 8/5] + ¾ [½ log 8/7 + ¼ log 4/5]
    of_the_teacher = 0.25 * LOG(4 / 7) + 0.5 * LOG(8 / 5)
    of_the_student = 0.5 * LOG(8 / 7) + 0.25 * LOG(4 / 5)
    assert value(partial(jsd, beta=0.25)) == pytest.approx(0.25 * of_the_teacher + 0.75 * of_the_student)


def test_the_ends_of_jsd():
    """Divided by β it tends to the forward KL, divided by 1 − β to the reverse one; the ends are these limits."""
    other = torch.tensor([[0.125, 0.75, 0.125]], dtype=torch.float64).log()
    assert value(partial(jsd, beta=1e-6), teacher=other) / 1e-6 == pytest.approx(
        value(forward_kl, teacher=other), rel=1e-4
    )
    assert value(partial(jsd, beta=1 - 1e-6), teacher=other) / 1e-6 == pytest.approx(
        value(reverse_kl, teacher=other), rel=1e-4
    )
    assert value(partial(jsd, beta=0), teacher=other) == value(forward_kl, teacher=other)
    assert value(partial(jsd, beta=1), teacher=other) == value(reverse_kl, teacher=other)


def test_top_k_puts_the_rest_into_one_bucket():
    # p = (1/2, 1/4, 1/8, 1/8), p_T = (1/8, 1/2, 1/4, 1/8): the teacher's two likeliest are ids 1 and 2.
    student = torch.tensor([[4.0, 2.0, 1.0, 1.0]], dtype=torch.float64).log()
    teacher = torch.tensor([[1.0, 4.0, 2.0, 1.0]], dtype=torch.float64).log()
    # ¼ log ½ + ⅛ log ½ + tail 5/8 against 1/4: ⅝ log 5/2
    assert value(partial(top_k, k=2), student, teacher) == pytest.approx(0.375 * LOG(0.5) + 0.625 * LOG(2.5))
    # k = 1: ¼ log ½ + ¾ log 3/2.  With all four, or more, it is the reverse KL: ½ log 4 + ¼ log ½ + ⅛ log ½ = ⅝ log 2.
    assert value(partial(top_k, k=1), student, teacher) == pytest.approx(0.25 * LOG(0.5) + 0.75 * LOG(1.5))
    for k in (4, 5):
        assert value(partial(top_k, k=k), student, teacher) == pytest.approx(0.625 * LOG(2))


def test_without_its_tail_top_k_could_be_cheated():
    """A student that moves all probability out of the teacher's ids must not look better for it."""
    teacher = torch.tensor([[1.0, 4.0, 2.0, 1.0]], dtype=torch.float64).log()
    away = torch.tensor([[1.0, 1e-6, 1e-6, 1.0]], dtype=torch.float64).log()
    p, p_T = away.softmax(-1), teacher.softmax(-1)
    headless = (p * (p / p_T).log())[0, 1:3].sum()
    assert headless < 0
    assert value(partial(top_k, k=2), away, teacher) > 1


# ---- the plain definitions, in float64 -----------------------------------------------------------------------------


def kl(a, b):
    return (a * (a / b).log()).sum(-1)


def plain_top_k(p, p_T, k):
    ids = p_T.topk(k).indices
    a, b = (torch.cat([x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, keepdim=True)], -1) for x in (p, p_T))
    return kl(a, b)


def plain_jsd(p, p_T, beta):
    m = beta * p_T + (1 - beta) * p
    return beta * kl(p_T, m) + (1 - beta) * kl(p, m)


PLAIN = {
    "reverse_kl": kl,
    "forward_kl": lambda p, p_T: kl(p_T, p),
    "jsd:0.5": partial(plain_jsd, beta=0.5),
    "jsd:0.1": partial(plain_jsd, beta=0.1),
    "jsd:0.9": partial(plain_jsd, beta=0.9),
    "jsd": partial(plain_jsd, beta=0.5),
    "top_k:1": partial(plain_top_k, k=1),
    "top_k:3": partial(plain_top_k, k=3),
}


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.integers(4, 12), sharpness=st.sampled_from([0.1, 1.0, 5.0]))
def test_values_and_gradients_are_those_of_the_definition(name, seed, width, sharpness):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(5, width, generator=generator, dtype=torch.float64) * sharpness for _ in range(2))
    student.requires_grad_()
    upstream = torch.randn(5, generator=generator, dtype=torch.float64)
    found, wanted = divergence_of(name)(student, teacher), PLAIN[name](student.softmax(-1), teacher.softmax(-1))
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-11)
    gradients = [torch.autograd.grad((x * upstream).sum(), student)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", PLAIN)
def test_a_definition_with_its_sides_exchanged_is_noticed(name):
    """The comparison above can fail: nothing here is so symmetric that a wrong order would pass, but jsd at ½."""
    torch.manual_seed(0)
    student, teacher = torch.randn(5, 9, dtype=torch.float64), torch.randn(5, 9, dtype=torch.float64)
    found, wrong = divergence_of(name)(student, teacher), PLAIN[name](teacher.softmax(-1), student.softmax(-1))
    assert torch.allclose(found, wrong) == (name in ("jsd", "jsd:0.5"))


@pytest.mark.parametrize("name", PLAIN)
def test_nothing_is_lost_in_the_tail(name):
    """Far-away logits: a probability that is zero in float32 has a finite logarithm, and the gradient is a number."""
    student = torch.tensor([[0.0, -200.0, -200.0, -300.0, -250.0]], requires_grad=True)
    teacher = torch.tensor([[-200.0, 0.0, -300.0, -200.0, -250.0]])
    found = divergence_of(name)(student, teacher)
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(student.grad).all()
    same = divergence_of(name)(teacher, teacher)
    assert same.abs().max() < 1e-6


# ---- through the vocabulary pass -----------------------------------------------------------------------------------


def total_variation(student, teacher):
    return (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1) / 2


EVERY = {**{name: divergence_of(name) for name in PLAIN}, "own": total_variation}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("vocabulary", "theirs"), [(31, 31), (31, 40), (40, 31)])
def test_chunks_and_widths(name, vocabulary, theirs):
    """Chunks change nothing. Vocabularies of other widths are trimmed to the shared ids and renormalised."""
    torch.manual_seed(0)
    D, divergence = 23, EVERY[name]
    states = torch.randn(D, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, 16, dtype=torch.float64, requires_grad=True)
    head, teacher = Head(weight, None), Head(torch.randn(theirs, 24, dtype=torch.float64), None)
    their_states, tokens = torch.randn(D, 24, dtype=torch.float64), torch.randint(31, (D,))

    trimmed = divergence((states @ weight.T / 0.7)[:, :31], teacher.logits(their_states)[:, :31] / 0.7)
    whole = [trimmed, *torch.autograd.grad((trimmed**2).sum(), [states, weight])]
    for chunk in (1, 5, 64):
        scores = vocabulary_scores(head, states, tokens, 0.7, Target(teacher, their_states, divergence), chunk)
        made = [scores.divergence, *torch.autograd.grad((scores.divergence**2).sum(), [states, weight])]
        for a, b in zip(made, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        alone = vocabulary_scores(head, states, tokens, 0.7, None, chunk)
        assert torch.equal(scores.logprob, alone.logprob)
        assert torch.equal(scores.entropy, alone.entropy)


@pytest.mark.parametrize("name", [n for n in PLAIN if n != "reverse_kl"])
def test_another_divergence_is_another_number(name):
    torch.manual_seed(0)
    head, teacher = Head(torch.randn(31, 16), None), Head(torch.randn(31, 24), None)
    states, their_states, tokens = torch.randn(9, 16), torch.randn(9, 24), torch.randint(31, (9,))
    made = [
        vocabulary_scores(head, states, tokens, 1.0, Target(teacher, their_states, divergence_of(n))).divergence
        for n in (name, "reverse_kl")
    ]
    assert (made[0] - made[1]).abs().min() > 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_beside_the_fused_kernels(name, monkeypatch):
    """On a GPU: log p and entropy come from the kernels, with the reverse KL; any other divergence has its own pass.

    The kernels are replaced by the definition they compute, and say whether they were given the teacher.
    """
    given = []

    def kernels(head, states, tokens, temperature, teacher, teacher_states, chunk, group):
        given.append(teacher is not None)
        logprob, entropy, *kl = reference_scores(head, states, tokens, temperature, teacher, teacher_states)
        return logprob, entropy, kl[0] if kl else None

    monkeypatch.setitem(sys.modules, "memopd.score.fused", SimpleNamespace(fused_scores=kernels))
    torch.manual_seed(0)
    states = torch.randn(23, 16, dtype=torch.float64, requires_grad=True)
    weight_of_head = torch.randn(31, 16, dtype=torch.float64, requires_grad=True)
    head, tokens = Head(weight_of_head, None), torch.randint(31, (23,))
    teacher = Head(torch.randn(40, 24, dtype=torch.float64), None)
    target = Target(teacher, torch.randn(23, 24, dtype=torch.float64), EVERY[name])
    made = vocabulary._fused(head, states, tokens, 0.7, target, chunk=5)
    plain = vocabulary_scores(head, states, tokens, 0.7, target, chunk=5)
    assert given == [name == "reverse_kl"]
    found = []
    for scores in (made, plain):
        columns = [scores.logprob, scores.entropy, scores.divergence]
        total = sum(weight * (column**2).sum() for weight, column in zip((1, 2, 3), columns, strict=True))
        found.append([*columns, *torch.autograd.grad(total, [states, weight_of_head])])
    torch.testing.assert_close(*found)
    assert vocabulary._fused(head, states, tokens, 0.7, None, chunk=5).divergence is None


def test_half_precision_logits_arrive_in_float32():
    seen = []

    def spy(student, teacher):
        seen.extend([student.dtype, teacher.dtype, teacher.requires_grad])
        return total_variation(student, teacher)

    weight = torch.randn(31, 16, dtype=torch.bfloat16, requires_grad=True)
    head, states = Head(weight, None), torch.randn(4, 16, dtype=torch.bfloat16)
    reference_scores(head, states, torch.zeros(4, dtype=torch.long), 1.0, head, states, spy)
    assert seen == [torch.float32, torch.float32, False]


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda s, t: total_variation(s, t).sum(), r"got shape \[\]"),
        (lambda s, t: s - t, r"got shape \[4, 31\]"),
        (lambda s, t: 0.5, "got float"),
    ],
)
def test_what_is_not_one_number_per_row_is_refused(wrong, got):
    head, states = Head(torch.randn(31, 16), None), torch.randn(4, 16)
    with pytest.raises(ValueError, match=rf"teacher.divergence: must return one number per row .*\[4\], {got}"):
        vocabulary_scores(head, states, torch.zeros(4, dtype=torch.long), 1.0, Target(head, states, wrong))


@pytest.mark.parametrize("wrong", [lambda s, t: total_variation(s.detach(), t), lambda s, t: s.new_ones(len(s))])
def test_a_divergence_without_a_gradient_is_refused(wrong):
    """It would be a number in the logs and nothing in the gradient."""
    head, states = Head(torch.randn(31, 16), None), torch.randn(4, 16)
    arguments = 1.0, Target(head, torch.randn(4, 16), wrong)
    vocabulary_scores(head, states, torch.zeros(4, dtype=torch.long), *arguments)  # only measured: nothing to train
    with pytest.raises(ValueError, match=r"teacher.divergence: .* teaches nothing: compute them without detach"):
        vocabulary_scores(head, states.clone().requires_grad_(), torch.zeros(4, dtype=torch.long), *arguments)


# ---- names ---------------------------------------------------------------------------------------------------------


def test_names():
    assert divergence_of("reverse_kl") is reverse_kl  # the fused kernels know it by identity
    assert divergence_of("memopd.score.divergences:forward_kl") is forward_kl
    assert divergence_of("jsd:0.25").keywords == {"beta": 0.25}
    assert divergence_of("top_k:5").keywords == {"k": 5}
    assert set(DIVERGENCES) == {"reverse_kl", "forward_kl", "jsd", "top_k"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kl", "'kl' is not one of reverse_kl, forward_kl, jsd, top_k; write module:name for your own"),
        ("jsd:1.5", "the number of 'jsd:1.5' must be between 0 and 1, as in jsd:0.5"),
        ("jsd:half", "the number of 'jsd:half' must be between 0 and 1"),
        ("jsd:nan", "the number of 'jsd:nan' must be between 0 and 1"),
        ("jsd:", "the number of 'jsd:' must be between 0 and 1"),
        ("top_k:0", "the number of 'top_k:0' must be a whole number above 0"),
        ("top_k:2.5", "the number of 'top_k:2.5' must be a whole number above 0"),
        ("forward_kl:2", "forward_kl takes no number"),
        ("no_such_module:mine", "No module named 'no_such_module'"),
        ("memopd.score.divergences:mine", "has no 'mine'"),
        ("math:pi", "must be a function, got float"),
        ("math:exp", "must be a function of two arguments"),
        ("memopd.score:Head", "must be a function of two arguments"),
    ],
)
def test_wrong_names_are_one_line(name, message):
    with pytest.raises(ValueError, match=r"^teacher.divergence: ") as error:
        divergence_of(name)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_divergence_may_leave_out_rows():
    """A chunk of which it takes no row has no gradient, and that is right."""

    def where_the_teacher_is_sure(student, teacher):
        sure = teacher[:, 0] > 0
        return reverse_kl(student, teacher) * sure if sure.any() else student.new_zeros(len(student))

    head, states = Head(torch.eye(4), None), torch.randn(4, 4).requires_grad_()
    taught = torch.tensor([[-1.0] * 4, [-1.0] * 4, [1.0] * 4, [-1.0] * 4])
    target = Target(head, taught, where_the_teacher_is_sure)
    scores = vocabulary_scores(head, states, torch.zeros(4, dtype=torch.long), 1.0, target, chunk=1)
    scores.divergence.sum().backward()
    assert states.grad.abs().sum(-1).gt(0).tolist() == [False, False, True, False]
