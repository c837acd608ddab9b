"""Real vLLM servers that die, come back with old weights, or cannot take new ones."""

import logging
import threading
import time

import numpy as np
import pytest
from real_vllm import free_port, make_model, scorer, serving, wait_until_up

from memopd.engine import Request
from memopd.engine.vllm import weights as weight_updates
from memopd.engine.vllm.engine import StaleWeights, VllmEngine
from memopd.types import Sampling

pytestmark = pytest.mark.slow  # each starts servers of its own


def calls(tokenizer, episodes, turns, tokens):
    """Requests as a rollout makes them: `turns` one after another in each episode."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, len(tokenizer), n).astype(np.int32) for n in rng.integers(20, 150, episodes)]
    return [
        [Request(prompt, 100 * e + t, Sampling(max_tokens=tokens), episode=f"e{e}") for t in range(turns)]
        for e, prompt in enumerate(prompts)
    ]


def test_a_server_killed_during_a_rollout_loses_and_doubles_nothing(first, second, caplog):
    """Forty episodes of four calls each at two servers. One is killed amid them and comes back, with the weights it was
    started with. Every call is answered once, by the policy in its record; the returned server is brought up to date
    before it gets requests."""
    path, _, tokenizer = first
    trained, model = second
    caplog.set_level(logging.INFO)
    port = free_port()
    with serving(path) as one, serving(path, port) as two:
        wait_until_up(one, two)
        engine = VllmEngine([one.url, two.url], tokenizer, weights=trained, version=5)
        gaps = engine.verify(scorer(model), [np.arange(1, 60), np.arange(1, 9)], tolerance=1e-3)
        assert set(gaps) == {one.url, two.url}
        episodes = calls(tokenizer, episodes=40, turns=4, tokens=60)
        expected = [c.tokens.tolist() for turns in episodes for c in engine.generate(turns)]

        recorded = {}
        lock = threading.Lock()

        def run(turns):
            """An episode thread of a rollout: a call, its record, the next call."""
            for t, request in enumerate(turns):
                completion = engine.generate([request])[0]
                with lock:
                    assert (request.episode, t) not in recorded
                    recorded[request.episode, t] = completion

        threads = [threading.Thread(target=run, args=(turns,), daemon=True) for turns in episodes]
        for thread in threads:
            thread.start()
        victim = engine._fleet.servers[1]
        while len(recorded) < 30 or victim.outstanding < 5:
            time.sleep(0.001)
        interrupted = victim.outstanding
        two.kill()
        for thread in threads:
            thread.join(300)
        assert sorted(recorded) == sorted((turns[0].episode, t) for turns in episodes for t in range(4))
        assert any(two.url in r.message and "down" in r.message for r in caplog.records)

        together = [recorded[turns[0].episode, t] for turns in episodes for t in range(4)]
        pairs = [(r.prompt, c.tokens) for r, c in zip([r for turns in episodes for r in turns], together, strict=True)]
        assert weight_updates.gap(scorer(model)(pairs, 1.0), together) < 1e-3
        assert {c.policy_version for c in together} == {5}
        # The seed decides, not the server. Batches differ, so a draw within rounding of a boundary may flip.
        flips = sum(c.tokens.tolist() != e for c, e in zip(together, expected, strict=True))
        print(f"\n{interrupted} of {len(together)} calls interrupted; {flips} differ from those of an undisturbed run")
        assert flips <= 2

        with serving(path, port) as back:
            wait_until_up(back)
            limit = time.monotonic() + 60
            while not all(s.down_since is None for s in engine._fleet.servers):
                assert time.monotonic() < limit
                time.sleep(0.1)
            requests = [r for turns in episodes[:10] for r in turns]
            completions = engine.generate(requests)
            assert {c.policy_version for c in completions} == {5}
            pairs = [(r.prompt, c.tokens) for r, c in zip(requests, completions, strict=True)]
            assert weight_updates.gap(scorer(model)(pairs, 1.0), completions) < 1e-3
            assert "POST /inference/v1/generate" in back.log.read_text().partition("update_weight_version")[2]
            engine.close()


def test_the_only_server_is_waited_for(first):
    path, _, tokenizer = first
    port = free_port()
    requests = [r for turns in calls(tokenizer, 8, 1, tokens=300) for r in turns]
    with serving(path, port) as only:
        wait_until_up(only)
        engine = VllmEngine([only.url], tokenizer)
        heard = []
        tickets = [engine.submit(requests[0], heard.append), *(engine.submit(r) for r in requests[1:])]
        while len(heard) < 3:
            time.sleep(0.01)
        only.kill()
        told = list(heard)
        with serving(path, port):
            completions = [t.completion.result(240) for t in tickets]
            assert [c.stop for c in completions].count("aborted") == 0  # one seed, one server, the same way again
            assert completions[0].tokens.tolist() == heard
            assert heard[: len(told)] == told
        engine.close()


def test_tied_embeddings_that_vllm_on_cpu_leaves_behind_are_caught(tmp_path):
    """vLLM 0.32 on CPU reloads the embedding and keeps the old output head."""
    _, tokenizer = make_model(tmp_path / "old", seed=0, tied=True)
    new, _ = make_model(tmp_path / "new", seed=1, tied=True)
    with serving(tmp_path / "old") as server:
        wait_until_up(server)
        engine = VllmEngine([server.url], tokenizer)
        engine.update(tmp_path / "new", version=1)
        with pytest.raises(StaleWeights, match=server.url) as caught:
            engine.verify(scorer(new), [np.arange(1, 60)], tolerance=1e-3)
        print(f"\n{caught.value}")
        engine.close()


def test_a_server_with_the_wrong_flags_is_refused(first):
    path, _, tokenizer = first
    with serving(path, None, "--logprobs-mode", "raw_logprobs") as raw:
        wait_until_up(raw)
        with pytest.raises(ValueError, match=f"{raw.url} .*--logprobs-mode processed_logprobs"):
            VllmEngine([raw.url], tokenizer)
