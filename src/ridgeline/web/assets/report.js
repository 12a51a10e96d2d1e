"use strict";
/* Draws the report from the JSON in #data. All text goes through textContent, so a name is never markup. */
(() => {
const D = JSON.parse(document.getElementById("data").textContent);
const R = D.rows, W = R.words, N = R.expected_s.length, T = D.totals;
const $ = (id) => document.getElementById(id);
const word = (column, i) => W[R[column][i]];
const BOUNDS = ["compute", "memory", "cache", "latency", "issue"];
const boundVar = (b) => `var(--${BOUNDS.includes(b) ? b : "other"})`;

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
function scaled(value, steps) {
  for (const [scale, unit] of steps) if (Math.abs(value) >= scale * 0.9995) return `${digits(value / scale)} ${unit}`;
  const [scale, unit] = steps[steps.length - 1];
  return `${digits(value / scale)} ${unit}`;
}
const digits = (v) => Math.abs(v) >= 999.5 ? Math.round(v).toLocaleString("en-US") : String(Number(v.toPrecision(3)));
const seconds = (v) => v === 0 ? "0 s" : scaled(v, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);
const bytes = (v) => scaled(v, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
const flops = (v) => scaled(v, [[1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1, "FLOP"]]);
const joules = (v) => scaled(v, [[1e6, "MJ"], [1e3, "kJ"], [1, "J"], [1e-3, "mJ"], [1e-6, "µJ"]]);
const count = (v) => scaled(v, [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]]).trim();
const percent = (f) => f > 0 && f < 0.0005 ? "<0.1 %" : `${(100 * f).toFixed(f < 0.0995 ? 1 : 0)} %`;
const usd = (v) => v >= 1 ? `$${v.toLocaleString("en-US", { maximumFractionDigits: 2 })}` : v > 0 ? `$${v.toFixed(Math.min(12, 2 - Math.floor(Math.log10(v))))}` : "–";
const times = (v) => !isFinite(v) ? "–" : v < 99.5 ? `${v.toFixed(2)}×` : v < 999.5 ? `${v.toFixed(0)}×` : ">999×";
const sum = (list) => list.reduce((a, b) => a + b, 0);

const tip = $("tip");
function showTip(event, title, facts) {
  tip.replaceChildren(el("b", { text: title }), ...facts.map(([k, v]) => el("div", {}, el("span", { text: k }), el("span", { text: v }))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - box.width - 8), below = event.clientY + 16;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${below + box.height > innerHeight ? Math.max(4, event.clientY - box.height - 12) : below}px`;
}
function hover(node, title, facts) {
  node.addEventListener("pointermove", (e) => showTip(e, title, facts()));
  node.addEventListener("pointerleave", () => { tip.hidden = true; });
}

const rowS = R.expected_s, totalS = sum(rowS);

// ---- what if: values that the model computed for every position of the sliders, one alone or two together ----------
const AXES = D.whatif.axes, POSITIONS = AXES.map(([, , , factors]) => [...factors, 1].sort((a, b) => a - b));
const key = (moved) => moved.map(([axis, factor]) => `${axis}=${factor}`).join(" ");
const VALUES = new Map(D.whatif.moved.map((moved, at) => [key(moved), D.whatif.values[at]]));
let moved = [];  // [axis, factor] of the sliders that are not at 1×, the last moved last

function outcome() {
  const found = moved.length ? VALUES.get(key([...moved].sort((a, b) => a[0] - b[0]))) : [T.expected_s, T.busy_s, T.energy_j, T.usd];
  const words = moved.flatMap(([axis, factor]) => AXES[axis][2].map((word) => `${word}=${factor}x`)).join(" ");
  $("command").textContent = words ? `--on "${D.title.device}${D.title.device.includes("=") ? ";" : ""} ${words}"` : "";
  if (!found) { $("outcome").replaceChildren(el("p", { class: "dim", text: "No such device can be: its numbers contradict each other." })); return; }
  const [wall, busy, energy, money] = found;
  const rows = [
    ["wall time", T.expected_s, wall, seconds, false], ["device busy", T.busy_s, busy, seconds, false],
    ["device idle", T.idle_s, Math.max(0, wall - busy), seconds, false], ["energy a step", T.energy_j, energy, joules, false],
    ["average power", T.power_w, wall ? energy / wall : 0, (v) => `${v.toFixed(0)} W`, false],
  ];
  if (T.usd_per_hour) rows.push(["money a step", T.usd, money, usd, false]);
  if (T.rate) rows.push([`${T.rate[0]}/s`, T.rate[1], T.rate[1] * T.expected_s / wall, digits, true]);
  const body = rows.map(([name, was, is, show, more]) => {
    const ratio = was > 0 ? is / was : 1, same = Math.abs(ratio - 1) < 0.0005, better = more ? ratio > 1 : ratio < 1;
    return el("tr", {}, el("td", { text: name }), el("td", { text: show(was) }), el("td", { text: show(is) }),
      el("td", { class: same ? "dim" : better ? "better" : "worse", text: same ? "·" : `${ratio > 1 ? "+" : "−"}${Math.abs(100 * (ratio - 1)).toFixed(1)} %` }));
  });
  const speedup = wall > 0 ? T.expected_s / wall : 1;
  $("outcome").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, el("th"), el("th", { text: "predicted" }), el("th", { text: "what if" }), el("th", { text: `${speedup.toFixed(2)}× speed` }))), el("tbody", {}, ...body)));
}
function sliders() {
  const parts = AXES.map(([word, label], axis) => {
    const at = POSITIONS[axis], one = at.indexOf(1), shown = el("output", { text: "1×" });
    const input = el("input", { type: "range", min: "0", max: String(at.length - 1), step: "1", value: String(one), id: `s-${word}` });
    input.addEventListener("input", () => {
      moved = moved.filter(([other]) => other !== axis);
      if (Number(input.value) !== one) moved.push([axis, at[Number(input.value)]]);
      if (moved.length > 2) moved.shift();
      show();
    });
    return { input, shown, one, at, row: el("div", { class: "slider" }, el("label", { for: `s-${word}`, text: label }), input, shown) };
  });
  function show() {
    parts.forEach(({ input, shown, one, at }, axis) => {
      const found = moved.find(([other]) => other === axis), place = found ? at.indexOf(found[1]) : one;
      input.value = String(place);
      shown.textContent = `${at[place]}×`;
      input.setAttribute("aria-valuetext", `${at[place]} times`);
    });
    outcome();
  }
  $("sliders").append(...parts.map(({ row }) => row));
  $("reset").addEventListener("click", () => { moved = []; show(); });
}

// ---- summary ------------------------------------------------------------------------------------------------------
function card(label, value, sub, cls, ...extra) {
  return el("div", { class: `card ${cls || ""}` }, el("div", { class: "label", text: label }), el("div", { class: "value", text: value }), ...extra, el("div", { class: "sub", text: sub }));
}
const meter = (...parts) => el("div", { class: "meter" }, ...parts.map(([frac, color]) => el("i", { style: `width:${Math.max(0, Math.min(1, frac)) * 100}%;background:${color}` })));
function cards() {
  const M = D.memory, frac = M.peak_bytes / M.capacity_bytes, idle = T.expected_s ? T.idle_s / T.expected_s : 0;
  const list = [
    card("wall time", seconds(T.expected_s), `90 % interval ${seconds(T.interval_s[0])} … ${seconds(T.interval_s[1])}`, "", intervalBar()),
    card("device busy", seconds(T.busy_s), `idle ${seconds(T.idle_s)} (${percent(idle)}); the host spends ${seconds(T.host_s)} on calls`, idle > 0.3 ? "warn" : "", meter([1 - idle, "var(--accent)"])),
    card("distance from the floor", times(T.floor_s ? T.expected_s / T.floor_s : Infinity), `the speed of light is ${seconds(T.floor_s)}`, "", meter([T.expected_s ? T.floor_s / T.expected_s : 0, "var(--good)"])),
    card("MFU", percent(T.mfu_frac), `${flops(T.flops)} a step; memory bandwidth ${percent(T.dram_frac)} used`, "", meter([T.mfu_frac, "var(--compute)"])),
    card("peak memory", bytes(M.peak_bytes), M.missing_bytes ? `misses ${bytes(M.missing_bytes)}: the device has ${bytes(M.capacity_bytes)}` : `${percent(frac)} of ${bytes(M.capacity_bytes)}: ${frac > 0.92 ? "tight" : "fits"}`, M.missing_bytes ? "bad" : frac > 0.92 ? "warn" : "", meter([frac, M.missing_bytes ? "var(--bad)" : "var(--memory)"])),
    card("energy", joules(T.energy_j), `${T.power_w.toFixed(0)} W on average of ${T.tdp_w.toFixed(0)} W${T.throttle > 1.001 ? `; the limit slows compute by ${percent(T.throttle - 1)}` : ""}`, "", meter([T.power_w / T.tdp_w, "var(--latency)"])),
    card("money", T.usd ? `${usd(T.usd)}` : "–", T.usd_per_hour ? `a step, at ${usd(T.usd_per_hour)} an hour (${T.price_date})` : "no price known"),
    T.rate ? card("rate", `${digits(T.rate[1])}`, `${T.rate[0]} a second${T.usd ? `, ${usd(T.usd / (T.rate[1] * T.expected_s) * 1e6)} per million` : ""}`)
           : card("parameters", count(T.num_params), `${T.num_kernels.toLocaleString("en-US")} kernels a step`),
  ];
  $("cards").replaceChildren(...list);
}
function intervalBar() {
  const [low, high] = T.interval_s, end = high * 1.08 || 1, at = (v) => 100 * v / end;
  const bar = el("div", { class: "meter" });
  bar.append(el("i", { style: `position:absolute;left:${at(low)}%;width:${at(high) - at(low)}%;background:color-mix(in srgb, var(--accent) 40%, transparent)` }),
    el("i", { style: `position:absolute;left:calc(${at(T.expected_s)}% - 1.5px);width:3px;background:var(--accent)` }));
  return bar;
}
function heading() {
  const t = D.title;
  $("title").replaceChildren(document.createTextNode(t.model), el("span", { class: "on", text: " on " }), document.createTextNode(t.device === t.device_title || t.device.includes("=") ? t.device : t.device_title));
  const hidden = t.mode === "decode" ? "seq" : "kv", sizes = Object.entries(t.sizes).filter(([k]) => k !== hidden).map(([k, v]) => k === "precision" ? v : `${k} ${v}`);
  $("subtitle").textContent = [t.mode, t.execution, ...sizes, `${count(T.num_params)} parameters`, `${T.num_kernels.toLocaleString("en-US")} kernels`, `basis: ${T.basis}`].join("  ·  ");
  const miss = D.notes.find((n) => n.startsWith("does not fit"));
  if (miss) { $("alert").hidden = false; $("alert").replaceChildren(el("b", { text: "Does not fit" }), document.createTextNode(miss.replace(/^does not fit/, ""))); }
  $("foot").textContent = `Ridgeline ${t.version} · graph ${t.hash.slice(0, 12)} · one file, no network`;
}

// ---- roofline and distance ----------------------------------------------------------------------------------------
// A chart is as wide as its panel, so that its letters keep their size in a narrow window.
const wide = (id) => Math.max(300, $(id).clientWidth || 1240);
const PLOT = { get w() { return wide("plot"); }, h: 470, l: 84, r: 18, t: 14, b: 48 };
let plotKind = "roofline";
function facts(i) {
  const t = rowS[i], f = R.flops[i], b = R.bytes[i];
  return [["op", `${word("op", i)} (${word("phase", i)})`], ["kernel", word("kernel", i) || "–"], ["time, all runs", `${seconds(t)} (${percent(t / (totalS || 1))})`],
    ["runs", R.times[i].toLocaleString("en-US")], ["a run", seconds(t / R.times[i])], ["90 % interval", `${seconds(R.low_s[i])} … ${seconds(R.high_s[i])}`],
    ["floor", `${seconds(R.floor_s[i])}, ${times(R.expected_s[i] / R.floor_s[i])}`], ["bound", word("bound", i)],
    ["achieved", [f ? `${flops(f / t)}/s` : "", b ? `${bytes(b / t)}/s` : ""].filter(Boolean).join(", ") || "–"],
    ["work", `${flops(f)}, ${bytes(b)}`], ["intensity", f && b ? `${digits(f / b)} FLOP/B` : "–"], ["basis", word("basis", i)], ...(word("source", i) ? [["source", word("source", i)]] : [])];
}
const label = (i) => word("module", i) || word("name", i);
function logAxis(lo, hi) { return { lo: Math.floor(Math.log10(lo)), hi: Math.ceil(Math.log10(hi)) }; }
function frame(xa, ya, xLabel, yLabel, xShow, yShow) {
  const { w, h, l, r, t, b } = PLOT, root = svg("svg", { viewBox: `0 0 ${w} ${h}`, role: "img" });
  const X = (v) => l + (Math.log10(v) - xa.lo) / (xa.hi - xa.lo) * (w - l - r), Y = (v) => h - b - (Math.log10(v) - ya.lo) / (ya.hi - ya.lo) * (h - t - b);
  for (let e = xa.lo; e <= xa.hi; e++) root.append(svg("line", { class: "grid", x1: X(10 ** e), x2: X(10 ** e), y1: t, y2: h - b }), svg("text", { x: X(10 ** e), y: h - b + 18, "text-anchor": "middle" }, xShow(10 ** e)));
  for (let e = ya.lo; e <= ya.hi; e++) root.append(svg("line", { class: "grid", x1: l, x2: w - r, y1: Y(10 ** e), y2: Y(10 ** e) }), svg("text", { x: l - 8, y: Y(10 ** e) + 4, "text-anchor": "end" }, yShow(10 ** e)));
  root.append(svg("line", { class: "axis", x1: l, x2: w - r, y1: h - b, y2: h - b }), svg("line", { class: "axis", x1: l, x2: l, y1: t, y2: h - b }));
  root.append(svg("text", { x: (l + w - r) / 2, y: h - 8, "text-anchor": "middle" }, xLabel), svg("text", { x: 14, y: (t + h - b) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(t + h - b) / 2})` }, yLabel));
  const clip = svg("clipPath", { id: "plot-clip" });
  clip.append(svg("rect", { x: l, y: t, width: w - l - r, height: h - t - b }));
  const inside = svg("g", { "clip-path": "url(#plot-clip)" });
  root.append(clip, inside);
  return { root, inside, X, Y };
}
const MAX_DOTS = 3000;
function dots(inside, ids, x, y) {
  const biggest = Math.max(...ids.map((i) => rowS[i]), 1e-30);
  for (const i of ids) {
    const dot = svg("circle", { class: "dot", cx: x(i).toFixed(1), cy: y(i).toFixed(1), r: (3 + 17 * Math.sqrt(rowS[i] / biggest)).toFixed(1), fill: boundVar(word("bound", i)) });
    hover(dot, label(i), () => facts(i));
    inside.append(dot);
  }
}
function longest(test) {
  const ids = [];
  for (let i = 0; i < N; i++) if (rowS[i] > 0 && test(i)) ids.push(i);
  ids.sort((a, b) => rowS[b] - rowS[a]);
  return ids.slice(0, MAX_DOTS);
}
function roofline() {
  const ids = longest((i) => R.flops[i] > 0 && R.bytes[i] > 0), timed = longest(() => true).length;
  const C = D.ceilings, peaks = C.peaks, dram = C.dram_bytes_per_s, l2 = C.l2_bytes_per_s;
  const top = Math.max(...peaks.map((p) => p[1]));
  const xs = ids.map((i) => R.flops[i] / R.bytes[i]), ys = ids.map((i) => R.flops[i] / rowS[i]);
  const xa = logAxis(Math.min(0.1, ...xs), Math.max(1e3, 3 * top / dram, ...xs)), ya = logAxis(Math.max(Math.min(1e11, ...ys), top / 1e9), top * 1.05);
  const { root, inside, X, Y } = frame(xa, ya, "arithmetic intensity, FLOP per byte", "achieved FLOP/s", (v) => v >= 1e4 ? count(v) : String(v), (v) => flops(v).replace("FLOP", ""));
  const x0 = 10 ** xa.lo, x1 = 10 ** xa.hi, labels = [];
  const slope = (bw, cls, name, cap) => {
    const knee = Math.min(cap / bw, x1);
    inside.append(svg("path", { class: `ceiling ${cls}`, d: `M${X(x0)} ${Y(x0 * bw)}L${X(knee)} ${Y(knee * bw)}` }));
    const from = Math.max(x0, 10 ** ya.lo / bw), at = from * (knee / from) ** 0.3, angle = Math.atan2(Y(at * 10 * bw) - Y(at * bw), X(at * 10) - X(at)) * 180 / Math.PI;
    labels.push(svg("text", { class: "ink over", x: X(at), y: Y(at * bw) + (cls ? -6 : 15), transform: `rotate(${angle} ${X(at)} ${Y(at * bw)})` }, name));
  };
    slope(l2, "l2", `L2 ${bytes(l2)}/s`, top);
  slope(dram, "", `DRAM ${bytes(dram)}/s`, top);
  for (const [name, is] of peaks) {
    inside.append(svg("path", { class: `ceiling ${name.includes("vector") ? "vec" : ""}`, d: `M${X(Math.max(x0, is / l2))} ${Y(is)}L${X(x1)} ${Y(is)}` }));
    labels.push(svg("text", { class: "ink over", x: X(x1) - 8, y: Y(is) - 6, "text-anchor": "end" }, `${name} ${flops(is)}/s`));
  }
  dots(inside, ids, (i) => X(R.flops[i] / R.bytes[i]), (i) => Y(Math.max(R.flops[i] / rowS[i], 10 ** ya.lo)));
  inside.append(...labels);
  $("plot").replaceChildren(root);
  $("plot-note").textContent = `Every dot is a node of the graph, its area the time of all its runs. ${timed - ids.length ? `${timed - ids.length} rows do no arithmetic (copies, gathers, fills) and are only in the other view. ` : ""}A dot above the DRAM line found its inputs in the L2.`;
}
function distance() {
  const ids = longest((i) => R.floor_s[i] > 0), one = (i) => [R.floor_s[i] / R.times[i], rowS[i] / R.times[i]];
  const all = ids.flatMap(one).concat([1e-6, 1e-5]), a = { lo: Math.max(-10, Math.floor(Math.log10(Math.min(...all)))), hi: Math.ceil(Math.log10(Math.max(...all))) };
  const ya = { lo: Math.max(a.lo, Math.floor(Math.log10(Math.min(...ids.map((i) => one(i)[1]), 1e-5)))), hi: a.hi };
  const { root, inside, X, Y } = frame(a, ya, "floor of one run: the speed of light", "expected time of one run", seconds, seconds);
  for (const k of [1, 2, 10, 100]) {
    const x0 = 10 ** a.lo, x1 = 10 ** a.hi, at = Math.max(10 ** ya.lo * 1.6, x0 * k * 1.2) / k;
    inside.append(svg("path", { class: `ceiling ${k > 1 ? "was" : ""}`, d: `M${X(x0)} ${Y(x0 * k)}L${X(x1)} ${Y(x1 * k)}` }), svg("text", { class: "ink", x: X(at) + (k === 1 ? 14 : 6), y: Y(at * k) + (k === 1 ? 4 : -3) }, k === 1 ? "speed of light" : `${k}×`));
  }
  dots(inside, ids, (i) => X(Math.max(one(i)[0], 10 ** a.lo)), (i) => Y(Math.max(one(i)[1], 10 ** ya.lo)));
  $("plot").replaceChildren(root);
  $("plot-note").textContent = "Every row, with or without arithmetic: height above the solid line is what a better kernel could win at most. Short runs are held by latency.";
}

// ---- modules ------------------------------------------------------------------------------------------------------
let zoom = [];
function tree() {
  const root = { name: D.title.model, kids: new Map(), t: 0, bounds: {}, rows: [], path: [] };
  for (let i = 0; i < N; i++) {
    if (!(rowS[i] > 0)) continue;
    const parts = (word("module", i) ? word("module", i).split(".") : []).concat([`${word("op", i)}${word("phase", i) === "forward" ? "" : ` ${word("phase", i)}`}`]);
    let at = root;
    add(at, i);
    parts.forEach((part, depth) => {
      const key = depth === parts.length - 1 ? `\u0000${part}` : part;
      if (!at.kids.has(key)) at.kids.set(key, { name: part, kids: new Map(), t: 0, bounds: {}, rows: [], path: at.path.concat([key]), leaf: depth === parts.length - 1 });
      at = at.kids.get(key);
      add(at, i);
    });
  }
  return root;
}
function add(node, i) {
  node.t += rowS[i];
  node.rows.push(i);
  node.bounds[word("bound", i)] = (node.bounds[word("bound", i)] || 0) + rowS[i];
}
const mostly = (node) => Object.entries(node.bounds).sort((a, b) => b[1] - a[1])[0][0];
function repeatOf(node) {
  const first = R.times[node.rows[0]];
  return node.name === "*" && node.rows.every((i) => R.times[i] === first) ? ` × ${first}` : "";
}
function icicle() {
  const root = tree(), w = wide("icicle"), rowH = 27;
  let focus = root;
  for (const key of zoom) { if (!focus.kids.has(key)) break; focus = focus.kids.get(key); }
  const depthOf = (n) => n.kids.size ? 1 + Math.max(...[...n.kids.values()].map(depthOf)) : 1;
  const out = svg("svg", { viewBox: `0 0 ${w} ${Math.max(1, depthOf(focus)) * rowH}`, role: "img" });
  const draw = (node, x, width, depth) => {
    if (width < 0.6) return;
    const rect = svg("rect", { class: "cell", x: x.toFixed(1), y: depth * rowH, width: width.toFixed(1), height: rowH, rx: 3, fill: boundVar(mostly(node)), "fill-opacity": node.leaf ? 0.95 : Math.max(0.62, 0.9 - 0.05 * (6 - depth)) });
    const floor = sum(node.rows.map((i) => R.floor_s[i])), was = sum(node.rows.map((i) => R.expected_s[i]));
    hover(rect, node.path.map((p) => p.replace("\u0000", "")).join(".") || node.name, () => [["time", `${seconds(node.t)} (${percent(node.t / (root.t || 1))})`], ["floor", `${seconds(floor)}, ${times(was / floor)}`],
      ["mostly", `${mostly(node)} (${percent(node.bounds[mostly(node)] / node.t)})`], ["kernels", sum(node.rows.map((i) => R.num_kernels[i])).toLocaleString("en-US")], ["energy", joules(sum(node.rows.map((i) => R.energy_j[i])))]]);
    rect.addEventListener("click", () => { tip.hidden = true; zoom = node === focus ? node.path.slice(0, -1) : node.path; icicle(); });
    out.append(rect);
    if (width > 34) {
      const text = `${node.name}${repeatOf(node)}`, room = Math.floor((width - 10) / 6.6), share = ` ${percent(node.t / (root.t || 1))}`;
      const shown = text.length > room ? `${text.slice(0, Math.max(1, room - 1))}…` : text + (text.length + share.length <= room ? share : "");
      out.append(svg("text", { class: "on-cell", x: (x + 6).toFixed(1), y: depth * rowH + 18 }, shown));
    }
    let left = x;
    for (const kid of [...node.kids.values()].sort((a, b) => b.t - a.t)) { draw(kid, left, width * kid.t / node.t, depth + 1); left += width * kid.t / node.t; }
  };
  if (focus.t > 0) draw(focus, 0, w, 0);
  $("icicle").replaceChildren(out);
  $("crumbs").textContent = focus.path.map((p) => p.replace("\u0000", "")).join(".");
}

// ---- bars ---------------------------------------------------------------------------------------------------------
let barKey = "op";
function bars() {
  const groups = new Map();
  for (let i = 0; i < N; i++) {
    if (!(rowS[i] > 0)) continue;
    const key = word(barKey, i) || "–";
    if (!groups.has(key)) groups.set(key, { t: 0, floor: 0, was: 0, kernels: 0, bounds: {}, rows: [] });
    const g = groups.get(key);
    g.floor += R.floor_s[i]; g.was += R.expected_s[i]; g.kernels += R.num_kernels[i];
    add(g, i);
  }
  const all = [...groups.entries()].sort((a, b) => b[1].t - a[1].t), list = all.slice(0, 24), total = sum(all.map(([, g]) => g.t)) || 1, most = list.length ? list[0][1].t : 1;
  const nodes = list.map(([name, g]) => {
    const color = boundVar(mostly(g)), floor = Math.min(g.t, g.floor);
    const track = el("div", { class: "track" }, el("i", { style: `width:${100 * floor / most}%;background:${color}` }), el("i", { style: `width:${100 * (g.t - floor) / most}%;background:color-mix(in srgb, ${color} 38%, transparent)` }));
    return el("div", { class: "bar" }, el("div", { class: "name", text: name, title: name }), track,
      el("div", { class: "facts" }, el("b", { text: seconds(g.t) }), document.createTextNode(` ${percent(g.t / total)} · ${times(g.was / g.floor)} floor · ${g.kernels.toLocaleString("en-US")} kernels`)));
  });
  if (all.length > list.length) nodes.push(el("div", { class: "dim", text: `${all.length - list.length} more take ${seconds(sum(all.slice(24).map(([, g]) => g.t)))}` }));
  $("bars").replaceChildren(...nodes);
}

// ---- memory -------------------------------------------------------------------------------------------------------
const KIND_COLORS = { param: "#4f6bed", state: "#8a5cf0", grad: "#d9487d", activation: "#0d9aa5", input: "#6b9a2f", buffer: "#9a7a3b", constant: "#7d8896", workspace: "#dd8a12" };
function memory() {
  const M = D.memory, w = wide("memory"), h = 300, l = 76, r = 18, t = 16, b = 34, n = Math.max(1, M.num_nodes - 1);
  const withCapacity = M.capacity_bytes < 2.2 * M.peak_bytes, top = (withCapacity ? Math.max(M.capacity_bytes, M.peak_bytes) : M.peak_bytes) * 1.08 || 1;
  const X = (i) => l + i / n * (w - l - r), Y = (v) => h - b - v / top * (h - t - b), out = svg("svg", { viewBox: `0 0 ${w} ${h}`, role: "img" });
  const step = niceStep(top / 5);
  for (let v = 0; v <= top; v += step) out.append(svg("line", { class: "grid", x1: l, x2: w - r, y1: Y(v), y2: Y(v) }), svg("text", { x: l - 8, y: Y(v) + 4, "text-anchor": "end" }, bytes(v)));
  let low = 0;
  for (const kind of [...M.resident_kinds.filter((k) => M.by_kind[k]), ...(M.workspace_bytes ? ["workspace"] : [])].sort((a, c) => M.by_kind[c] - M.by_kind[a])) {
    const high = low + M.by_kind[kind], band = svg("rect", { x: l, width: w - l - r, y: Y(high), height: Math.max(0, Y(low) - Y(high)), fill: KIND_COLORS[kind] || "#7d8896", "fill-opacity": .8 });
    hover(band, kind, () => [["resident the whole step", bytes(M.by_kind[kind])]]);
    out.append(band);
    low = high;
  }
  if (M.curve.length) {
    const line = M.curve.map(([i, v], k) => `${k ? "L" : "M"}${X(i).toFixed(1)} ${Y(Math.max(v, low)).toFixed(1)}`).join("");
    const first = M.curve[0][0], last = M.curve[M.curve.length - 1][0];
    const area = svg("path", { d: `${line}L${X(last)} ${Y(low)}L${X(first)} ${Y(low)}Z`, fill: KIND_COLORS.activation, "fill-opacity": .75 });
    area.addEventListener("pointermove", (e) => {
      const box = out.getBoundingClientRect(), i = ((e.clientX - box.left) / box.width * w - l) / (w - l - r) * n;
      const point = M.curve.reduce((best, p) => Math.abs(p[0] - i) < Math.abs(best[0] - i) ? p : best);
      showTip(e, `node ${point[0] + 1} of ${M.num_nodes}`, [["live", bytes(point[1])], ["comes and goes", bytes(point[1] - low)], ["free", bytes(Math.max(0, M.capacity_bytes - point[1]))]]);
    });
    area.addEventListener("pointerleave", () => { tip.hidden = true; });
    out.append(area);
    const peak = M.curve.reduce((best, p) => p[1] > best[1] ? p : best), right = X(peak[0]) > w - 190;
    out.append(svg("circle", { cx: X(peak[0]), cy: Y(peak[1]), r: 4, fill: "var(--ink)" }), svg("text", { class: "ink", x: X(peak[0]) + (right ? -9 : 9), y: Y(peak[1]) - 6, "text-anchor": right ? "end" : "start" }, `peak ${bytes(M.peak_bytes)}`));
  }
  if (withCapacity) out.append(svg("line", { x1: l, x2: w - r, y1: Y(M.capacity_bytes), y2: Y(M.capacity_bytes), stroke: "var(--bad)", "stroke-width": 1.6, "stroke-dasharray": "6 4" }), svg("text", { x: l + 8, y: Y(M.capacity_bytes) - 5, style: "fill:var(--bad)" }, `capacity ${bytes(M.capacity_bytes)}`));
  out.append(svg("line", { class: "axis", x1: l, x2: w - r, y1: h - b, y2: h - b }), svg("text", { x: (l + w - r) / 2, y: h - 8, "text-anchor": "middle" }, `node as run, 1 to ${M.num_nodes.toLocaleString("en-US")}`));
  $("memory").replaceChildren(out);
  $("memory-note").textContent = `Live bytes after the allocations of every node, repeats included.${withCapacity ? "" : ` The capacity, ${bytes(M.capacity_bytes)}, is ${digits(M.capacity_bytes / M.peak_bytes)}× the peak and lies above the picture.`}`;
  const kinds = Object.entries(M.by_kind).sort((a, c) => c[1] - a[1]), whole = sum(kinds.map((k) => k[1])) || 1;
  $("kinds").replaceChildren(el("div", { class: "stack" }, ...kinds.map(([k, v]) => el("i", { title: k, style: `width:${100 * v / whole}%;background:${KIND_COLORS[k] || "#7d8896"}` }))),
    el("div", { class: "legend" }, ...kinds.map(([k, v]) => el("span", {}, el("i", { style: `background:${KIND_COLORS[k] || "#7d8896"}` }), document.createTextNode(`${k} ${bytes(v)} (${percent(v / whole)})`)))));
}
function niceStep(v) { const p = 10 ** Math.floor(Math.log10(v)), m = v / p; return (m < 1.5 ? 1 : m < 3.5 ? 2 : m < 7.5 ? 5 : 10) * p; }

// ---- table --------------------------------------------------------------------------------------------------------
const share = (i) => rowS[i] / (totalS || 1);
const COLUMNS = [
  ["module", (i) => label(i)], ["op", (i) => word("op", i)], ["phase", (i) => word("phase", i)], ["kernel", (i) => word("kernel", i)], ["bound", (i) => word("bound", i)],
  ["runs", (i) => R.times[i], (v) => v.toLocaleString("en-US")], ["time", (i) => rowS[i], seconds], ["share", share, percent],
  ["× floor", (i) => R.floor_s[i] ? R.expected_s[i] / R.floor_s[i] : Infinity, times], ["floor", (i) => R.floor_s[i], seconds],
  ["FLOP/s", (i) => rowS[i] ? R.flops[i] / rowS[i] : 0, (v) => v ? `${flops(v)}/s` : "–"], ["bytes/s", (i) => rowS[i] ? R.bytes[i] / rowS[i] : 0, (v) => v ? `${bytes(v)}/s` : "–"],
  ["FLOPs", (i) => R.flops[i], (v) => v ? flops(v) : "–"], ["bytes", (i) => R.bytes[i], (v) => v ? bytes(v) : "–"], ["host", (i) => R.host_s[i], seconds],
  ["energy", (i) => R.energy_j[i], joules], ["basis", (i) => word("basis", i)], ["source", (i) => word("source", i)],
].filter(([name, value]) => name !== "source" || R.source.some((id) => W[id]));
const table = { sort: 6, down: true, shown: 100 };
function tableHead() {
  const row = el("tr", {}, ...COLUMNS.map(([name, , show], c) => {
    const th = el("th", { class: `${show ? "num" : ""} ${table.sort === c ? "sorted" : ""}`, tabindex: "0", text: name + (table.sort === c ? (table.down ? " ↓" : " ↑") : "") });
    const sort = () => { table.down = table.sort === c ? !table.down : Boolean(show); table.sort = c; tableHead(); tableBody(); };
    th.addEventListener("click", sort);
    th.addEventListener("keydown", (e) => { if (e.key === "Enter") sort(); });
    return th;
  }));
  $("rows").tHead.replaceChildren(row);
}
function tableBody() {
  const text = $("filter").value.trim().toLowerCase(), bound = $("bound-filter").value, phase = $("phase-filter").value, value = COLUMNS[table.sort][1], ids = [];
  for (let i = 0; i < N; i++) {
    if (bound && word("bound", i) !== bound) continue;
    if (phase && word("phase", i) !== phase) continue;
    if (text && !`${label(i)} ${word("op", i)} ${word("kernel", i)} ${word("source", i)}`.toLowerCase().includes(text)) continue;
    ids.push(i);
  }
  const numeric = Boolean(COLUMNS[table.sort][2]);
  ids.sort((a, b) => (numeric ? value(a) - value(b) || 0 : String(value(a)).localeCompare(String(value(b)))) * (table.down ? -1 : 1) || a - b);
  $("rows").tBodies[0].replaceChildren(...ids.slice(0, table.shown).map((i) => el("tr", {}, ...COLUMNS.map(([name, get, show]) => {
    const v = get(i), td = el("td", { class: show ? "num" : "" });
    if (name === "bound") td.append(el("span", { class: "chip", style: `background:${boundVar(v)}`, text: v }));
    else { td.textContent = show ? show(v) : v; if (!show) td.title = v; }
    return td;
  }))));
  $("row-count").textContent = `${Math.min(table.shown, ids.length).toLocaleString("en-US")} of ${ids.length.toLocaleString("en-US")} rows, ${seconds(sum(ids.map((i) => rowS[i])))}`;
  $("more").hidden = ids.length <= table.shown;
}
function filters() {
  for (const [id, column] of [["bound-filter", "bound"], ["phase-filter", "phase"]]) {
    const words = [...new Set(R[column].map((k) => W[k]))].sort();
    $(id).append(el("option", { value: "", text: `every ${column}` }), ...words.map((v) => el("option", { value: v, text: v })));
    $(id).addEventListener("change", tableBody);
  }
  $("filter").addEventListener("input", tableBody);
  $("more").addEventListener("click", () => { table.shown += 500; tableBody(); });
}

// ---- notes --------------------------------------------------------------------------------------------------------
function notes() {
  $("notes").replaceChildren(...(D.notes.length ? D.notes : ["nothing to note"]).map((n) => el("li", { text: n })));
  const whole = sum(D.bases.map((x) => x[1])) || 1, color = { measured: "var(--good)", fitted: "var(--memory)", datasheet: "var(--warn)", assumed: "var(--bad)" };
  $("bases").replaceChildren(el("div", { class: "stack" }, ...D.bases.map(([k, v]) => el("i", { style: `width:${100 * v / whole}%;background:${color[k]}` }))),
    el("div", { class: "legend" }, ...D.bases.map(([k, v]) => el("span", {}, el("i", { style: `background:${color[k]}` }), document.createTextNode(`${percent(v / whole)} of the device time is ${k}`)))));
  $("device").tHead.replaceChildren(el("tr", {}, ...["number", "value", "basis", "source"].map((x, c) => el("th", { class: c === 1 ? "num" : "", text: x }))));
  $("device").tBodies[0].replaceChildren(...D.device.map(([k, v, basis, source]) => el("tr", {}, el("td", { text: k }), el("td", { class: "num", text: deviceNumber(k, v) }), el("td", { text: basis }), el("td", { text: source }))));
}
function deviceNumber(key, v) {
  if (/^(tensor|vector)\./.test(key)) return `${flops(v)}/s`;
  if (key.endsWith("bytes_per_s")) return `${bytes(v)}/s`;
  if (key.endsWith("_bytes")) return bytes(v);
  if (key.endsWith("_hz")) return `${digits(v / 1e6)} MHz`;
  if (key.endsWith("_w")) return `${digits(v)} W`;
  return key.includes("usd") ? usd(v) : digits(v);
}

// ---- all together -------------------------------------------------------------------------------------------------
function redraw() { (plotKind === "roofline" ? roofline : distance)(); icicle(); bars(); tableBody(); }
function tabs(id, attr, choose) {
  for (const button of $(id).querySelectorAll("button")) button.addEventListener("click", () => {
    for (const other of $(id).querySelectorAll("button")) other.classList.toggle("on", other === button);
    choose(button.dataset[attr]);
  });
}
tabs("plot-tabs", "plot", (kind) => { plotKind = kind; $("plot-name").textContent = kind === "roofline" ? "Roofline" : "Distance from the floor"; (kind === "roofline" ? roofline : distance)(); });
tabs("by-tabs", "by", (key) => { barKey = key; bars(); });
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
const present = [...new Set(R.bound.map((k) => W[k]))].filter((b) => b !== "free");
$("bound-legend").replaceChildren(...present.map((b) => el("span", {}, el("i", { style: `background:${boundVar(b)}` }), document.createTextNode(`bound by ${b}`))));
heading(); cards(); sliders(); outcome(); filters(); tableHead(); memory(); notes(); redraw();
addEventListener("resize", () => { memory(); redraw(); });
document.documentElement.dataset.ready = "yes";
})();
