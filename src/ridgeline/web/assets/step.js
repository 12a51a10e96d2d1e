"use strict";
// One page for a simulated step and for a search: cards, bars a stage, a canvas timeline, memory, frontier.

const D = JSON.parse(document.getElementById("data").textContent);
const S = D.step, Q = D.search;
const $ = (id) => document.getElementById(id);
const COLORS = { compute: "var(--good)", tp: "var(--memory)", cp: "var(--cache)", ep: "var(--issue)", dp: "var(--compute)", bubble: "var(--latency)", optimizer: "var(--accent)", other: "var(--other)" };
const NAMES = { compute: "compute", tp: "tensor-parallel exchange", cp: "context exchange", ep: "expert exchange", dp: "gradients and parameters", bubble: "bubble", optimizer: "optimizer", other: "overheads, stragglers" };
const PASS = { F: ["forward", "--cache"], B: ["backward", "--compute"], W: ["weight gradients", "--memory"] };
const KINDS = { parameters: "var(--cache)", gathered: "var(--memory)", gradients: "var(--compute)", optimizer: "var(--accent)", activations: "var(--latency)", working: "var(--issue)", buffers: "var(--good)", fragments: "var(--bad)", context: "var(--other)" };

function el(tag, attrs, ...children) {
  const node = document.createElement(tag);
  for (const [k, v] of Object.entries(attrs || {})) node.setAttribute(k, v);
  for (const child of children) node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  return node;
}
function svg(tag, attrs, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(attrs || {})) node.setAttribute(k, v);
  if (text !== undefined) node.textContent = text;
  return node;
}
function scaled(value, steps) {
  const [scale, unit] = steps.find(([s]) => Math.abs(value) >= s) || steps[steps.length - 1];
  const v = value / scale;
  return `${Math.abs(v) >= 999.5 ? Math.round(v).toLocaleString("en-US") : Number(v.toPrecision(3))} ${unit}`;
}
const seconds = (v) => v === 0 ? "0 s" : scaled(v, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);
const bytes = (v) => scaled(v, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
const flops = (v) => scaled(v, [[1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1, "FLOP"]]);
const percent = (f) => f > 0 && f < 0.0005 ? "<0.1 %" : `${(100 * f).toFixed(f < 0.0995 ? 1 : 0)} %`;
const count = (v) => Math.round(v).toLocaleString("en-US");
const usd = (v) => v >= 1 ? `$${v.toLocaleString("en-US", { maximumFractionDigits: 2 })}` : `$${Number(v.toPrecision(3))}`;
const sum = (list) => list.reduce((a, b) => a + b, 0);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const tip = $("tip");
function showTip(event, title, facts) {
  tip.replaceChildren(el("b", {}, title), ...facts.map(([k, v]) => el("div", {}, el("span", { class: "dim" }, `${k} `), v)));
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 280)}px`;
  tip.style.top = `${event.clientY + 14}px`;
}
function hover(node, title, facts) {
  node.addEventListener("mousemove", (event) => showTip(event, title, facts));
  node.addEventListener("mouseleave", () => { tip.hidden = true; });
}
function legend(id, entries) {
  $(id).replaceChildren(...entries.map(([name, color]) => el("span", {}, el("i", { style: `background:${color}` }), name)));
}

function heading() {
  $("title").append(S.model, el("span", { class: "on" }, " on "), S.cluster);
  $("subtitle").textContent = `${S.title} · ${S.stack_title} (${S.stack_basis})`;
  if (!S.fits) {
    $("alert").hidden = false;
    $("alert").append(el("b", {}, "Does not fit: "), `a rank needs ${bytes(S.peak_bytes)} of ${bytes(S.capacity_bytes)}. Raise tp, pp or zero, recompute, or take a smaller micro-batch.`);
  }
}
function card(label, value, sub, cls = "") {
  return el("div", { class: `card ${cls}` }, el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "sub" }, sub));
}
function cards() {
  const list = [
    card("Step", seconds(S.step_s), `90 % interval ${seconds(S.interval_s[0])} … ${seconds(S.interval_s[1])}, basis ${S.basis}`),
    card("Model FLOP utilization", percent(S.mfu_frac), `HFU ${percent(S.hfu_frac)}, ${flops(S.flops_per_s_per_device)}/s a device`),
    card("Throughput", `${count(S.tokens_per_s_per_device)} ${S.unit}s/s`, `a device; ${count(S.tokens_per_s_per_device * S.num_devices)} in all, ${count(S.tokens)} a step`),
    card("Memory of a rank", bytes(S.peak_bytes), `of ${bytes(S.capacity_bytes)}: ${S.fits ? "fits" : "does not fit"}`, S.fits ? (S.peak_bytes > 0.95 * S.capacity_bytes ? "warn" : "") : "bad"),
    card("Exposed communication", percent(S.exposed_s / S.step_s), `${seconds(S.exposed_s)}; pipeline bubble ${percent(S.bubble_frac)}`),
    card("Energy and money", usd(S.usd), `a step at ${usd(S.price_usd_per_hour)} a device-hour; ${Number((S.energy_j / 3.6e6).toPrecision(3))} kWh, ${Number((S.energy_j / S.tokens).toPrecision(3))} J a ${S.unit}`),
  ];
  const r = D.run;
  if (r) list.push(
    card("Whole run", `${Number(r.days.toPrecision(3))} days`, `${r.tokens.toExponential(2)} tokens, ${count(r.num_steps)} steps, goodput ${percent(r.goodput_frac)}`),
    card("Whole run, cost", `$${count(r.usd)}`, `${count(r.energy_j / 3.6e9)} MWh, ${count(r.num_failures)} failures expected, checkpoint every ${Number((r.checkpoint_every_s / 60).toPrecision(2))} min`));
  $("cards").replaceChildren(...list);
}

// A chart is as wide as its panel, so that its letters keep their size in a narrow window.
const wide = (id) => Math.max(300, $(id).clientWidth || 1240);
const numTicks = (w) => w < 480 ? 3 : 5;
function parts() {
  const rows = S.stages, h = 22, gap = 5, w = wide("parts"), left = 76, top = 4, height = top + rows.length * (h + gap) + 24;
  const chart = svg("svg", { viewBox: `0 0 ${w} ${height}` });
  const x = (v) => left + v / S.step_s * (w - left - 10);
  rows.forEach((row, i) => {
    const y = top + i * (h + gap);
    chart.append(svg("text", { x: 0, y: y + 15 }, `stage ${i}`));
    let at = 0;
    for (const name of S.part_names) {
      const v = row[name];
      if (v <= 0) continue;
      const rect = svg("rect", { x: x(at), y, width: Math.max(0.5, x(at + v) - x(at)), height: h, fill: COLORS[name], "fill-opacity": name === "bubble" ? 0.35 : 0.85 });
      hover(rect, `stage ${i}: ${NAMES[name]}`, [["time", seconds(v)], ["share", percent(v / S.step_s)]]);
      chart.append(rect);
      at += v;
    }
  });
  for (let i = 0, n = numTicks(w); i <= n; i++) {
    const v = S.step_s * i / n;
    chart.append(svg("text", { x: x(v), y: height - 4, "text-anchor": i === n ? "end" : "middle" }, seconds(v)));
  }
  $("parts").replaceChildren(chart);
  legend("parts-legend", S.part_names.filter((n) => rows.some((r) => r[n] > 0)).map((n) => [NAMES[n], COLORS[n]]));
}

const view = { from: 0, to: 1 };
function timeline() {
  const canvas = $("timeline"), lanes = S.lanes, pp = lanes.length;
  const ratio = devicePixelRatio || 1, w = canvas.clientWidth || 1240, h = Math.max(90, Math.min(520, pp * 26 + 30));
  canvas.style.height = `${h}px`;
  canvas.width = w * ratio; canvas.height = h * ratio;
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  const end = Math.max(...lanes.map((l) => l.end[l.end.length - 1] || 0)), left = 70, row = (h - 26) / pp;
  if (view.to === 1 && view.from === 0) view.to = end;
  const x = (v) => left + (v - view.from) / (view.to - view.from) * (w - left - 6);
  g.clearRect(0, 0, w, h);
  g.font = "11.5px system-ui, sans-serif";
  lanes.forEach((lane, s) => {
    g.fillStyle = css("--dim"); g.fillText(`stage ${s}`, 0, s * row + row / 2 + 4);
    g.fillStyle = css("--soft"); g.fillRect(left, s * row + 1, w - left - 6, row - 3);
    for (let i = 0; i < lane.start.length; i++) {
      if (lane.end[i] < view.from || lane.start[i] > view.to) continue;
      const a = Math.max(left, x(lane.start[i])), b = Math.min(w - 6, x(lane.end[i]));
      g.globalAlpha = 0.55 + 0.4 * ((lane.micro[i] % 4) / 3);
      g.fillStyle = css(PASS[lane.kind[i]][1]);
      g.fillRect(a, s * row + 1, Math.max(0.6, b - a - (b - a > 4 ? 0.8 : 0)), row - 3);
      g.globalAlpha = 1;
      if (b - a > 22 && row > 13) { g.fillStyle = "#fff"; g.fillText(lane.micro[i], a + 4, s * row + row / 2 + 4); }
    }
  });
  g.fillStyle = css("--dim");
  for (let i = 0, n = numTicks(w); i <= n; i++) { const v = view.from + (view.to - view.from) * i / n; g.textAlign = ["left", ...Array(n - 1).fill("center"), "right"][i]; g.fillText(seconds(v), x(v), h - 6); }
  g.textAlign = "left";
  timeline.at = (px, py) => {
    const s = Math.floor(py / row), v = view.from + (px - left) / (w - left - 6) * (view.to - view.from), lane = lanes[s];
    const i = lane ? lane.start.findIndex((start, k) => start <= v && v <= lane.end[k]) : -1;
    return { s, v, i, lane };
  };
  const skipped = S.skipped_s > 0 ? `a steady stretch of ${seconds(S.skipped_s)}, each round like the one shown, is left out` : "";
  $("timeline-note").textContent = skipped;
  legend("timeline-legend", Object.values(PASS).filter(([, ], i) => lanes.some((l) => l.kind.includes("FBW"[i]))).map(([name, color]) => [name, `var(${color})`]));
}
function wireTimeline() {
  const canvas = $("timeline");
  let start = null;
  canvas.addEventListener("mousemove", (event) => {
    const { s, i, lane } = timeline.at(event.offsetX, event.offsetY);
    if (i < 0 || !lane) { tip.hidden = true; return; }
    showTip(event, `stage ${s}: ${PASS[lane.kind[i]][0]} of micro-batch ${lane.micro[i]}`, [["chunk", lane.chunk[i]], ["from", seconds(lane.start[i])], ["for", seconds(lane.end[i] - lane.start[i])], ["live", bytes(lane.live[i] || 0)]]);
  });
  canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
  canvas.addEventListener("mousedown", (event) => { start = timeline.at(event.offsetX, 0).v; });
  canvas.addEventListener("mouseup", (event) => {
    const end = timeline.at(event.offsetX, 0).v;
    if (start !== null && Math.abs(end - start) > (view.to - view.from) / 200) { view.from = Math.max(0, Math.min(start, end)); view.to = Math.max(start, end); timeline(); }
    start = null;
  });
  canvas.addEventListener("dblclick", () => { view.from = 0; view.to = 1; timeline(); });
}

function memory() {
  const w = wide("memory"), h = 280, left = 66, bottom = 26, lanes = S.lanes;
  const chart = svg("svg", { viewBox: `0 0 ${w} ${h}` });
  const end = Math.max(...lanes.map((l) => l.end[l.end.length - 1] || 0)), top = 1.08 * Math.max(S.capacity_bytes, S.peak_bytes);
  const x = (v) => left + v / end * (w - left - 8), y = (v) => h - bottom - v / top * (h - bottom - 8);
  for (let i = 0; i <= 4; i++) {
    const v = top * i / 4;
    chart.append(svg("line", { class: "grid", x1: left, x2: w - 8, y1: y(v), y2: y(v) }), svg("text", { x: 0, y: y(v) + 4 }, bytes(v)));
  }
  lanes.forEach((lane, s) => {
    const step = Math.max(1, Math.floor(lane.live.length / 600)), points = [];
    for (let i = 0; i < lane.live.length; i += step) points.push(`${x(lane.start[i]).toFixed(1)},${y(lane.live[i]).toFixed(1)}`, `${x(lane.end[i]).toFixed(1)},${y(lane.live[i]).toFixed(1)}`);
    const hue = 215 + 110 * s / Math.max(1, lanes.length - 1);
    const line = svg("polyline", { points: points.join(" "), fill: "none", stroke: `hsl(${hue} 65% 55%)`, "stroke-width": 1.3, "stroke-opacity": 0.85 });
    hover(line, `stage ${s}`, [["peak", bytes(S.memory[s].peak_bytes)]]);
    chart.append(line);
  });
  chart.append(svg("line", { x1: left, x2: w - 8, y1: y(S.capacity_bytes), y2: y(S.capacity_bytes), stroke: "var(--bad)", "stroke-dasharray": "5 4" }));
  for (let i = 0, n = numTicks(w); i <= n; i++) chart.append(svg("text", { x: x(end * i / n), y: h - 6, "text-anchor": i === n ? "end" : "middle" }, seconds(end * i / n)));
  $("memory").replaceChildren(chart);
  kinds();
}
function kinds() {
  const rows = S.memory, w = wide("memory-kinds"), left = 66, step = Math.max(9, Math.min(24, 250 / rows.length)), h = rows.length * step + 26;
  const chart = svg("svg", { viewBox: `0 0 ${w} ${h}` });
  const top = 1.05 * Math.max(S.capacity_bytes, S.peak_bytes), x = (v) => left + v / top * (w - left - 8);
  rows.forEach((row, i) => {
    let at = 0;
    if (step > 11 || i % 2 === 0) chart.append(svg("text", { x: 0, y: i * step + step / 2 + 4 }, `stage ${row.stage}`));
    for (const [name, color] of Object.entries(KINDS)) {
      const v = row[name] || 0;
      if (v <= 0) continue;
      const rect = svg("rect", { x: x(at), y: i * step + 1, width: Math.max(0.4, x(at + v) - x(at)), height: step - 2, fill: color, "fill-opacity": 0.85 });
      hover(rect, `stage ${row.stage}: ${name}`, [["bytes", bytes(v)], ["of the peak", percent(v / row.peak_bytes)]]);
      chart.append(rect);
      at += v;
    }
  });
  chart.append(svg("line", { x1: x(S.capacity_bytes), x2: x(S.capacity_bytes), y1: 0, y2: h - 20, stroke: "var(--bad)", "stroke-dasharray": "5 4" }));
  chart.append(svg("text", { x: x(S.capacity_bytes), y: h - 6, "text-anchor": "end" }, bytes(S.capacity_bytes)));
  $("memory-kinds").replaceChildren(chart);
  legend("memory-legend", Object.entries(KINDS).filter(([n]) => rows.some((r) => r[n] > 0)));
}

function table(headings, rows) {
  return el("table", { class: "plain" }, el("thead", {}, el("tr", {}, ...headings.map((t) => el("th", {}, t)))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((c) => el("td", {}, c))))));
}
function plan() {
  const shown = Object.entries(S.plan).map(([k, v]) => [k, String(v)]);
  const half = Math.ceil(shown.length / 3);
  $("plan").replaceChildren(el("div", { style: "display:grid;grid-template-columns:repeat(auto-fit,minmax(240px,1fr));gap:0 24px" },
    ...[0, 1, 2].map((i) => table(["choice", "value"], shown.slice(i * half, (i + 1) * half)))));
}

function search() {
  if (!Q) return;
  $("search-panel").hidden = false;
  $("search-note").textContent = `${count(Q.num_candidates)} legal plans: ${Object.entries(Q.outcomes).map(([k, v]) => `${count(v)} ${k}`).join(", ")}`;
  const w = wide("frontier"), h = 330, left = 70, bottom = 34, all = Q.points;
  const chart = svg("svg", { viewBox: `0 0 ${w} ${h}` });
  const xs = all.map((p) => p[1]), ys = all.map((p) => p[0]);
  const x0 = Math.min(...xs) * 0.95, x1 = Math.max(S.capacity_bytes * 1.15, Math.min(Math.max(...xs), S.capacity_bytes * 2)), y0 = Math.min(...ys) * 0.97, y1 = Math.min(Math.max(...ys), y0 * 2.2) * 1.02;
  const x = (v) => left + (v - x0) / (x1 - x0) * (w - left - 10), y = (v) => h - bottom - (v - y0) / (y1 - y0) * (h - bottom - 8);
  for (let i = 0, n = numTicks(w); i <= n; i++) {
    const v = y0 + (y1 - y0) * i / n, m = x0 + (x1 - x0) * i / n;
    chart.append(svg("line", { class: "grid", x1: left, x2: w - 10, y1: y(v), y2: y(v) }), svg("text", { x: 0, y: y(v) + 4 }, seconds(v)),
      svg("text", { x: x(m), y: h - 12, "text-anchor": i === n ? "end" : "middle" }, bytes(m)));
  }
  for (const [t, b] of all) if (b <= x1 && t <= y1) {
    const dot = svg("circle", { cx: x(b), cy: y(t), r: 3, fill: b > S.capacity_bytes ? "var(--bad)" : "var(--accent)", "fill-opacity": 0.45 });
    hover(dot, "a plan", [["step", seconds(t)], ["memory", bytes(b)]]);
    chart.append(dot);
  }
  const front = Q.frontier.filter(([t, b]) => b <= x1 && t <= y1);
  chart.append(svg("polyline", { points: front.map(([t, b]) => `${x(b)},${y(t)}`).join(" "), fill: "none", stroke: "var(--ink)", "stroke-width": 1.4 }));
  for (const [t, b, words] of front) {
    const dot = svg("circle", { cx: x(b), cy: y(t), r: 4.5, fill: "var(--good)" });
    hover(dot, words, [["step", seconds(t)], ["memory", bytes(b)]]);
    chart.append(dot);
  }
  chart.append(svg("line", { x1: x(S.capacity_bytes), x2: x(S.capacity_bytes), y1: 4, y2: h - bottom, stroke: "var(--bad)", "stroke-dasharray": "5 4" }));
  $("frontier").replaceChildren(chart);
  $("best").replaceChildren(table(["plan", "step", "MFU", `${S.unit}s/s/device`, "memory", "exposed", "bubble", "$ a step"],
    Q.best.map((b) => [b.plan, seconds(b.step_s), percent(b.mfu_frac), count(b.tokens_per_s_per_device), bytes(b.peak_bytes), percent(b.exposed_s / b.step_s), percent(b.bubble_frac), usd(b.usd)])));
  $("sensitivity").replaceChildren(table(["change", "step", "", "because"], Q.sensitivity.map((s) => [`${s.choice} ${s.from} → ${s.to}`, s.step_s === null ? "–" : seconds(s.step_s), s.step_s === null ? "" : `${(100 * (s.step_s / S.step_s - 1)).toFixed(1)} %`, s.why])));
}

$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  timeline();
});
heading(); cards(); search(); parts(); timeline(); wireTimeline(); memory(); plan();
addEventListener("resize", () => { search(); parts(); timeline(); memory(); });
