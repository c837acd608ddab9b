// The sections other than curves and episodes: cards, tables, bars.

const TEACHER = {
  aligned: "MemOPD: the teacher reads exactly what the student read",
  persistent: "The control: the teacher reads a flattened history",
  none: "Reinforcement learning without a teacher",
};
const NAMES = {
  reward: "Reward", em: "EM, training", f1: "F1, training", dev_em: "EM, dev", dev_f1: "F1, dev", loss: "Loss",
  dev_loss: "Loss, dev",
};
const STAGES = {
  sample: "the agent plays its episodes", compile: "calls become packed rows",
  check: "packed rows are compared with calls run alone", score: "policy, reference, critic and teacher read the same rows",
  advantages: "rewards become advantages", update: "gradients and optimiser steps", dev: "evaluation on questions that are never trained on",
};

function kindOf(run) {
  const { loss, loss_ppo } = run.series.values;
  return loss && !loss_ppo ? "Supervised training on recorded interactions" : TEACHER[teacherState(run)] || "";
}

function teacherState(run) {
  const teacher = run.config.teacher || {};
  return teacher.weight === 0 ? "none" : teacher.state;
}

function overview(data) {
  const cards = data.arms.map((arm, i) => {
    const runs = arm.runs.map((run) => data.runs[run]);
    const checks = runs.flatMap((run) => run.equivalence);
    const passed = checks.filter((check) => check.passed).length;
    const time = mean(runs.map((run) => Object.values(run.seconds).reduce((a, b) => a + b, 0)));
    const saved = mean(runs.flatMap((run) => run.series.values.rows_saved || []));
    return el("article", { class: "card arm" },
      el("h3", { class: `key c${i % 8}` }, arm.label),
      el("p", { class: "says" }, kindOf(runs[0])),
      el("dl", {},
        fact("steps", runs.map((run) => run.steps).filter((s, n, all) => all.indexOf(s) === n).join(" and ")
          + (runs.length > 1 ? `, ${runs.length} seeds` : "")),
        fact("time", runs.length > 1 ? `${seconds(time)} per seed` : seconds(time)),
        known(saved) ? fact("rows saved", `${Math.round(100 * saved)} %`) : null,
        checks.length ? fact("equivalence checks", `${passed} of ${checks.length} passed`, passed < checks.length) : null),
      ends(runs));
  });
  return section("overview", "At a glance",
    "An agent with compact memory rewrites its own context between calls. Here it is trained call by call, each in exactly the state that it was in.",
    el("div", { class: "cards arms" }, cards));
}

function fact(name, value, bad = false) {
  return el("div", {}, el("dt", {}, name), el("dd", { class: bad ? "bad" : null }, value));
}

function ends(runs) {
  const keys = [...new Set(runs.flatMap((run) => run.ends.map((e) => e.key)))];
  if (!keys.length) return null;
  const rows = keys.map((key) => {
    const found = runs.map((run) => run.ends.find((e) => e.key === key)).filter(known);
    const [start, end] = [0, 1].map((n) => mean(found.map((e) => e.ends[n].mean)));
    const spread = (n) => (found.length === 1 && known(found[0].ends[n].spread) ? ` ± ${number(found[0].ends[n].spread, 2)}` : "");
    const where = (n) => `steps ${[...new Set(found[0].ends[n].steps)].join(" to ")}`;
    return [NAMES[key] || key, el("span", { title: where(0) }, number(start) + spread(0)),
      el("span", { title: where(1) }, number(end) + spread(1)), signed(end - start)];
  });
  return el("div", {}, table(["", "start", "end", "change"], rows),
    el("p", { class: "foot" }, `Means over the first and the last tenth of the steps (at least five, at most half of them)${runs.length > 1 ? " and over the seeds" : ", ± standard error"}; for dev, the first and the last evaluation.`));
}

function evaluation(data) {
  if (!data.evaluations.length)
    return section("evaluation", "Evaluation", null, el("p", { class: "note" }, "There is no evaluation yet. ",
      el("code", {}, "memopd evaluate TASKS --index INDEX --model RUN/model -o RUN/evaluation/after.json"), " makes one."));
  const many = data.runs.length > 1;
  const interval = (v, digits = 3) => (v ? el("span", {}, number(v[0], digits), el("small", {}, ` ${number(v[1], digits)} to ${number(v[2], digits)}`)) : "–");
  const tables = data.evaluations.map(({ k, lines }) => {
    const compared = lines.some((line) => line.against_first);
    const head = ["system", "EM ↑", "F1 ↑", "valid", "calls", "peak ↓", "dependency ↓", "time ↓ s"];
    const rows = lines.map((line) => {
      const m = line.metrics;
      const name = [many ? `${line.run} · ${line.name}` : line.name,
        line.system === line.name ? "" : el("small", { class: "below" }, line.system)];
      const cells = [el("span", {}, name), interval(m.em), interval(m.f1), m.valid ? `${Math.round(100 * m.valid[0])} %` : "–",
        m.calls ? number(m.calls[0]) : "–", interval(m.peak, 4), m.dependency ? number(m.dependency[0]) : "–",
        m.seconds ? number(m.seconds[0]) : "–"];
      return compared ? [...cells, difference(line, "em"), difference(line, "f1")] : cells;
    });
    const notes = [...new Set(lines.map((l) => `${count(l.tasks, "task")}${l.seeds > 1 ? ` × ${l.seeds} seeds` : ""}, grading ${l.grading}, time on ${l.engine}`))];
    return el("div", {}, el("h3", {}, k === 1 ? "One question per task" : `${k} questions per task`),
      table(compared ? [...head, "Δ EM to the first line", "Δ F1 to the first line"] : head, rows),
      el("p", { class: "foot" }, `${notes.join("; ")}. Ranges are 95 % intervals: tasks drawn with replacement, 10,000 times`
        + (compared ? "; differences are paired, task by task." : ".")));
  });
  return section("evaluation", "Evaluation",
    "EM and F1 are summed over a task's questions. Peak is the longest context of any call, in tokens; dependency sums the context that every sampled token depends on.", tables);
}

function difference(line, metric) {
  const d = line.against_first && line.against_first[metric];
  if (!d) return "–";
  const sure = d.low > 0 ? "up" : d.high < 0 ? "down" : null;
  return el("span", { class: sure, title: `p = ${number(d.p)}` }, signed(d.difference),
    el("small", {}, ` ${signed(d.low)} to ${signed(d.high)}`));
}

function time(data) {
  const timed = data.runs.filter((run) => Object.keys(run.seconds).length);
  if (!timed.length) return null;
  const order = [...Object.keys(STAGES), ...new Set(timed.flatMap((run) => Object.keys(run.seconds)))];
  const stages = [...new Set(order)].filter((stage) => timed.some((run) => run.seconds[stage] > 0));
  const total = (run) => Object.values(run.seconds).reduce((a, b) => a + b, 0);
  const most = Math.max(...timed.map(total));
  const bars = timed.map((run) => el("div", { class: "stack" },
    el("div", { class: "name" }, data.runs.length > 1 ? run.name : "all steps",
      el("small", {}, ` ${seconds(total(run))}, ${seconds(total(run) / run.steps)} per step`)),
    el("div", { class: "track" }, stages.map((stage, i) => {
      const s = run.seconds[stage] || 0;
      return s > 0 ? el("div", {
        class: `part s${i % 8} ${s > most / 12 ? "named" : ""}`, "--share": `${100 * s / most}%`,
        pointermove: (event) => showTip(event, el("b", {}, stage), el("div", {}, `${seconds(s)}, ${Math.round(100 * s / total(run))} %`), el("div", { class: "says" }, STAGES[stage] || "")),
        pointerleave: hideTip,
      }, s > most / 12 ? stage : "") : null;
    }))));
  const legend = el("div", { class: "legend" }, stages.map((stage, i) => el("span", { class: `key s${i % 8}`, title: STAGES[stage] || null }, stage)));
  return section("time", "Where the time went", "Wall seconds of every stage, over the whole run.", legend, bars);
}

function equivalence(data) {
  const rows = data.runs.flatMap((run) => run.equivalence.map((r) => [
    data.runs.length > 1 ? `${run.name}, step ${r.step}` : `step ${r.step}`,
    el("span", { class: r.passed ? "good" : "bad" }, r.passed ? "✓ equal" : "✗ differs"),
    number(r.max_logit_error), number(r.max_logprob_error), number(r.error), number(r.tolerance),
    el("small", {}, r.tolerance_source || ""),
    r.shared ? `${number(r.rows)} rows for ${number(r.tokens)} tokens` : "call by call",
    `${number(r.decisions)} in ${number(r.calls)} calls`, r.dtype,
  ]));
  if (!rows.length) return null;
  return section("equivalence", "Is packing exact?",
    "Calls that begin alike share rows in training. Here the same calls were also run one by one and their logits compared. Sharing may change them only by rounding; if it changes them more, the run stops.",
    table(["", "", "max |Δ logit|", "max |Δ log p|", "error", "tolerance", "source of the tolerance", "packed", "sampled tokens", "precision"], rows));
}

function audits(data) {
  const many = data.runs.length > 1;
  const made = data.runs.flatMap((run) => run.audits.map((a) => ({ ...a, label: many ? `${run.name} · ${a.name}` : a.name })));
  if (!made.length) return null;
  const percent = (x) => (known(x) ? (100 * x).toFixed(2) : "–");
  const beside = (key, columns, name) => {
    const names = [...new Set(made.flatMap((a) => a[key].map((row) => row[name])))];
    const rows = names.map((one) => [one, ...made.flatMap((a) => {
      const row = a[key].find((r) => r[name] === one);
      return columns.map(([, show]) => (row ? show(row) : "–"));
    })]);
    return names.length ? table(["", ...made.flatMap((a) => columns.map(([title]) => (made.length > 1 ? `${a.label}: ${title}` : title)))], rows) : null;
  };
  const error = [["p99 |Δ log p|", (r) => number(r.p99_logprob)], ["top-1 %", (r) => percent(r.top1)], ["false clip %", (r) => percent(r.false_clip)]];
  const calls = [["tokens", (r) => number(r.decisions)], ["top-1 %", (r) => percent(r.top1)], ["mean KL", (r) => number(r.mean_kl)]];
  const part = (title, says, content) => (content ? el("div", {}, el("h3", {}, title), el("p", { class: "foot" }, says), content) : null);
  const arms = made.map((a) => {
    const saved = (rows) => `${(a.tokens / rows).toFixed(2)}×`;
    const rows = a.arms.map((r) => [r.arm, number(r.sequences), number(r.rows), saved(r.rows), saved(r.shared_rows),
      number(r.lost), number(r.p99_logprob), number(r.top1_changed), percent(r.false_clip)]);
    return part(`What other trainers do: ${a.label}`,
      `A sequence per call has ${number(a.tokens)} rows, MemOPD ${number(a.rows)} (${saved(a.rows)}). At best: every common beginning of the sequences once. Lost: sampled tokens without a gradient.`,
      rows.length ? table(["", "sequences", "rows", "saves", "at best", "lost", "p99 |Δ log p|", "changed", "false clip %"], rows) : null);
  });
  return section("audit", "Audit",
    "The same sampled tokens, scored as other trainers would: how far they are from the calls run alone.",
    part("Against the calls alone", made.map((a) => `${a.label}: ${a.model}, ${a.dtype}, ${count(a.calls, "call")}, packing ${a.passed ? "exact" : "NOT exact"}`).join("; ") + ".",
      beside("representations", error, "representation")),
    part("What rounding does by itself", made.map((a) => (a.precise ? `${a.label}: ${a.dtype} against the calls alone in ${a.precise}` : "")).filter(Boolean).join("; ") + ". Packing may be at most twice as far as the calls alone.",
      beside("rounding", error, "representation")),
    part("Persistent history, by call", "From 0. Until the agent drops something, a flattened history is what it read.", beside("student", calls, "calls")),
    part("Teacher in persistent history, by call", "The same for the teacher.", beside("teacher", calls, "calls")),
    arms);
}

function configuration(data) {
  const fields = [];
  const configs = data.runs.map((run) => run.config);
  for (const part of [...new Set(configs.flatMap(Object.keys))])
    for (const key of [...new Set(configs.flatMap((c) => Object.keys(c[part] || {})))])
      fields.push([`${part}.${key}`, configs.map((c) => JSON.stringify((c[part] || {})[key]) || "–")]);
  const head = ["setting", ...(data.runs.length > 1 ? data.runs.map((run) => run.name) : ["value"])];
  const rows = (list) => list.map(([name, values]) => [el("code", {}, name), ...values.map((v) => el("code", {}, v))]);
  const differ = fields.filter(([, values]) => new Set(values).size > 1);
  return section("configuration", "Configuration", data.runs.length > 1 ? (differ.length ? "The runs differ in:" : "The runs have the same settings.") : null,
    differ.length ? table(head, rows(differ), head.length) : null,
    el("details", {}, el("summary", {}, `All ${fields.length} settings`), table(head, rows(fields), head.length)));
}
