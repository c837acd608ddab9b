"""The audit's numbers where they can be worked out by hand."""

import json
import math
from collections import Counter
from dataclasses import replace
from io import StringIO

import pytest
import torch
from calls import mem1_calls
from rich.console import Console

from memopd.score import Head
from memopd.types import Call, Episode, Sampling, Segment
from memopd.verify.audit import Domain, audit, domain
from memopd.verify.families import demo, tiny_model
from memopd.verify.tables import print_audit

Q, A0, O0, A1, O1, A2 = [5, 6, 7], [10, 11], [20, 21, 22], [30, 31, 32], [40], [50, 51]
MEM1 = Episode("e", "t", [Call(Q, A0), Call(Q + A0 + O0, A1), Call(Q + A1 + O1, A2)])
GROWING = Episode("g", "t", [Call(Q, A0), Call(Q + A0 + O0, A1), Call(Q + A0 + O0 + A1 + O1, A2)])


def episodes_of(seeds: range, **sampling) -> list[Episode]:
    return [Episode(f"e{s}", f"t{s}", mem1_calls(s), sampling=Sampling(**sampling)) for s in seeds]


@torch.no_grad()
def with_logprobs(model, episode: Episode, shift: float = 0.0) -> Episode:
    """What an exact sampler would have recorded, plus `shift`."""
    calls = []
    for call in episode.calls:
        ids = torch.tensor([[*call.prompt.tolist(), *call.completion.tolist()]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(call.prompt) - 1 : -1]
        logp = (logits / episode.sampling.temperature).log_softmax(-1)
        recorded = logp.gather(1, torch.tensor(call.completion).long()[:, None])[:, 0]
        calls.append(replace(call, logprobs=(recorded + shift).double().numpy()))
    return replace(episode, calls=tuple(calls))


# ---- domains ------------------------------------------------------------------------------------------------


def test_domain_counts():
    """Sampled Σ|a| = 7. The flattened history adds Σ|o| = 4; the assistant turns add Σ|x| = 0 + 5 + 4."""
    assert domain([MEM1]) == Domain(sampled=7, trajectory_spurious=4, response_spurious=9)
    assert domain([GROWING]) == Domain(7, 4, 0 + 5 + 9)
    assert domain([MEM1, GROWING]) == Domain(14, 8, 23)


def test_domain_counts_with_a_recorded_prefix():
    """q recorded as one id: the two others of each prompt are mutable context, and x_0 is part of the history."""
    prefix = Segment("prefix", 0, 1)
    spans = [(), (Segment("observation", 5, 8),), (Segment("observation", 6, 7),)]
    calls = [replace(c, segments=(prefix, *s)) for c, s in zip(MEM1.calls, spans, strict=True)]
    assert domain([replace(MEM1, calls=tuple(calls))]) == Domain(7, 4 + 2, 9 + 3 * 2)


def test_a_context_only_call_is_spurious_wherever_it_counts():
    helper = replace(MEM1.calls[1], trainable=False)
    assert domain([replace(MEM1, calls=(MEM1.calls[0], helper, MEM1.calls[2]))]) == Domain(4, 4 + 3, 9 + 3)


# ---- representations ----------------------------------------------------------------------------------------


def test_an_audit_of_compact_memory():
    episodes = episodes_of(range(3))
    report = audit(tiny_model("qwen2"), episodes, "dense", name="a model")
    assert (report.model, report.episodes, report.calls) == ("a model", 3, 12)
    persistent, floor, packed = report.representations
    assert [r.representation for r in report.representations] == [
        "persistent history",
        "batching floor",
        "reconstructed packing",
    ]
    assert persistent.p99_logprob >= 1000 * packed.p99_logprob
    assert persistent.top1 < 1
    assert persistent.top1_changed == round((1 - persistent.top1) * 3 * 4 * 6) > 0
    assert persistent.false_clip > 0
    for right in (floor, packed):
        assert (right.top1, right.top1_changed, right.false_clip) == (1, 0, 0)
        assert right.max_logprob < 1e-4
    assert [r.representation for r in report.corruption] == ["visibility only", "positions only", "both"]
    assert all(r.p99_logprob >= 1000 * packed.p99_logprob for r in report.corruption)
    assert report.passed
    assert report.equivalence.decisions == 3 * 4 * 6
    assert report.domain == Domain(72, 3 * 3 * 7, 3 * 3 * 13)
    assert (report.teacher, report.recorded, report.notes) == ((), None, ())


def visible(scheme) -> bytes:
    return b"" if scheme is None else scheme.mask.numpy().tobytes()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_no_pass_runs_twice(monkeypatch, temperature):
    """Every state once through the layers, and once through the vocabulary, per model and precision.

    A state is its ids, positions, visibility and attention. Of the check of a head we count only that it is there: it
    runs three ids, twice per model.
    """
    model, teacher = tiny_model("qwen2"), tiny_model("llama", seed=5)
    passes, heads = Counter(), Counter()

    def layers(module, args, given):
        key = type(module).__name__, module.dtype, module.config._attn_implementation
        positions = given.get("position_ids")
        place = None if positions is None else positions.numpy().tobytes()
        passes[
            *key,
            given["input_ids"].shape,
            given["input_ids"].numpy().tobytes(),
            place,
            visible(given.get("memopd_scheme")),
        ] += 1

    for one in (model, teacher):
        one.model.register_forward_pre_hook(layers, with_kwargs=True)
    logits = Head.logits

    def counted(head, states):
        heads[head.weight.dtype, head.weight.shape, states.numpy().tobytes()] += 1
        return logits(head, states)

    monkeypatch.setattr(Head, "logits", counted)
    episodes = [with_logprobs(model, e) for e in episodes_of(range(2), temperature=temperature)]
    passes.clear()
    assert audit(model, episodes, "dense", teacher=teacher).passed
    checks = [count for key, count in passes.items() if key[3] == (1, 3)]
    assert sorted(checks) == [2, 2, 2]  # the model, its float64 copy and the teacher
    others = {key: count for key, count in passes.items() if key[3] != (1, 3)}
    assert set(others.values()) == {1}
    # Alone 8 calls, in float64 8; padded 2 episodes; packed 1; persistent 2, mem1-official 2 and three corruptions of
    # 2; teacher 4. The sequences of fork and realign are those of calls alone.
    assert len(others) == 8 + 8 + 2 + 1 + 2 + 2 + 3 * 2 + 4
    assert set(heads.values()) == {1}


def test_progress_names_every_stage_and_counts_calls():
    stages = []

    def progress(name, items):
        stages.append((name, len(items)))
        return items

    model = tiny_model("qwen2")
    audit(model, episodes_of(range(2)), "dense", teacher=model, progress=progress)
    assert stages == [
        ("calls alone", 8),
        ("calls in padded batches", 2),
        ("packed", 1),
        ("persistent history", 2),
        ("fork", 6),  # of 4 calls each, the first two are one sequence
        ("realign", 6),
        ("mem1-official", 2),
        *[(wrong, 2) for wrong in ("visibility only", "positions only", "both")],
        ("calls alone, float64", 8),
        ("vocabulary", 1),
        ("teacher", 2),
    ]


def test_where_the_context_only_grows_flattening_is_right():
    model = tiny_model("qwen2", dtype=torch.float64)
    report = audit(model, [GROWING], "dense", teacher=model)
    for row in (*report.representations, *report.corruption):
        assert row.max_logprob <= 1e-12
        assert (row.top1, row.top1_changed, row.false_clip) == (1, 0, 0)
    for mismatch in (report.student, report.teacher):
        assert [(t.calls, t.decisions, t.top1) for t in mismatch] == [
            ("call 0", 2, 1),
            ("call 1", 3, 1),
            ("call 2", 2, 1),
            ("call 1 and later", 5, 1),
        ]
        assert all(abs(t.mean_kl) <= 1e-12 for t in mismatch)


def test_every_row_is_at_the_temperature_of_its_episode():
    model = tiny_model("qwen2", dtype=torch.float64)
    hot, cold = (audit(model, episodes_of(range(2), temperature=t), "dense").representations[0] for t in (100.0, 1.0))
    assert hot.max_logprob < cold.max_logprob / 10
    assert hot.top1 == cold.top1


def test_models_that_run_unshared_have_no_packed_state_to_corrupt():
    report = audit(tiny_model("bloom (own attention)"), episodes_of(range(2)), "dense")
    assert report.passed
    assert report.corruption == ()
    assert [n.split(":")[0] for n in report.notes] == ["mem1-official", "visibility only", "positions only", "both"]
    assert report.representations[0].p99_logprob > 1e-2
    assert report.representations[2].max_logprob == 0


def test_nothing_to_audit():
    helper = Episode("e", "t", [Call([5], [6], trainable=False)])
    for episodes in ([], [helper]):
        with pytest.raises(ValueError, match="no episode with a trainable call"):
            audit(tiny_model("qwen2"), episodes, "dense")
    assert audit(tiny_model("qwen2"), [helper, MEM1], "dense").episodes == 1


# ---- teachers -----------------------------------------------------------------------------------------------


def test_flattening_is_right_for_calls_0_and_1_and_wrong_from_call_2_on():
    """Under MEM1's rule, call 1 reads q, a_0 and o_0: all that there is. The mean over calls 1 to 3 hides that."""
    teacher = tiny_model("llama", seed=5, dtype=torch.float64)
    report = audit(tiny_model("qwen2", dtype=torch.float64), episodes_of(range(3)), "dense", teacher=teacher)
    for mismatch in (report.student, report.teacher):
        rows = {row.calls: row for row in mismatch}
        names = ["call 0", "call 1", "call 2", "call 3 and later", "call 1 and later", "call 2 and later"]
        assert list(rows) == names
        assert [row.decisions for row in mismatch] == [18, 18, 18, 18, 54, 36]
        for same in ("call 0", "call 1"):
            assert (rows[same].top1, rows[same].top1_changed) == (1, 0)
            assert abs(rows[same].mean_kl) <= 1e-12
            assert rows[same].p99_logprob <= 1e-12
        for differs in names[2:]:
            row = rows[differs]
            assert row.mean_kl > 0.01
            assert row.p99_logprob > 0.1
            assert row.top1_changed == round((1 - row.top1) * row.decisions) > 0
        assert rows["call 1 and later"].mean_kl == pytest.approx(rows["call 2 and later"].mean_kl * 36 / 54)
        assert rows["call 2 and later"].mean_kl == pytest.approx(
            (rows["call 2"].mean_kl + rows["call 3 and later"].mean_kl) / 2
        )


def test_one_call_has_no_update():
    episode = Episode("e", "t", [Call(Q, A0)])
    model = tiny_model("qwen2")
    report = audit(model, [episode], "dense", teacher=model)
    for (only,) in (report.student, report.teacher):
        assert (only.calls, only.decisions) == ("call 0", 2)


# ---- what the sampler recorded ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_recorded_gap(temperature):
    model = tiny_model("qwen2")
    episodes = episodes_of(range(2), temperature=temperature)
    exact = audit(model, [with_logprobs(model, e) for e in episodes], "dense").recorded
    assert exact.decisions == 48
    assert exact.mean <= 2e-6
    assert exact.p99 <= 1e-5
    assert abs(exact.k3) <= 1e-9

    shifted = audit(model, [with_logprobs(model, e, shift=0.1) for e in episodes], "dense").recorded
    assert shifted.mean == pytest.approx(0.1, abs=2e-6)
    assert shifted.p99 == pytest.approx(0.1, abs=1e-5)
    assert shifted.k3 == pytest.approx(math.exp(-0.1) - 1 + 0.1, abs=1e-6)  # r = e^-0.1, log r = -0.1


def test_only_calls_with_log_probabilities_count():
    model = tiny_model("qwen2")
    one = with_logprobs(model, episodes_of(range(1))[0])
    part = replace(one, calls=tuple(replace(c, logprobs=None) if t else c for t, c in enumerate(one.calls)))
    assert audit(model, [*episodes_of(range(1, 2)), part], "dense").recorded.decisions == 6


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}])
def test_a_cut_distribution_cannot_be_compared(cut):
    model = tiny_model("qwen2")
    (episode,) = episodes_of(range(1))
    recorded = replace(with_logprobs(model, episode), sampling=Sampling(**cut))
    report = audit(model, [recorded], "dense")
    assert report.recorded is None
    assert report.notes == ("4 calls were sampled with top-p or top-k: no recorded gap for them",)


# ---- the demo, and what is shown ----------------------------------------------------------------------------


def test_the_demo_is_sampled_as_it_says():
    model, episodes = demo(episodes=2, calls=3)
    assert [e.id for e in episodes] == ["demo-00", "demo-01"]
    for episode in episodes:
        assert [len(c.prompt) for c in episode.calls] == [40, 40 + 24 + 30, 40 + 24 + 30]
        for before, call in zip(episode.calls, episode.calls[1:], strict=False):
            assert call.prompt[40:64].tolist() == before.completion.tolist()
            assert [s.kind for s in call.segments] == ["prefix", "memory", "observation"]
    again = demo(episodes=2, calls=3)[1]
    assert again == episodes
    assert demo(episodes=2, calls=3, seed=1)[1] != episodes
    assert audit(model, episodes, "dense").recorded.mean < 1e-5


def test_tables_and_json_say_the_same():
    model = tiny_model("qwen2")
    report = audit(model, [with_logprobs(model, e) for e in episodes_of(range(2))], "dense", teacher=model)
    text = StringIO()
    print_audit(report, Console(file=text, width=120))
    for part in (
        "persistent history",
        "reconstructed packing",
        "visibility only",
        "call 2 and later",
        "a sequence per call",
        "mem1-official",
        "Rounding: float32 against the calls alone in float64",
        "Floor of float32: a call run alone is",
        "Recorded against recomputed",
        "Packing is equivalent",
        f"{report.representations[0].p99_logprob:.3g}",
        f"{report.domain.sampled + report.domain.response_spurious:,}",
    ):
        assert part in text.getvalue()
    read = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert read["passed"] is True
    assert read["representations"][0]["p99_logprob"] == report.representations[0].p99_logprob
    assert read["domain"]["sampled"] == 48


def test_a_failure_is_shown_in_words():
    model = tiny_model("qwen2")
    report = audit(model, [MEM1], "dense")
    failed = replace(report, equivalence=replace(report.equivalence, passed=False, problems=("call 0: broken",)))
    assert failed.passed is False
    text = StringIO()
    print_audit(failed, Console(file=text, width=120))
    assert "NOT EQUIVALENT" in text.getvalue()
    assert "call 0: broken" in text.getvalue()
