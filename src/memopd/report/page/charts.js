// Curves as inline SVG: one card per metric and one line per arm, which is the mean of its seeds, with a band from the
// smallest to the largest. Pointing at one card shows the values of the same step in all cards.

const HEIGHT = 148, LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 20;

class Curves {
  constructor(data) {
    this.data = data;
    this.smoothing = Math.max(...data.runs.map((r) => r.series.steps.length)) > 60 ? 0.7 : 0;
    this.hidden = new Set();
    this.at = null; // the step that the pointer is at
    this.charts = data.charts.flatMap((group) => group.charts.map((chart) => new Chart(chart, data, this)));
  }

  element() {
    const slider = el("input", {
      type: "range", min: 0, max: 0.95, step: 0.05, value: this.smoothing, "aria-label": "smoothing",
      input: (event) => { this.smoothing = Number(event.target.value); this.draw(); },
    });
    const at = new Map(this.charts.map((chart) => [chart.key, chart]));
    const groups = this.data.charts.map((group) => [
      el("h3", {}, group.title),
      el("div", { class: "cards" }, group.charts.map((chart) => at.get(chart.key).element)),
    ]);
    new ResizeObserver(() => this.draw()).observe(document.getElementById("page"));
    return el("div", { class: "curves" },
      el("div", { class: "bar" }, this.legend(), el("label", { class: "slider" }, "Smoothing", slider)), groups);
  }

  legend() {
    if (this.data.arms.length < 2) return el("span");
    return el("div", { class: "legend" }, this.data.arms.map((arm, i) => el("button", {
      type: "button", class: `key c${i % 8}`, "aria-pressed": "true", title: "show or hide",
      click: (event) => {
        const off = this.hidden.has(i);
        off ? this.hidden.delete(i) : this.hidden.add(i);
        event.currentTarget.setAttribute("aria-pressed", String(off));
        this.draw();
      },
    }, arm.label, arm.runs.length > 1 ? el("small", {}, ` ${arm.runs.length} seeds`) : null)));
  }

  draw() {
    for (const chart of this.charts) chart.draw(this.at);
  }

  read(step) {
    this.at = step;
    for (const chart of this.charts) chart.read(step);
  }
}

class Chart {
  constructor({ key, title, description }, data, curves) {
    Object.assign(this, { key, data, curves });
    this.lines = data.arms.map((arm) => armLine(arm, data, key)).map((points, arm) => ({ arm, points }))
      .filter((line) => line.points.length);
    this.picture = svg("svg", { height: HEIGHT, role: "img", "aria-label": title });
    this.values = el("div", { class: "values" });
    this.element = el("figure", { class: "card" },
      el("figcaption", {}, el("h4", {}, title), description && el("p", { class: "says" }, description), this.values), this.picture);
    this.picture.addEventListener("pointermove", (event) => this.showStep(event));
    this.picture.addEventListener("pointerleave", () => { curves.read(null); hideTip(); });
  }

  shown() {
    return this.lines.filter((line) => !this.curves.hidden.has(line.arm));
  }

  draw(step) {
    const width = this.width = Math.max(160, this.element.clientWidth - 2);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const lines = this.shown();
    const all = lines.flatMap((line) => line.points.flatMap((p) => [p.low, p.high]));
    const steps = this.lines.flatMap((line) => line.points.map((p) => p.step));
    this.first = Math.min(...steps), this.last = Math.max(...steps, this.first + 1);
    this.scale = scaleOf(all.length ? all : [0, 1]);
    const parts = [];
    for (const tick of this.scale.ticks) {
      const y = this.y(tick);
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        svg("text", { class: "tick", x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, number(tick)));
    }
    for (const [step, anchor] of [[this.first, "start"], [this.last, "end"]].filter(([step]) => steps.includes(step)))
      parts.push(svg("text", { class: "tick", x: this.x(step), y: HEIGHT - 4, "text-anchor": anchor },
        anchor === "start" ? `step ${step}` : step));
    if (this.scale.log) parts.push(svg("text", { class: "tick", x: width - RIGHT, y: TOP + 4, "text-anchor": "end" }, "log"));
    for (const { arm, points } of lines) parts.push(...this.line(arm, points));
    this.mark = svg("g", { class: "mark" });
    this.picture.replaceChildren(...parts, this.mark);
    this.read(step);
  }

  line(arm, points) {
    const path = (get) => points.map((p, i) => `${i ? "L" : "M"}${this.x(p.step).toFixed(1)} ${this.y(get(p, i)).toFixed(1)}`).join("");
    const smooth = smoothed(points.map((p) => p.mean), this.curves.smoothing);
    const parts = [];
    if (points.some((p) => p.low < p.high)) {
      const back = [...points].reverse().map((p) => `L${this.x(p.step).toFixed(1)} ${this.y(p.low).toFixed(1)}`).join("");
      parts.push(svg("path", { class: `band c${arm % 8}`, d: `${path((p) => p.high)}${back}Z` }));
    }
    if (this.curves.smoothing > 0) parts.push(svg("path", { class: `raw c${arm % 8}`, d: path((p) => p.mean) }));
    parts.push(svg("path", { class: `line c${arm % 8}`, d: path((p, i) => smooth[i]) }));
    if (points.length <= 12)
      for (const [i, p] of points.entries())
        parts.push(svg("circle", { class: `dot c${arm % 8}`, cx: this.x(p.step), cy: this.y(smooth[i]), r: 2.4 }));
    return parts;
  }

  x(step) {
    return LEFT + (step - this.first) / (this.last - this.first) * (this.width - LEFT - RIGHT);
  }

  y(value) {
    const { low, high, log } = this.scale;
    const share = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);
  }

  step(event) {
    const box = this.picture.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    return this.first + Math.max(0, Math.min(1, share)) * (this.last - this.first);
  }

  // The point of every line that is nearest to a step, or its last point without a step.
  points(step) {
    const near = (a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a);
    return this.shown().map(({ arm, points }) => ({ arm, ...(step === null ? points.at(-1) : points.reduce(near)) }));
  }

  read(step) {
    const found = this.points(step);
    const values = found.map(({ arm, mean }) => el("span", { class: `value c${arm % 8}` }, number(mean)));
    const marks = found.map(({ arm, step: at, mean }) => svg("circle", { class: `dot c${arm % 8}`, cx: this.x(at), cy: this.y(mean), r: 3.2 }));
    if (step !== null && found.length) {
      const at = found[0].step, x = this.x(at);
      values.push(el("span", { class: "at" }, `step ${at}`));
      marks.unshift(svg("line", { x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.mark.replaceChildren(...(step === null ? [] : marks));
    this.values.replaceChildren(...values);
  }

  showStep(event) {
    const step = this.step(event);
    this.curves.read(step);
    if (this.data.runs.length < 2) return;
    showTip(event, ...this.points(step).map(({ arm, mean, low, high }) => el("div", { class: `key c${arm % 8}` },
      `${this.data.arms[arm].label} `, el("b", {}, number(mean, 4)), low < high ? el("small", {}, ` ${number(low)} to ${number(high)}`) : null)));
  }
}

// [{step, mean, low, high}] over the seeds of an arm.
function armLine(arm, data, key) {
  const found = new Map();
  for (const run of arm.runs) {
    const { steps, values } = data.runs[run].series;
    (values[key] || []).forEach((value, i) => {
      if (known(value)) found.set(steps[i], [...(found.get(steps[i]) || []), value]);
    });
  }
  return [...found].sort((a, b) => a[0] - b[0]).map(([step, values]) => ({
    step, mean: mean(values), low: Math.min(...values), high: Math.max(...values),
  }));
}

// A running mean that weighs older points less, fair to the first ones too.
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

// Round numbers around the values; by powers of ten where they span more than two of them.
function scaleOf(values) {
  let low = Math.min(...values), high = Math.max(...values);
  if (low > 0 && high / low > 100) {
    const ticks = [];
    for (let e = Math.ceil(Math.log10(low)); e <= Math.log10(high); e++) ticks.push(10 ** e);
    const every = Math.ceil(ticks.length / 4);
    return { low: low / 1.2, high: high * 1.2, log: true, ticks: ticks.filter((_, i) => i % every === 0) };
  }
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
  if (low > 0 && low < high * 0.4) low = 0;
  const rough = (high - low) / 3, unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 2.5, 5, 10].find((m) => m * unit >= rough);
  const from = Math.floor(low / step + 1e-9), to = Math.ceil(high / step - 1e-9);
  const ticks = Array.from({ length: to - from + 1 }, (_, i) => Number(((from + i) * step).toPrecision(6)));
  return { low: from * step, high: to * step, log: false, ticks };
}
