"""Other people's agents, in environments of their own, play through a real gateway in front of a scripted engine.

Each leaves an episode with the ids that the client was shown, an audit that passes, and a gradient at its tool calls.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from agents.tools import calculate
from scripted import Scripted, encode, letters, serving
from scripted_agent import SUMMARY, say, say_example
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import memopd
from memopd.record import read_episodes, write_episodes
from memopd.types import Episode

HERE = Path(__file__).parent
ENVIRONMENTS = Path(os.environ["MEMOPD_CLIENTS"])
TOKENIZER = HERE.parents[2] / "shared" / "tokenizers" / "qwen2.5-coder-0.5b"
AGENTS = {  # the episodes of each agent
    "openai": ("openai-3", ["openai_chat", "openai_chat_stream", "openai_responses", "openai_responses_stream"]),
    "anthropic": ("openai-3", ["anthropic", "anthropic_stream"]),
    "openai_agents": ("openai-3", ["agents_chat", "agents_responses"]),
    "langchain": ("openai-3", ["langchain", "langchain_summary"]),
    "smolagents": ("openai-3", ["smolagents"]),
    "mem1": ("openai-3", ["mem1_chat", "mem1_completions", "mem1_defaults"]),
    "litellm": ("openai-2", ["litellm", "litellm_stream"]),
    "verifiers": ("openai-2", ["verifiers_chat", "verifiers_messages", "verifiers_responses"]),
}
EPISODES = [episode for _, episodes in AGENTS.values() for episode in episodes]
NO_IDS = {"agents_responses", "litellm_stream", "verifiers_messages", "verifiers_responses"}  # they do not ask for ids
BYTEWISE = {"openai_chat", "anthropic"}  # sampled letter by letter: no text that is encoded again has these ids
ACTION = re.compile(r"<tool_call>.*?</tool_call>|<search>.*?</search>", re.DOTALL)

pytestmark = pytest.mark.skipif(not TOKENIZER.is_dir(), reason="needs the real tokenizers of ../shared/tokenizers")


@dataclass
class Played:
    folder: Path  # of the model, beside the store
    model: Qwen2ForCausalLM
    tokenizer: object
    said: dict[str, list[tuple[list[int], list[int]]]]  # of each episode the ids that the engine read and sampled
    errors: dict[str, str]  # of each agent that failed
    shown: dict[str, dict]  # what the agents report of each episode
    stored: dict[str, Episode]


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Played:
    """All agents at once, against one gateway."""
    folder = tmp_path_factory.mktemp("clients")
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    model = tiny_model(folder / "model", tokenizer)
    said = defaultdict(list)

    def sample(request):
        text = say(request.episode, tokenizer.decode(request.prompt.tolist()))
        ids = [*(letters if request.episode in BYTEWISE else encode)(tokenizer, text), tokenizer.eos_token_id]
        said[request.episode].append((request.prompt.tolist(), ids))
        return ids

    engine = Scripted(sample, tokenizer, model=model)
    with serving(engine, folder / "store", model="tiny") as url:
        errors, shown = run_agents(url)
        for name in said:
            httpx.post(f"{url}/episodes/{name}/reward", json={"reward": 1.0, "task": "velm"}).raise_for_status()
    return Played(folder, model, tokenizer, said, errors, shown, {e.id: e for e in read_episodes(folder / "store")})


def tiny_model(folder, tokenizer):
    """Qwen2 with the real vocabulary and random weights: its probabilities are those that the engine reports."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def run_agents(url):
    """The error of each agent that failed, and what the others print."""
    running = {}
    quiet = {"PATH": os.environ["PATH"], "NO_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    for name, (environment, _) in AGENTS.items():
        python = ENVIRONMENTS / environment / "bin" / "python"
        running[name] = subprocess.Popen(
            [python, HERE / "agents" / f"with_{name}.py", url, "tiny"],
            env=quiet, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    errors, shown = {}, {}
    for name, process in running.items():
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        if process.returncode:
            errors[name] = err
        else:
            shown |= json.loads(out.splitlines()[-1])
    return errors, shown


@pytest.mark.parametrize("agent", AGENTS)
def test_the_agent_answers_with_the_result_of_its_tools(played, agent):
    assert not played.errors.get(agent), played.errors[agent]
    for episode in AGENTS[agent][1]:
        assert "126 km" in played.shown[episode]["answer"]
        assert len(played.stored[episode].calls) >= 2


@pytest.mark.parametrize("episode", EPISODES)
def test_recorded_ids_are_those_of_the_engine_and_of_the_answers(played, episode):
    recorded = [(c.prompt.tolist(), c.completion.tolist()) for c in played.stored[episode].calls]
    assert [prompt for prompt, _ in recorded] == [prompt for prompt, _ in played.said[episode]]
    for (_, sampled), (_, said) in zip(recorded, played.said[episode], strict=True):
        assert sampled == said[: len(sampled)]
        assert len(sampled) == len(said) or episode.startswith("mem1")  # which stops at a stop string
    if episode in BYTEWISE:  # ids of a text that was encoded again would differ
        assert all(
            sampled[:-1] != encode(played.tokenizer, played.tokenizer.decode(sampled[:-1])) for _, sampled in recorded
        )
    shown = [(prompt, sampled) for prompt, sampled in played.shown[episode]["ids"]]
    assert shown == ([] if episode in NO_IDS else recorded)


@pytest.mark.parametrize("episode", EPISODES)
def test_replay_has_a_gradient_at_every_token_of_the_tool_calls(played, episode):
    calls = list(played.stored[episode].calls)
    actions = [action_tokens(played.tokenizer, call) for call in calls]
    acting = [n for n, at in enumerate(actions) if len(at) > 5]
    assert acting
    found = gradients(played.model, calls, actions)
    assert all(found[n] > 0 for n in acting)
    calls[acting[0]] = replace(calls[acting[0]], trainable=False)
    assert gradients(played.model, calls, actions)[acting[0]] == 0


def action_tokens(tokenizer, call) -> np.ndarray:
    """The places in the completion of the tokens that are part of a tool call."""
    ends = [len(tokenizer.decode(call.completion[: n + 1].tolist())) for n in range(len(call.completion))]
    spans = [match.span() for match in ACTION.finditer(tokenizer.decode(call.completion.tolist()))]
    return np.array([n for n, end in enumerate(ends) if any(a < end <= b for a, b in spans)], int)


def gradients(model, calls, actions) -> list[float]:
    """For each call the least gradient over its tool-call tokens: at the token's own logit, and of any weight."""
    model.zero_grad()
    logprobs = memopd.packed_logprobs(model, calls)
    chosen = [lp[at] if len(lp) else lp for lp, at in zip(logprobs, actions, strict=True)]
    (-torch.cat(chosen).sum()).backward()
    weights = min(float(p.grad.abs().max()) for p in model.parameters())
    return [min(weights, float((1 - lp.detach().exp()).min())) if len(lp) else 0.0 for lp in chosen]


def test_the_audit_passes(played):
    """On the last episode of every agent: the vocabulary is Qwen's, so that an audit of all would take minutes."""
    store = played.folder / "audited"
    write_episodes(store, [played.stored[episodes[-1]] for _, episodes in AGENTS.values()])
    audit = ["audit", store, "--model", played.folder / "model", "--json"]
    ended = subprocess.run([sys.executable, "-m", "memopd.cli", *audit], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert report["passed"]
    assert report["episodes"] == len(AGENTS)


def test_a_summary_is_marked_and_not_trained_on(played):
    calls = played.stored["langchain_summary"].calls
    summaries = [call for call in calls if call.purpose == "summary"]
    assert summaries
    assert not any(call.trainable for call in summaries)
    assert all(call.trainable for call in calls if call.purpose != "summary")
    last = played.tokenizer.decode(calls[-1].prompt.tolist())
    assert SUMMARY in last


def test_the_example_records_an_agent_that_summarises(played, tmp_path):
    engine = Scripted(lambda request: say_example(played.tokenizer.decode(request.prompt.tolist())), played.tokenizer)
    python = ENVIRONMENTS / "openai-3" / "bin" / "python"
    with serving(engine, tmp_path, model="tiny") as url:
        example = [python, HERE.parents[1] / "examples" / "tool_agent.py", url, "tiny"]
        ended = subprocess.run(example, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("6 episodes, mean reward 1.00\n"), ended.stdout
    episodes = list(read_episodes(tmp_path))
    assert {len(e.calls) for e in episodes} == {4}  # look-ups, sum, summary, answer
    assert {e.calls[2].purpose for e in episodes} == {"summary"}
    assert {len([e for e in episodes if e.task_id == task]) for task in {e.task_id for e in episodes}} == {2}


def test_the_calculator_reads_arithmetic_and_runs_nothing():
    values = ["90 + 3 * 12", "(1 + 2) * -3 / 4", "2", "1 +", "()", "__import__('os')", "1 2", "1 / 0", "", "(" * 99_999]
    no = "This is no expression."
    assert [calculate(value) for value in values] == ["126", "-2.25", "2", no, no, no, no, no, no, no]
