"use strict";
/* Draws the explanation from the JSON in #data. All text goes through textContent, so a name is never markup. */
(() => {
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

// ---- small tools ------------------------------------------------------------------------------------------------
function el(tag, attrs, ...children) {
  const node = document.createElement(tag);
  for (const [k, v] of Object.entries(attrs || {})) k === "text" ? (node.textContent = v) : k === "style" ? (node.style.cssText = v) : node.setAttribute(k, v);
  node.append(...children);
  return node;
}
function svg(tag, attrs, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(attrs || {})) node.setAttribute(k, v);
  if (text !== undefined) node.textContent = text;
  return node;
}
const digits = (v) => Math.abs(v) >= 999.5 ? Math.round(v).toLocaleString("en-US") : String(Number(v.toPrecision(3)));
const ms = (v) => v >= 1000 ? `${digits(v / 1000)} s` : v >= 1 || v === 0 ? `${digits(v)} ms` : `${digits(v * 1000)} µs`;
const bytes = (v) => { for (const [s, u] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (v >= s) return `${digits(v / s)} ${u}`; return `${digits(v)} B`; };
const percent = (f) => f > 0 && f < 0.0005 ? "<0.1 %" : `${(100 * f).toFixed(f < 0.0995 ? 1 : 0)} %`;
const ending = (text, n) => text.length <= n ? text : `…${text.slice(text.length - n + 1)}`;  // modules of a network begin alike
const place = (parts) => parts.filter(Boolean).map((part) => part.replace(/^.*[/](?=[^/]*:\d+$)/, "")).join(" · ");
const wide = (id) => Math.max(300, $(id).clientWidth || 1200);  // a chart is as wide as its panel, so that its text keeps its size
const clip = (text, n) => text.length <= n ? text : `${text.slice(0, n - 1)}…`;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const tip = $("tip");
function showTip(event, title, facts) {
  tip.replaceChildren(el("b", { text: title }), ...facts.filter(([, v]) => v).map(([k, v]) => el("div", {}, el("span", { text: k }), el("span", { text: v }))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), below = event.clientY + 16;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${below + box.height > innerHeight ? Math.max(4, event.clientY - box.height - 12) : below}px`;
}
function hover(node, title, facts) {
  node.addEventListener("pointermove", (e) => showTip(e, title, facts()));
  node.addEventListener("pointerleave", () => { tip.hidden = true; });
}

// ---- head -------------------------------------------------------------------------------------------------------
function drawHead() {
  $("title").textContent = D.title;
  $("subtitle").textContent = [D.device, D.num_ranks > 1 ? `${D.num_ranks} ranks` : "", D.totals.all.num_gpu_events ? `${D.replay.num_steps} step${D.replay.num_steps > 1 ? "s" : ""}` : ""].filter(Boolean).join(" · ");
  $("verdict").textContent = D.verdict;
  const won = D.step_ms ? D.recoverable_ms / D.step_ms : 0, all = D.totals.all;
  const cards = [
    ["a step", ms(D.step_ms), (D.replay.num_steps > 1 ? `mean of ${D.replay.num_steps} steps` : "one step") + (D.replay.recorded_ms > 1.02 * D.step_ms ? `, ${ms(D.replay.recorded_ms)} as recorded; without the recording ${D.is_timed ? "as measured" : "by estimate"}` : ""), ""],
    ["device busy", percent(D.busy_frac), `${digits(all.busy_ms)} of ${digits(all.total_ms)} ms, ${all.num_gpu_events.toLocaleString("en-US")} device events`, D.busy_frac < 0.5 ? "bad" : D.busy_frac < 0.8 ? "warn" : ""],
    ["to win back", ms(D.recoverable_ms), `${percent(won)} of the step by ${D.findings.length} finding${D.findings.length === 1 ? "" : "s"}`, won > 0.3 ? "bad" : won > 0.1 ? "warn" : ""],
  ];
  $("cards").replaceChildren(...cards.map(([label, value, sub, tone]) => el("div", { class: `card ${tone}` },
    el("div", { class: "label", text: label }), el("div", { class: "value", text: value }), el("div", { class: "sub", text: sub }))));
  $("foot").textContent = `Ridgeline ${D.version}`;
}

// ---- findings ---------------------------------------------------------------------------------------------------
function drawFindings() {
  $("findings-note").textContent = D.findings.length ? "most valuable first; milliseconds of a step, each on its own" : "";
  if (!D.findings.length) { $("findings").replaceChildren(el("p", { class: "none", text: "None: no known mistake costs more than 2 % of the step." })); return; }
  $("findings").replaceChildren(...D.findings.map(drawFinding));
}
function drawFinding(f, i) {
  const whole = Math.max(D.step_ms, D.replay.recorded_ms), at = (v) => `${Math.min(100, 100 * v / whole).toFixed(2)}%`;  // gains end at the step as recorded
  const track = el("div", { class: "interval", title: "share of the step as recorded" });
  if (f.later_ms > 1.5 * f.high_ms) track.append(el("i", { class: "later", style: `left:0;width:${at(f.later_ms)}` }));
  track.append(el("i", { style: `left:${at(f.low_ms)};width:${at(f.high_ms - f.low_ms)}` }));
  if (f.expected_ms > 0.01 * f.high_ms) track.append(el("i", { class: "likely", title: "likely", style: `left:${at(f.expected_ms)}` }));
  const rows = [["why", f.cause], ["where", f.where], ["do", f.change]];
  if (f.later_ms > 1.5 * f.high_ms) rows.push(["later", `up to ${ms(f.later_ms)} once the findings above are fixed`]);
  if (f.unchecked.length) rows.push(["unchecked", f.unchecked.join("; ")]);
  for (const o of f.alternatives) rows.push(["or", `for the same time (${ms(o.low_ms)} to ${ms(o.high_ms)}): ${o.cause}. Then: ${o.change}${o.tell ? `. What tells: ${o.tell}` : ""}`]);
  const list = el("dl", {}, ...rows.flatMap(([k, v]) => [el("dt", { text: k }), el("dd", { text: v, class: k === "do" ? "do" : "" })]));
  const box = el("div", { class: "finding", "data-rule": f.rule },
    el("h3", {}, el("span", { text: `${i + 1}. ${f.what}` }), el("span", { class: "gain", text: `${ms(f.low_ms)} to ${ms(f.high_ms)}${f.expected_ms > 0.01 * f.high_ms ? `, likely ${ms(f.expected_ms)}` : ""}` })), track, list);
  if (f.evidence.length) box.append(el("details", {}, el("summary", { text: "evidence" }), evidence(f.evidence)));
  box.append(el("div", { class: "dim", text: `rule ${f.rule}, version ${f.version} · interval ${f.basis}` }));
  return box;
}
function evidence(rows) {
  const keys = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const cell = (v) => v === undefined || v === null ? "" : typeof v === "number" ? digits(v) : String(v);
  return el("table", {}, el("thead", {}, el("tr", {}, ...keys.map((k) => el("th", { text: k.replaceAll("_", " ") })))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...keys.map((k) => el("td", { text: cell(row[k]) }))))));
}

// ---- where the time went ----------------------------------------------------------------------------------------
const SHARES = [["compute", "compute_ms", "var(--compute)"], ["exposed communication", "exposed_comm_ms", "var(--issue)"], ["exposed copies", "exposed_memcpy_ms", "var(--memory)"], ["idle", "idle_ms", "var(--bad)"]];
function drawShares() {
  const all = D.totals.all, shown = SHARES.filter(([, key]) => all[key] > 0);
  $("shares").replaceChildren(...shown.map(([name, key, fill]) => {
    const part = el("span", { style: `width:${100 * all[key] / all.total_ms}%;background:${fill}` });
    hover(part, name, () => [["time", ms(all[key])], ["share", percent(all[key] / all.total_ms)]]);
    return part;
  }));
  $("shares-legend").replaceChildren(...shown.map(([name, key, fill]) => el("span", {}, el("i", { style: `background:${fill}` }), `${name} ${ms(all[key])} (${percent(all[key] / all.total_ms)})`)));
  const causes = Object.entries(D.idle).map(([name, c]) => [name, c.idle_ms + c.exposed_ms, c]).sort((a, b) => b[1] - a[1]).filter(([, v]) => v > 0.001 * all.total_ms);
  const most = Math.max(...causes.map(([, v]) => v), 1e-9);
  $("idle").replaceChildren(...causes.map(([name, value, c]) => {
    const first = c.places[0] || {}, where = [first.module, first.source, first.op || first.name].filter(Boolean).join(" · ");
    return el("div", { class: "bar" }, el("div", { class: "name", text: D.idle_words[name] || name, title: name }),
      el("div", { class: "track" }, el("i", { style: `width:${100 * value / most}%;background:var(--bad);opacity:.75` })),
      el("div", { class: "facts", title: where }, el("b", { text: ms(value) }), ` ${ending(place([first.module, first.source, first.op || first.name]), 34)}`));
  }));
}

// ---- timeline ---------------------------------------------------------------------------------------------------
const FILL = { kernel: "--compute", communication: "--issue", memcpy: "--memory", memset: "--cache", runtime: "--latency", op: "--cache", annotation: "--other", dataloader: "--bad", gc: "--bad", python: "--other" };
const view = { from: 0, to: 1, drag: null, boxes: [], inked: {} };
const ROW = 15, LEFT = 150;
function laneRows() {
  const lanes = !D.timeline.critical.length ? [] : [["critical path", 1, D.timeline.critical.map(([a, b, side, name]) => [a, b - a, name, side === "device" ? "kernel" : "runtime", -1, 0, ""])]];
  for (const [name, spans] of D.timeline.lanes) {
    const depth = Math.min(9, Math.max(...spans.map((s) => s[5])) + 1);
    lanes.push([name, name.startsWith("host") ? depth : 1, spans]);
  }
  return lanes;
}
function drawTimeline() {
  const canvas = $("timeline"), lanes = laneRows();
  const height = lanes.reduce((sum, [, rows]) => sum + rows * ROW + 12, 26), width = canvas.clientWidth, scale = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = width * scale; canvas.height = height * scale;
  const g = canvas.getContext("2d");
  g.scale(scale, scale);
  g.clearRect(0, 0, width, height);
  g.font = "11px system-ui, sans-serif";
  view.boxes = []; view.inked = {};
  const span = view.to - view.from, x = (t) => LEFT + (t - view.from) / span * (width - LEFT - 4);
  drawTicks(g, x, width, height);
  let y = 24;
  for (const [name, rows, spans] of lanes) {
    g.fillStyle = color("--dim");
    g.textBaseline = "middle";
    g.fillText(clip(name, 22), 2, y + ROW / 2);
    for (const s of spans) drawSpan(g, s, x, y, width, rows);
    y += rows * ROW + 12;
  }
  if (view.drag) {
    g.fillStyle = color("--accent"); g.globalAlpha = 0.18;
    g.fillRect(Math.min(view.drag[0], view.drag[1]), 0, Math.abs(view.drag[1] - view.drag[0]), height);
    g.globalAlpha = 1;
  }
}
function drawTicks(g, x, width, height) {
  const span = view.to - view.from, raw = span / 8, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  g.strokeStyle = color("--line"); g.fillStyle = color("--dim"); g.textBaseline = "top";
  for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
    g.beginPath(); g.moveTo(x(t), 16); g.lineTo(x(t), height); g.stroke();
    const over = x(t) + 2 + g.measureText(ms(t)).width > width;
    g.textAlign = over ? "right" : "left";
    g.fillText(ms(t), over ? width : x(t) + 2, 2);
    g.textAlign = "left";
  }
}
function drawSpan(g, s, x, y, width, rows) {
  const [start, length, word, kind, finding, depth, module] = s;
  if (start > view.to || start + length < view.from) return;
  const a = Math.max(LEFT, x(start)), b = Math.min(width, x(start + length)), w = Math.max(0.6, b - a);
  const top = y + Math.min(depth, rows - 1) * ROW;
  g.fillStyle = color(FILL[kind] || "--other");
  g.globalAlpha = kind === "annotation" || kind === "python" ? 0.45 : 0.85;
  g.fillRect(a, top, w, ROW - 2);
  g.globalAlpha = 1;
  if (finding >= 0 && w > 1.5) { g.strokeStyle = color("--warn"); g.lineWidth = 1.5; g.strokeRect(a + 0.5, top + 0.5, Math.max(1, w - 1), ROW - 3); g.lineWidth = 1; }
  const name = typeof word === "number" ? D.timeline.words[word] : word;
  if (w > 34 && a >= (view.inked[top] || 0)) {  // one name in a place: what lies deeper is told by the tip
    view.inked[top] = a + Math.min(w, g.measureText(name).width + 6);
    g.save(); g.beginPath(); g.rect(a, top, w, ROW); g.clip(); g.fillStyle = "#fff"; g.textBaseline = "middle"; g.fillText(name, a + 3, top + ROW / 2 - 1); g.restore(); }
  view.boxes.push([a, top, a + w, top + ROW - 2, name, start, length, kind, finding, typeof module === "number" ? D.timeline.words[module] : module]);
}
function timelineEvents() {
  const canvas = $("timeline");
  const time = (px) => view.from + (Math.max(LEFT, px) - LEFT) / (canvas.clientWidth - LEFT - 4) * (view.to - view.from);
  canvas.addEventListener("pointerdown", (e) => { view.drag = [e.offsetX, e.offsetX]; canvas.setPointerCapture(e.pointerId); });
  canvas.addEventListener("pointermove", (e) => {
    if (view.drag) { view.drag[1] = e.offsetX; drawTimeline(); return; }
    const hit = view.boxes.findLast(([a, t, b, d]) => e.offsetX >= a - 1 && e.offsetX <= b + 1 && e.offsetY >= t && e.offsetY <= d);
    if (!hit) { tip.hidden = true; return; }
    showTip(e, clip(hit[4] || "host", 220), [["kind", hit[7]], ["start", ms(hit[5])], ["duration", ms(hit[6])], ["module", hit[9]], ["finding", hit[8] >= 0 ? D.findings[hit[8]].rule : ""]]);
  });
  canvas.addEventListener("pointerup", () => {
    const drag = view.drag; view.drag = null;
    if (drag && Math.abs(drag[1] - drag[0]) > 4) { const [a, b] = [time(Math.min(...drag)), time(Math.max(...drag))]; view.from = a; view.to = Math.max(b, a + 1e-6); }
    drawTimeline();
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  const reset = () => { view.from = 0; view.to = D.timeline.length_ms; drawTimeline(); };
  canvas.addEventListener("dblclick", reset);
  $("zoom-out").addEventListener("click", reset);
  addEventListener("resize", drawTimeline);
  $("timeline-note").textContent = D.timeline.left_out ? `the shortest ${D.timeline.left_out.toLocaleString("en-US")} spans are left out` : "";
  const shown = [["kernel", "kernel"], ["communication", "communication"], ["memcpy", "copy"], ["op", "op"], ["runtime", "runtime call"], ["dataloader", "data loader, collector"]];
  const seen = new Set(D.timeline.lanes.flatMap(([, spans]) => spans.map((s) => s[3])));
  if (seen.has("gc")) seen.add("dataloader");
  $("timeline-about").textContent = "Drag to zoom in, double-click for the whole step." + (D.timeline.critical.length ? " The top lane is the critical path: what decided how long the step took. Spans of a finding are outlined." : "");
  $("timeline-legend").replaceChildren(...shown.filter(([kind]) => seen.has(kind)).map(([kind, label]) => el("span", {}, el("i", { style: `background:var(${FILL[kind]})` }), label)));
  reset();
}

// ---- steps ------------------------------------------------------------------------------------------------------
const PARTS = [["kernel", "--compute"], ["communication", "--issue"], ["memcpy", "--memory"], ["memset", "--cache"], ["runtime", "--latency"], ["dataloader", "--bad"], ["cpu_exec", "--other"], ["other", "--line"]];
function drawSteps() {
  if (D.steps.length < 2) { $("steps-panel").hidden = true; return; }
  const width = wide("steps"), height = 190, shown = D.steps.slice(0, 120), most = Math.max(...shown.map((s) => s.total_ms)), w = Math.min(60, (width - 60) / shown.length);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height + 24}`, role: "img" });
  shown.forEach((step, i) => {
    let y = height;
    for (const [part, fill] of PARTS) {
      const h = (step.categories_ms[part] || 0) / most * (height - 12);
      if (h <= 0) continue;
      y -= h;
      chart.append(svg("rect", { x: 50 + i * w, y, width: Math.max(1, w - 3), height: h, fill: `var(${fill})` }));
    }
    const all = svg("rect", { x: 50 + i * w, y: 0, width: w, height, fill: "transparent" });
    hover(all, `step ${step.step}${D.num_ranks > 1 ? `, rank ${step.rank}` : ""}`, () => [["total", ms(step.total_ms)], ...PARTS.map(([p]) => [p.replace("_", " "), step.categories_ms[p] ? ms(step.categories_ms[p]) : ""])]);
    chart.append(all);
    if (w > 24) chart.append(svg("text", { x: 50 + i * w + w / 2 - 2, y: height + 15, "text-anchor": "middle" }, D.num_ranks > 1 ? `r${step.rank}` : String(step.step)));
  });
  chart.append(svg("text", { x: 0, y: 20 }, ms(most)), svg("text", { x: 0, y: height }, "0"));
  $("steps").replaceChildren(chart, el("div", { class: "legend" }, ...PARTS.map(([p, fill]) => el("span", {}, el("i", { style: `background:var(${fill})` }), p.replace("_", " ")))));
}

// ---- flame graph by module --------------------------------------------------------------------------------------
function tree() {
  const root = { name: "step", ms: 0, num: 0, children: new Map() };
  for (const row of D.modules) {
    const path = [...(row.module ? row.module.split(".") : []), row.op || "(no op)", row.kernel];
    let node = root;
    node.ms += row.ms; node.num += row.num;
    for (const part of path) {
      if (!node.children.has(part)) node.children.set(part, { name: part, ms: 0, num: 0, children: new Map(), parent: node });
      node = node.children.get(part);
      node.ms += row.ms; node.num += row.num;
    }
  }
  return root;
}
let flameAt = null;
const CURVES = ["--ink", "--compute", "--memory", "--latency", "--issue", "--cache", "--good", "--bad", "--warn", "--other"];
const HUES = ["--compute", "--memory", "--cache", "--latency", "--issue", "--other"];
const hue = (name) => HUES[[...name].reduce((h, c) => (h * 31 + c.charCodeAt(0)) >>> 0, 7) % HUES.length];
function drawFlame(node) {
  flameAt = node;
  const width = wide("flame"), row = 22, cells = [];
  let deepest = 0;
  const place = (n, x, w, depth) => {
    if (w < 1.5 || depth > 18) return;
    deepest = Math.max(deepest, depth);
    cells.push([n, x, w, depth]);
    let at = x;
    for (const child of [...n.children.values()].sort((a, b) => b.ms - a.ms)) { const cw = w * child.ms / Math.max(n.ms, 1e-12); place(child, at, cw, depth + 1); at += cw; }
  };
  place(node, 0, width, 0);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${(deepest + 1) * row}`, role: "img" });
  for (const [n, x, w, depth] of cells) {
    const cell = svg("rect", { class: "cell", x, y: depth * row, width: w, height: row - 1, fill: depth ? `var(${hue(n.name)})` : "var(--other)", "fill-opacity": 0.8 });
    hover(cell, clip(n.name, 260), () => [["time", ms(n.ms)], ["share of device time", percent(n.ms / flame.ms)], ["kernels a step", digits(n.num)]]);
    cell.addEventListener("click", () => drawFlame(depth === 0 && n.parent ? n.parent : n));
    chart.append(cell);
    if (w > 40) chart.append(svg("text", { class: "on-cell", x: x + 4, y: depth * row + 15 }, clip(n.name, Math.floor(w / 6.6))));
  }
  const crumbs = [];
  for (let n = node; n; n = n.parent) crumbs.unshift(n.name);
  $("crumbs").textContent = crumbs.length > 1 ? crumbs.join(" › ") : "";
  $("flame").replaceChildren(chart);
}
const flame = tree();

// ---- roofline ---------------------------------------------------------------------------------------------------
function drawRoofline() {
  const R = D.roofline;
  if (!R) { $("roofline-panel").hidden = true; return; }
  const width = wide("roofline"), height = 360, left = 100, bottom = 30;
  const xs = R.dots.map((d) => Math.log10(d.flops / d.bytes)), ys = R.dots.map((d) => Math.log10(d.flops / d.s)), top = Math.log10(Math.max(...R.peaks.map((p) => p[1])));
  const x0 = Math.min(...xs, 0) - 0.3, x1 = Math.max(...xs, 3) + 0.3, y0 = Math.min(...ys, top - 3) - 0.3, y1 = top + 0.3;
  const x = (v) => left + (v - x0) / (x1 - x0) * (width - left - 10), y = (v) => height - bottom - (v - y0) / (y1 - y0) * (height - bottom - 10);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (let e = Math.ceil(x0); e <= x1; e++) chart.append(svg("line", { class: "grid", x1: x(e), x2: x(e), y1: 8, y2: height - bottom }), svg("text", { x: x(e), y: height - 10, "text-anchor": "middle" }, `${digits(10 ** e)}`));
  for (let e = Math.ceil(y0); e <= y1; e++) chart.append(svg("line", { class: "grid", x1: left, x2: width - 10, y1: y(e), y2: y(e) }), svg("text", { x: left - 8, y: y(e) + 4, "text-anchor": "end" }, `${digits(10 ** (e - 12))} TFLOP/s`));
  const slope = Math.log10(R.dram_bytes_per_s);
  let above = -100;
  for (const [name, peak] of R.peaks) {
    const p = Math.log10(peak), knee = p - slope, crowded = y(p) - above < 14;  // two roofs close together: the lower name below its line
    above = y(p);
    chart.append(svg("path", { class: "ceiling", d: `M${x(Math.max(x0, y0 - slope))},${y(Math.max(y0, x0 + slope))} L${x(knee)},${y(p)} L${x(x1)},${y(p)}` }), svg("text", { class: "ink", x: width - 14, y: crowded ? y(p) + 12 : y(p) - 5, "text-anchor": "end" }, name));
  }
  R.dots.forEach((d, i) => {
    const dot = svg("circle", { class: "dot", cx: x(xs[i]), cy: y(ys[i]), r: Math.max(3, Math.min(16, Math.sqrt(d.s * 1e6) / 2)), fill: "var(--compute)" });
    hover(dot, clip(d.name, 200), () => [["time", ms(d.s * 1e3)], ["floor", d.floor_s ? ms(d.floor_s * 1e3) : ""], ["reached", `${digits(d.flops / d.s / 1e12)} TFLOP/s`], ["flops a byte", digits(d.flops / d.bytes)]]);
    chart.append(dot);
  });
  chart.append(svg("text", { x: width - 14, y: height - bottom - 8, "text-anchor": "end" }, "flops a byte →"));
  $("roofline").replaceChildren(chart);
}

// ---- measured against expected -----------------------------------------------------------------------------------
function drawGaps() {
  if (!D.gaps.length) { $("gaps-panel").hidden = true; return; }
  const shown = D.gaps.slice(0, 15), most = Math.max(...shown.map((g) => g.measured_ms), 1e-9);
  $("gaps").replaceChildren(...shown.map((g) => {
    const width = (v) => `${100 * Math.min(v, g.measured_ms) / most}%`;
    const track = el("div", { class: "track layered" },
      el("i", { style: `width:${width(g.measured_ms)};background:var(--bad);opacity:.35` }),
      el("i", { style: `width:${width(g.expected_ms)};background:var(--compute);opacity:.6` }),
      el("i", { style: `width:${width(g.floor_ms)};background:var(--compute)` }));
    const name = [g.module, g.op].filter(Boolean).join(" · "), facts = `expected ${ms(g.expected_ms)}, floor ${ms(g.floor_ms)}, ${digits(g.num)} a step`;
    return el("div", { class: "bar" }, el("div", { class: "name", text: ending(name, 34), title: name }), track,
      el("div", { class: "facts", title: facts }, el("b", { text: ms(g.measured_ms) }), ` ${facts}`));
  }));
}

// ---- memory -----------------------------------------------------------------------------------------------------
function drawMemory() {
  if (!D.memory.length) { $("memory-panel").hidden = true; return; }
  const width = wide("memory"), height = 220, left = 70, points = D.memory.flatMap((m) => m.points);
  const t0 = Math.min(...points.map((p) => p[0])), t1 = Math.max(...points.map((p) => p[0]), t0 + 1e-9), most = Math.max(...points.map((p) => p[1]), 1);
  const x = (t) => left + (t - t0) / (t1 - t0) * (width - left - 10), y = (v) => height - 20 - v / most * (height - 34);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  chart.append(svg("text", { x: 0, y: 18 }, bytes(most)), svg("text", { x: 0, y: height - 20 }, "0"), svg("line", { class: "axis", x1: left, x2: width - 10, y1: height - 20, y2: height - 20 }));
  D.memory.forEach((m, i) => {
    let d = "", last = 0;
    for (const [t, v] of m.points) { d += d ? `H${x(t)}V${y(v)}` : `M${x(t)},${y(v)}`; last = v; }
    const line = svg("path", { d, fill: "none", stroke: `var(${CURVES[i % CURVES.length]})`, "stroke-width": 2 });
    hover(line, m.name, () => [["most", bytes(Math.max(...m.points.map((p) => p[1])))], ["last", bytes(last)]]);
    chart.append(line);
  });
  $("memory").replaceChildren(chart, el("div", { class: "legend" }, ...D.memory.map((m, i) => el("span", {}, el("i", { style: `background:var(${CURVES[i % CURVES.length]})` }), m.name))));
}

function drawHeld() {
  const row = (name, num, peak, hue) => el("div", { class: "bar" }, el("div", { class: "name", text: ending(name.replace(/[^ ]*[/](?=[^/ ]*:)/g, ""), 34), title: name }),
    el("div", { class: "track" }, el("i", { style: `width:${100 * num / Math.max(1, peak.allocated_bytes)}%;background:var(${hue})` })),
    el("div", { class: "facts" }, el("b", { text: bytes(num) }), ` ${percent(num / Math.max(1, peak.allocated_bytes))}`));
  $("held").replaceChildren(...D.held.flatMap((peak) => [
    el("p", { class: "dim", text: `At the peak${D.held.length > 1 ? ` of device ${peak.device}` : ""} ${bytes(peak.allocated_bytes)} are held${peak.reserved_bytes === null ? "" : `, ${bytes(peak.reserved_bytes)} reserved`}.` }),
    ...Object.entries(peak.by_category).map(([name, num]) => row(name, num, peak, "--memory")),
    ...peak.holders.filter((h) => h.module || h.op || h.source.includes(":")).slice(0, 10).map((h) => row([h.module, h.source, h.op].filter(Boolean).join(" · ") || h.phase, h.num_bytes, peak, "--compute")),
  ]));
}

// ---- what the answers rest on -----------------------------------------------------------------------------------
function drawQuality() {
  const R = D.replay, all = D.totals.all, linked = D.totals.linked, notes = [];
  if (all.num_gpu_events) notes.push(`The replay of what was recorded differs from it by ${percent(R.error_frac)}.`);
  if (R.unexplained_frac > 0.005) notes.push(`In ${percent(R.unexplained_frac)} of the time the device waits for something that the trace does not show.`);
  if (R.host_frac < 0.995) notes.push(D.is_timed ? `The step and the gains are those measured without the recording: calls of the host are taken at ${percent(R.host_frac)} of their recorded time.` : `Recording slows the host, and nobody timed this program without it: calls of the host are taken at ${percent(R.host_frac)} of their recorded time, as is usual.`);
  if (linked.num_gpu_events && linked.num_gpu_events < all.num_gpu_events) notes.push(`${(all.num_gpu_events - linked.num_gpu_events).toLocaleString("en-US")} of ${all.num_gpu_events.toLocaleString("en-US")} device events have no launch in the file. They are counted; without them the device would be busy ${ms(linked.busy_ms)} instead of ${ms(all.busy_ms)}.`);
  for (const issue of D.quality.issues || []) if (issue.code !== "unlinked") notes.push(`${issue.what[0].toUpperCase()}${issue.what.slice(1)}; ${issue.effect}.`);
  $("quality").replaceChildren(...notes.map((n) => el("li", { text: n })));
}

function repaint() { if (D.timeline) drawTimeline(); }
addEventListener("resize", () => { drawSteps(); drawFlame(flameAt); drawRoofline(); drawMemory(); });
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  repaint();
});
// A file of memory or of the host alone: panels of device time would show zeros as if they were results.
if (!D.totals.all.num_gpu_events) {
  const bare = ["findings", "shares", "flame", ...(D.timeline && D.timeline.lanes.length ? [] : ["timeline"])];
  for (const id of bare) $(id).closest("section").hidden = true;
  $("cards").hidden = true;
}
drawHead(); drawFindings(); drawShares(); drawSteps(); drawFlame(flame); drawGaps(); drawRoofline(); drawMemory(); drawHeld(); drawQuality();
if (D.timeline) timelineEvents();
document.documentElement.dataset.drawn = "yes";
})();
