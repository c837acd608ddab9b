// The two columns of the viewer: what a call read, and what a flattened history would have contained instead.

const KINDS = {
  prefix: "Stable prefix", memory: "Memory", observation: "Observation", response: "Response", context: "Context",
};
const LETTERS = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind[0], kind]));
const LONG = 3000; // characters of a new text before its middle is folded
const UNREAD = ": not in what the call read";
const FEW = 40; // tokens: a fold of fewer saves no lines
const HEAD = 120, TAIL = 160; // tokens that then stay in view

// An episode as the page reads it: ids from the pool of its run, pieces with names.
class Reader {
  constructor(run, episode) {
    this.pool = run.pool;
    this.vocabulary = run.vocabulary;
    this.special = new Set(run.vocabulary.special);
    this.flat = this.spans(episode.flat);
    const named = ([kind, source, n, flat, at, spans]) => ({ kind: LETTERS[kind], source, n, flat, at, spans });
    this.calls = episode.calls.map((call) => ({
      ...call, read: call.read.map(named), dropped: call.dropped.map(named), flattened: call.flattened.map(named),
    }));
  }

  spans(list) {
    const ids = [];
    for (let i = 0; i < list.length; i += 2) for (let k = 0; k < list[i + 1]; k += 1) ids.push(this.pool[list[i] + k]);
    return ids;
  }

  word(id) {
    return this.vocabulary.texts ? this.vocabulary.texts[id] : `⟨${this.vocabulary.ids[id]}⟩`;
  }

  ids(piece) {
    return piece.spans ? this.spans(piece.spans) : this.flat.slice(piece.flat, piece.flat + piece.n);
  }

  prompt(call) {
    return new Passage(this, call.read.flatMap((piece) => this.ids(piece)));
  }

  sampled(call) {
    return this.flat.slice(call.begin, call.begin + call.sampled);
  }
}

const READERS = new Map();

function readerOf(run, episode) {
  if (!READERS.has(episode)) READERS.set(episode, new Reader(run, episode));
  return READERS.get(episode);
}

function total(pieces) {
  return pieces.reduce((sum, piece) => sum + piece.n, 0);
}

function span(start, n) {
  return n === 1 ? `position ${start}` : `positions ${start} to ${start + n - 1}`;
}

function block(kind, title, meta, ...body) {
  return el("div", { class: `block ${kind}` }, el("div", { class: "head" }, el("b", {}, title), el("span", {}, meta)), body);
}

function short(passage, from, to, find, tag = "div") {
  const fold = passage.visible(from, to) > 200 && !hits(find, passage.text.slice(passage.starts[from], passage.starts[to]));
  return clamped(el(tag, { class: "text" }, passage.nodes(from, to, find)), fold);
}

// Text in view; of a long one its beginning and its end, where the question is.
function inView(passage, from, to, find) {
  const first = passage.outside(Math.min(to, from + HEAD)), last = passage.outside(Math.max(from, to - TAIL), false);
  if (passage.visible(from, to) <= LONG || first >= last) return el("div", { class: "text" }, passage.nodes(from, to, find));
  const middle = passage.text.slice(passage.starts[first], passage.starts[last]);
  return el("div", { class: "text" }, passage.nodes(from, first, find),
    el("details", { class: "middle", open: hits(find, middle) }, el("summary", {}, `${count(last - first, "token")} more`), passage.nodes(first, last, find, false)),
    passage.nodes(last, to, find, false));
}

// One line for what a reader has seen already; it opens.
function folded(says, names, blocks, find, texts, kind = "") {
  return el("details", { class: `kept ${kind}`, open: hits(find, texts) },
    el("summary", {}, el("b", {}, says), " ", el("small", {}, names)), blocks);
}

function listed(names) {
  const distinct = [...new Set(names.map((name) => name[0].toLowerCase() + name.slice(1)))];
  return distinct.length > 3 ? `${distinct.slice(0, 2).join(", ")} and ${distinct.length - 2} more` : distinct.join(", ");
}

function origin(piece, of) {
  const from = known(piece.source) ? ` ${of} call ${piece.source}` : "";
  return `${KINDS[piece.kind] || piece.kind}${from}`;
}

function titleOf(piece) {
  const from = known(piece.source) ? ` from call ${piece.source}` : "";
  if (piece.kind === "memory") return `Memory kept${from}${piece.flat === null ? ", rewritten" : ""}`;
  if (piece.kind === "observation") return `Observation${known(piece.source) ? `: the result of call ${piece.source}'s action` : ""}`;
  return KINDS[piece.kind];
}

// What of a prompt is folded: its unchanged spans, less the tools that they cut in two, without those of a few tokens.
function foldsOf(call, passage) {
  const starts = new Set(call.read.map((piece) => piece.at));
  return call.before.map(([from, to]) => [starts.has(from) ? from : passage.line(from), to])
    .map(([from, to]) => [passage.outside(from), passage.outside(to, false)]).filter(([from, to]) => to - from >= FEW);
}

// The pieces of a prompt, cut where a fold begins or ends.
function partsOf(call, passage) {
  const folds = foldsOf(call, passage), cuts = folds.flat();
  return call.read.flatMap((piece) => {
    const bounds = [piece.at, ...cuts.filter((at) => at > piece.at && at < piece.at + piece.n), piece.at + piece.n];
    return bounds.slice(1).map((stop, i) => ({
      ...piece, at: bounds[i], n: stop - bounds[i], fresh: !folds.some(([from, to]) => from <= bounds[i] && stop <= to),
    }));
  });
}

function readColumn(call, t, reader, find, wrote) {
  const passage = reader.prompt(call), blocks = [];
  let dropped = call.dropped.length ? droppedBlock(call, reader, find) : null, seen = [];
  const fold = () => {
    if (!seen.length) return;
    const from = seen[0].at, to = from + total(seen);
    blocks.push(folded(`${count(total(seen), "token")} as before`, listed(seen.map((piece) => titleOf(piece))),
      seen.map((piece) => shown(piece)), find, passage.text.slice(passage.starts[from], passage.starts[to])));
    seen = [];
  };
  const shown = (piece) => block(piece.kind, titleOf(piece), `${count(piece.n, "token")}, ${span(piece.at, piece.n)}`,
    inView(passage, piece.at, piece.at + piece.n, find));
  for (const piece of partsOf(call, passage)) {
    if (!piece.fresh) {
      seen.push(piece);
      continue;
    }
    fold();
    if (piece.kind !== "prefix" && dropped) {
      blocks.push(dropped);
      dropped = null;
    }
    blocks.push(shown(piece));
  }
  fold();
  if (dropped) blocks.push(dropped);
  const lost = total(call.dropped);
  return el("div", { class: "column read" },
    el("h4", {}, "What this call read"),
    el("p", { class: "says" }, t === 0 ? `${count(call.prompt, "token")}: the task, and nothing else yet.`
      : `${count(call.prompt, "token")}. ${lost ? `${count(lost, "token")} of the call before ${lost === 1 ? "was" : "were"} dropped: the agent has only what it wrote down.` : "Nothing of the call before has been dropped."}`),
    blocks, wrote);
}

function droppedBlock(call, reader, find) {
  const parts = call.dropped.map((piece) => block(`${piece.kind} gone`, `Dropped: ${origin(piece, "of").toLowerCase()}`,
    count(piece.n, "token"), short(new Passage(reader, reader.ids(piece)), 0, piece.n, find, "del")));
  return el("div", { class: "drops" }, parts);
}

function unseenOf(call) {
  return total(call.flattened.filter((piece) => piece.at === null));
}

function rewrittenOf(call) {
  return total(call.read.filter((piece) => piece.flat === null));
}

// Whether a flattened history is what the call read.
function flattensRight(call) {
  return unseenOf(call) === 0 && call.moved === 0 && rewrittenOf(call) === 0;
}

function flattenedColumn(call, t, reader, state, find) {
  const passage = new Passage(reader, reader.flat.slice(0, call.begin)), blocks = [];
  const unread = t ? reader.calls[t - 1].flattened.filter((piece) => piece.at === null) : [];
  const foldsAs = ({ at, flat, n }) => (at === flat ? "read" : at === null && unread.some((piece) => piece.flat <= flat && flat + n <= piece.flat + piece.n) ? "unread" : null);
  let run = []; // pieces next to each other that fold into one line
  const fold = () => {
    if (!run.length) return;
    const n = count(total(run), "token"), names = listed(run.map((piece) => origin(piece, "of")));
    const text = passage.text.slice(passage.starts[run[0].flat], passage.starts[run[0].flat + total(run)]);
    blocks.push(foldsAs(run[0]) === "read" ? folded(`${n} as in the call`, names, run.map((piece) => shown(piece, "", ", as in the call")), null, text)
      : folded(`${n} that call ${t - 1} did not read either`, names, run.map((piece) => shown(piece, "unseen", UNREAD)), find, text, "unread"));
    run = [];
  };
  const shown = (piece, mark, meta) => block(`${piece.kind} ${mark}`, origin(piece, "of"), `${count(piece.n, "token")}, ${span(piece.flat, piece.n)}${meta}`,
    short(passage, piece.flat, piece.flat + piece.n, find));
  for (const piece of call.flattened) {
    const as = foldsAs(piece);
    if (run.length && foldsAs(run[0]) !== as) fold();
    if (as) {
      run.push(piece);
      continue;
    }
    blocks.push(piece.at === null ? shown(piece, "unseen", UNREAD) : shown(piece, "moved", `, but at ${piece.at} in the call`));
  }
  fold();
  const [unseen, rewritten] = [unseenOf(call), rewrittenOf(call)];
  const words = flattensRight(call) ? [t === 0 ? "The same: nothing has been dropped yet." : "The same: nothing has been dropped so far, so flattening is right here."] : [
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
