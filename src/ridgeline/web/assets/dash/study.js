// A study: frontier scatter, parallel coordinates and table share one set of limits; every point leads to its report.
import { ask, askColumns, color, el, keep, link, panel, say, seconds, shown, table, when } from "./page.js";
import { axes, chart, hideTip, savers, scale, showTip } from "./charts.js";

const MAX_LINES = 2500, PAGE_ROWS = 50;

export async function studiesPage(page) {
  const list = el("div", {});
  const fill = async () => {
    const found = await ask("/api/studies");
    list.replaceChildren(found.length ? table([["study"], ["state"], ["points", true], ["begun"], ["version"], ["git"]], found.map((s) => [el("a", { href: link(["study", s.id]), text: s.name }), s.state, s.planned.toLocaleString("en-US"), when(s.at), s.version, s.git || "–"])) : el("p", { class: "dim", text: "No study is kept: ridgeline study MODEL --vary … --store URL" }));
    return found;
  };
  page.append(panel("Studies", list));
  await fill();
  const timer = setInterval(() => fill().catch(() => {}), 4000);
  return () => clearInterval(timer);
}

export async function studyPage(page, path, query) {
  const base = `/api/studies/${encodeURIComponent(path[0] || "")}`;
  let info = await ask(base), sample = null, full = false, rowsAsked = 0, gone = false;
  const parse = (text) => { try { return JSON.parse(text) || {}; } catch { return {}; } };
  const goals = info.objectives.map((o) => o.text), numbers = info.columns.filter((name) => name !== "reason");
  const names = [...new Set([...goals, ...numbers])];
  const state = { x: names.includes(query.x) ? query.x : goals[1] || (goals[0] ? numbers[0] : numbers[0]), y: names.includes(query.y) ? query.y : goals[0] || numbers[1] || numbers[0],
    only: query.only || "feasible", where: parse(query.where), sort: query.sort || "", down: query.down === "1", start: 0, sure: query.sure === "1", a: query.a || "", b: query.b || "" };
  const dims = [...new Set([...info.axes, ...info.objectives.flatMap((o) => o.names)])].filter((name) => info.columns.includes(name)).slice(0, 12);
  const remember = () => keep(["study", ...path.slice(0, 1)], { x: state.x, y: state.y, only: state.only === "feasible" ? "" : state.only, sure: state.sure ? "1" : "", where: Object.keys(state.where).length ? JSON.stringify(state.where) : "", sort: state.sort, down: state.down ? "1" : "", a: state.a, b: state.b });
  const filterWords = () => ({ where: JSON.stringify(state.where), only: state.only, sort: state.sort, down: state.down ? "1" : "0" });

  // ---- which of the drawn points keep the limits
  let passing = new Uint8Array(0);
  function judge() {
    const n = sample ? sample.rows : 0, flags = n ? sample.columns.get("#flags").values : [];
    passing = new Uint8Array(n);
    const tests = Object.entries(state.where).filter(([name]) => sample && sample.columns.has(name)).map(([name, limits]) => {
      const { values, words } = sample.columns.get(name), e = 1e-6;
      if (words && limits.some((v) => typeof v === "string")) return (i) => limits.includes(words[values[i]]);
      const [low, high] = limits.map((v, at) => v === null ? (at ? Infinity : -Infinity) : v);
      return (i) => values[i] >= low - Math.abs(low) * e && values[i] <= high + Math.abs(high) * e;
    });
    for (let i = 0; i < n; i++) passing[i] = (state.only === "all" || (state.only === "feasible" ? flags[i] & 1 : flags[i] & 2)) && tests.every((test) => test(i)) ? 1 : 0;
  }

  // ---- scatter
  const box = { l: 88, r: 16, t: 12, b: 44 };
  let X = null, Y = null, drag = null, cursor = -1;
  const scatter = chart("scatter with the frontier: arrow keys walk along it, Enter opens a point", 440, (pen, w, h) => {
    if (!sample) return;
    const [sx, sy] = sample.scales, unit = (text) => { const goal = info.objectives.find((o) => o.text === text); return goal && goal.names.length === 1 && /^\w+$/.test(text) ? goal.names[0] : text; }, col = (name) => sample.columns.get(name);
    X = scale(sx, box.l + 8, w - box.r - 8); Y = scale(sy, h - box.b - 8, box.t + 8);
    axes(pen, w, h, X, Y, box, unit(state.x), unit(state.y), [col(state.x).words, col(state.y).words]);
    const xs = col(state.x).values, ys = col(state.y).values, flags = col("#flags").values, counts = col("#count").values;
    const most = Math.log1p(counts.reduce((a, b) => Math.max(a, b), 1)), side = Math.max(2, Math.min(5, 3000 / Math.sqrt(sample.rows * 40 + 1))), accent = color("--memory"), dim = color("--other");
    for (const round of [0, 1]) for (let i = 0; i < sample.rows; i++) {
      if (passing[i] !== round || !counts[i]) continue;
      const strong = 0.35 + 0.6 * Math.log1p(counts[i]) / most;
      pen.rect(X(xs[i]) - side / 2, Y(ys[i]) - side / 2, side, side, round ? accent : dim, round ? strong : 0.22 * strong);
    }
    const best = frontierOrder();
    if (goals.length > 1) for (let k = 1; k < best.length; k++) pen.line([[X(xs[best[k - 1]]), Y(ys[best[k - 1]])], [X(xs[best[k]]), Y(ys[best[k]])]], color("--accent"), 1.2, 0.7);
    for (const i of best) if (flags[i] & 2) pen.circle(X(xs[i]), Y(ys[i]), 3.6, color(passing[i] ? "--accent" : "--other"), color("--panel"));
    for (const [point, ring] of [[state.a, "--bad"], [state.b, "--latency"]]) { const i = point === "" ? -1 : col("#").values.indexOf(Number(point)); if (i >= 0) pen.circle(X(xs[i]), Y(ys[i]), 7, "transparent", color(ring)); }
    if (cursor >= 0) pen.circle(X(xs[cursor]), Y(ys[cursor]), 6, "transparent", color("--ink"));
    if (drag && drag.to) pen.rect(Math.min(drag.from[0], drag.to[0]), Math.min(drag.from[1], drag.to[1]), Math.abs(drag.to[0] - drag.from[0]), Math.abs(drag.to[1] - drag.from[1]), color("--accent"), 0.15);
  });
  function frontierOrder() {
    const flags = sample.columns.get("#flags").values, xs = sample.columns.get(state.x).values, all = [];
    for (let i = 0; i < sample.rows; i++) if (flags[i] & 2) all.push(i);
    return all.sort((a, b) => xs[a] - xs[b]);
  }
  const nearest = (e) => {
    if (!sample || !X) return -1;
    const xs = sample.columns.get(state.x).values, ys = sample.columns.get(state.y).values, flags = sample.columns.get("#flags").values;
    let found = -1, best = 12 ** 2;
    for (let i = 0; i < sample.rows; i++) { const d = (X(xs[i]) - e.offsetX) ** 2 + (Y(ys[i]) - e.offsetY) ** 2 - (flags[i] & 2 ? 30 : 0); if (d < best) { best = d; found = i; } }
    return found;
  };
  const describe = (i) => [...sample.columns].filter(([name]) => !name.startsWith("#") && !/\.(low|high)$/.test(name)).slice(0, 14).map(([name, c]) => [name, c.words ? c.words[c.values[i]] || "–" : shown(name, c.values[i])]).concat(sample.columns.get("#count").values[i] > 1 ? [["points here", sample.columns.get("#count").values[i].toLocaleString("en-US")]] : []);
  scatter.addEventListener("pointerdown", (e) => { drag = { from: [e.offsetX, e.offsetY], to: null }; scatter.setPointerCapture(e.pointerId); });
  scatter.addEventListener("pointermove", (e) => {
    if (drag && Math.hypot(e.offsetX - drag.from[0], e.offsetY - drag.from[1]) > 5) { drag.to = [e.offsetX, e.offsetY]; hideTip(); scatter.redraw(); return; }
    const i = nearest(e);
    if (i < 0) hideTip(); else showTip(e, `point ${sample.columns.get("#").values[i]}`, describe(i));
  });
  scatter.addEventListener("pointerleave", hideTip);
  scatter.addEventListener("pointerup", (e) => {
    if (drag && drag.to) {
      const sides = [[X.back(drag.from[0]), X.back(drag.to[0])], [Y.back(drag.from[1]), Y.back(drag.to[1])]].map((pair) => pair.sort((a, b) => a - b));
      drag = null;
      limit(state.x, sides[0]); limit(state.y, sides[1]);
      changed();
      return;
    }
    drag = null;
    const i = nearest(e);
    if (i >= 0) choose(sample.columns.get("#").values[i], e.shiftKey);
  });
  scatter.addEventListener("keydown", (e) => {
    if (e.key === "Escape") { state.where = {}; changed(); return; }
    if (!sample || !["ArrowLeft", "ArrowRight", "Enter"].includes(e.key)) return;
    e.preventDefault();
    const best = frontierOrder(), at = best.indexOf(cursor);
    if (e.key === "Enter") { if (cursor >= 0) choose(sample.columns.get("#").values[cursor], e.shiftKey); return; }
    cursor = best[Math.max(0, Math.min(best.length - 1, at + (e.key === "ArrowRight" ? 1 : -1)))] ?? -1;
    if (cursor >= 0) say(`point ${sample.columns.get("#").values[cursor]}: ${describe(cursor).slice(0, 6).map((f) => f.join(" ")).join(", ")}`);
    scatter.redraw();
  });

  // ---- parallel coordinates
  let lanes = [], pull = null;
  const parallel = chart("parallel coordinates: drag on an axis to limit it; the limits below do the same by keyboard", 330, (pen, w, h) => {
    if (!sample || !full) return;
    const flags = sample.columns.get("#flags").values, place = (k) => 50 + k * (w - 100) / Math.max(1, dims.length - 1);
    lanes = dims.map((name, k) => {
      const { values, words } = sample.columns.get(name);
      let low = Infinity, high = -Infinity;
      for (const v of values) if (Number.isFinite(v)) { if (v < low) low = v; if (v > high) high = v; }
      if (low > high) [low, high] = [0, 1];
      const s = { low, high, log: !words && low > 0 && high > 20 * low };
      return { name, words, values, s, x: place(k), Y: scale(s, h - 34, 36) };
    });
    const ids = [], step = Math.max(1, Math.ceil(sample.rows / MAX_LINES));
    for (let i = 0; i < sample.rows; i++) if (i % step === 0 || flags[i] & 2) ids.push(i);
    ids.sort((a, b) => passing[a] - passing[b] || (flags[a] & 2) - (flags[b] & 2));
    for (const i of ids) {
      const line = lanes.filter((lane) => Number.isFinite(lane.values[i])).map((lane) => [lane.x, lane.Y(lane.values[i])]);
      if (line.length > 1) pen.line(line, color(!passing[i] ? "--other" : flags[i] & 2 ? "--accent" : "--memory"), flags[i] & 2 && passing[i] ? 1.4 : 0.8, !passing[i] ? 0.05 : flags[i] & 2 ? 0.8 : 0.18);
    }
    lanes.forEach((lane, k) => {
      pen.line([[lane.x, 36], [lane.x, h - 34]], color("--dim"));
      const room = Math.floor((w - 100) / Math.max(1, dims.length - 1) / 6.6), words = lane.name.length > room ? `${lane.name.slice(0, Math.max(2, room - 1))}…` : lane.name, anchor = k === 0 ? "start" : k === lanes.length - 1 ? "end" : "middle", x = k === 0 ? 6 : k === lanes.length - 1 ? w - 6 : lane.x;
      pen.text(x, 12, words, color("--ink"), anchor);
      const ends = lane.words ? ["", ""] : [shown(lane.name, lane.s.high), shown(lane.name, lane.s.low)];
      if (room > 8) { pen.text(x, 28, ends[0], color("--dim"), anchor); pen.text(x, h - 20, ends[1], color("--dim"), anchor); }
      if (lane.words && room > 6) lane.words.slice(0, 12).forEach((word, v) => pen.text(lane.x + 4, lane.Y(v) + 4, word.slice(0, 12), color("--dim")));
      const limits = state.where[lane.name];
      if (limits && typeof limits[0] !== "string") { const [y0, y1] = [limits[1] === null ? 36 : lane.Y(limits[1]), limits[0] === null ? h - 34 : lane.Y(limits[0])]; pen.rect(lane.x - 6, y0, 12, Math.max(3, y1 - y0), color("--accent"), 0.3); }
    });
    if (pull && pull.to !== null) pen.rect(pull.lane.x - 8, Math.min(pull.from, pull.to), 16, Math.abs(pull.to - pull.from), color("--accent"), 0.3);
  });
  parallel.addEventListener("pointerdown", (e) => { const lane = lanes.find((one) => Math.abs(one.x - e.offsetX) < 16); if (lane) { pull = { lane, from: e.offsetY, to: null }; parallel.setPointerCapture(e.pointerId); } });
  parallel.addEventListener("pointermove", (e) => { if (pull) { pull.to = e.offsetY; parallel.redraw(); } });
  parallel.addEventListener("pointerup", () => {
    if (!pull) return;
    const { lane, from, to } = pull;
    pull = null;
    if (to === null || Math.abs(to - from) < 4) delete state.where[lane.name];
    else {
      const sides = [lane.Y.back(from), lane.Y.back(to)].sort((a, b) => a - b).map((v) => Math.max(lane.s.low, Math.min(lane.s.high, v)));
      if (lane.words) state.where[lane.name] = lane.words.filter((_, at) => at >= sides[0] - 0.5 && at <= sides[1] + 0.5); else limit(lane.name, sides);
    }
    changed();
  });
  parallel.addEventListener("keydown", (e) => { if (e.key === "Escape") { state.where = {}; changed(); } });
  const limit = (name, [low, high]) => { state.where[name] = [low, high].map((v) => v === null ? null : Number(v.toPrecision(6))); };

  // ---- limits, table, point
  const limits = el("div", { class: "limits" }), rowsPlace = el("div", {}), chosen = el("div", {}), status = el("div", {}), counted = el("span", { class: "dim" });
  function drawLimits() {
    limits.replaceChildren(...[...new Set([...dims, state.x, state.y])].map((name) => {
      const now = state.where[name] || [null, null], words = now.some((v) => typeof v === "string");
      const input = (at) => el("input", { type: words ? "text" : "number", step: "any", value: words ? (at ? "" : now.join(" ")) : now[at] === null ? "" : String(now[at]), placeholder: at ? "at most" : "at least", "aria-label": `${name} ${at ? "at most" : "at least"}`, onchange: (e) => {
        const both = (state.where[name] || [null, null]).slice(0, 2);
        both[at] = e.target.value === "" ? null : Number(e.target.value);
        if (both.every((v) => v === null)) delete state.where[name]; else state.where[name] = both;
        changed();
      } });
      return el("fieldset", {}, el("span", { text: name }), input(0), words ? null : input(1));
    }), el("button", { type: "button", class: "small", text: "clear limits", onclick: () => { state.where = {}; changed(); } }));
  }
  async function drawRows() {
    const mine = ++rowsAsked, found = await ask(`${base}/rows`, { ...filterWords(), start: state.start, limit: PAGE_ROWS });
    if (mine !== rowsAsked || gone) return;
    counted.textContent = `${found.total.toLocaleString("en-US")} of ${info.points.toLocaleString("en-US")} points`;
    const sort = (name) => () => { state.down = state.sort === name ? !state.down : false; state.sort = name; state.start = 0; remember(); drawRows(); };
    const heads = [["point", true], ...found.names.map((name) => [name, name !== "reason" && typeof (found.rows[0] || [])[found.names.indexOf(name)] !== "string", sort(name), state.sort === name ? (state.down ? "descending" : "ascending") : null])];
    const body = found.rows.map((row, at) => el("tr", { class: [state.a, state.b].includes(String(found.points[at])) ? "on" : null }, el("td", { class: "num" }, el("button", { type: "button", class: "small", text: String(found.points[at]), "aria-label": `show point ${found.points[at]}; with shift, compare`, onclick: (e) => choose(found.points[at], e.shiftKey) })),
      ...row.map((v, k) => el("td", { class: heads[k + 1][1] ? "num" : null, text: shown(found.names[k], v), title: v === null ? null : String(v) }))));
    rowsPlace.replaceChildren(table(heads, body), el("div", { class: "row" },
      el("button", { type: "button", class: "small", text: "previous", disabled: state.start === 0, onclick: () => { state.start = Math.max(0, state.start - PAGE_ROWS); drawRows(); } }),
      el("button", { type: "button", class: "small", text: "next", disabled: state.start + PAGE_ROWS >= found.total, onclick: () => { state.start += PAGE_ROWS; drawRows(); } }),
      el("span", { class: "dim", text: found.total ? `${state.start + 1} … ${Math.min(found.total, state.start + PAGE_ROWS)}` : "no point keeps these limits" })));
    rowsPlace.querySelector("table").classList.add("nowrap");
  }
  async function choose(point, second) {
    if (second && state.a !== "") state.b = String(point); else { state.a = String(point); state.b = ""; }
    remember();
    scatter.redraw();
    await drawPoint();
  }
  async function drawPoint() {
    if (state.a === "") { chosen.replaceChildren(); return; }
    try { chosen.replaceChildren(pointPanel(await ask(`${base}/points/${state.a}`), state.b)); } catch (error) { chosen.replaceChildren(el("p", { class: "error", text: error.message })); }
  }
  function changed() {
    state.start = 0;
    remember(); judge(); drawLimits(); scatter.redraw(); parallel.redraw();
    drawRows().catch((error) => rowsPlace.replaceChildren(el("p", { class: "error", text: error.message })));
  }
  function drawStatus() {
    const frac = info.planned ? Math.min(1, info.points / info.planned) : 0, running = info.state === "running", meter = el("i", {}), good = info.outcomes.find(([word]) => !word);
    meter.style.width = `${100 * frac}%`;
    status.replaceChildren(el("p", { class: "dim", text: `${info.state}: ${info.points.toLocaleString("en-US")} of ${info.planned.toLocaleString("en-US")} points, ${(good ? good[1] : 0).toLocaleString("en-US")} feasible · begun ${when(info.at)} · ridgeline ${info.version}` }),
      ...(running ? [el("div", { class: "meter", role: "progressbar", "aria-valuenow": String(Math.round(100 * frac)), "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": "progress" }, meter)] : []));
  }
  async function load() {
    const began = performance.now(), words = { x: state.x, y: state.y, ...(state.sure ? { sure: "1" } : {}) };
    sample = await askColumns(`${base}/sample`, words);
    full = false;
    judge(); scatter.redraw();
    scatter.dataset.drawn = (performance.now() - began).toFixed(0);
    say(`${sample.points.toLocaleString("en-US")} points drawn in ${seconds((performance.now() - began) / 1000)}`);
    sample = await askColumns(`${base}/sample`, { ...words, every: "1" });
    full = true;
    judge(); scatter.redraw(); parallel.redraw();
  }
  const axis = (which) => el("select", { "aria-label": `${which} axis`, onchange: (e) => { state[which] = e.target.value; remember(); drawLimits(); load().catch(broken); } }, ...names.map((name) => el("option", { value: name, text: name, selected: name === state[which] })));
  const broken = (error) => status.append(el("p", { class: "error", text: error.message }));
  const only = el("select", { "aria-label": "which points", onchange: (e) => { state.only = e.target.value; changed(); } }, ...[["feasible", "feasible points"], ["frontier", "the frontier"], ["all", "all points"]].map(([value, text]) => el("option", { value, text, selected: state.only === value })));
  const sure = el("input", { type: "checkbox", checked: state.sure, onchange: (e) => { state.sure = e.target.checked; remember(); load().catch(broken); } });
  const csv = el("button", { type: "button", class: "small", text: "CSV", onclick: () => { location.href = `${base}/points.csv?${new URLSearchParams(filterWords())}`; } });
  const outcomes = info.outcomes.filter(([word]) => word), matters = el("div", {});
  page.append(panel(info.name, status),
    panel(["Frontier ", savers("frontier", scatter)], el("div", { class: "row" }, el("label", {}, "x", axis("x")), el("label", {}, "y", axis("y")), goals.length ? el("label", {}, sure, "frontier within the intervals") : null), el("p", { class: "dim", text: "Drag to limit both axes, Escape to clear; click a point for all of it, with shift for a second one to compare." }), scatter),
    chosen,
    ...(dims.length > 1 ? [panel(["Parallel coordinates ", savers("parallel", parallel)], parallel)] : []),
    panel(["Points ", counted, el("span", { class: "tools" }, csv)], el("div", { class: "row" }, only), limits, rowsPlace),
    panel("What matters", matters),
    ...(outcomes.length ? [panel("Why points are excluded", table([["reason"], ["points", true]], outcomes.map(([word, n]) => [word, n.toLocaleString("en-US")])))] : []));
  drawStatus(); drawLimits();
  const first = load();
  await first;
  await Promise.all([drawRows(), drawPoint()]);
  const weigh = () => ask(`${base}/matters`).then((found) => matters.replaceChildren(Object.keys(found).length ? table([["share of the variance"], ...info.axes.map((name) => [name, true])], Object.entries(found).map(([text, shares]) => [text, ...info.axes.map((name) => `${(100 * (shares[name] || 0)).toFixed(0)} %`)])) : el("p", { class: "dim", text: "no objective" }))).catch((error) => matters.replaceChildren(el("p", { class: "dim", text: error.message })));
  weigh();
  const timer = info.state !== "running" ? null : setInterval(async () => {
    try {
      const now = await ask(base), grown = now.points !== info.points || now.state !== info.state;
      info = now;
      if (gone) return;
      drawStatus();
      if (grown) { await load(); await drawRows(); weigh(); }
      if (now.state !== "running") clearInterval(timer);
    } catch (error) { say(error.message); }
  }, 1500);
  return () => { gone = true; clearInterval(timer); hideTip(); };
}

function pointPanel(found, other) {
  const actions = [el("a", { href: link(["point", found.id, String(found.point)]), text: "permalink" })];
  if (found.evaluator === "predict") actions.push(el("a", { href: `/reports/point/${found.id}/${found.point}`, target: "_blank", rel: "noopener", text: "full report" }));
  if (other !== "" && other !== undefined) actions.push(el("a", { href: link(["compare"], { a: `point:${found.id}:${found.point}`, b: `point:${found.id}:${other}` }), text: `compare with point ${other}` }));
  const rows = Object.entries(found.values).filter(([name]) => !/\.(low|high)$/.test(name)).map(([name, v]) => {
    const low = found.values[`${name}.low`], high = found.values[`${name}.high`];
    return [name, name === "reason" && v === "" ? "feasible" : shown(name, v), low === undefined || low === null ? "" : `${shown(name, low)} … ${shown(name, high)}`];
  });
  return panel(`Point ${found.point}`, el("div", { class: "row" }, ...actions), table([["column"], ["value", true], ["90 % interval", true]], rows));
}
export async function pointPage(page, path) {
  const found = await ask(`/api/studies/${encodeURIComponent(path[0] || "")}/points/${encodeURIComponent(path[1] || "")}`);
  page.append(el("p", {}, el("a", { href: link(["study", found.id], { a: String(found.point) }), text: `study ${found.name}` })), pointPanel(found, ""));
}
