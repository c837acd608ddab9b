// Makes elements from data. Text always becomes a text node; no part of the page parses data as HTML.

const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function known(x) {
  return x !== null && x !== undefined;
}

// Three or four digits, whatever the size.
function number(x, digits = 3) {
  if (!known(x)) return "–";
  if (x === 0) return "0";
  if (x < 0) return `−${number(-x, digits)}`;
  if (x >= 1e6 || x < 1e-3) return x.toExponential(Math.max(0, digits - 2)).replace(/\.0+e/, "e").replace("e+", "e");
  if (x >= 1000) return Math.round(x).toLocaleString("en");
  return String(Number(x.toPrecision(digits)));
}

function signed(x, digits = 3) {
  return (x > 0 ? "+" : x < 0 ? "−" : "") + number(Math.abs(x), digits);
}

function seconds(s) {
  if (s < 90) return `${number(s, s < 10 ? 2 : 3)} s`;
  if (s < 5400) return `${number(s / 60, 2)} min`;
  return `${number(s / 3600, 3)} h`;
}

function count(n, word) {
  return `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
}

function mean(values) {
  const present = values.filter(known);
  return present.length ? present.reduce((a, b) => a + b, 0) / present.length : null;
}

function section(id, title, description, ...children) {
  return el("section", { id }, el("h2", {}, title), description && el("p", { class: "says" }, description), ...children);
}

// A table in a box that scrolls where the window is narrow. Cells are text or elements; `left`: columns of words.
function table(head, rows, left = 1) {
  const side = (i) => (i < left ? "word" : null);
  return el("div", { class: "wide" }, el("table", {},
    el("thead", {}, el("tr", {}, head.map((cell, i) => el("th", { class: side(i), scope: "col" }, cell)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", { class: side(i) }, cell)))))));
}

const tip = document.getElementById("tip");

// Beside the pointer, inside the window.
function showTip(event, ...children) {
  tip.replaceChildren(...children);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const at = event.clientX === undefined || event.type === "focusin" ? event.target.getBoundingClientRect() : null;
  const x = at ? at.left : event.clientX, y = at ? at.bottom : event.clientY;
  const left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8));
  const top = y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18;
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}

// One of several, as buttons. `options`: [value, label, why it cannot be chosen or null].
function choice(label, options, chosen, choose) {
  return el("div", { class: "choice", role: "group", "aria-label": label },
    options.map(([value, text, why]) => el("button", {
      type: "button", "aria-pressed": String(value === chosen), disabled: Boolean(why), title: why,
      click: () => choose(value),
    }, text)));
}
