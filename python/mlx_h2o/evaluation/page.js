"use strict";
// Which positions were held: one map per layer, and the text with what is left at its end.
const recorded = JSON.parse(document.getElementById("recorded").textContent);
const expanded = (digits) =>
  Array.from(digits.replace(/(\d)\((\d+)\)/g, (_, digit, count) => digit.repeat(+count)), Number);
const STOPS = [[0, 114, 178], [0, 158, 115], [230, 159, 0], [213, 94, 0], [160, 20, 60]];

// share: 0 to 9, of the heads that hold it; folded: a row stands for 2 ** folded.
function colour(share, folded) {
  const place = Math.min(folded / 1.5, STOPS.length - 1);
  const low = Math.floor(place), high = Math.ceil(place), part = place - low;
  const strength = share === 0 ? 0 : 0.2 + 0.8 * share / 9;
  return STOPS[low].map((from, n) =>
    Math.round(255 - strength * (255 - (from + part * (STOPS[high][n] - from)))));
}

const pick = Object.fromEntries(["task", "strategy", "layer"].map(
  (name) => [name, document.getElementById(name)]));

function fill(select, names) {
  const before = select.value;
  select.replaceChildren(...names.map((name, n) => new Option(name, String(n))));
  if (before !== "" && +before < names.length) select.value = before;
}

const tasks = Object.keys(recorded);
const task = () => recorded[tasks[+pick.task.value]];
const held = () => Object.values(task().held)[+pick.strategy.value];

function draw(layer, canvas) {
  const { moments, tokens, width } = held();
  const ranges = Math.ceil(tokens / width);
  const shares = expanded(layer.map);
  const folded = layer.map_folded ? expanded(layer.map_folded) : null;
  canvas.width = moments.length;
  canvas.height = ranges;
  const context = canvas.getContext("2d");
  const image = context.createImageData(moments.length, ranges);
  shares.forEach((share, n) =>
    image.data.set([...colour(share, folded ? folded[n] : 0), 255], 4 * n));
  context.putImageData(image, 0, 0);
}

function showMaps() {
  document.getElementById("maps").replaceChildren(...held().layers.map((layer, n) => {
    const figure = document.createElement("figure");
    const canvas = document.createElement("canvas");
    const caption = document.createElement("figcaption");
    caption.textContent = `${layer.name}: ${layer.rows} rows`;
    figure.append(canvas, caption);
    figure.addEventListener("click", () => { pick.layer.value = String(n + 1); showText(); });
    draw(layer, canvas);
    return figure;
  }));
}

// Of a list of layers the means, or one layer's own.
function ending(layers) {
  const all = layers.map((layer) => ({
    shares: expanded(layer.end), folded: layer.end_folded && expanded(layer.end_folded) }));
  return all[0].shares.map((_, n) => {
    const there = all.filter((one) => one.shares[n]);
    const rows = there.map((one) => (one.folded ? 2 ** one.folded[n] : 1));
    return {
      share: all.reduce((sum, one) => sum + one.shares[n], 0) / all.length,
      rows: rows.reduce((sum, one) => sum + one, 0) / Math.max(1, rows.length),
      layers: there.length,
    };
  });
}

// Which tokens a fact begins or ends in.
function inFacts({ pieces, facts }) {
  const whole = pieces.join(""), marked = new Set();
  for (const fact of facts) {
    const start = whole.indexOf(fact);
    let place = 0;
    pieces.forEach((piece, n) => {
      if (start >= 0 && place < start + fact.length && place + piece.length > start) marked.add(n);
      place += piece.length;
    });
  }
  return marked;
}

function showText() {
  const chosen = +pick.layer.value, { layers, tokens } = held();
  const folds = layers.some((layer) => layer.end_folded);
  const end = ending(chosen ? [layers[chosen - 1]] : layers);
  const facts = inFacts(task());
  document.getElementById("text").replaceChildren(...task().pieces.map((piece, n) => {
    const span = document.createElement("span"), at = end[n];
    span.textContent = piece;
    if (facts.has(n)) span.classList.add("fact");
    if (!at || !at.share) return span;
    span.classList.add("held");
    const said = colour(at.share, Math.log2(at.rows));
    span.style.background = `rgb(${said})`;
    if (at.share > 5) span.style.color = "#fff";
    span.title = `position ${n}: held by ${Math.round(at.share / 9 * 100)} % of the heads` +
      (chosen ? "" : `, in ${at.layers} of ${layers.length} layers`) +
      (folds ? `, a row stands for about ${Math.round(at.rows)}` : "");
    return span;
  }));
  const left = end.filter((at) => at.share).length;
  document.getElementById("left").textContent =
    `${left} of ${tokens} positions are still held by some head.`;
  document.querySelectorAll("#maps figure").forEach(
    (figure, n) => figure.classList.toggle("chosen", n + 1 === chosen));
  for (const scale of document.querySelectorAll(".folding")) scale.hidden = !folds;
}

function showStrategy() {
  fill(pick.layer, ["all layers", ...held().layers.map((layer) => layer.name)]);
  showMaps();
  showText();
}

function showTask() {
  fill(pick.strategy, Object.keys(task().held));
  showStrategy();
}

for (const [n, mark] of document.querySelectorAll(".folding i").entries())
  mark.style.background = `rgb(${colour(9, n)})`;
for (const [n, mark] of document.querySelectorAll(".sharing i").entries())
  mark.style.background = `rgb(${colour([0, 3, 6, 9][n], 0)})`;
fill(pick.task, tasks.map((name) => ({ ppl: "one by one (ppl)", needle: "with facts (needle)" })[name]
  || name));
pick.task.addEventListener("change", showTask);
pick.strategy.addEventListener("change", showStrategy);
pick.layer.addEventListener("change", showText);
showTask();
