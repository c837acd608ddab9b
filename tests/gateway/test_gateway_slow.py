"""Proofs that take minutes: a hundred kills, the order of system calls, a full disk, twenty thousand calls.

As a program, it is a gateway with a real engine of tiny weights:  test_gateway_slow.py STORE PORT
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import httpx
import pytest
from gateway_parts import MODEL, client, tokenizer, until, user
from test_gateway_crash import PARTS, SESSIONS, Session, free_port, process

from memopd import http
from memopd.engine.local import LocalEngine
from memopd.gateway.episodes import Ledger
from memopd.gateway.server import create_app
from memopd.record import read_episodes

KILLS = 100
CLIENTS, CALLS, TURNS = 96, 20_000, 10


class OnDisk:
    """The calls that a store has, read as a restart reads them. Parts never change, so each is read once."""

    def __init__(self, store: Path) -> None:
        self.store, self.parts, self.calls = store, set(), {}

    def read(self) -> dict[str, Counter]:
        for part in set(self.store.glob("*.parquet")) - self.parts:
            self.parts.add(part)
            self.calls |= {episode.id: _ids(episode.calls) for episode in read_episodes(part)}
        ledger = Ledger(self.store)
        still_open = {name: _ids([r.call for r in ledger.calls(name)]) for name in ledger._unfinished}
        ledger.close()
        return self.calls | still_open


def _ids(calls) -> Counter:
    return Counter((tuple(call.prompt.tolist()), tuple(call.completion.tolist())) for call in calls)


def missing(answered, on_disk) -> list:
    """The acknowledged calls that are not on disk exactly once."""
    return [name for name, read, sampled in answered if on_disk.get(name, Counter())[tuple(read), tuple(sampled)] != 1]


# ---- a hundred kills


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing(tmp_path):
    rng, on_disk = random.Random(0), OnDisk(tmp_path)
    answered, rewarded, begun = [], set(), time.monotonic()
    for kill in range(KILLS):
        with process(tmp_path, free_port()) as (url, server):
            agent, http_client = client(url, "none"), httpx.Client(timeout=30)
            sessions = [Session(agent, http_client, url, f"k{kill}-s{n}", 2 + n % 3) for n in range(SESSIONS)]
            for session in sessions:
                session.start()
            wanted = rng.randint(1, 200)
            while sum(len(session.answers) for session in sessions) < wanted:
                time.sleep(0.001)
            server.send_signal(signal.SIGKILL)
            for session in sessions:
                session.join(60)
                assert not session.is_alive()
        new = [answer for session in sessions for answer in session.answers]
        answered += new
        rewarded |= {episode for session in sessions for episode in session.rewarded}
        assert not missing(new, on_disk.read()), f"kill {kill}"
    with process(tmp_path, free_port()) as (url, server):
        assert httpx.get(f"{url}/health").json()["finished"] >= len(rewarded)
        server.send_signal(signal.SIGTERM)  # a stop writes all finished episodes to the store
        server.wait(60)
    found = on_disk.read()
    assert not missing(answered, found)
    assert rewarded <= set(on_disk.calls)
    assert max(max(calls.values()) for calls in found.values()) == 1
    took = time.monotonic() - begun
    print(f"{KILLS} kills, {len(answered):,} answers, {len(rewarded):,} rewards, 0 missing, 0 twice, {took:.0f} s")


# ---- what happens before an answer


JOURNAL = re.compile(r"\bwrite\(\d+<[^>]*/journal/\d+\.journal>, ")
RECORD = re.compile(r'\\"call\\":\\"(e\d+)\\",\\"number\\":(\d+)|\\"finish\\":\\"(e\d+)\\"')
SYNCED = re.compile(r"fdatasync(?:\(\d+<[^>]*\.journal>\)| resumed>\)) += 0")
ANSWER = re.compile(r'\\"id\\":\\"(?:chat)?cmpl-(e\d+)-(\d+)\\"(?=.*\\"finish_reason\\":\\"(?:stop|length)\\")')
REWARD = re.compile(r'\\"episode\\":\\"(e\d+)\\",\\"finished\\":true')


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_the_kernel_sees_fdatasync_before_every_answer(tmp_path):
    """strace prints a call when it begins and when it returns: an answer that begins to leave before the fdatasync of
    its record has returned fails the test."""
    trace, store = tmp_path / "trace", tmp_path / "store"
    calls = "trace=write,fdatasync,sendto,sendmsg,writev"
    strace = ["strace", "-f", "-y", "-s", "1000000", "-e", calls, "-e", "signal=none", "-o", trace]
    with process(store, free_port(), [*strace, sys.executable, PARTS]) as (url, server), ThreadPoolExecutor(16) as pool:

        def session(n):
            for turn in range(10):
                stream = client(url, f"e{n}", timeout=120).chat.completions.create(
                    model=MODEL, messages=[user(f"question {turn}")], stream=bool(turn % 2)
                )
                list(stream)
            return httpx.post(f"{url}/episodes/e{n}/reward", json={"reward": 1.0}, timeout=120).status_code

        try:
            assert set(pool.map(session, range(16))) == {200}
        finally:  # the gateway's parent is strace
            os.kill(int(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()), signal.SIGKILL)
    written, durable, answered = set(), set(), []
    for line in trace.read_text(errors="replace").splitlines():
        if JOURNAL.search(line):
            written |= {match for match in RECORD.findall(line)}
        elif SYNCED.search(line):
            durable |= written
        elif " send" in line:
            answers = [(*found, "") for found in ANSWER.findall(line)] + [("", "", e) for e in REWARD.findall(line)]
            assert set(answers) <= durable, line[:200]
            answered += answers
    assert len(answered) == len(set(answered)) == 16 * 11
    assert set(answered) == durable
    syncs = sum(bool(SYNCED.search(line)) for line in trace.read_text(errors="replace").splitlines())
    print(f"{len(answered)} answers, each after the fdatasync of its record; {syncs} fdatasync")


# ---- a full disk


@contextmanager
def small_disk(folder: Path, size: str):
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path):
    """Sessions go on until the first 503. Every answer they got is there, and a restart with room goes on."""
    disk = tmp_path / "disk"
    with small_disk(disk, "4m"):
        (disk / "ballast").write_bytes(b"x" * (3 << 20))
        store = disk / "store"
        with process(store, free_port()) as (url, server):
            agent, http_client = client(url, "none"), httpx.Client(timeout=30)
            sessions = [Session(agent, http_client, url, f"s{n}", 50) for n in range(SESSIONS)]
            for session in sessions:
                session.start()
            for session in sessions:
                session.join(300)
                assert not session.is_alive()
            health = httpx.get(f"{url}/health")
            assert health.status_code == 503
            assert "No space left on device: nothing more is recorded until a restart" in health.json()["status"]
            refused = httpx.post(f"{url}/episodes/new/v1/completions", json={"model": MODEL, "prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_recorded")
            assert server.poll() is None
        assert shutil.disk_usage(disk).free < 64 << 10
        answered = [answer for session in sessions for answer in session.answers]
        rewarded = {episode for session in sessions for episode in session.rewarded}
        (disk / "ballast").unlink()
        on_disk = OnDisk(store)
        found = on_disk.read()
        assert not missing(answered, found)
        with process(store, free_port()) as (url, _):
            assert httpx.get(f"{url}/health").status_code == 200
            name = answered[-1][0] if answered[-1][0] not in rewarded else "another"
            assert client(url, name).completions.create(model=MODEL, prompt="go on").choices[0].text
        unconfirmed = sum(sum(calls.values()) for calls in found.values()) - len(answered)
    print(f"{len(answered):,} answers before the disk was full, 0 missing, {unconfirmed} more recorded")


# ---- many calls


def state_of(process_id: int) -> dict[str, int]:
    """Resident memory (KiB), threads and open files of a process."""
    status = Path(f"/proc/{process_id}/status").read_text()
    memory, threads = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) for name in ("VmRSS", "Threads"))
    return {"memory": memory, "threads": threads, "files": len(os.listdir(f"/proc/{process_id}/fd"))}


@pytest.mark.slow
def test_memory_threads_and_files_stay_flat_over_20000_calls(tmp_path):
    """The second half of the calls may not cost more than the first: neither threads nor files, nor 1 KiB per call."""
    samples: list[tuple[int, dict[str, int]]] = []
    done = 0

    # Made before any connects: a client that stalls for long between connecting and sending is cut off.
    clients = [httpx.AsyncClient(timeout=120, verify=False) for _ in range(CLIENTS)]

    async def one(url: str, n: int) -> None:
        nonlocal done
        async with clients[n] as http_client:
            for call in range(CALLS // CLIENTS + (n < CALLS % CLIENTS)):
                episode = f"{url}/episodes/c{n}-{call // TURNS}"
                body = {"model": MODEL, "prompt": f"the town {n} {call}", "max_tokens": 1 + call % 2}
                (await http_client.post(f"{episode}/v1/completions", json=body)).raise_for_status()
                done += 1
                if call % TURNS == TURNS - 1:
                    (await http_client.post(f"{episode}/reward", json={"reward": 1.0})).raise_for_status()

    async def everyone(url: str, process_id: int) -> None:
        running = asyncio.gather(*(one(url, n) for n in range(CLIENTS)))
        while not running.done():
            samples.append((done, state_of(process_id)))
            await asyncio.sleep(0.25)
        await running

    begun = time.monotonic()
    with process(tmp_path, free_port(), [sys.executable, __file__]) as (url, server):
        asyncio.run(everyone(url, server.pid))
        took = time.monotonic() - begun
        until(lambda: httpx.get(f"{url}/health").json()["running"] == 0)
    assert done == CALLS
    parts = [[s for calls, s in samples if a <= calls / CALLS < a + 0.25] for a in (0, 0.25, 0.5, 0.75)]
    most = {name: [max(s[name] for s in part) for part in parts] for name in ("memory", "threads", "files")}
    memory = [mean(s["memory"] for s in part) for part in parts]
    growth = (memory[3] - memory[2]) * 1024 / (CALLS / 4)  # bytes per call, between two quarters
    numbers = "; ".join(f"{name} {values}" for name, values in most.items())
    print(f"{CALLS:,} calls, {CLIENTS} clients, {took:.0f} s; most in each quarter: {numbers}; {growth:.0f} bytes/call")
    # The engine's thread comes and goes, and pools start threads when first needed: growth is what stays to the end.
    assert most["threads"][3] <= max(most["threads"][:3])
    assert max(most["files"][2:]) <= max(most["files"][:2]) + 4  # a part that is being written, a segment
    assert growth < 1024


def _serve(store: Path, port: int) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=336, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    engine = LocalEngine(Qwen2ForCausalLM(config).eval(), tokenizer(), slots=CLIENTS)
    http.server(create_app(engine, store, model=MODEL, store_delay=1.0), host="127.0.0.1", port=port).run()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
