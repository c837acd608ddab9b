// Passages: decoded ids, and what stands out in them: special tokens, roles, and the definitions, calls and results of
// tools. Everything here is text: a passage that a model wrote is searched for patterns, never parsed as HTML.

const ROLE = /^(system|developer|user|assistant|model|tool|function|ipython|environment)(?=\n|$)/;
const TOOL_ROLES = new Set(["tool", "function", "ipython", "environment"]);
const TOOLS = [ // kind, opening, closing; without a closing, the next special token ends it
  ["definitions", "<tools>", "</tools>"], ["definitions", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
  ["call", "<tool_call>", "</tool_call>"], ["call", "[TOOL_CALLS]", null], ["call", "<|python_tag|>", null],
  ["result", "<tool_response>", "</tool_response>"], ["result", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
];

const NEAR = 24; // tokens

// The roles and tools of a text, in order: [{ kind, start, end, body: [start, end], label }]. `specials`: [start, end] of
// every special token. `role`: who speaks where no special token has said it yet.
function marks(text, specials, role = null) {
  const found = [], messages = [{ role, start: 0 }];
  specials.forEach(([, end], i) => {
    const next = i + 1 < specials.length ? specials[i + 1][0] : text.length;
    const said = ROLE.exec(text.slice(end, Math.min(next, end + 20)));
    if (!said) return;
    const after = end + said[1].length;
    messages.push({ role: said[1], start: next === after && i + 1 < specials.length ? specials[i + 1][1] : after }); // <|end_header_id|>
    found.push({ kind: "role", start: end, end: after });
  });
  const stop = (from, most) => Math.min(most, ...specials.map(([start]) => start).filter((start) => start >= from));
  messages.forEach((message, i) => {
    const end = i + 1 < messages.length ? messages[i + 1].start : text.length;
    const tools = TOOLS.flatMap((tool) => toolsOf(text, tool, message, end, stop));
    if (message.role === "assistant") tools.push(...bareCalls(text, message.start, stop(message.start, end)));
    if (!tools.length && TOOL_ROLES.has(message.role)) {
      const body = [message.start + text.slice(message.start).match(/^\n*/)[0].length, stop(message.start, end)];
      if (body[0] < body[1]) tools.push({ kind: "result", start: body[0], end: body[1], body, label: "Tool result" });
    }
    found.push(...tools);
  });
  found.sort((a, b) => a.start - b.start);
  return found.filter((mark, i) => i === 0 || mark.start >= Math.max(...found.slice(0, i).map((m) => m.end)));
}

function toolsOf(text, [kind, opening, closing], message, end, stop) {
  const found = [];
  if (kind !== "definitions" && ["system", "developer"].includes(message.role)) return found; // only says how to call
  for (let start = text.indexOf(opening, message.start); start >= 0 && start < end; start = text.indexOf(opening, start + 1)) {
    const from = start + opening.length, closed = closing ? text.indexOf(closing, from) : -1;
    const until = stop(from, closed >= 0 && closed < end ? closed : end);
    const said = text.slice(from, until).trim();
    if (!said || (kind === "definitions" && !/^[[{]/.test(said))) continue; // "within <tools></tools> tags" names them only
    found.push({ kind, start, end: until === closed ? closed + closing.length : until, body: [from, until], label: toolLabel(kind, said) });
  }
  return found;
}

// Calls without tags around them, which small models write and clients accept: {"name": "...", "arguments": {...}}.
function bareCalls(text, from, end) {
  const found = [], opening = /\{\s*"name"\s*:\s*"[^"\n]{1,80}"\s*,\s*"(arguments|parameters)"\s*:/g;
  for (const { index } of text.slice(from, end).matchAll(opening)) {
    const start = from + index, until = closing(text, start, end);
    found.push({ kind: "call", start, end: until, body: [start, until], label: toolLabel("call", text.slice(start, until)) });
  }
  return found;
}

// Where the braces that open at `start` are closed again, outside of strings.
function closing(text, start, end) {
  let depth = 0, quoted = false;
  for (let at = start; at < end; at += 1) {
    const letter = text[at];
    if (quoted && letter === "\\") at += 1;
    else if (letter === '"') quoted = !quoted;
    else if (!quoted && (letter === "{" || letter === "}")) {
      depth += letter === "{" ? 1 : -1;
      if (!depth) return at + 1;
    }
  }
  return end;
}

function toolLabel(kind, said) {
  const names = [...new Set([...said.matchAll(/"name"\s*:\s*"([^"]{1,80})"|<function=([\w.-]{1,80})>/g)].map((m) => m[1] || m[2]))];
  if (kind === "definitions") return `Tool definitions${names.length ? `: ${names.join(", ")}` : ""}`;
  if (kind === "result") return "Tool result";
  let broken = false;
  try {
    if (/^[[{]/.test(said)) JSON.parse(said);
  } catch {
    broken = true;
  }
  return `Tool call${names.length ? `: ${names[0]}` : ""}${broken ? " (not valid JSON)" : ""}`;
}

// What an agent was asked: the last message of the user in its first prompt.
function lastUser(passage) {
  const role = passage.marks.findLast((mark) => mark.kind === "role" && passage.text.slice(mark.start, mark.end) === "user");
  if (!role) return "";
  const start = passage.specials.find(([from]) => from === role.end)?.[1] ?? role.end;
  const end = passage.specials.find(([from]) => from >= start)?.[0] ?? passage.text.length;
  return passage.text.slice(start, end).trim();
}

class Passage {
  constructor(reader, ids, role = null) {
    this.starts = [];
    this.specials = [];
    const words = [];
    let at = 0;
    for (const id of ids) {
      const word = reader.word(id);
      this.starts.push(at);
      words.push(word);
      if (reader.special.has(id)) this.specials.push([at, at + word.length]);
      at += word.length;
    }
    this.starts.push(at);
    this.text = words.join("");
    this.marks = marks(this.text, this.specials, role);
  }

  // The nodes of tokens `from` to `to`. `find`: a pattern to highlight, or null. `begins`: whether a block begins here.
  nodes(from, to, find, begins = true) {
    let at = this.starts[from];
    const end = this.starts[to], made = [];
    while (begins && at < end && this.text[at] === "\n") at += 1; // an empty first line carries no information
    for (const mark of this.marks) {
      const [start, stop] = [Math.max(at, mark.start), Math.min(end, mark.end)];
      if (start >= stop) continue;
      const tool = mark.kind !== "role";
      made.push(this.plain(at, start - (tool && start > at && this.text[start - 1] === "\n" ? 1 : 0), find));
      made.push(tool ? this.tool(mark, start, stop, find) : el("b", { class: "role" }, this.text.slice(start, stop)));
      at = stop + (tool && stop < end && this.text[stop] === "\n" ? 1 : 0); // a box has an end of line of its own
    }
    made.push(this.plain(at, end, find));
    return made.flat();
  }

  tool(mark, start, stop, find) {
    const [open, close] = mark.body.map((at) => Math.max(start, Math.min(stop, at)));
    const faint = (from, to) => (from < to ? el("span", { class: "special" }, this.text.slice(from, to)) : null);
    const said = [faint(start, open), this.plain(open, close, find), faint(close, stop)];
    if (mark.kind === "definitions") {
      return el("details", { class: "tool definitions", open: hits(find, this.text.slice(open, close)) },
        el("summary", {}, mark.label), el("div", { class: "said" }, said));
    }
    return el("div", { class: `tool ${mark.kind}` }, el("div", { class: "label" }, mark.label),
      clamped(el("div", { class: "said" }, said), close - open > 1200 && !hits(find, this.text.slice(open, close))));
  }

  // Text in which special tokens are faint and what was searched for is marked.
  plain(from, to, find) {
    const made = [];
    let at = from;
    for (const [start, end] of this.specials) {
      if (start < at || end > to) continue;
      made.push(...highlighted(this.text.slice(at, start), find), el("span", { class: "special" }, this.text.slice(start, end)));
      at = end;
    }
    return at < to ? [...made, ...highlighted(this.text.slice(at, to), find)] : made;
  }

  // The characters that a reader sees of these tokens: definitions of tools are folded.
  visible(from, to) {
    const [start, end] = [this.starts[from], this.starts[to]];
    return this.marks.filter((m) => m.kind === "definitions").reduce((n, m) => n - Math.max(0, Math.min(end, m.end) - Math.max(start, m.start)), end - start);
  }

  // The token near here with which a line begins, if there is one, so that a fold does not begin within a sentence.
  line(token) {
    const found = this.starts.slice(token, token + NEAR).findIndex((start) => this.text[start - 1] === "\n");
    return found < 0 ? token : token + found;
  }

  // The first token from here on, or the last up to here, at which no tool is cut in two.
  outside(token, onward = true) {
    const at = this.starts[token], mark = this.marks.find((m) => m.start < at && at < m.end);
    if (!mark) return token;
    return onward ? this.starts.findIndex((start) => start >= mark.end) : this.starts.findLastIndex((start) => start <= mark.start);
  }
}

function hits(find, text) {
  return Boolean(find) && text.search(find) >= 0;
}

function highlighted(text, find) {
  if (!find || !text) return text ? [text] : [];
  const made = [];
  let at = 0;
  for (const found of text.matchAll(find)) {
    if (!found[0]) continue;
    made.push(text.slice(at, found.index), el("mark", {}, found[0]));
    at = found.index + found[0].length;
  }
  return [...made, text.slice(at)];
}

// A long text shows its first lines, and a button for the rest.
function clamped(body, fold) {
  if (!fold) return body;
  body.classList.add("folded");
  return [body, el("button", { type: "button", class: "more", "aria-expanded": "false", click: (event) => {
    const folded = body.classList.toggle("folded");
    event.target.textContent = folded ? "show all" : "fold";
    event.target.setAttribute("aria-expanded", String(!folded));
  } }, "show all")];
}
