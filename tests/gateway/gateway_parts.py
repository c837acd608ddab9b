"""Parts for the gateway's tests: a small tokenizer, a scripted engine, and a server in a thread.

As a program, it is a server for tests that kill it:  gateway_parts.py STORE PORT
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import openai
import scripted
from scripted import serving, until

from memopd import http
from memopd.gateway.server import create_app
from memopd.world.tokenizer import train_tokenizer

__all__ = ["MODEL", "Scripted", "client", "encode", "letters", "serving", "tokenizer", "until", "user"]

MODEL = "tiny"


@cache
def tokenizer() -> Any:
    words = "the river flows past the old town and the people of the town search for the answer in the memory of it"
    return train_tokenizer([f"{words} {n} <search>{w}</search>" for n, w in enumerate(words.split())], 320)


def encode(text: str) -> list[int]:
    return scripted.encode(tokenizer(), text)


def letters(text: str) -> list[int]:
    return scripted.letters(tokenizer(), text)


class Scripted(scripted.Scripted):
    """The scripted engine, with the small tokenizer."""

    def __init__(self, say: scripted.Say, pace: float = 0.0) -> None:
        super().__init__(say, tokenizer(), pace)


def client(url: str, episode: str, token: str = "none", **settings: Any) -> openai.OpenAI:
    base = f"{url}/episodes/{episode}/v1"
    return openai.OpenAI(base_url=base, api_key=token, **{"max_retries": 0, "timeout": 30} | settings)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


if __name__ == "__main__":
    # Each answer names its prompt, so that a test can compare the records with the answers.
    app = create_app(
        Scripted(lambda request: f"the answer to {request.prompt.sum()} in {len(request.prompt)}", pace=0.001),
        Path(sys.argv[1]),
        model=MODEL,
        store_delay=0.1,
    )
    http.server(app, host="127.0.0.1", port=int(sys.argv[2])).run()
