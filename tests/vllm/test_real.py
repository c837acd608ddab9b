"""One real vLLM server: ids and log-probabilities as recorded, weight updates that are seen to have arrived."""

import copy
import json
import threading
import time

import httpx
import numpy as np
import pytest
from real_vllm import prompts_of, scorer

from memopd.engine import Request
from memopd.engine.vllm import weights as weight_updates
from memopd.engine.vllm.engine import StaleWeights, VllmEngine, rounding_tolerance
from memopd.types import Sampling, StopReason


def requests_of(tokenizer, count, seed=0, stop=(), **sampling):
    sampling = Sampling(**{"max_tokens": 32, **sampling})
    return [Request(p, 1000 * seed + i, sampling, stop) for i, p in enumerate(prompts_of(tokenizer, count, seed))]


def pairs_of(requests, completions):
    return [(r.prompt, c.tokens) for r, c in zip(requests, completions, strict=True)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_recorded_ids(engine, first, temperature):
    """A wrong id on the way in or out would show as a wrong log-probability. Bound: docs/architecture.md, verify."""
    _, model, tokenizer = first
    requests = requests_of(tokenizer, 48, temperature=temperature)
    started = time.monotonic()
    completions = engine.generate(requests)
    seconds = time.monotonic() - started
    pairs = pairs_of(requests, completions)
    exact = np.concatenate(scorer(copy.deepcopy(model).double())(pairs, temperature))
    alone = np.concatenate(scorer(model)(pairs, temperature))
    sampled = np.concatenate([c.logprobs for c in completions])
    assert len(sampled) > 1000
    own, server = np.abs(alone - exact).max(), np.abs(sampled - exact).max()
    print(f"\ntemperature {temperature}: {len(sampled)} tokens in {seconds:.1f} s; from float64 the server is "
          f"{server:.1e}, transformers {own:.1e}")  # fmt: skip
    assert server <= 2 * own
    wrong = [(p, np.roll(c, 1)) for p, c in pairs if len(c) > 1]  # the check can fail
    right = np.concatenate([c.logprobs for c in completions if len(c.tokens) > 1])
    assert np.abs(np.concatenate(scorer(model)(wrong, temperature)) - right).max() > 1


def test_the_server_reads_the_ids_we_send(server, first):
    tokenizer = first[2]
    for prompt in prompts_of(tokenizer, 8):
        payload = {"token_ids": prompt.tolist(), "sampling_params": {"max_tokens": 1}, "return_token_ids": True}
        answer = httpx.post(f"{server.url}/inference/v1/generate", json=payload).json()
        assert answer["prompt_token_ids"] == prompt.tolist()


def test_top_k_and_top_p_are_in_the_log_probabilities(engine, first):
    _, model, tokenizer = first
    import torch

    requests = requests_of(tokenizer, 8, top_k=3)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        path = torch.tensor([[*request.prompt.tolist(), *completion.tokens.tolist()]])
        with torch.no_grad():
            logits = model(path).logits[0, len(request.prompt) - 1 : -1]
        kept = torch.where(logits >= logits.topk(3).values[:, -1:], logits, -torch.inf).log_softmax(-1)
        expected = kept.gather(1, path[0, len(request.prompt) :, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    narrow = engine.generate(requests_of(tokenizer, 8, top_p=0.01))
    assert all(np.abs(c.logprobs).max() == 0 for c in narrow)  # one token is left


def test_a_grammar_is_followed_and_the_likeliest_tokens_come_with_the_ids(engine, first):
    """vLLM's structured outputs read the grammars that the gateway makes."""
    tokenizer = first[2]
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}
    schema |= {"additionalProperties": False}
    grammar = f'start: call | output\noutput: %json {json.dumps(schema)}\ncall: "<a>" output "</a>"\n'
    prompts = prompts_of(tokenizer, 6)
    requests = [Request(p, i, Sampling(max_tokens=64), grammar=grammar) for i, p in enumerate(prompts)]
    for completion in engine.generate(requests):
        said = tokenizer.decode(completion.tokens, skip_special_tokens=True)
        assert json.loads(said.removeprefix("<a>").removesuffix("</a>"))["n"] in (1, 22, 333)
        assert completion.stop is StopReason.STOP
    (listed,) = engine.generate([Request(prompts[0], 1, Sampling(max_tokens=8), top_logprobs=3)])
    (plain,) = engine.generate([Request(prompts[0], 1, Sampling(max_tokens=8))])
    assert listed.tokens.tolist() == plain.tokens.tolist()
    for token, logprob, top in zip(listed.tokens, listed.logprobs, listed.top, strict=True):
        assert [p for _, p in top] == sorted((p for _, p in top), reverse=True)
        assert 3 <= len(top) <= 4  # the sampled token is among them
        assert dict(top)[int(token)] == pytest.approx(logprob)


def test_a_seed_gives_the_same_ids_alone_and_among_others(engine, first):
    tokenizer = first[2]
    requests = requests_of(tokenizer, 32, seed=1)
    together = engine.generate(requests)
    alone = [engine.generate([r])[0] for r in requests[:6]]
    assert [c.tokens.tolist() for c in alone] == [c.tokens.tolist() for c in together[:6]]
    other = engine.generate([Request(requests[0].prompt, 77, requests[0].sampling)])[0]
    assert other.tokens.tolist() != together[0].tokens.tolist()
    for seed in (-1, 2**64 - 1):  # vLLM reads -1 as none at all
        a, b = engine.generate([Request(requests[0].prompt, seed, requests[0].sampling)] * 2)
        assert a.tokens.tolist() == b.tokens.tolist()


def test_a_stop_string_inside_a_token_keeps_the_token(engine, first):
    """The ids are those of the run that nothing stopped, up to the token in which the string ends."""
    tokenizer = first[2]
    inside = across = 0
    for prompt in prompts_of(tokenizer, 12, seed=2):
        request = Request(np.append(prompt, tokenizer.encode(".")), 0, Sampling(max_tokens=64))
        free = engine.generate([request])[0]
        pieces = [tokenizer.decode([t]) for t in free.tokens]
        for i, piece in enumerate(pieces):
            if i == 0 or len(piece) < 3 or not (piece + pieces[i - 1]).isascii() or free.tokens[i] == 0:
                continue
            for stop in (piece[1:2], pieces[i - 1][-1] + piece[:1]):
                ends = [n for n in range(1, 65) if stop in tokenizer.decode(free.tokens[:n])]
                stopped = engine.generate([Request(request.prompt, request.seed, request.sampling, (stop,))])[0]
                assert stopped.tokens.tolist() == free.tokens[: ends[0]].tolist()
                np.testing.assert_allclose(stopped.logprobs, free.logprobs[: ends[0]], atol=1e-4)
                assert stopped.stop is StopReason.STOP
                cut = tokenizer.decode(stopped.tokens)
                inside += not cut.endswith(stop)
                across += stop not in tokenizer.decode(stopped.tokens[-1:])
            break
    assert inside >= 3
    assert across >= 3


def test_a_prompt_that_ends_inside_a_character_is_refused_with_stop_strings(engine, server, first):
    """vLLM would find the stop string in the prompt. Should it cease to, the refusal can go."""
    tokenizer = first[2]
    half = tokenizer.encode("é")[:1]
    prompt = [*tokenizer.encode("<search>Boro</search>"), *half]
    with pytest.raises(ValueError, match="ends inside a character"):
        engine.generate([Request(prompt, 0, Sampling(max_tokens=20), ("</search>",))])
    assert len(engine.generate([Request(prompt, 0, Sampling(max_tokens=20))])[0].tokens) > 1
    parameters = {"max_tokens": 20, "seed": 0, "stop": ["</search>"]}
    payload = {"token_ids": prompt, "sampling_params": parameters}
    (choice,) = httpx.post(f"{server.url}/inference/v1/generate", json=payload).json()["choices"]
    assert choice["stop_reason"] == "</search>"
    assert "</search>" not in tokenizer.decode(choice["token_ids"])


def test_stop_reasons(engine, first):
    tokenizer = first[2]
    whole = tokenizer.encode(".")  # prompts end with a whole character
    requests = [
        Request([*p, *whole], i, Sampling(max_tokens=100)) for i, p in enumerate(prompts_of(tokenizer, 64, seed=3))
    ]
    completions = engine.generate(requests)
    ended = [c for c in completions if c.tokens[-1] == tokenizer.eos_token_id]
    assert ended
    assert all(c.stop is StopReason.STOP for c in ended)  # the end token is kept, and has a log-probability
    assert all(c.stop is StopReason.LENGTH and len(c.tokens) == 100 for c in completions if c not in ended)
    again = [Request(r.prompt, r.seed, r.sampling, ("<|end|>",)) for r in requests]  # it is text like any other
    assert [c.tokens.tolist() for c in engine.generate(again)] == [c.tokens.tolist() for c in completions]


def test_no_limit_means_the_end_of_the_context(engine, first):
    tokenizer = first[2]
    requests = requests_of(tokenizer, 24, max_tokens=None)
    pairs = zip(requests, engine.generate(requests), strict=True)
    lengths = [len(r.prompt) + len(c.tokens) for r, c in pairs if c.stop is StopReason.LENGTH]
    assert lengths
    assert set(lengths) == {512}


def test_ids_are_heard_as_they_come(engine, first):
    requests = requests_of(first[2], 4, seed=4)
    heard = [[] for _ in requests]
    tickets = [engine.submit(r, h.append) for r, h in zip(requests, heard, strict=True)]
    streamed = [t.completion.result(60) for t in tickets]
    assert heard == [c.tokens.tolist() for c in streamed]
    whole = engine.generate(requests)
    assert heard == [c.tokens.tolist() for c in whole]
    for a, b in zip(streamed, whole, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
        assert (a.stop, a.policy_version) == (b.stop, b.policy_version)


def test_a_cancelled_request_ends_at_the_server_too(engine, server, first):
    requests = requests_of(first[2], 8, seed=5, max_tokens=None)
    lengths = [len(c.tokens) for c in engine.generate(requests)]
    request = requests[int(np.argmax(lengths))]
    assert max(lengths) > 200
    heard, enough = [], threading.Event()

    def listen(token):
        heard.append(token)
        if len(heard) == 5:
            enough.set()

    ticket = engine.submit(request, listen)
    assert enough.wait(60)
    ticket.cancel()
    completion = ticket.completion.result(60)
    assert completion.stop is StopReason.ABORTED
    assert completion.tokens.tolist() == heard[: len(completion.tokens)]
    assert 5 <= len(completion.tokens) == len(completion.logprobs) < max(lengths)
    ticket.cancel()  # again: nothing
    for _ in range(100):
        metrics = httpx.get(f"{server.url}/metrics").text
        running = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running")]
        if running and all(float(line.rpartition(" ")[2]) == 0 for line in running):
            break
    else:
        raise AssertionError(running)


def test_an_update_is_in_the_next_batch(engine, first, second):
    """And its gap is reported. Prompts are those of before: keys and values of the old weights must be gone."""
    _, model, tokenizer = first
    path, updated = second
    requests = requests_of(tokenizer, 16, seed=6)
    before = engine.generate(requests)
    assert {c.policy_version for c in before} == {1}
    started = time.monotonic()
    engine.update(path, version=2)
    seconds = time.monotonic() - started
    with pytest.raises(ValueError, match="not verified"):
        engine.generate(requests)
    exact = scorer(copy.deepcopy(updated).double())
    tolerance = rounding_tolerance(scorer(updated), exact, pairs_of(requests, before), 1.0)
    (gap,) = engine.verify(scorer(updated), [r.prompt for r in requests], tolerance=tolerance).values()
    after = engine.generate(requests)
    assert {c.policy_version for c in after} == {2}
    pairs = pairs_of(requests, after)
    moved = weight_updates.gap(scorer(model)(pairs, 1.0), after)
    print(f"\nupdate in {seconds:.2f} s: gap {gap:.1e}, tolerance {tolerance:.1e}; old weights are {moved:.2g} away")
    assert weight_updates.gap(scorer(updated)(pairs, 1.0), after) <= tolerance < 1e-3 < moved


def test_tensors_are_written_where_the_server_reads_them(server, first, second, tmp_path):
    tokenizer = first[2]
    engine = VllmEngine([server.url], tokenizer, weights=first[0], folder=tmp_path)
    for version, model in [(1, second[1]), (2, first[1]), (3, second[1])]:
        engine.update(model.state_dict(), version)
        engine.verify(scorer(model), prompts_of(tokenizer, 4), tolerance=1e-3)
        assert [p.name for p in tmp_path.iterdir()] == [f"weights-{version}"]
    engine.close()
    engine = VllmEngine([server.url], tokenizer)  # who joins later learns from the label
    assert engine.version == 3
    assert engine.generate(requests_of(tokenizer, 1))[0].policy_version == 3
    engine.close()


def test_weights_may_come_another_way(engine, second, first):
    """As vLLM's own transfer does: a function sends them, the rest is the same."""

    def send(url):
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(second[0])}}
        assert httpx.post(f"{url}/collective_rpc", json=load).status_code == 200

    engine.update(send, version=9)
    engine.verify(scorer(second[1]), prompts_of(first[2], 4), tolerance=1e-3)
    assert engine.generate(requests_of(first[2], 1))[0].policy_version == 9


def test_weights_that_did_not_arrive_stop_the_run_by_name(engine, server, first):
    engine.update(lambda url: None, version=4)
    with pytest.raises(StaleWeights, match=f"{server.url}: stale weights: .* version 4 ") as caught:
        engine.verify(scorer(_other(first)), prompts_of(first[2], 4), tolerance=1e-3)
    assert caught.value.url == server.url
    assert caught.value.gap > 1 > caught.value.tolerance == 1e-3
    with pytest.raises(ValueError, match="not verified"):
        engine.generate(requests_of(first[2], 1))
    with pytest.raises(StaleWeights, match="nan"):  # a trainer that diverged agrees with nobody
        engine.verify(lambda pairs, _: [np.full(len(c), np.nan) for _, c in pairs], [[1, 2]], tolerance=1e-3)


def test_a_prefix_cache_that_is_kept_is_noticed(engine, first, second, monkeypatch):
    """Keys and values of old weights under new ones: the update resets them, and the check would see if it did not."""
    prompts = [np.resize(p, 300) for p in prompts_of(first[2], 4)]  # several blocks of the cache
    engine.verify(scorer(first[1]), prompts, tolerance=1e-3)

    async def keep(fleet, server):
        pass

    with monkeypatch.context() as patch:
        patch.setattr(weight_updates, "_reset_prefix_cache", keep)
        engine.update(second[0], version=2)
    with pytest.raises(StaleWeights):
        engine.verify(scorer(second[1]), prompts, tolerance=1e-3)
    engine.update(second[0], version=3)
    engine.verify(scorer(second[1]), prompts, tolerance=1e-3)


def test_an_update_waits_for_what_is_under_way(engine, first, second):
    """Every completion is of one policy: those begun before end before, those asked for later wait."""
    requests = requests_of(first[2], 16, seed=7, max_tokens=200)
    tickets = [engine.submit(r) for r in requests]
    engine.update(second[0], version=2)
    assert all(t.completion.done() for t in tickets)
    completions = [t.completion.result() for t in tickets]
    assert {c.policy_version for c in completions} == {1}
    assert weight_updates.gap(scorer(first[1])(pairs_of(requests, completions), 1.0), completions) < 1e-3


def test_weights_changed_behind_our_back_are_put_right(engine, server, first, second):
    """As when the server was restarted between two requests: its label is not ours, its answer does not count."""
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(second[0])}}
    assert httpx.post(f"{server.url}/collective_rpc", json=load).status_code == 200
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200
    httpx.post(f"{server.url}/update_weight_version", json={"new_version": "default"})
    requests = requests_of(first[2], 8, seed=8)
    completions = engine.generate(requests)
    assert weight_updates.gap(scorer(first[1])(pairs_of(requests, completions), 1.0), completions) < 1e-3
    assert {c.policy_version for c in completions} == {1}


def test_what_the_server_refuses_is_said_in_one_line(engine, server, first, tmp_path):
    tokenizer = first[2]
    with pytest.raises(ValueError, match=f"{server.url}.*maximum context length"):
        engine.generate([Request(np.ones(600, np.int32), 0)])
    with pytest.raises(ValueError, match="out of vocabulary"):
        engine.generate([Request([100_000], 0)])
    with pytest.raises(ValueError, match=r"temperature 0\.01 at the lowest"):  # vLLM would sample from another one
        engine.generate([Request([5], 0, Sampling(temperature=0.001))])
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):  # being told a wrong path kills a server
        engine.update(tmp_path, version=2)
    with pytest.raises(ValueError, match="folder"):
        engine.update({}, version=2)
    assert len(engine.generate(requests_of(tokenizer, 2))) == 2


def _other(first):
    other = copy.deepcopy(first[1])
    other.lm_head.weight.data.neg_()
    return other
