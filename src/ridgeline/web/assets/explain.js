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
  const won = WHOLE ? D.recoverable_ms / WHOLE : 0, all = D.totals.all;
  const cards = [
    ["a step", ms(D.step_ms), (D.replay.num_steps > 1 ? `mean of ${D.replay.num_steps} steps` : "one step") + (D.replay.recorded_ms > 1.02 * D.step_ms ? `, ${ms(D.replay.recorded_ms)} as recorded; without the recording ${D.is_timed ? "as measured" : "by estimate"}` : ""), ""],
    ["device busy", percent(D.busy_frac), `of the step; ${all.num_gpu_events.toLocaleString("en-US")} device events in all`, D.busy_frac < 0.5 ? "bad" : D.busy_frac < 0.8 ? "warn" : ""],
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

// ---- from the floor to the step ---------------------------------------------------------------------------------
const WHOLE = D.waterfall ? D.waterfall.unrecorded_ms : D.step_ms;  // what every share on the page is of
function drawWaterfall() {
  const W = D.waterfall;
  if (!W) { $("waterfall-panel").hidden = true; return; }
  $("waterfall-note").textContent = [W.num_steps > 1 ? `mean of ${W.num_steps} steps` : "one step", W.num_devices > 1 ? `and ${W.num_devices} devices` : ""].filter(Boolean).join(" ");
  const longest = Math.max(W.step_ms, W.unrecorded_ms), rows = [];
  let at = 0;
  for (const stage of W.stages) {
    const bars = W.bars.filter((bar) => bar.stage === stage.stage);
    if (!bars.length) continue;
    if (stage.stage === "recording") rows.push(line("step without the recording", 0, WHOLE, longest, "--ink", true));
    else if (bars.length > 1) rows.push(line(stage.label, at, stage.ms, longest, bars[0].style, true));
    for (const bar of bars) {
      const label = bars.length > 1 || ["floor", "unrecorded", "communication", "recording"].includes(stage.stage) ? bar.label : `${stage.label}: ${bar.label}`;
      const box = el("details", { class: `wf${bars.length > 1 ? " inner" : ""}`, "data-bar": bar.key }, el("summary", {}, line(label, at, bar.ms, longest, bar.style, bars.length === 1)));
      box.addEventListener("toggle", () => { if (box.open && box.children.length === 1) box.append(drill(bar)); });
      rows.push(box);
      at += bar.ms;
    }
  }
  rows.push(line(W.step_ms > 1.0005 * WHOLE ? "step as recorded" : "step", 0, W.step_ms, longest, "--ink", true));
  $("waterfall").replaceChildren(...rows);
  const notes = [...W.notes];
  if (W.named_idle_frac < 0.995) notes.push(`${percent(1 - W.named_idle_frac)} of the idle time has no host activity in the trace`);
  $("waterfall-notes").replaceChildren(...notes.map((n) => el("li", { text: n })));
}
function line(label, at, value, longest, hue, strong) {
  return el("div", { class: `bar wf-row${strong ? " strong" : ""}` }, el("div", { class: "name", text: label, title: label }),
    el("div", { class: "track" }, el("i", { style: `margin-left:${100 * at / longest}%;width:max(1px, ${100 * value / longest}%);background:var(${hue});flex:none` })),
    el("div", { class: "facts" }, el("b", { text: ms(value) }), ` ${percent(value / WHOLE)}`));
}
function drill(bar) {
  const names = bar.findings.map((rule) => D.findings.findIndex((f) => f.rule === rule)).filter((i) => i >= 0);
  const brief = (name) => clip(name.replace(/^void /, "").replaceAll("(anonymous namespace)::", "").replace(/(?<=.)[<(].*$/s, ""), 70);
  const where = (p) => place([ending(p.module, 60), p.source, p.op, brief(p.name)].filter((v, i, all) => all.indexOf(v) === i)) || "no place recorded";
  const body = el("tbody", {});
  for (const part of bar.parts) {
    const row = el("tr", { class: part.spans.length ? "opens" : "", tabindex: part.spans.length ? "0" : "-1" }, el("td", { text: where(part), title: [part.module, part.source, part.op, part.name].filter(Boolean).join("\n") }), el("td", { class: "num", text: ms(part.ms) }), el("td", { class: "num", text: digits(part.count) }), el("td", { class: "num", text: ms(part.longest_ms) }));
    const spans = el("tr", { class: "spans" }, el("td", { colspan: "4" }, ...part.spans.map(([name, start, lasts]) => el("div", { text: `${clip(name, 160)}: at ${start.toLocaleString("en-US")} ms for ${ms(lasts)}` }))));
    spans.hidden = true;
    const toggle = () => { spans.hidden = !spans.hidden; };
    if (part.spans.length) { row.addEventListener("click", toggle); row.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); toggle(); } }); }
    body.append(row, spans);
  }
  return el("div", { class: "drill" }, el("p", {}, el("b", { text: "Generally: " }), bar.remedy),
    ...(names.length ? [el("p", {}, el("b", { text: "Findings: " }), names.map((i) => `${i + 1}. ${D.findings[i].what}`).join("; "))] : []),
    el("div", { class: "scroll" }, el("table", { class: "parts" }, el("thead", {}, el("tr", {}, ...["where", "a step", "times", "longest"].map((h, i) => el("th", { class: i ? "num" : "", text: h })))), body)));
}

// ---- tables -----------------------------------------------------------------------------------------------------
const shownTable = { at: 0, by: -1, down: true };
const UNITS = [["_bytes_per_s", (v) => `${bytes(v)}/s`], ["_per_s", (v) => `${digits(v)}/s`], ["bytes", bytes], ["_ms", ms], ["_us", (v) => ms(v / 1000)], ["_frac", percent]];
const shownCell = (column, v) => v === null || v === undefined ? "" : typeof v !== "number" ? String(v) : (UNITS.find(([end]) => column.endsWith(end)) || [0, (n) => Number.isInteger(n) ? n.toLocaleString("en-US") : digits(n)])[1](v);
function drawTables() {
  if (!D.tables.length) { $("tables-panel").hidden = true; return; }
  $("tables-tabs").replaceChildren(...D.tables.map((t, i) => {
    const tab = el("button", { type: "button", role: "tab", class: i === shownTable.at ? "on" : "", "aria-selected": String(i === shownTable.at), text: t.table });
    tab.addEventListener("click", () => { Object.assign(shownTable, { at: i, by: -1, down: true }); drawTables(); });
    return tab;
  }));
  const T = D.tables[shownTable.at], wanted = $("tables-search").value.toLowerCase();
  const kept = T.columns.map((name, i) => i).filter((i) => T.rows.some((row) => row[i] !== null && row[i] !== ""));
  let rows = wanted ? T.rows.filter((row) => row.some((v) => typeof v === "string" && v.toLowerCase().includes(wanted))) : [...T.rows];
  if (shownTable.by >= 0) rows.sort((a, b) => order(a[shownTable.by], b[shownTable.by]) * (shownTable.down ? -1 : 1));
  const heads = kept.map((i) => {
    const on = shownTable.by === i, number = T.rows.some((row) => typeof row[i] === "number");
    const head = el("th", { class: `${number ? "num" : ""}${on ? " sorted" : ""}`, "aria-sort": on ? (shownTable.down ? "descending" : "ascending") : "none" });
    const press = el("button", { type: "button", text: T.columns[i].replace(/_(ms|us|frac|bytes_per_s)$/, "").replaceAll("_", " ") + (on ? (shownTable.down ? " ↓" : " ↑") : "") });
    press.addEventListener("click", () => { shownTable.down = on ? !shownTable.down : number; shownTable.by = i; drawTables(); });
    head.append(press);
    return head;
  });
  $("table").replaceChildren(el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows.slice(0, 100).map((row) => el("tr", {}, ...kept.map((i) => {
    const text = shownCell(T.columns[i], row[i]);
    return el("td", { class: typeof row[i] === "number" ? "num" : "", title: text.length > 30 ? text : "", text: ["module", "source"].includes(T.columns[i]) ? ending(text, 44) : clip(text, 60) });
  })))));
  $("tables-note").textContent = [rows.length > 100 ? `the first 100 of ${rows.length.toLocaleString("en-US")} rows` : "", T.num_rows > T.rows.length ? `${T.num_rows.toLocaleString("en-US")} rows in all: ridgeline explain TRACE --table ${T.table} --csv out.csv` : "", T.note].filter(Boolean).join(" · ");
}
function order(a, b) { return a === b ? 0 : a === null ? -1 : b === null ? 1 : a < b ? -1 : 1; }
$("tables-search").addEventListener("input", drawTables);

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
  const span = view.to - view.from, raw = span / Math.max(2, Math.min(8, Math.floor((width - LEFT) / 70))), power = 10 ** Math.floor(Math.log10(raw));
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
    hover(cell, clip(n.name, 260), () => [["time", ms(n.ms)], ["share of the step", percent(n.ms / WHOLE)], ["kernels a step", digits(n.num)]]);
    cell.addEventListener("click", () => drawFlame(depth === 0 && n.parent ? n.parent : n));
    chart.append(cell);
    if (w > 40) chart.append(svg("text", { class: "on-cell", x: x + 4, y: depth * row + 15 }, clip(n.name, Math.floor((w - 8) / 7))));
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
  const width = wide("roofline"), height = 360, left = 52, bottom = 34;
  $("roofline-note").textContent = `Kernels with ${percent(R.coverage_frac)} of the kernel time have known work.`;
  const xs = R.dots.map((d) => Math.log10(d.flops / d.bytes)), ys = R.dots.map((d) => Math.log10(d.flops / d.s)), top = Math.log10(Math.max(...R.peaks.map((p) => p[1])));
  const x0 = Math.min(...xs, 0) - 0.3, x1 = Math.max(...xs, 3) + 0.3, y0 = Math.min(...ys, top - 3) - 0.3, y1 = top + 0.3;
  const x = (v) => left + (v - x0) / (x1 - x0) * (width - left - 10), y = (v) => height - bottom - (v - y0) / (y1 - y0) * (height - bottom - 10);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" }), power = (e) => e < -2 || e > 5 ? `1e${e}` : digits(10 ** e);
  for (let e = Math.ceil(x0); e <= x1; e++) chart.append(svg("line", { class: "grid", x1: x(e), x2: x(e), y1: 8, y2: height - bottom }), svg("text", { x: x(e), y: height - 10, "text-anchor": "middle" }, power(e)));
  for (let e = Math.ceil(y0); e <= y1; e++) chart.append(svg("line", { class: "grid", x1: left, x2: width - 10, y1: y(e), y2: y(e) }), svg("text", { x: left - 8, y: y(e) + 4, "text-anchor": "end" }, power(e - 12)));
  const slope = Math.log10(R.dram_bytes_per_s);
  const labels = [];
  for (const [name, peak] of R.peaks) {
    const p = Math.log10(peak), knee = p - slope;
    chart.append(svg("path", { class: "ceiling", d: `M${x(Math.max(x0, y0 - slope))},${y(Math.max(y0, x0 + slope))} L${x(knee)},${y(p)} L${x(x1)},${y(p)}` }));
    labels.push([name, y(p) - 5]);
  }
  labels.sort((a, b) => a[1] - b[1]);
  labels.forEach((label, i) => { label[1] = Math.max(label[1], 12, i ? labels[i - 1][1] + 14 : 0); });  // no two on top of each other
  R.dots.forEach((d, i) => {
    const dot = svg("circle", { class: "dot", cx: x(xs[i]), cy: y(ys[i]), r: Math.max(3, Math.min(16, Math.sqrt(d.s * 1e6) / 2)), fill: "var(--compute)" });
    hover(dot, clip(d.name, 200), () => [["time", ms(d.s * 1e3)], ["floor", d.floor_s ? ms(d.floor_s * 1e3) : ""], ["reached", `${digits(d.flops / d.s / 1e12)} TFLOP/s`], ["flops a byte", digits(d.flops / d.bytes)]]);
    chart.append(dot);
  });
  for (const [name, at] of labels) chart.append(svg("text", { class: "ink over", x: width - 14, y: at, "text-anchor": "end" }, name));
  chart.append(svg("text", { class: "over", x: width - 14, y: height - bottom - 8, "text-anchor": "end" }, "flops a byte →"), svg("text", { class: "over", x: left + 6, y: 18 }, "TFLOP/s"));
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
  const bare = ["findings", "flame", ...(D.timeline && D.timeline.lanes.length ? [] : ["timeline"])];
  for (const id of bare) $(id).closest("section").hidden = true;
  $("cards").hidden = true;
}
drawHead(); drawWaterfall(); drawTables(); drawFindings(); drawSteps(); drawFlame(flame); drawGaps(); drawRoofline(); drawMemory(); drawHeld(); drawQuality();
if (D.timeline) timelineEvents();
document.documentElement.dataset.drawn = "yes";
})();
