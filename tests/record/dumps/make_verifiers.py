"""Write verifiers/traces.jsonl and verifiers/records.jsonl with verifiers' own training client, graph and writer.

pip install verifiers==0.4.0
python tests/record/dumps/make_verifiers.py TOKENIZER

TOKENIZER is a folder with HuggingFaceTB/SmolLM2-135M-Instruct's tokenizer. A model is not needed: the server below says
what it is told to, where vLLM's /inference/v1/generate would sample. Everything else is as in a training run.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from renderers.base import load_tokenizer
from verifiers.v1 import graph
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.episode import EnvInfo, Episode, GroupInfo
from verifiers.v1.semantic import ParentLink
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, ModelCall, Trace, TraceTask
from verifiers.v1.types import SamplingConfig, SystemMessage, UserMessage
from verifiers.v1.utils.trace_store import TRACES_FILE, write_episode

HERE = Path(__file__).parent / "verifiers"
MODEL = sys.argv[1]
TOKENIZER = load_tokenizer(MODEL)
REPLIES: list[str] = []  # what the server samples next
SENT: list[tuple[list[int], list[int]]] = []  # what it read and sampled: the test compares the import with this


class Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ids = TOKENIZER.encode(REPLIES.pop(0), add_special_tokens=False)
        SENT.append((body["token_ids"], ids))
        content = [{"token": f"token_id:{id}", "logprob": -1 / (3 + k)} for k, id in enumerate(ids)]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        self.answer({"request_id": f"r{len(SENT)}", "choices": [choice]})

    def do_GET(self) -> None:
        self.answer({"data": [{"id": MODEL, "max_model_len": 2048}]})

    def answer(self, value: dict) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


async def turn(trace: Trace, client: TrainClient, prompt: list, says: str) -> int:
    """One model call, as verifiers' interception server makes and records it."""
    REPLIES.append(says + "<|im_end|>")
    pending = graph.prepare_turn(trace, prompt)
    sampling = SamplingConfig(temperature=1.0, max_tokens=64)
    response = await client.get_response(ChatDialect(), {"model": MODEL}, sampling, turn=pending)
    node = pending.commit(response)
    trace.calls.append(ModelCall(node=node, sampling=sampling, finish_reason=response.finish_reason))
    return node


def new_trace(id: str, task: TraceTask, **agent: object) -> Trace:
    return Trace(id=id, task=task, agent=AgentInfo(config=AgentConfig(), **agent))


async def play(client: TrainClient) -> list[Episode]:
    task = TraceTask(type="Task", data=TaskData(idx=0, prompt="Who wrote it?"), key="task-7")
    system, user = SystemMessage(content="Answer."), UserMessage(content="Who wrote it?")

    # Three calls on a growing history, then one on a history rewritten into notes; a rejected compaction beside it.
    long = new_trace("long", task)
    history: list = [system, user]
    for says, observed in (("search: author", "It is by Ann."), ("search: Ann", "Ann Bell.")):
        node = await turn(long, client, history, says)
        history = [*history, long.nodes[node].message, UserMessage(content=observed)]
    await turn(long, client, history, "notes: Ann Bell")
    rejected = await turn(long, client, [*history, UserMessage(content="Summarise.")], "a summary")
    long.nodes[rejected].semantic_parents.append(ParentLink(node=rejected - 1, type="compaction_attempt"))
    await turn(long, client, [system, UserMessage(content="Who wrote it? Notes: Ann Bell")], "Ann Bell")
    long.record_reward("right", 1.0, weight=0.5)
    long.record_reward("brief", 0.25)

    # Two agents in one episode; the second one is not trained.
    solver = new_trace("solver", task, name="solver")
    await turn(solver, client, [system, user], "Bob")
    solver.record_reward("right", 0.0)
    judge = new_trace("judge", task, name="judge", trainable=False)
    await turn(judge, client, [UserMessage(content="Is it Bob?")], "no")
    for trace in (long, solver, judge):
        trace.stop("agent_completed")
        trace.ok = True
    env = EnvInfo(id="made")
    return [
        Episode(id="e0", env=env, task=task, traces=[long], group=GroupInfo(id="g0"), ok=True),
        Episode(id="e1", env=env, task=task, traces=[solver, judge], ok=True),
    ]


def main() -> None:
    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = TrainClientConfig(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key_var="NONE")
    episodes = asyncio.run(play(TrainClient(config)))
    server.shutdown()
    HERE.mkdir(exist_ok=True)
    (HERE / TRACES_FILE).unlink(missing_ok=True)
    for episode in episodes:
        write_episode(HERE, episode)
    (HERE / "records.jsonl").write_text(json.dumps(episodes[0].traces[0].to_record()) + "\n")
    (HERE / "calls.json").write_text(json.dumps(SENT))


main()
