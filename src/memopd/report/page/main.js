// Assembles the page.

const data = JSON.parse(document.getElementById("data").textContent);
const curves = new Curves(data);
const viewer = data.runs.some((run) => run.episodes.length) ? new Viewer(data) : null;
const episodes = viewer && section("episodes", "Episodes, token by token",
  "Every call of an agent with compact memory reads its own context. Step through an episode to see what each call kept, dropped and wrote, and how training used every token.",
  data.runs.some((run) => run.episodes.length && !run.vocabulary.texts) ? el("p", { class: "note" }, "No tokenizer was found for some runs: their tokens are shown as ids.") : null,
  viewer.element);
const sections = [
  overview(data), episodes,
  data.charts.length ? section("curves", "Curves", "Point at a curve to see the values of the same step in all of them.", curves.element()) : null,
  evaluation(data), time(data), equivalence(data), audits(data), configuration(data),
].filter(known);

const root = document.documentElement;
const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
document.getElementById("top").append(
  el("div", { class: "brand" }, el("span", {}, "MemOPD"), el("h1", {}, data.title)),
  el("nav", {}, sections.map((s) => el("a", { href: `#${s.id}` }, s.id === "equivalence" ? "Exactness" : s.id[0].toUpperCase() + s.id.slice(1)))),
  el("button", { type: "button", class: "theme", title: "light or dark", "aria-label": "light or dark",
    click: () => { root.dataset.theme = dark() ? "light" : "dark"; } }, "◐"));
document.getElementById("page").replaceChildren(...sections);
curves.draw();
if (viewer && viewer.asked) episodes.scrollIntoView();
root.dataset.ready = "yes";
