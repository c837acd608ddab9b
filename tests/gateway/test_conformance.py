"""An installed conformance suite, llm-comply, against the gateway's three wire formats, with a scripted engine.

It checks answers and events against the published schemas and their order. To write the report that is committed:

    python tests/gateway/test_conformance.py > tests/results/llm-comply.txt
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the program; pytest has it

from scripted import Scripted, serving
from transformers import AutoTokenizer

TOKENIZERS = Path(__file__).parents[3] / "shared" / "tokenizers"
FORMATS = ("openai-chat", "anthropic", "open-responses")
IMAGE = "models here read text alone; an image is a 400 that says so"
EXPECTED = {  # ids that fail, with the reason
    "chat-image-input": IMAGE,
    "anth-image-input": IMAGE,
    "image-input": IMAGE,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco"}}\n</tool_call>'

pytestmark = pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="needs the real tokenizers of ../shared/tokenizers")


def results(store: Path) -> dict[str, list[dict]]:
    """The suite's results for each format, as it prints them."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZERS / "smollm2-135m")
    tokenizer.chat_template = (TOKENIZERS / "qwen2.5-coder-0.5b" / "chat_template.jinja").read_text()
    engine = Scripted(lambda request: CALL if request.grammar else "Hello to you.", tokenizer, max_length=4096)
    found = {}
    with serving(engine, store, model="scripted", token="secret") as url:
        for form in FORMATS:
            key = ["--auth-header", "x-api-key", "--no-bearer"] if form == "anthropic" else []
            command = [
                sys.executable,
                "-m",
                "llm_comply.cli",
                "--format",
                form,
                "-u",
                f"{url}/v1",
                "-k",
                "secret",
                *key,
            ]
            command += ["-m", "scripted", "-H", f"x-memopd-episode:{form}", "--json"]
            run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            found[form] = json.loads(run.stdout)["results"]
    return found


def test_only_what_is_expected_fails(tmp_path):
    pytest.importorskip("llm_comply")
    everything = [one for some in results(tmp_path).values() for one in some]
    assert len(everything) >= 31
    failed = {one["id"]: one.get("errors", []) for one in everything if one["status"] == "failed"}
    assert failed.keys() == EXPECTED.keys(), failed
    assert all("HTTP 400" in errors[0] for errors in failed.values()), failed


def main() -> None:
    with tempfile.TemporaryDirectory() as store:
        for form, some in results(Path(store)).items():
            print(f"{form}: {sum(one['status'] == 'passed' for one in some)} of {len(some)} passed")
            for one in some:
                about = EXPECTED.get(one["id"], "NOT EXPECTED") if one["status"] == "failed" else ""
                notes = [about] if about else [*one.get("errors", []), *one.get("warnings", [])]
                print(f"  {one['status']:8} {one['id']}" + "".join(f"  ({note})" for note in notes))


if __name__ == "__main__":
    main()
