"""kill -9 of a gateway with 64 sessions: every answered call is on disk, none twice, and a restart serves at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from gateway_parts import MODEL, client, user

from memopd.gateway.episodes import Ledger
from memopd.record import read_episodes

SESSIONS = 64
PARTS = Path(__file__).with_name("gateway_parts.py")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def process(store: Path, port: int, program: Sequence[str | Path] = (sys.executable, PARTS)):
    """A gateway in a process of its own. It is killed, not stopped."""
    url = f"http://127.0.0.1:{port}"
    paths = [str(PARTS.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]  # tests/scripted.py
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [*program, store, str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            end = time.monotonic() + 300  # a busy machine takes long to import torch
            while server.poll() is None:
                assert time.monotonic() < end
                try:
                    assert httpx.get(f"{url}/health").status_code == 200
                    break
                except httpx.TransportError:
                    time.sleep(0.02)
            yield url, server
        finally:
            server.send_signal(signal.SIGKILL)
            complaints = server.stderr.read()
    assert "Traceback" not in complaints


class Session(threading.Thread):
    """Makes calls until the server dies. Every answer that it received must be on disk."""

    def __init__(self, agent: openai.OpenAI, http: httpx.Client, url: str, name: str, calls: int) -> None:
        super().__init__(daemon=True)
        self.agent, self.http, self.url, self.name, self.calls = agent, http, url, name, calls
        self.answers: list[tuple[str, list[int], list[int]]] = []  # episode, ids read, ids sampled
        self.rewarded: list[str] = []

    def run(self) -> None:
        extra = {"return_token_ids": True}
        try:
            for n in range(10**6):
                episode = f"{self.name}-{n}"
                create = self.agent.with_options(base_url=f"{self.url}/episodes/{episode}/v1").chat.completions.create
                for t in range(self.calls):
                    messages = [user(f"question {t} of {episode}")]
                    if t % 2:
                        answer = create(model=MODEL, messages=messages, extra_body=extra)
                        ids = answer.model_extra["prompt_token_ids"], answer.choices[0].model_extra["token_ids"]
                    else:
                        first, *_, last = create(model=MODEL, messages=messages, stream=True, extra_body=extra)
                        ids = first.model_extra["prompt_token_ids"], last.choices[0].model_extra["token_ids"]
                    self.answers.append((episode, *ids))
                answer = self.http.post(f"{self.url}/episodes/{episode}/reward", json={"reward": 1.0})
                if answer.status_code == 200:
                    self.rewarded.append(episode)
        except (openai.OpenAIError, httpx.HTTPError, KeyError, TypeError, ValueError):
            pass  # the server is gone; a stream without its last chunk was not answered


@pytest.mark.parametrize("answers", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_kill_9_with_64_sessions(tmp_path, answers):
    with process(tmp_path, free_port()) as (url, server):
        agent, http = client(url, "none"), httpx.Client(timeout=30)
        sessions = [Session(agent, http, url, f"s{n}", calls=2 + n % 3) for n in range(SESSIONS)]
        for session in sessions:
            session.start()
        while sum(len(session.answers) for session in sessions) < answers:
            time.sleep(0.001)
        server.send_signal(signal.SIGKILL)
        for session in sessions:
            session.join(60)
            assert not session.is_alive()
    answered = [answer for session in sessions for answer in session.answers]
    rewarded = {episode for session in sessions for episode in session.rewarded}
    assert len(answered) >= answers

    with process(tmp_path, free_port()) as (url, _):  # it serves at once, the open episodes go on
        name = sessions[0].answers[-1][0]
        if not httpx.get(f"{url}/episodes/{name}").json()[
            "finished"
        ]:  # it may be, although no client got the confirmation
            assert client(url, name).completions.create(model=MODEL, prompt="go on").choices[0].text
        for episode in sorted(rewarded)[:3]:
            with pytest.raises(openai.ConflictError):
                client(url, episode).completions.create(model=MODEL, prompt="go on")
        assert httpx.get(f"{url}/health").json()["finished"] >= len(rewarded)

    on_disk: dict[str, list[tuple[list[int], list[int]]]] = defaultdict(list)
    ledger = Ledger(tmp_path)
    ledger.compact()
    for name in {episode for episode, _, _ in answered}:
        on_disk[name] += [(r.call.prompt.tolist(), r.call.completion.tolist()) for r in ledger.calls(name)]
    ledger.close()
    stored = list(read_episodes(tmp_path)) if list(tmp_path.glob("*.parquet")) else []  # each part is checked whole
    assert rewarded <= {episode.id for episode in stored}
    for episode in stored:
        assert not on_disk[episode.id]
        on_disk[episode.id] = [(call.prompt.tolist(), call.completion.tolist()) for call in episode.calls]
    for name, read, sampled in answered:
        assert on_disk[name].count((read, sampled)) == 1
    for calls in on_disk.values():
        assert len({tuple(read) for read, _ in calls}) == len(calls)  # each question was asked once
    assert not [path for path in tmp_path.rglob("*") if path.suffix not in (".parquet", ".journal", ".tmp", "")]
    print(f"{len(answered)} answers, {len(rewarded)} episodes finished, {len(stored)} stored")


def test_sigterm_stops_in_order(tmp_path):
    with process(tmp_path, free_port()) as (url, server):
        assert client(url, "e1").completions.create(model=MODEL, prompt="x").choices[0].text
        assert httpx.post(f"{url}/episodes/e1/reward", json={"reward": 1}).status_code == 200
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait(20) in (0, -signal.SIGTERM)
    assert [episode.id for episode in read_episodes(tmp_path)] == ["e1"]
