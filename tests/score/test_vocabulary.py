"""The vocabulary pass against float64 written out, for every family's head."""

import pytest
import torch

from memopd.compile import compile_calls
from memopd.score import Head, Target, head_of, score, teacher_target, vocabulary_scores
from memopd.score.score import is_critic, packed_logprobs
from memopd.score.vocabulary import CPU_LOGITS, reference_scores
from memopd.verify.equivalence import alone_states, sampled_tokens
from memopd.verify.families import FAMILIES, tiny_model
from memopd.verify.models import example_calls


def by_hand(logits, tokens, teacher_logits, temperature):
    """Straight from the definitions, float64."""
    p = torch.softmax(logits.double() / temperature, -1)
    logprob = torch.stack([row[t].log() for row, t in zip(p, tokens, strict=True)])
    entropy = -(p * p.log()).sum(-1)
    shared = min(logits.shape[-1], teacher_logits.shape[-1])
    a = p[:, :shared] / p[:, :shared].sum(-1, keepdim=True)
    b = torch.softmax(teacher_logits.double()[:, :shared] / temperature, -1)
    return logprob, entropy, (a * (a / b).log()).sum(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_head(family):
    model = tiny_model(family, dtype=torch.float64)
    calls = example_calls()
    with torch.no_grad():
        states, tokens = alone_states(model, calls), sampled_tokens(calls, torch.device("cpu"))
    teacher = Head(torch.randn(131, 24, dtype=torch.float64), None)
    theirs = torch.randn(len(tokens), 24, dtype=torch.float64)
    head = head_of(model)
    for temperature in (1.0, 0.7):
        scores = vocabulary_scores(head, states, tokens, temperature, Target(teacher, theirs), chunk=7)
        expected = by_hand(head.logits(states), tokens, teacher.logits(theirs), temperature)
        for actual, wanted in zip((scores.logprob, scores.entropy, scores.divergence), expected, strict=True):
            assert torch.allclose(actual, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("vocabulary", "theirs"), [(131, 131), (131, 140), (140, 131)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_do_not_depend_on_chunks(vocabulary, theirs, softcap, bias):
    torch.manual_seed(0)
    D, H = 23, 16
    states = torch.randn(D, H, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocabulary, H, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(vocabulary, dtype=torch.float64, requires_grad=True) if bias else None
    head = Head(weight, offset, scale=0.5, softcap=softcap)
    teacher = Target(Head(torch.randn(theirs, 24, dtype=torch.float64), None), torch.randn(D, 24, dtype=torch.float64))
    tokens = torch.randint(min(vocabulary, theirs), (D,))
    leaves = [states, weight] + ([offset] if bias else [])

    def gradients(scores):
        logprob, entropy, divergence = scores
        return torch.autograd.grad((logprob * 0.3 + entropy**2 + divergence).sum(), leaves)

    whole = gradients(reference_scores(head, states, tokens, 0.7, teacher.head, teacher.states))
    for chunk in (1, 5, 64):
        made = vocabulary_scores(head, states, tokens, 0.7, teacher, chunk)
        parts = gradients((made.logprob, made.entropy, made.divergence))
        for a, b in zip(parts, whole, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("width", "rows"), [(40_000, [419, 181]), (131, [600])])
def test_a_chunk_on_a_cpu_holds_few_logits(width, rows):
    """1,024 rows of a vocabulary of 49,152 and its teacher's took 1.6 GB at once, beside all activations."""
    seen = []

    def spy(student, teacher):
        seen.append(len(student))
        return (student - teacher).mean(-1)

    head, states = Head(torch.randn(width, 1), None), torch.randn(600, 1)
    vocabulary_scores(head, states, torch.zeros(600, dtype=torch.long), 1.0, Target(head, states, spy))
    assert seen == rows
    assert max(rows) * width <= CPU_LOGITS


def test_a_teacher_equal_to_the_student_diverges_by_nothing():
    model, calls = tiny_model("qwen2", dtype=torch.float64), example_calls()
    packs = [compile_calls(calls)]
    scores = score(model, packs, teacher=teacher_target(model, packs))
    assert scores.divergence.abs().max() < 1e-12
    scores.divergence.sum().backward()
    assert max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) < 1e-10


def test_teacher_states_may_wait_elsewhere():
    model, teacher = tiny_model("qwen2", dtype=torch.float64), tiny_model("llama", seed=1, dtype=torch.float64)
    packs = [compile_calls(example_calls(seed)) for seed in range(2)]
    target = teacher_target(teacher, packs, keep_on="cpu")
    assert target.states.shape == (sum(len(p.decisions) for p in packs), 64)
    both = score(model, packs, teacher=target)
    one_by_one = [score(model, [p], teacher=teacher_target(teacher, [p])) for p in packs]
    assert torch.allclose(both.divergence, torch.cat([s.divergence for s in one_by_one]), rtol=1e-12)


def test_a_critic_gives_values_at_the_decisions():
    from transformers import AutoModelForTokenClassification, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=1,
    )  # fmt: skip
    critic = AutoModelForTokenClassification.from_config(config, dtype=torch.float64).eval()
    assert is_critic(critic)
    calls = example_calls()
    values = score(critic, [compile_calls(calls)]).value
    alone = [
        critic(input_ids=torch.tensor([[*c.prompt, *c.completion[:-1]]])).logits[0, len(c.prompt) - 1 :, 0]
        for c in calls
    ]
    assert torch.allclose(values, torch.cat(alone), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("budget", [None, 60])
def test_packed_logprobs_are_those_of_the_calls_alone(budget):
    model, calls = tiny_model("qwen3", dtype=torch.float64), example_calls()
    packed = packed_logprobs(model, calls, temperature=0.7, budget=budget)
    for call, logprob in zip(calls, packed, strict=True):
        logits = model(input_ids=torch.tensor([[*call.prompt, *call.completion[:-1]]])).logits[
            0, len(call.prompt) - 1 :
        ]
        wanted = (logits / 0.7).log_softmax(-1).gather(-1, torch.tensor(call.completion).long()[:, None])[:, 0]
        assert torch.allclose(logprob, wanted, rtol=1e-10, atol=1e-12)
    sum(x.sum() for x in packed).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_no_gradient_reaches_the_teacher():
    model, teacher = tiny_model("qwen2", dtype=torch.float64), tiny_model("llama", seed=1, dtype=torch.float64)
    packs = [compile_calls(example_calls())]
    live = Target(head_of(teacher), teacher_target(teacher, packs).states)
    score(model, packs, teacher=live).divergence.sum().backward()
    assert all(p.grad is None for p in teacher.parameters())


def test_teacher_states_of_other_packs_are_refused():
    model = tiny_model("qwen2", dtype=torch.float64)
    packs = [compile_calls(example_calls(seed)) for seed in range(2)]
    with pytest.raises(ValueError, match="the teacher's states are of 72 decisions, these packs have 36"):
        score(model, packs[:1], teacher=teacher_target(model, packs))


def test_a_critic_of_several_labels_is_refused():
    from transformers import AutoModelForTokenClassification, LlamaConfig

    config = LlamaConfig(vocab_size=131, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                         num_attention_heads=4, num_labels=3)  # fmt: skip
    with pytest.raises(ValueError, match="a critic has one label"):
        score(AutoModelForTokenClassification.from_config(config).eval(), [compile_calls(example_calls())])


def test_a_budget_bounds_and_an_over_long_call_is_named():
    with pytest.raises(ValueError, match="call 1 of 4 needs"):
        packed_logprobs(tiny_model("qwen3"), example_calls(), budget=40)
