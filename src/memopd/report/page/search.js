// Search over the episodes of all runs: questions, answers, ids, and everything that was read or written.

const AROUND = 60; // characters of a match's surroundings

// A pattern that finds what was typed, whatever the case and however its words are spaced; null for nothing.
function pattern(typed) {
  const words = typed.trim().split(/\s+/).filter(Boolean).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return words.length ? new RegExp(words.join("\\s+"), "gi") : null;
}

// The texts of an episode, and the call that shows each: [[call, text], ...].
function textsOf(run, episode) {
  const reader = readerOf(run, episode), { calls } = reader;
  const decode = (ids) => ids.map((id) => (reader.special.has(id) ? "\n" : reader.word(id))).join("");
  const found = episode.questions.map(([text, answers]) => [0, `${text} ${answers.join(" or ")}`]);
  found.push([0, `${episode.id} ${episode.task}`]);
  calls.forEach((call, t) => {
    const start = t ? calls[t - 1].begin + calls[t - 1].sampled : 0;
    found.push([t, decode(reader.flat.slice(start, call.begin + call.sampled))]);
    for (const piece of call.read) if (piece.spans) found.push([t, decode(reader.ids(piece))]);
  });
  return found;
}

class Search {
  constructor(data) {
    this.data = data;
    this.texts = null; // decoded when something is searched for
  }

  // The first match of every episode that has one: { run, episode, call, around: [before, match, after] }.
  find(wanted) {
    this.texts ||= this.data.runs.flatMap((run, r) => run.episodes.map((episode, e) => [r, e, textsOf(run, episode)]));
    return this.texts.map(([run, episode, texts]) => {
      for (const [call, text] of texts) {
        const at = text.search(wanted);
        if (at < 0) continue;
        const [match] = text.slice(at).match(new RegExp(wanted.source, "i"));
        const line = (part) => part.replace(/\s+/g, " ");
        return { run, episode, call, around: [(at > AROUND ? "…" : "") + line(text.slice(Math.max(0, at - AROUND), at)), line(match), line(text.slice(at + match.length, at + match.length + AROUND)) + (at + match.length + AROUND < text.length ? "…" : "")] };
      }
      return null;
    }).filter(known);
  }

  get size() {
    return this.data.runs.reduce((n, run) => n + run.episodes.length, 0);
  }
}
