// Runs and their history, one run, what differs between two, receipts and serving curves.
import { ask, color, el, keep, link, panel, saveCsv, say, shown, table, when } from "./page.js";
import { axes, chart, hideTip, savers, scale, showTip } from "./charts.js";

export async function runsPage(page, _, query) {
  const home = await ask("/api/home"), filter = el("input", { type: "search", placeholder: "filter: model, device, kind…", "aria-label": "filter", value: query.filter || "" }), body = el("div", {});
  const list = () => {
    const text = filter.value.trim().toLowerCase();
    keep(["runs"], { filter: filter.value });
    const rows = home.things.filter((t) => `${t.thing} ${t.kind}`.toLowerCase().includes(text)).slice(0, 500);
    body.replaceChildren(rows.length ? table([["subject"], ["device"], ["kind"], ["runs", true], ["newest"], ["what exactly"]], rows.map((t) => [
      el("a", { href: link(["history"], { kind: t.kind, thing: t.thing }), text: t.subject || "–" }), t.device, t.kind, t.runs.toLocaleString("en-US"), when(t.newest), t.thing])) : el("p", { class: "dim", text: home.things.length ? "nothing matches" : "Nothing is kept yet: give a verb --store, or set RIDGELINE_STORE." }));
  };
  filter.addEventListener("input", list);
  const tags = Object.entries(home.tags).map(([name, run]) => el("a", { href: link(["run", run]), text: name }));
  page.append(panel("Runs", el("div", { class: "row filters" }, filter), body), ...(tags.length ? [panel("Tags", el("div", { class: "row" }, ...tags))] : []));
  list();
}

export async function historyPage(page, _, query) {
  const found = await ask("/api/history", { kind: query.kind || "", thing: query.thing || "", metric: query.metric || "" });
  const choose = el("select", { "aria-label": "number" }, ...found.metrics.map((name) => el("option", { value: name, text: name, selected: name === found.metric })));
  choose.addEventListener("change", () => { location.hash = link(["history"], { ...query, metric: choose.value }).replace(/^.*#/, "#"); });
  const runs = found.runs, level = new Array(runs.length).fill(null), starts = new Set(found.levels.slice(1).map(([start]) => start));
  for (const [start, stop, median] of found.levels) for (let i = start; i < stop; i++) level[i] = median;
  const values = runs.map((r) => r.value), plot = el("div", {});
  const svg = chart("history", 300, (pen, w, h) => drawHistory(pen, w, h, found, level, starts));
  let drawn = null;
  const draw = () => {
    if (drawn) drawn.destroy();
    const width = Math.max(280, plot.clientWidth), axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
    drawn = new uPlot({ width, height: 320, scales: { x: { time: false } }, cursor: { drag: { x: true, y: false } },
      series: [{ label: "run", value: (_, v) => v === null ? "–" : `${runs[v] ? `${runs[v].id.slice(0, 10)} ${when(runs[v].at)}` : v}` },
        { label: found.metric, stroke: color("--accent"), width: 1.6, points: { show: true, size: 6 }, value: (_, v) => shown(found.metric, v) },
        { label: "level", stroke: color("--latency"), width: 2, dash: [6, 4], paths: uPlot.paths.stepped({ align: 1 }), points: { show: false }, value: (_, v) => shown(found.metric, v) }],
      axes: [{ ...axis, values: (_, ticks) => ticks.map((v) => Number.isInteger(v) && runs[v] ? runs[v].at.slice(5, 10) : "") }, { ...axis, size: 84, values: (_, ticks) => ticks.map((v) => shown(found.metric, v)) }],
      hooks: { draw: [(u) => { for (const at of starts) { const x = u.valToPos(at - 0.5, "x", true); u.ctx.strokeStyle = color("--bad"); u.ctx.beginPath(); u.ctx.moveTo(x, u.bbox.top); u.ctx.lineTo(x, u.bbox.top + u.bbox.height); u.ctx.stroke(); } }] },
    }, [runs.map((_, i) => i), values, level], plot);
    drawn.root.querySelector("canvas").setAttribute("aria-label", `${found.metric} over ${runs.length} runs`);
  };
  const moved = found.levels.length > 1 ? `${found.regressed ? "REGRESSED" : "changed"}: ${(100 * (found.change - 1)).toFixed(1)} % at the last of ${found.levels.length - 1} change${found.levels.length > 2 ? "s" : ""}` : "no change beyond the noise";
  const noise = runs.length > 3 ? `a run scatters by ${(100 * found.noise_frac).toPrecision(2)} %` : "too few runs to know their noise";
  const pick = new Set(), compare = el("button", { type: "button", text: "compare two", disabled: true, onclick: () => { const [a, b] = [...pick]; location.hash = `#/compare?${new URLSearchParams({ a: `run:${a}`, b: `run:${b}` })}`; } });
  const rows = runs.map((r, at) => el("tr", { class: starts.has(at) ? "on" : null }, el("td", {}, el("input", { type: "checkbox", "aria-label": `choose run ${r.id.slice(0, 10)}`, onchange: (e) => { e.target.checked ? pick.add(r.id) : pick.delete(r.id); compare.disabled = pick.size !== 2; } })),
    el("td", {}, el("a", { href: link(["run", r.id]), text: r.id.slice(0, 10) })), el("td", { text: when(r.at) }), el("td", { text: r.version }), el("td", { text: r.git || "–" }), el("td", { class: "num", text: shown(found.metric, r.value) }),
    el("td", { text: [starts.has(at) ? "changed beyond the noise" : "", r.changed ? "the model itself changed" : ""].filter(Boolean).join(", ") }))).reverse();
  const save = el("button", { type: "button", class: "small", text: "CSV", onclick: () => saveCsv("history.csv", ["run", "at", "version", "git", found.metric, "low", "high"], runs.map((r) => [r.id, r.at, r.version, r.git, r.value, r.low, r.high])) });
  const hidden = el("div", { class: "offscreen" }, svg);
  hidden.style.cssText = "height:0;overflow:hidden";
  page.append(panel(["History ", savers("history", svg, [save])], el("p", { class: "dim", text: `${found.kind}: ${found.thing}` }), el("div", { class: "row" }, choose, el("span", { class: found.regressed ? "bad" : "dim", text: `${moved}; ${noise}` })), plot, hidden),
    panel(["Runs ", compare], table([[""], ["run"], ["at"], ["version"], ["git"], [found.metric, true], ["change"]], rows)));
  draw();
  svg.redraw();
  const sized = new ResizeObserver(() => drawn.setSize({ width: Math.max(280, plot.clientWidth), height: 320 }));
  sized.observe(plot);
  document.addEventListener("colors", draw);
  return () => { document.removeEventListener("colors", draw); sized.disconnect(); drawn.destroy(); };
}
function drawHistory(pen, w, h, found, level, starts) {
  const box = { l: 84, r: 14, t: 12, b: 42 }, values = found.runs.map((r) => r.value), low = Math.min(...values), high = Math.max(...values), pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  const X = scale({ low: 0, high: Math.max(1, values.length - 1) }, box.l, w - box.r), Y = scale({ low: low - pad, high: high + pad }, h - box.b, box.t);
  axes(pen, w, h, X, Y, box, "run", found.metric, [null, null]);
  for (const at of starts) pen.line([[X(at - 0.5), box.t], [X(at - 0.5), h - box.b]], color("--bad"));
  for (const [start, stop, median] of found.levels) pen.line([[X(start), Y(median)], [X(stop - 1), Y(median)]], color("--latency"), 2);
  pen.line(values.map((v, i) => [X(i), Y(v)]), color("--accent"), 1.6);
  values.forEach((v, i) => pen.circle(X(i), Y(v), 3, color("--accent")));
}

export async function runPage(page, path) {
  const run = await ask(`/api/runs/${encodeURIComponent(path[0] || "")}`);
  const facts = [["kind", run.measured ? `${run.kind}, measured` : run.kind], ["device", run.device], ["at", when(run.at)], ["version", run.version], ["git", run.git], ...Object.entries(run.settings), ...Object.entries(run.environment)].map(([k, v]) => [k, typeof v === "object" ? JSON.stringify(v) : v]);
  const buttons = [el("a", { href: link(["history"], { kind: run.kind, thing: run.thing }), text: "history" }), el("a", { href: link(["compare"], { a: `run:${run.id}` }), text: "compare with another" })];
  if (run.kind === "optimize") buttons.push(el("a", { href: `/reports/run/${run.id}`, target: "_blank", rel: "noopener", text: "the receipt" }));
  if (run.kind === "predict") buttons.push(el("a", { href: `/what-if?${new URLSearchParams({ model: run.subject, on: run.device, execution: run.settings.execution || "eager", ...options(run.settings) })}`, text: "what if" }));
  page.append(panel(el("span", { text: `${run.subject} ` }), el("p", { class: "dim", text: `${run.id} · ${run.thing}` }), el("div", { class: "row" }, ...buttons)),
    ...(run.curve.length ? [servingPanel(run)] : []),
    panel("Numbers", table([["name"], ["value", true], ["low", true], ["high", true], ["basis"]], run.numbers.map(([n, v, low, high, basis]) => [n, shown(n, v), low === null ? "" : shown(n, low), high === null ? "" : shown(n, high), basis]))),
    panel("Made with", table([["what"], [""]], facts)),
    ...(run.artifacts.length ? [panel("Files", table([["kind"], ["path"], ["bytes", true]], run.artifacts.map(([k, p, n]) => [k, p, n.toLocaleString("en-US")])))] : []),
    panel("Document", el("details", {}, el("summary", { text: "as --json printed it" }), el("pre", { text: JSON.stringify(run.document, null, 1).slice(0, 400000) }))));
}
const options = (settings) => Object.fromEntries(["mode", "batch", "seq", "kv", "image", "precision", "optimizer"].filter((k) => settings[k]).map((k) => [k, settings[k]]));

export async function comparePage(page, _, query) {
  const inputs = ["a", "b"].map((k) => el("input", { type: "text", size: "38", value: query[k] || "", "aria-label": `side ${k}`, placeholder: "run:ID, a tag, or point:STUDY:NUMBER" }));
  const go = () => { location.hash = `#/compare?${new URLSearchParams({ a: inputs[0].value.trim(), b: inputs[1].value.trim() })}`; };
  for (const input of inputs) input.addEventListener("keydown", (e) => { if (e.key === "Enter") go(); });
  page.append(panel("Compare", el("div", { class: "row" }, ...inputs, el("button", { type: "button", text: "compare", onclick: go }))));
  if (!query.a || !query.b) {
    const runs = await ask("/api/runs", { limit: 40 });
    page.append(panel("Newest runs", table([["run"], ["kind"], ["at"], ["what"]], runs.map((r) => [el("button", { type: "button", class: "small", text: r.id.slice(0, 10), onclick: () => { (inputs[0].value ? inputs[1] : inputs[0]).value = `run:${r.id}`; } }), r.kind, when(r.at), r.thing]))));
    return;
  }
  const found = await ask("/api/compare", { a: query.a, b: query.b });
  const ratio = ([name, a, b]) => { const both = typeof a === "number" && typeof b === "number" && a; return [name, shown(name, a), shown(name, b), both ? `${(b / a).toFixed(3)}×` : ""]; };
  const plain = (v) => v === null || v === undefined ? "–" : typeof v === "object" ? JSON.stringify(v) : v;
  page.append(panel(["Numbers ", el("button", { type: "button", class: "small", text: "CSV", onclick: () => saveCsv("compare.csv", ["number", "a", "b"], found.numbers) })], el("p", { class: "dim", text: `A: ${found.a}` }), el("p", { class: "dim", text: `B: ${found.b}` }), table([["number"], ["A", true], ["B", true], ["B / A", true]], found.numbers.map(ratio))),
    ...(found.ops.length ? [panel("Op by op", table([["module"], ["op"], ["A", true], ["B", true], ["B − A", true], ["bound"]], found.ops.filter((o) => o.delta_s).map((o) => [o.module || "–", o.op, shown("x_s", o.a_s), shown("x_s", o.b_s), shown("x_s", o.delta_s), o.a_bound === o.b_bound ? o.a_bound : `${o.a_bound} → ${o.b_bound}`])))] : []),
    panel("Settings that differ", found.settings.length ? table([["what"], ["A"], ["B"]], found.settings.map(([n, a, b]) => [n, plain(a), plain(b)])) : el("p", { class: "dim", text: "none" })),
    ...(found.rest.length ? [panel("What else differs in their documents", table([["where"], ["A", true], ["B", true]], found.rest.map(([n, a, b]) => [n, shown(n, a), shown(n, b)])))] : []));
}

export async function receiptsPage(page) {
  const runs = await ask("/api/runs", { kind: "optimize", limit: 500 });
  page.append(panel("Receipts of optimize", runs.length ? table([["model"], ["device"], ["at"], ["eager", true], ["optimized", true], ["× eager", true], [""]], runs.map((r) => [el("a", { href: link(["run", r.id]), text: r.subject }), r.device, when(r.at), shown("x_s", r.metrics.eager_s), shown("x_s", r.metrics.final_s), shown("x", r.metrics.speedup), el("a", { href: `/reports/run/${r.id}`, target: "_blank", rel: "noopener", text: "receipt" })])) : el("p", { class: "dim", text: "none is kept: ridgeline optimize … --store URL" })));
}
export async function servingPage(page) {
  const runs = [...await ask("/api/runs", { kind: "serve", limit: 200 }), ...await ask("/api/runs", { kind: "serve search", limit: 200 })];
  page.append(panel("Serving", runs.length ? table([["model"], ["device"], ["kind"], ["at"], ["tokens/s", true], ["TTFT", true], ["TPOT", true]], runs.map((r) => [el("a", { href: link(["run", r.id]), text: r.subject }), r.device, r.kind, when(r.at), shown("x", r.metrics.output_tokens_per_s), shown("x_s", r.metrics["ttft_s.mean"]), shown("x_s", r.metrics["tpot_s.mean"])])) : el("p", { class: "dim", text: "none is kept: ridgeline serve … --store URL" })));
  const last = runs.find((r) => r.kind === "serve search") || runs[0];
  if (last) { const run = await ask(`/api/runs/${last.id}`); if (run.curve.length) page.append(servingPanel(run)); }
}
function servingPanel(run) {
  const box = { l: 84, r: 18, t: 14, b: 44 }, points = run.curve, span = (key) => { const all = points.map((p) => p[key]); const low = Math.min(...all), high = Math.max(...all); return { low: Math.min(0, low), high: high * 1.04 || 1, log: false }; };
  let X, Y;
  const canvas = chart(`throughput of ${points.length} loads`, 360, (pen, w, h) => {
    X = scale(span("user"), box.l, w - box.r); Y = scale(span("device"), h - box.b, box.t);
    axes(pen, w, h, X, Y, box, "tokens/s a user", "tokens/s a device", [null, null]);
    const best = points.filter((p) => p.frontier).sort((a, b) => a.user - b.user);
    pen.line(best.map((p) => [X(p.user), Y(p.device)]), color("--accent"), 1.6);
    for (const p of points) pen.circle(X(p.user), Y(p.device), p.frontier ? 5 : 3.5, color(p.keeps_slo ? "--accent" : "--other"), null, 0.85);
  });
  canvas.addEventListener("pointermove", (e) => {
    const near = points.map((p) => [Math.hypot(X(p.user) - e.offsetX, Y(p.device) - e.offsetY), p]).sort((a, b) => a[0] - b[0])[0];
    if (near[0] > 18) hideTip(); else showTip(e, near[1].title, [["a user", `${shown("x", near[1].user)} tokens/s`], ["a device", `${shown("x", near[1].device)} tokens/s`], ["TTFT", shown("x_s", near[1].ttft_s)], ["TPOT", shown("x_s", near[1].tpot_s)], ["$ per million", shown("x", near[1].usd)], ["keeps the SLO", near[1].keeps_slo ? "yes" : "no"]]);
  });
  canvas.addEventListener("pointerleave", hideTip);
  const save = el("button", { type: "button", class: "small", text: "CSV", onclick: () => saveCsv("serving.csv", ["title", "user", "device", "ttft_s", "tpot_s", "usd", "keeps_slo", "frontier"], points.map((p) => [p.title, p.user, p.device, p.ttft_s, p.tpot_s, p.usd, p.keeps_slo, p.frontier])) });
  say("");
  return panel(["Throughput against interactivity ", savers("serving", canvas, [save])], el("p", { class: "dim", text: "Gray loads miss the SLO; the line is the frontier." }), canvas);
}
