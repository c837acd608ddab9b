"""Run by an interpreter that has vLLM: our side of its weight transfer, up to where tensors would move."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
import vllm.distributed.weight_transfer.nccl_engine as nccl

from memopd.engine.vllm_transfer import Transfer

said = []


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        said.append([self.path, None])
        self.answer({"world_size": 2})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said.append([self.path, json.loads(body) if body else None])
        self.answer({})

    def answer(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


# What needs GPUs: the meeting of the processes, the broadcast, the wait for it.
nccl.open_trainer_endpoint = lambda info: said.append(["meet", info.world_size]) or object()
nccl.packed_nccl_broadcast_producer = lambda iterator, **_: said.append(["send", [name for name, _ in iterator]])
nccl.NCCLTrainerWeightTransferEngine._post_send_sync = lambda self: None

server = HTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
transfer = Transfer(torch.nn.Linear(3, 2), "127.0.0.1")
for _ in range(2):
    transfer(f"http://127.0.0.1:{server.server_port}")
json.dump(said, sys.stdout)
