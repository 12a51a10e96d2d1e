"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";
const time = (s) => s === 0 ? "0" : s >= 100 ? s.toFixed(0) + " s" : s >= 1 ? s.toFixed(2) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(s >= 0.1 ? 0 : 1) + " ms" : (s * 1e6).toFixed(0) + " µs";
const num = (v) => v === 0 ? "0" : v >= 1e9 ? (v / 1e9).toFixed(1) + "G" : v >= 1e6 ? (v / 1e6).toFixed(1) + "M" : v >= 1e4 ? (v / 1e3).toFixed(0) + "k" : v >= 100 ? v.toFixed(0) : v >= 10 ? v.toFixed(1) : v.toFixed(2);
const money = (v) => "$" + (v >= 1 ? v.toFixed(2) : v.toPrecision(3));
const percent = (v) => (100 * v).toFixed(v < 0.1 ? 1 : 0) + " %";

function node(tag, attrs, parent, text) {
  const made = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(attrs)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) found.push(v);
  return found;
}

// A chart is as wide as its panel, so that its letters keep their size in a narrow window.
const wide = (id) => Math.max(300, $(id).clientWidth || 1240);
function frame(parent, width, height, xs, ys, xname, yname, xshow, yshow) {
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }, parent);
  const left = 62, right = 16, top = 12, bottom = 40;
  const x = (v) => left + (v - xs[0]) / (xs[1] - xs[0] || 1) * (width - left - right);
  const y = (v) => height - bottom - (v - ys[0]) / (ys[1] - ys[0] || 1) * (height - top - bottom);
  for (const v of ticks(ys[0], ys[1], 5)) {
    node("line", { x1: left, x2: width - right, y1: y(v), y2: y(v), class: "grid" }, svg);
    node("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, svg, yshow(v));
  }
  for (const v of ticks(xs[0], xs[1], width > 500 ? 9 : 4)) node("text", { x: x(v), y: height - bottom + 17, "text-anchor": "middle" }, svg, xshow(v));
  node("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "axis" }, svg);
  node("text", { x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, svg, xname);
  if (yname) node("text", { x: 14, y: (top + height - bottom) / 2, transform: `rotate(-90 14 ${(top + height - bottom) / 2})`, "text-anchor": "middle" }, svg, yname);
  return { svg, x, y, bottom: height - bottom };
}

function line(plot, xs, ys, color, stepped) {
  let path = "";
  xs.forEach((v, i) => { path += i ? (stepped ? `H${plot.x(v).toFixed(1)}V${plot.y(ys[i]).toFixed(1)}` : `L${plot.x(v).toFixed(1)} ${plot.y(ys[i]).toFixed(1)}`) : `M${plot.x(v).toFixed(1)} ${plot.y(ys[i]).toFixed(1)}`; });
  return node("path", { d: path, fill: "none", stroke: color, "stroke-width": 1.8 }, plot.svg);
}

function card(label, value, sub) {
  const made = document.createElement("div"); made.className = "card";
  for (const [name, text] of [["label", label], ["value", value], ["sub", sub]]) {
    const part = document.createElement("div"); part.className = name; part.textContent = text; made.appendChild(part);
  }
  $("cards").appendChild(made);
}

function cards(m) {
  const latency = (s) => `${time(s.low)} – ${time(s.high)} (90 %); p50 ${time(s.p50)}, p99 ${time(s.p99)}`;
  card("time to first token, mean", time(m.ttft_s.mean), latency(m.ttft_s));
  card("time per output token, mean", time(m.tpot_s.mean), latency(m.tpot_s));
  card("output tokens a second", num(m.output_tokens_per_s), `${num(m.output_tokens_per_s_per_device)} a device, ${num(m.tokens_per_s_per_user)} a user`);
  card("cost of a million output tokens", money(m.usd_per_million_output), `${money(m.usd_per_million_tokens)} with prompts; ${m.energy_j_per_token.toFixed(2)} J a token`);
  card("cache in use, peak", percent(m.cache_peak_frac), `${percent(m.cache_mean_frac)} on average; ${m.preemptions} preemptions`);
  card("requests that keep the SLO", percent(m.good_frac), `${num(m.goodput_per_s)} good requests a second of ${num(m.requests_per_s)}`);
}

function distributions() {
  const names = { ttft: "time to first token", tpot: "time per output token", e2e: "end to end" };
  for (const [key, name] of Object.entries(names)) {
    const box = document.createElement("div"); box.className = "chart"; $("cdf").appendChild(box);
    const points = data.cdf[key], high = points[points.length - 1][0];
    const plot = frame(box, 400, 240, [0, high * 1.02], [0, 1], name, "", time, (v) => (100 * v).toFixed(0) + " %");
    line(plot, points.map((p) => p[0]), points.map((p) => p[1]), "var(--accent)");
    for (const p of [0.5, 0.99]) {
      const at = data.metrics[`${key}_s`][`p${100 * p}`];
      node("circle", { cx: plot.x(at), cy: plot.y(p), r: 3.5, fill: "var(--accent)" }, plot.svg);
      const far = plot.x(at) > 300;
      node("text", { x: plot.x(at) + (far ? -8 : 8), y: plot.y(p) + (p > 0.9 ? 14 : 4), class: "ink over", "text-anchor": far ? "end" : "start" }, plot.svg, `p${100 * p}: ${time(at)}`);
    }
  }
}

function overTime() {
  const s = data.samples, end = s.at_s[s.at_s.length - 1];
  const high = Math.max(data.capacity_tokens, ...s.held);
  const plot = frame($("cache"), wide("cache"), 260, [0, end], [0, high * 1.05], "seconds", "tokens", (v) => num(v), num);
  const area = line(plot, s.at_s, s.held, "var(--memory)", true);
  const fill = node("path", { d: area.getAttribute("d") + `V${plot.bottom}H${plot.x(s.at_s[0])}Z`, fill: "var(--memory)", "fill-opacity": 0.16 }, plot.svg);
  fill.setAttribute("stroke", "none");
  node("line", { x1: plot.x(0), x2: plot.x(end), y1: plot.y(data.capacity_tokens), y2: plot.y(data.capacity_tokens), stroke: "var(--bad)", "stroke-dasharray": "5 4" }, plot.svg);
  node("text", { x: plot.x(end) - 6, y: plot.y(data.capacity_tokens) + 14, "text-anchor": "end", class: "ink over" }, plot.svg, `capacity ${num(data.capacity_tokens)} tokens`);
  const most = Math.max(1, ...s.running, ...s.waiting);
  const second = frame($("batch"), wide("batch"), 240, [0, end], [0, most * 1.08], "seconds", "requests", (v) => num(v), num);
  line(second, s.at_s, s.running, "var(--compute)", true);
  line(second, s.at_s, s.waiting, "var(--latency)", true);
  legend("batch-legend", [["var(--compute)", "decoding"], ["var(--latency)", "waiting"]]);
}

function legend(id, entries) {
  for (const [color, text] of entries) {
    const part = document.createElement("span"), mark = document.createElement("i");
    mark.style.background = color; part.appendChild(mark); part.appendChild(document.createTextNode(text)); $(id).appendChild(part);
  }
}

const COLORS = ["var(--accent)", "var(--memory)", "var(--compute)", "var(--latency)", "var(--issue)", "var(--good)", "var(--bad)", "var(--other)"];

function pareto() {
  const points = data.points;
  if (!points.length) { $("pareto-panel").remove(); $("table-panel").remove(); return; }
  const high = [Math.max(...points.map((p) => p.user)), Math.max(...points.map((p) => p.device))];
  const plot = frame($("pareto"), wide("pareto"), 420, [0, high[0] * 1.06], [0, high[1] * 1.08], "tokens a second and user", "tokens a second and device", num, num);
  const groups = [...new Set(points.map((p) => data.kind === "search" ? `${p.title} ${p.precision}` : "this deployment"))];
  groups.forEach((name, i) => {
    const color = COLORS[i % COLORS.length];
    const mine = points.filter((p) => data.kind !== "search" || `${p.title} ${p.precision}` === name).sort((a, b) => a.user - b.user);
    line(plot, mine.map((p) => p.user), mine.map((p) => p.device), color).setAttribute("stroke-opacity", 0.45);
    let labelled = null;
    for (const p of mine) {
      const dot = node("circle", { cx: plot.x(p.user), cy: plot.y(p.device), r: p.keeps ? 5 : 3.5, fill: color, "fill-opacity": p.keeps ? 0.95 : 0.4, class: "dot" }, plot.svg);
      node("title", {}, dot, `${p.title} ${p.precision}, ${p.concurrency || "at the rate"} in flight: TTFT ${time(p.ttft_s)}, TPOT ${time(p.tpot_s)}, ${money(p.usd)} a million`);
      const at = [plot.x(p.user), plot.y(p.device)];
      if (data.kind !== "search" && !(labelled && Math.abs(at[0] - labelled[0]) < 26 && Math.abs(at[1] - labelled[1]) < 15)) {
        node("text", { x: at[0] + 8, y: at[1] - 6, class: "over" }, plot.svg, p.concurrency);
        labelled = at;
      }
    }
  });
  if (data.frontier.length > 1) line(plot, data.frontier.map((p) => p.user), data.frontier.map((p) => p.device), "var(--ink)").setAttribute("stroke-dasharray", "4 4");
  if (data.best) {
    node("circle", { cx: plot.x(data.best.user), cy: plot.y(data.best.device), r: 10, fill: "none", stroke: "var(--good)", "stroke-width": 2.5 }, plot.svg);
    node("text", { x: plot.x(data.best.user) + 14, y: plot.y(data.best.device) + 4, class: "ink over" }, plot.svg, "cheapest that keeps the SLO");
  }
  if (data.kind === "search") legend("pareto-legend", groups.slice(0, 16).map((g, i) => [COLORS[i % COLORS.length], g]));
}

function table() {
  if (!data.points.length) return;
  const heads = ["deployment", "precision", "devices", "in flight", "TTFT", "TPOT", "tokens/s/user", "tokens/s/device", "$/M output", "keep the SLO"];
  const row = (cells, tag) => {
    const made = document.createElement("tr");
    cells.forEach((text, i) => { const cell = document.createElement(tag); cell.textContent = text; if (i > 1) cell.className = "num"; made.appendChild(cell); });
    return made;
  };
  const head = document.createElement("thead"); head.appendChild(row(heads, "th")); $("points").appendChild(head);
  const body = document.createElement("tbody");
  const chosen = data.kind === "search" ? [...data.points].sort((a, b) => a.usd - b.usd).slice(0, 40) : data.points;
  for (const p of chosen) body.appendChild(row([p.title, p.precision, p.devices, p.concurrency || "–", time(p.ttft_s), time(p.tpot_s), num(p.user), num(p.device), money(p.usd), percent(p.good)], "td"));
  $("points").appendChild(body);
}

$("title").textContent = data.title;
$("subtitle").textContent = data.subtitle || "";
if (data.kind === "serve") {
  cards(data.metrics); distributions(); overTime();
  $("foot").textContent = `Basis: ${data.metrics.basis}. Intervals hold 90 % of published runs of this engine. Ridgeline ${data.version}.`;
} else for (const id of ["cdf-panel", "cache-panel", "batch-panel"]) $(id).remove();
pareto(); table();
$("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
