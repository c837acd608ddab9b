"""What the local engine records is what the model gives for each call alone, whoever ran beside it."""

import numpy as np
import pytest
import torch
from calls import mem1_calls

import memopd
from memopd.engine import Request
from memopd.engine.local import LocalEngine
from memopd.engine.local import engine as local_module
from memopd.engine.local import passes as passes_module
from memopd.engine.local.cache import Cache, Match, Slots
from memopd.engine.local.sampler import Uniforms
from memopd.models.adapters import activate, adapter_weights, add_adapter, new_config, tuner_layers
from memopd.score import head_of
from memopd.types import Call, Sampling, StopReason
from memopd.verify.equivalence import alone_states, at_precision, sampled_tokens
from memopd.verify.families import FAMILIES, VOCABULARY, tiny_model

REFUSED = ("qwen3-next", "mamba2", "bloom")


def requests(count, seed=0, longest=100, most=30, **sampling):
    """Prompts of random lengths; every third starts as one of three others do."""
    rng = np.random.default_rng(seed)
    shared = [rng.integers(3, VOCABULARY, longest // 2) for _ in range(3)]
    made = []
    for i in range(count):
        prompt = rng.integers(3, VOCABULARY, rng.integers(1, longest // 2))
        if i % 3 == 0:
            prompt = np.concatenate([shared[rng.integers(3)], prompt])
        limit = int(rng.integers(1, most + 1))
        made.append(Request(prompt.astype(np.int32), i, Sampling(**sampling, max_tokens=limit), episode=f"e{i}"))
    return made


def calls_of(some, completions):
    return [Call(r.prompt, c.tokens, c.logprobs, c.stop) for r, c in zip(some, completions, strict=True)]


def engine(model, slots=64, **rest):
    return LocalEngine(model, None, slots=slots, **{"max_length": 256, **rest})


@torch.no_grad()
def alone_logprobs(model, calls, temperature=1.0):
    logits = head_of(model).logits(alone_states(model, calls)).double() / temperature
    return logits.log_softmax(-1).gather(1, sampled_tokens(calls, logits.device)[:, None])[:, 0]


def gaps(model, calls, temperature=1.0):
    """(recorded, packed, tolerance): how far each is from the calls alone in float64, and how far it may be: twice as
    far as the calls alone in float32 are."""
    exact = alone_logprobs(at_precision(model, torch.float64), calls, temperature)
    alone = alone_logprobs(model, calls, temperature)
    rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    tolerance = 2 * max((alone - exact).abs().max(), rounding)
    with torch.no_grad():
        packed = torch.cat(memopd.packed_logprobs(model, calls, temperature=temperature, budget=4096)).double()
    recorded = torch.as_tensor(np.concatenate([c.logprobs for c in calls]))
    return *(float((x - exact).abs().max()) for x in (recorded, packed)), float(tolerance)


def test_recorded_log_probabilities_are_the_trainers():
    """500 calls of random lengths, through 64 slots, in float32: against each call alone, and packed."""
    model = tiny_model("qwen2")
    some = requests(500)
    calls = calls_of(some, engine(model).generate(some))
    recorded, packed, tolerance = gaps(model, calls)
    assert recorded <= tolerance
    assert packed <= tolerance
    assert sum(len(c.completion) for c in calls) > 5000


@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_temperature_is_part_of_the_distribution(temperature):
    model = tiny_model("qwen2")
    some = requests(40, temperature=temperature)
    recorded, _, tolerance = gaps(model, calls_of(some, engine(model).generate(some)), temperature)
    assert recorded <= tolerance


@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.startswith(REFUSED)])
def test_families(family):
    model = tiny_model(family)
    some = requests(40, longest=60)
    recorded, _, tolerance = gaps(model, calls_of(some, engine(model, slots=8, max_length=100).generate(some)))
    assert recorded <= tolerance


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.startswith(REFUSED)])
def test_what_cannot_be_sampled_from_is_refused(family):
    with pytest.raises(ValueError, match="the local engine cannot sample from it; serve it with vLLM"):
        engine(tiny_model(family))


# ---- the check above can fail -------------------------------------------------------------------------------------


def off_by_one(monkeypatch):
    """Positions of sampled tokens one too far."""
    length = local_module.SampledSequence.length.fget
    monkeypatch.setattr(local_module.SampledSequence, "length", property(lambda s: length(s) + 1))


def wrong_slot(monkeypatch):
    """A copied prefix one token longer than what the two prompts share."""
    match = Slots.match

    def longer(self, prompt):
        found = match(self, prompt)
        extra = bool(found.ready) and found.ready < min(len(prompt) - 1, self.ready[found.slot])
        return Match(found.slot, found.ready + extra, found.coming)

    monkeypatch.setattr(Slots, "match", longer)


def stale_slot(monkeypatch):
    """Prompts that enter do not write their keys: the slot's last owner's stay."""
    write = Cache.write

    def forgetful(self, layer, rows, key, value):
        if layer in self.layers and len(rows) > 40:
            return self.layers[layer]
        return write(self, layer, rows, key, value)

    monkeypatch.setattr(Cache, "write", forgetful)


def unmasked(monkeypatch):
    """Sequences that share a call read past their own end."""
    group = passes_module.group

    def open(slots, lengths, room, dtype):
        made = group(slots, lengths, room, dtype)
        made.masks = [None] * len(made.masks)
        return made

    monkeypatch.setattr(passes_module, "group", open)


@pytest.mark.parametrize("mistake", [off_by_one, wrong_slot, stale_slot, unmasked])
def test_mistakes_are_found(mistake, monkeypatch):
    model = tiny_model("qwen2")
    some = requests(100)
    mistake(monkeypatch)
    recorded, _, tolerance = gaps(model, calls_of(some, engine(model, slots=16).generate(some)))
    assert recorded > 10 * tolerance


def test_mistakes_would_be_found_by_nothing_else():
    """The same requests without a mistake."""
    model = tiny_model("qwen2")
    some = requests(100)
    recorded, _, tolerance = gaps(model, calls_of(some, engine(model, slots=16).generate(some)))
    assert recorded <= tolerance


# ---- independent of what runs beside --------------------------------------------------------------------------------


@torch.no_grad()
def flips(model, some, one, other):
    """(differing draws, compared draws). Every difference must be a draw within rounding of a boundary: past the first
    one the two sequences are different states, and are not compared."""
    differing = compared = 0
    precise = at_precision(model, torch.float64)
    for request, a, b in zip(some, one, other, strict=True):
        both = min(len(a.tokens), len(b.tokens))
        apart = np.flatnonzero(a.tokens[:both] != b.tokens[:both])
        if not len(apart):
            assert len(a.tokens) == len(b.tokens)
            compared += both
            continue
        at = int(apart[0])
        ids = torch.as_tensor(np.concatenate([request.prompt, a.tokens[:at]]))[None].long()
        cumulative = precise(input_ids=ids).logits[0, -1].softmax(-1).cumsum(0).numpy()
        draw = Uniforms(request.seed).until(at + 1)[at]
        assert abs(cumulative - draw).min() < 1e-5, f"{request.episode}: token {at} differs, and not by rounding"
        differing, compared = differing + 1, compared + at + 1
    return differing, compared


def test_same_seed_same_tokens_at_any_batch_size():
    model = tiny_model("qwen2")
    some = requests(150)
    differing, compared = flips(model, some, engine(model, slots=1).generate(some), engine(model).generate(some))
    assert compared > 2000
    assert differing <= 1


@pytest.mark.slow
def test_same_seed_same_tokens_at_any_batch_size_on_many_draws():
    """Under 1 in 10,000 differ."""
    model = tiny_model("qwen2")
    model.generation_config.eos_token_id = None  # completions as long as asked for
    some = requests(2000, most=100)
    differing, compared = flips(model, some, engine(model, slots=1).generate(some), engine(model).generate(some))
    print(f"{differing} of {compared:,} draws differ between 1 and 64 slots")
    assert compared > 90_000
    assert differing * 10_000 < compared


def test_an_episode_does_not_depend_on_what_ran_beside_it():
    model = tiny_model("qwen2")
    some = requests(60)
    whole = engine(model, slots=16).generate(some)
    backwards = engine(model, slots=16).generate(some[::-1])[::-1]
    others = [*requests(50, seed=1), *some[:20], *requests(50, seed=2)]
    beside = engine(model, slots=16).generate(others)[50:70]
    for one, other in ((whole, backwards), (whole[:20], beside)):
        assert flips(model, some[: len(other)], one, other)[0] <= 1


def test_with_other_weights_slots_are_given_out_as_if_new():
    """A resumed run has a new engine: were the slots left in another order, the same calls would round otherwise."""
    model = tiny_model("qwen2")
    one = engine(model, slots=24)
    one.generate(requests(13, seed=1))
    assert one._slots.oldest(10) != list(range(10))
    with one.updating(1):
        pass
    assert one._slots.oldest(10) == list(range(10))


def test_another_seed_samples_otherwise():
    model = tiny_model("qwen2")
    one, other = (engine(model).generate([Request(np.arange(5, 20), s, Sampling(max_tokens=30))])[0] for s in (0, 1))
    assert one.tokens.tolist() != other.tokens.tolist()


def test_draws_follow_the_distribution():
    """10,000 first tokens of one prompt: frequencies against probabilities, by chi-square."""
    model = tiny_model("qwen2")
    prompt = np.arange(5, 45)
    made = engine(model).generate([Request(prompt, s, Sampling(max_tokens=1)) for s in range(10_000)])
    counts = np.bincount([c.tokens[0] for c in made], minlength=VOCABULARY)
    with torch.no_grad():
        p = model(input_ids=torch.as_tensor(prompt)[None]).logits[0, -1].double().softmax(-1).numpy()
    likely = p > 1e-3
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = 10_000 * np.append(p[likely], p[~likely].sum())
    square = ((observed - expected) ** 2 / expected).sum()
    assert square < 2 * len(observed)  # the mean is one less than their number, the deviation its square root


# ---- limits, ends, weights ----------------------------------------------------------------------------------------


def test_limits_and_ends():
    model = tiny_model("qwen2")
    made = engine(model, max_length=40).generate([Request(np.arange(5, 35), s) for s in range(50)])
    assert {c.stop for c in made} == {StopReason.LENGTH, StopReason.STOP}
    for c in made:
        ended = c.tokens[-1] == 2  # the end-of-sequence token, which is kept
        assert c.stop == (StopReason.STOP if ended else StopReason.LENGTH)
        assert ended or len(c.tokens) == 10  # up to max_length
        assert 2 not in c.tokens[:-1]
    assert [len(c.tokens) for c in engine(model).generate([Request(np.arange(5, 9), 0, Sampling(max_tokens=1))])] == [1]


def test_prefixes_are_computed_once(monkeypatch):
    """A group of eight rollouts of one task, then their second calls."""
    model = tiny_model("qwen2")
    rows = []
    write = Cache.write
    monkeypatch.setattr(Cache, "write", lambda s, layer, r, k, v: (rows.append(len(r)), write(s, layer, r, k, v))[1])
    one = engine(model, slots=8)
    rows.clear()
    one.generate([Request(np.arange(60) % 50 + 5, s, Sampling(max_tokens=1)) for s in range(8)])
    layers = 3
    assert sum(rows) == layers * (60 + 7)  # one prompt, and the last token of each other
    rows.clear()
    one.generate([Request(np.append(np.arange(60) % 50 + 5, [7, s]), s, Sampling(max_tokens=1)) for s in range(8)])
    assert sum(rows) == layers * 8 * 2  # the two new ones of each


def test_weights_trained_in_place_are_noticed():
    model, seen = tiny_model("qwen2"), []
    one, calls = engine(model), [Request(c.prompt, 0, Sampling(max_tokens=20)) for c in mem1_calls(0, q=40)]
    for version in (0, 1, 2):
        made = one.generate(calls)
        recorded, _, tolerance = gaps(model, calls_of(calls, made))
        assert recorded <= tolerance
        assert {c.policy_version for c in made} == {version}
        seen.append(made[0].tokens.tolist())
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.05)
        one.version = version + 1
    assert seen[0] != seen[1] != seen[2]
    made = one.generate(calls)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    calls = [Request(c.prompt, 0, Sampling(max_tokens=20)) for c in calls]
    recorded, _, tolerance = gaps(model, calls_of(calls, one.generate(calls)))  # nobody said that they changed
    assert recorded <= tolerance


def test_another_active_adapter_is_noticed():
    """It changes neither the address nor the version counter of any weight."""
    model, some = tiny_model("qwen2"), [Request(c.prompt, 0, Sampling(max_tokens=20)) for c in mem1_calls(0, q=40)]
    one = engine(model)

    def check():
        made, fresh = one.generate(some), engine(model).generate(some)
        assert [c.tokens.tolist() for c in made] == [c.tokens.tolist() for c in fresh]
        assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(made, fresh, strict=True))
        return made[0].tokens.tolist()

    bare = check()
    for name in ("a", "b"):  # to an engine that is there already
        add_adapter(model, new_config(4, 8, ("all-linear",)), name, trainable=False)
        with torch.no_grad():
            for key, weight in adapter_weights(model, name).items():
                if ".lora_B." in key:
                    weight.normal_(0, 0.3)
    seen = [bare]
    for name in ("a", "b"):
        activate(model, name)
        seen.append(check())
    assert seen[0] != seen[1] != seen[2]
    for layer in tuner_layers(model):
        layer.enable_adapters(False)
    assert check() == bare
    for layer in tuner_layers(model):
        layer.enable_adapters(True)
    activate(model, "b")
    assert check() == seen[2]
    activate(model, None)
    assert check() == bare


def test_with_another_adapter_the_layers_are_not_searched_again(monkeypatch):
    """Nothing is searched unless weights changed: finding the layers takes as long as a pass of a small model."""
    model, found = tiny_model("qwen2"), []
    search = local_module._tuned_layers
    monkeypatch.setattr(local_module, "_tuned_layers", lambda m: found.append(search(m)) or found[-1])
    add_adapter(model, new_config(4, 8, ("q_proj",)), "a", trainable=False)
    one = engine(model)
    for name in ("a", None, "a", "a"):
        activate(model, name)
        one.generate(requests(2))
    assert [len(layers) for layers in found] == [len(tuner_layers(model))]


def test_stale_keys_would_be_found(monkeypatch):
    model = tiny_model("qwen2")
    one, calls = engine(model), [Request(c.prompt, 0, Sampling(max_tokens=20)) for c in mem1_calls(0, q=40)]
    one.generate(calls)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.05)
    monkeypatch.setattr(Slots, "invalidate", lambda self: None)
    recorded, _, tolerance = gaps(model, calls_of(calls, one.generate(calls)))
    assert recorded > 10 * tolerance


def test_update_copies_a_state_dict():
    model, trained = tiny_model("qwen2"), tiny_model("qwen2", seed=1)
    one, some = engine(model), requests(5)
    one.generate(some)
    one.update(trained.state_dict(), version=7)
    made, expected = one.generate(some), engine(trained).generate(some)
    assert [c.tokens.tolist() for c in made] == [c.tokens.tolist() for c in expected]
    assert made[0].policy_version == one.version == 7
    with pytest.raises(ValueError, match="lacks 1 of the model's parameters"):
        one.update({k: v for k, v in trained.state_dict().items() if k != "model.norm.weight"}, version=8)
    wrong = {**tiny_model("qwen2", seed=2).state_dict(), "model.norm.weight": torch.ones(3)}
    with pytest.raises(ValueError, match=r"another model: model\.norm\.weight has shape \(3,\) for"):
        one.update(wrong, version=8)
    assert one.version == 7
    assert [c.tokens.tolist() for c in one.generate(some)] == [c.tokens.tolist() for c in expected]


def test_the_model_is_given_back_as_it_was():
    model = tiny_model("qwen2")
    model.train()
    model.model.layers[1].eval()  # a trainer's choice
    model.set_attn_implementation("eager")
    modes = [m.training for m in model.modules()]
    one = engine(model)
    one.generate(requests(3))
    assert model.config._attn_implementation == "eager"
    assert [m.training for m in model.modules()] == modes
    model(input_ids=torch.arange(5)[None]).logits.sum().backward()  # and its parameters still learn
    assert all(p.grad is not None for p in model.parameters())


def test_top_k_and_top_p():
    model = tiny_model("qwen2")
    prompt = np.arange(5, 45)
    with torch.no_grad():
        p = model(input_ids=torch.as_tensor(prompt)[None]).logits[0, -1].double().softmax(-1).numpy()
    order = np.argsort(-p)
    nucleus = order[: int(np.searchsorted(p[order].cumsum(), 0.5)) + 1]
    one = engine(model)
    for sampling, kept in (
        (Sampling(top_k=3, max_tokens=1), order[:3]),
        (Sampling(top_p=0.5, max_tokens=1), nucleus),
        (Sampling(top_k=1, top_p=0.9, max_tokens=1), order[:1]),
        (Sampling(temperature=1e-30, max_tokens=1), order[:1]),
    ):
        plain = Sampling(max_tokens=1)  # beside requests of another kind
        made = one.generate([Request(prompt, s // 2, plain if s % 2 else sampling) for s in range(600)])[::2]
        assert {int(c.tokens[0]) for c in made} == set(kept.tolist())
        for c in made:
            expected = np.log(p[c.tokens[0]] / p[kept].sum())
            assert c.logprobs[0] == pytest.approx(expected, abs=2e-5)
