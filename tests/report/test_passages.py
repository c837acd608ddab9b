"""What the page's script finds in a text, run by node: roles, and the definitions, calls and results of tools."""

import json
import shutil
import subprocess

import pytest

from memopd.report.page import part

FIND = '{"type": "function", "function": {"name": "find", "parameters": {"name": {"type": "string"}}}}'
QWEN = (
    "<|im_start|>system\nwithin <tools></tools> tags:\n<tools>\n"
    f"{FIND}\n</tools>\n"
    'return <tool_call>\n{"name": <function-name>}\n</tool_call><|im_end|>\n<|im_start|>user\nWhere is user<|im_end|>\n'
    '<|im_start|>assistant\n<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "find", \n</tool_call>'
    "<|im_end|>\n<|im_start|>user\n<tool_response>\nin <tools>[1]</tools>\n</tool_response><|im_end|>\n"
)
LLAMA = (
    "<|start_header_id|>user<|end_header_id|>\n\nuser\nasks<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "find", "parameters": {"text": "a } \\" {"}} and more<|eot_id|>'
    "<|start_header_id|>ipython<|end_header_id|>\n\n[1, 2]<|eot_id|>"
)
MISTRAL = (
    '[AVAILABLE_TOOLS][{"function": {"name": "find"}}][/AVAILABLE_TOOLS]'
    '[TOOL_CALLS][{"name": "find"}]</s>[TOOL_RESULTS]{}[/TOOL_RESULTS]'
)
CUT_OFF = '<tool_call>\n{"name": "find", "arg'

FOUND = {
    QWEN: [
        ("role", "system"),
        ("Tool definitions: find", FIND),
        ("role", "user"),
        ("role", "assistant"),
        ("Tool call: find", '{"name": "find", "arguments": {}}'),
        ("Tool call: find (not valid JSON)", '{"name": "find",'),
        ("role", "user"),
        ("Tool result", "in <tools>[1]</tools>"),
    ],
    LLAMA: [
        ("role", "user"),
        ("role", "assistant"),
        ("Tool call: find", '{"name": "find", "parameters": {"text": "a } \\" {"}}'),
        ("role", "ipython"),
        ("Tool result", "[1, 2]"),
    ],
    MISTRAL: [
        ("Tool definitions: find", '[{"function": {"name": "find"}}]'),
        ("Tool call: find", '[{"name": "find"}]'),
        ("Tool result", "{}"),
    ],
    CUT_OFF: [("Tool call: find (not valid JSON)", '{"name": "find", "arg')],
    "no tools, only <tools></tools>": [],
}  # fmt: skip


def test_roles_and_tools_are_found():
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here: apt-get install nodejs")
    script = f"""{part("passages.js")}
    const texts = JSON.parse(require("fs").readFileSync(0, "utf8"));
    const special = /<\\|[a-z_]+\\|>|<\\/s>/g;
    const shown = (text) => marks(text, [...text.matchAll(special)].map((m) => [m.index, m.index + m[0].length]))
      .map((m) => (m.kind === "role" ? ["role", text.slice(m.start, m.end)] : [m.label, text.slice(...m.body).trim()]));
    console.log(JSON.stringify(texts.map(shown)));
    """
    done = subprocess.run(
        [node, "-e", script], input=json.dumps(list(FOUND)), capture_output=True, text=True, check=True
    )
    for text, found in zip(FOUND, json.loads(done.stdout), strict=True):
        assert [tuple(mark) for mark in found] == FOUND[text], text
