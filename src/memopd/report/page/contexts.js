// The two columns of the viewer: what a call read, and what a flattened history would have contained instead.

const KINDS = {
  prefix: "Stable prefix", memory: "Memory", observation: "Observation", response: "Response", context: "Context",
};
const LONG = 420; // characters of a block before it is folded

// Decodes spans of an episode's flattened history.
class Reader {
  constructor(run, episode) {
    this.words = run.vocabulary;
    this.flat = episode.flat;
  }

  word(id) {
    return this.words && this.words[id] !== undefined ? this.words[id] : `⟨${id}⟩`;
  }

  ids(piece) {
    return piece.ids || this.flat.slice(piece.flat, piece.flat + piece.n);
  }

  text(piece) {
    return this.ids(piece).map((id) => this.word(id)).join("");
  }

  sampled(call) {
    return this.flat.slice(call.begin, call.begin + call.sampled);
  }
}

function size(piece) {
  return piece.ids ? piece.ids.length : piece.n;
}

function total(pieces) {
  return pieces.reduce((sum, piece) => sum + size(piece), 0);
}

function span(start, n) {
  return n === 1 ? `position ${start}` : `positions ${start} to ${start + n - 1}`;
}

function block(kind, title, meta, text, { fold = LONG, gone = false } = {}) {
  const body = el(gone ? "del" : "div", { class: "text" }, text.replace(/^\n+/, "")); // an empty first line carries no information
  const node = el("div", { class: `block ${kind}` },
    el("div", { class: "head" }, el("b", {}, title), el("span", {}, meta)), body);
  if (text.length > fold) {
    body.classList.add("folded");
    node.append(el("button", { type: "button", class: "more", click: (event) => {
      const folded = body.classList.toggle("folded");
      event.target.textContent = folded ? "show all" : "fold";
    } }, "show all"));
  }
  return node;
}

function origin(piece, of) {
  const from = known(piece.source) ? ` ${of} call ${piece.source}` : "";
  return `${KINDS[piece.kind] || piece.kind}${from}`;
}

function readColumn(call, t, reader, wrote) {
  const blocks = [];
  let dropped = call.dropped.length ? droppedBlock(call, reader) : null;
  for (const piece of call.read) {
    if (piece.kind !== "prefix" && dropped) {
      blocks.push(dropped);
      dropped = null;
    }
    const rewritten = piece.flat === null;
    const title = piece.kind === "memory" ? `Memory kept${known(piece.source) ? ` from call ${piece.source}` : ""}${rewritten ? ", rewritten" : ""}`
      : piece.kind === "observation" ? `Observation${known(piece.source) ? `: the result of call ${piece.source}'s action` : ""}` : KINDS[piece.kind];
    const fold = piece.kind === "prefix" ? 200 : 2000;
    blocks.push(block(piece.kind, title, `${count(size(piece), "token")}, ${span(piece.at, size(piece))}`, reader.text(piece), { fold }));
  }
  if (dropped) blocks.push(dropped);
  return el("div", { class: "column read" },
    el("h4", {}, "What this call read"),
    el("p", { class: "says" }, t === 0 ? `${count(call.prompt, "token")}: the task, and nothing else yet.`
      : `${count(call.prompt, "token")}. ${call.dropped.length ? `${count(total(call.dropped), "token")} of the call before ${total(call.dropped) === 1 ? "was" : "were"} dropped: the agent has only what it wrote down.` : "Nothing of the call before has been dropped."}`),
    blocks, wrote);
}

function droppedBlock(call, reader) {
  const parts = call.dropped.map((piece) => block(`${piece.kind} gone`, `Dropped: ${origin(piece, "of").toLowerCase()}`,
    count(size(piece), "token"), reader.text(piece), { fold: 160, gone: true }));
  return el("div", { class: "drops" }, parts);
}

function flattenedColumn(call, t, reader, state) {
  const blocks = call.flattened.map((piece) => {
    const here = span(piece.flat, size(piece));
    const moved = piece.at !== null && piece.at !== piece.flat;
    const [mark, meta] = piece.at === null ? ["unseen", `${here}: not in what the call read`]
      : moved ? ["moved", `${here}, but at ${piece.at} in the call`] : ["", `${here}, as in the call`];
    return block(`${piece.kind} ${mark}`, origin(piece, "of"), `${count(size(piece), "token")}, ${meta}`, reader.text(piece), { fold: 200 });
  });
  const unseen = total(call.flattened.filter((piece) => piece.at === null));
  const rewritten = total(call.read.filter((piece) => piece.flat === null));
  const same = unseen === 0 && call.moved === 0 && rewritten === 0;
  const words = same ? [t === 0 ? "The same: nothing has been dropped yet." : "The same: nothing has been dropped so far, so flattening is right here."] : [
    `${count(call.begin, "token")} instead of ${call.prompt.toLocaleString("en")}. `,
    unseen ? `The agent did not see ${unseen.toLocaleString("en")} of them. ` : "",
    call.moved ? `${call.moved.toLocaleString("en")} are at another position. ` : "",
    rewritten ? `${rewritten.toLocaleString("en")} that it saw, in rewritten text, are missing. ` : "",
    `A token sampled at position ${call.prompt} would be scored at ${call.begin}, in a state that never occurred.`];
  return el("div", { class: "column flattened" },
    el("h4", {}, "What a flattened history would have contained"),
    el("p", { class: "says" }, words), state === "persistent" ? el("p", { class: "says warn" }, "In this run the teacher read this column, so its divergences belong to these states.") : null,
    blocks);
}
