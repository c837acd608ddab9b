// The episodes: choose one, step through its calls, and see the numbers that the update used for every sampled token.

const COLOURS = {
  advantage: { title: "Advantage", description: "The update raises the probability of blue tokens and lowers that of orange ones: the deeper the colour, the more." },
  divergence: { title: "Teacher divergence", description: "The divergence of the policy from the teacher at this token: the deeper the colour, the more they disagree." },
  logp: { title: "log p", description: "The log-probability of the token under the policy that sampled it: the deeper the colour, the less likely." },
};

const NOTHING = 1e-12; // a smaller scale would only show zeros

class Viewer {
  constructor(data) {
    this.data = data;
    this.runs = data.runs.map((run, i) => [run, i]).filter(([run]) => run.episodes.length);
    this.state = { run: this.runs[0][1], episode: 0, call: 0, colour: null };
    this.search = new Search(data);
    this.find = null; // the pattern that is searched for
    this.matches = [];
    this.body = el("div", { class: "episode" });
    this.results = el("div", { class: "results", hidden: true });
    this.said = el("span", { class: "hint", role: "status" });
    this.element = el("div", { class: "viewer" }, this.searchBar(), this.results, this.body);
    addEventListener("hashchange", () => this.fromHash() && this.draw());
    addEventListener("keydown", (event) => this.key(event));
    this.element.addEventListener("pointerover", (event) => this.hover(event));
    this.element.addEventListener("focusin", (event) => this.hover(event));
    this.element.addEventListener("pointerout", hideTip);
    this.element.addEventListener("focusout", hideTip);
    this.asked = this.fromHash();
    this.draw();
  }

  get run() { return this.data.runs[this.state.run]; }
  get episode() { return this.run.episodes[this.state.episode]; }
  get reader() { return readerOf(this.run, this.episode); }
  get call() { return this.reader.calls[this.state.call]; }

  // #run=0&episode=2&call=1&colour=divergence; values out of range are clamped.
  fromHash() {
    const given = new URLSearchParams(location.hash.slice(1));
    if (!given.has("episode")) return false;
    const whole = (name, last) => Math.max(0, Math.min(last, Math.trunc(Number(given.get(name))) || 0));
    const run = whole("run", this.data.runs.length - 1);
    this.state.run = this.data.runs[run].episodes.length ? run : this.runs[0][1];
    this.state.episode = whole("episode", this.run.episodes.length - 1);
    this.state.call = whole("call", this.episode.calls.length - 1);
    if (Object.hasOwn(COLOURS, given.get("colour"))) this.state.colour = given.get("colour");
    return true;
  }

  go({ run = this.state.run, episode = this.state.episode, call = this.state.call, colour = this.state.colour }) {
    Object.assign(this.state, { run, episode, call, colour });
    this.state.episode = Math.max(0, Math.min(this.state.episode, this.run.episodes.length - 1));
    this.state.call = Math.max(0, Math.min(this.state.call, this.episode.calls.length - 1));
    history.replaceState(null, "", `#run=${run}&episode=${this.state.episode}&call=${this.state.call}&colour=${colour}`);
    this.draw();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    this.go(event.shiftKey ? { episode: this.state.episode + step, call: 0 } : { call: this.state.call + step });
  }

  draw() {
    hideTip();
    const { call, state } = this, focused = document.activeElement?.dataset.focus;
    if (!state.colour || !this.has(state.colour)) state.colour = this.telling();
    this.scale = this.scaleOf(state.colour);
    this.body.replaceChildren(
      this.picker(), this.about(), this.map(), this.walk(),
      el("div", { class: `columns${flattensRight(call) ? " alike" : ""}` }, readColumn(call, state.call, this.reader, this.find, this.wrote()),
        flattenedColumn(call, state.call, this.reader, teacherState(this.run), this.find)),
      ...(this.has(state.colour) ? [this.strip()] : []));
    for (const [i, item] of [...this.results.querySelectorAll("button")].entries())
      item.setAttribute("aria-current", String(this.matches[i].run === state.run && this.matches[i].episode === state.episode));
    if (focused) this.body.querySelector(`[data-focus="${focused}"]:enabled`)?.focus({ preventScroll: true }); // it was drawn again
  }

  searchBar() {
    let later = null;
    const field = el("input", {
      type: "search", placeholder: "Search questions, answers, texts", "aria-label": "Search the episodes", autocomplete: "off", spellcheck: "false",
      input: () => {
        clearTimeout(later);
        later = setTimeout(() => this.look(field.value), 150);
      },
      keydown: (event) => {
        if (event.key !== "Enter" || !this.matches.length) return;
        const here = this.matches.findIndex((m) => m.run === this.state.run && m.episode === this.state.episode);
        this.show(this.matches[(here + (event.shiftKey ? this.matches.length - 1 : 1)) % this.matches.length]);
      },
    });
    return el("div", { class: "bar search" }, field, this.said);
  }

  // Search, say how many episodes match, and open the first.
  look(typed) {
    this.find = pattern(typed);
    this.matches = this.find ? this.search.find(this.find) : [];
    const { length } = this.matches;
    this.said.textContent = !this.find ? "" : length ? `${length} of ${count(this.search.size, "episode")} match${length === 1 ? "es" : ""}` : "no episode matches";
    this.results.hidden = !length;
    this.results.replaceChildren(...this.matches.map((match) => {
      const { step, reward } = this.data.runs[match.run].episodes[match.episode];
      const [before, found, after] = match.around;
      return el("button", { type: "button", click: () => this.show(match) },
        el("small", {}, this.runs.length > 1 ? `${this.data.runs[match.run].name}, ` : "", `step ${step}, reward ${number(reward)}, call ${match.call}`),
        el("span", {}, before, el("mark", {}, found), after));
    }));
    if (length) this.go(this.matches[0]);
    else this.draw();
  }

  show({ run, episode, call }) {
    this.go({ run, episode, call });
    this.body.querySelector(".columns mark, .chip.found, .questions mark")?.scrollIntoView({ block: "center" });
  }

  has(colour) {
    return this.episode.calls.some((call) => call[colour] && call[colour].some(known));
  }

  // The first colour that differs between tokens: an algorithm without a critic gives a whole episode one advantage.
  telling() {
    const names = Object.keys(COLOURS).filter((name) => this.has(name));
    return names.find((name) => new Set(this.episode.calls.flatMap((call) => (call[name] || []).filter(known))).size > 1) || names[0] || "advantage";
  }

  scaleOf(colour) {
    const sizes = this.episode.calls.flatMap((call) => (call[colour] || []).filter(known).map(Math.abs)).sort((a, b) => a - b);
    return sizes.length ? Math.max(sizes[Math.floor(0.98 * (sizes.length - 1))], NOTHING) : 1; // a single extreme token must not make the others pale
  }

  picker() {
    const { state } = this;
    const select = (label, focus, options, choose) => el("label", {}, label, el("select", {
      "data-focus": focus, change: (event) => choose(Number(event.target.value)),
    }, options));
    const { episodes } = this.run, steps = [...new Set(episodes.map((e) => e.step))];
    const label = (e) => `reward ${number(e.reward)}, ${count(e.calls.length, "call")}: ${cut(asked(this.run, e) || e.id, 90)}`;
    const groups = steps.map((step) => el("optgroup", { label: `Step ${step}` }, episodes.map((e, i) => (e.step === step
      ? el("option", { value: i, selected: i === state.episode }, label(e)) : null))));
    const move = (text, by, title) => el("button", { type: "button", title, "aria-label": title, "data-focus": `episode${by}`,
      disabled: state.episode + by < 0 || state.episode + by >= episodes.length, click: () => this.go({ episode: state.episode + by, call: 0 }) }, text);
    return el("div", { class: "bar picker" },
      this.runs.length > 1 ? select("Run", "run", this.runs.map(([run, i]) => el("option", { value: i, selected: i === state.run }, run.name)), (run) => this.go({ run, episode: 0, call: 0 })) : null,
      el("div", { class: "which" }, select("Episode", "episode", groups, (episode) => this.go({ episode, call: 0 })),
        move("‹", -1, "previous episode (Shift ←)"), move("›", 1, "next episode (Shift →)")));
  }

  about() {
    const e = this.episode, text = asked(this.run, e);
    const questions = e.questions.map(([question, answers]) => el("li", {}, highlighted(question, this.find), " ", el("b", {}, highlighted(answers.join(" or "), this.find))));
    return el("div", { class: "about" },
      questions.length ? el("ol", { class: "questions" }, questions) : text ? el("p", { class: "asked" }, highlighted(cut(text, 600), this.find)) : null,
      el("p", { class: "says" }, `step ${e.step} · reward ${number(e.reward)} · ${count(e.calls.reduce((n, c) => n + c.sampled, 0), "sampled token")}`,
        e.rule ? [" · memory rule ", el("code", {}, e.rule)] : null, " · ", el("code", {}, e.id)));
  }

  // A bar per call, to scale, and under it the flattened history, which grows while the agent's context does not.
  map() {
    const most = Math.max(...this.episode.calls.map((c) => Math.max(c.begin, c.prompt) + c.sampled));
    const part = (kind, n) => el("i", { class: kind, "--share": `${100 * n / most}%` });
    const rows = this.reader.calls.map((call, t) => el("button", {
      type: "button", class: "row", "data-focus": `call${t}`, "aria-pressed": String(t === this.state.call), click: () => this.go({ call: t }),
    }, el("span", { class: "name" }, `Call ${t}`, purpose(call), el("small", {}, call.purpose ? "" : action(this.text(call)))),
    el("span", { class: "bars" },
      el("span", { class: "real" }, call.read.map((p) => part(p.kind, p.n)), part("sampled", call.sampled)),
      el("span", { class: "flat" }, call.flattened.map((p) => part(p.at === null ? "unseen" : p.at === p.flat ? "same" : "moved", p.n)), part("sampled", call.sampled))),
    el("span", { class: "sizes" }, call.prompt.toLocaleString("en"), el("small", {}, ` / ${call.begin.toLocaleString("en")}`))));
    const keys = [["prefix", "stable prefix"], ["memory", "memory"], ["observation", "observation"], ["sampled", "sampled"], ["unseen", "thin bar: only in the flattened history"], ["moved", "at another position there"]];
    return el("div", { class: "map" }, el("div", { class: "legend" }, keys.map(([kind, text]) => el("span", { class: `key ${kind}` }, text)),
      el("span", { class: "sizes" }, "tokens read / flattened")), rows);
  }

  walk() {
    const { state, episode } = this;
    const button = (text, by, title) => el("button", { type: "button", title, "aria-label": title, "data-focus": `walk${by}`, disabled: state.call + by < 0 || state.call + by >= episode.calls.length,
      click: () => this.go({ call: state.call + by }) }, text);
    return el("div", { class: "bar walk" }, button("‹", -1, "previous call (←)"), el("h3", {}, `Call ${state.call}`, el("small", {}, ` (0 to ${episode.calls.length - 1})`)), purpose(this.call),
      button("›", 1, "next call (→)"), el("span", { class: "hint" }, el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " calls, with ", el("kbd", {}, "Shift"), " episodes"));
  }

  text(call) {
    return this.reader.sampled(call).filter((id) => !this.reader.special.has(id)).map((id) => this.reader.word(id)).join("");
  }

  wrote() {
    const { call, state } = this;
    const none = call.trainable ? "this run did not record these numbers" : "this call was not trained on";
    const options = Object.entries(COLOURS).map(([name, { title }]) => [name, title, this.has(name) ? null : none]);
    const numbers = options.some(([, , why]) => !why);
    const stats = [["mean advantage", mean(call.advantage || [])], ["mean divergence", mean(call.divergence || [])], ["mean log p", mean(call.logp || [])]].filter(([, v]) => v !== null);
    return el("div", { class: "wrote" },
      el("div", { class: "bar" }, el("h4", {}, "What it wrote"), numbers ? choice("Colour of tokens", options, state.colour, (colour) => this.go({ colour })) : null),
      numbers ? el("p", { class: "says" }, COLOURS[state.colour].description) : null,
      el("p", { class: "says" }, [stats.map(([name, v]) => `${name} ${number(v)}`).join(", "), numbers ? "" : "No numbers per token: training records them for a few episodes of each step.",
        call.stop === "length" ? "cut off at the token limit" : "", call.trainable ? "" : "not trained on"].filter(Boolean).join(" · ")),
      numbers ? this.ramp() : null, el("div", { class: "chips", tabindex: "-1" }, this.chips()));
  }

  // The sampled tokens; those of a tool's call stand in a box.
  chips() {
    const ids = this.reader.sampled(this.call), passage = new Passage(this.reader, ids, "assistant"), made = [];
    const found = new Set(this.find ? [...passage.text.matchAll(this.find)].flatMap((m) => ids.map((_, k) => k).filter((k) => passage.starts[k] < m.index + m[0].length && passage.starts[k + 1] > m.index)) : []);
    const boxes = passage.marks.filter((mark) => mark.kind === "call");
    let last = null, box = null;
    ids.forEach((id, k) => {
      const mark = boxes.find((m) => m.start <= passage.starts[k] && passage.starts[k] < m.end) || null;
      if (mark !== last) {
        box = mark && el("div", { class: "tool call" }, el("div", { class: "label" }, mark.label));
        if (box) made.push(box);
        last = mark;
      }
      (box ? (chip) => box.append(chip) : (chip) => made.push(chip))(this.chip(id, k, found.has(k)));
    });
    return made;
  }

  chip(id, k, found) {
    const { call, state } = this;
    const value = call[state.colour] ? call[state.colour][k] : null;
    const word = this.reader.word(id);
    return el("span", { class: `chip ${tint(state.colour, value)}${this.reader.special.has(id) ? " special" : ""}${found ? " found" : ""}`, "data-k": k, tabindex: "0", "--deep": depth(value, this.scale) },
      word === "" ? "∅" : word.replaceAll("\n", "↵\n"));
  }

  ramp() {
    const name = this.state.colour, most = number(this.scale, 2);
    if (this.scale <= NOTHING) return el("div", { class: "ramp" }, "0 everywhere");
    const [left, right] = name === "advantage" ? [`−${most}`, `+${most}`] : name === "logp" ? ["0", `−${most}`] : ["0", most];
    return el("div", { class: "ramp" }, left, el("i", { class: name }), `${right} and beyond`);
  }

  // All sampled tokens of the episode, with a bar for each.
  strip() {
    const name = this.state.colour, bars = [];
    const all = this.episode.calls.reduce((n, c) => n + c.sampled, 0);
    let at = 0;
    this.episode.calls.forEach((call, t) => {
      const here = t === this.state.call ? "here" : "";
      bars.push(svg("rect", { class: `stretch ${here}`, x: at, y: -50, width: call.sampled, height: 100, click: () => this.go({ call: t }) }));
      (call[name] || []).forEach((value, k) => {
        if (!known(value)) return;
        const tall = 48 * Math.min(1, Math.abs(value) / this.scale), up = name !== "logp" && value > 0;
        bars.push(svg("rect", { class: `token ${tint(name, value)} ${here}`, x: at + k + 0.1, width: 0.8, y: up ? -tall : 0, height: tall }));
      });
      at += call.sampled;
      if (t + 1 < this.episode.calls.length) bars.push(svg("rect", { class: "border", x: at - 0.1, width: 0.2, y: -50, height: 100 }));
    });
    const box = name === "advantage" ? [-50, 100] : name === "logp" ? [0, 50] : [-50, 50];
    return el("div", { class: "strip" }, el("p", { class: "says" }, `${COLOURS[name].title} over the whole episode, call after call`),
      svg("svg", { viewBox: `0 ${box[0]} ${all} ${box[1]}`, preserveAspectRatio: "none", role: "img", "aria-label": COLOURS[name].title }, bars));
  }

  hover(event) {
    const chip = event.target.closest && event.target.closest(".chip");
    if (!chip) return;
    const { call } = this, k = Number(chip.dataset.k), id = this.reader.sampled(call)[k];
    const row = (name, values, more = "") => (values && known(values[k]) ? el("div", {}, el("dt", {}, name), el("dd", {}, number(values[k], 4) + more)) : null);
    const taught = call.taught && !call.taught[k] ? " (not taught here)" : "";
    const p = call.logp && known(call.logp[k]) ? `, p ${number(Math.exp(call.logp[k]))}` : "";
    showTip(event, el("b", { class: "mono" }, JSON.stringify(this.reader.word(id))), el("dl", {},
      row("log p", call.logp, p), row("advantage", call.advantage), row("value", call.value), row("divergence", call.divergence, taught),
      el("div", {}, el("dt", {}, "position"), el("dd", {}, `${call.prompt + k}`)), el("div", {}, el("dt", {}, "token id"), el("dd", {}, `${this.reader.vocabulary.ids[id]}`))));
  }
}

function tint(colour, value) {
  return !known(value) ? "none" : colour === "advantage" ? (value < 0 ? "lower" : "raise") : colour;
}

function depth(value, scale) {
  return known(value) ? Math.min(1, Math.abs(value) / scale).toFixed(3) : "0";
}

// The label of a call that was not an action, such as a note that the memory rule asked for. `el` shows it as text.
function purpose(call) {
  return call.purpose ? el("span", { class: "purpose", title: "this call was not an action of the agent" }, call.purpose) : null;
}

// What a response does, in a few words: the protocol's tags, a tool's call, or how the text begins.
function action(text) {
  for (const tag of ["search", "answer"]) {
    const found = text.match(new RegExp(`<${tag}>([^]*?)(</${tag}>|$)`));
    if (found) return `${tag}: ${found[1].trim()}`;
  }
  const calls = marks(text, [], "assistant").filter((mark) => mark.kind === "call");
  if (calls.length) return calls.map((mark) => `${mark.label.replace("Tool call: ", "")} ${text.slice(...mark.body).match(/"(?:arguments|parameters)"\s*:\s*([^]*)\}/)?.[1].trim() ?? ""}`).join("; ");
  return cut(text.trim(), 80) || "no text";
}

// What an episode was asked: its questions, or else the last message of the user in its first prompt, without the
// instructions with which the messages of all episodes begin.
const ASKED = new Map();

function asked(run, episode) {
  if (!ASKED.has(run)) {
    const texts = run.episodes.map((e) => e.questions.map(([text]) => text).join(" ") || lastUser(readerOf(run, e).prompt(readerOf(run, e).calls[0])));
    const messages = [...new Set(texts.filter((_, i) => !run.episodes[i].questions.length))], alike = shared(messages);
    ASKED.set(run, new Map(run.episodes.map((e, i) => [e, e.questions.length || alike < LONG_START ? texts[i] : `… ${texts[i].slice(alike)}`])));
  }
  return ASKED.get(run).get(episode);
}

const LONG_START = 60; // characters

// The length of the sentences and lines with which all of several different texts begin.
function shared(texts) {
  if (texts.length < 2) return 0;
  const [first, ...others] = texts;
  let n = 0;
  while (n < first.length && others.every((text) => text[n] === first[n])) n += 1;
  return Math.max(0, ...[...first.slice(0, n).matchAll(/[.:!?]\s+|\n/g)].map((end) => end.index + end[0].length));
}

function cut(text, most) {
  const line = text.replace(/\s+/g, " ");
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}
