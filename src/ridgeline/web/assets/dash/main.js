// Chooses the page by the address.
import { $, ask, el, failed, link, place } from "./page.js";
import { comparePage, historyPage, receiptsPage, runPage, runsPage, servingPage } from "./runs.js";
import { pointPage, studiesPage, studyPage } from "./study.js";
import { whatIfPage } from "./whatif.js";

const PAGES = { runs: runsPage, history: historyPage, run: runPage, compare: comparePage, studies: studiesPage, study: studyPage, point: pointPage, receipts: receiptsPage, serving: servingPage };
const NAV = [["runs", "Runs"], ["studies", "Studies"], ["receipts", "Receipts"], ["serving", "Serving"], ["compare", "Compare"]];
let leave = () => {};

async function show() {
  const { path, query } = place(), asked = location.pathname === "/what-if" ? "what-if" : path[0] || "runs";
  leave();
  leave = () => {};
  $("tip").hidden = true;
  document.documentElement.dataset.ready = "";
  $("nav").replaceChildren(...NAV.map(([name, text]) => el("a", { href: link([name]), class: name === asked ? "on" : null, "aria-current": name === asked ? "page" : null, text })),
    el("a", { href: "/what-if", class: asked === "what-if" ? "on" : null, text: "What if" }));
  const page = el("div", {});
  $("main").replaceChildren(page);
  try {
    const make = asked === "what-if" ? whatIfPage : PAGES[asked];
    if (!make) throw new Error(`there is no page ${asked}`);
    leave = (await make(page, path.slice(1), query)) || (() => {});
  } catch (error) { page.replaceChildren(failed(error)); }
  document.documentElement.dataset.ready = "yes";
}
$("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme, dark = now ? now === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  for (const canvas of document.querySelectorAll("canvas.plot")) canvas.redraw();
  document.dispatchEvent(new Event("colors"));
});
$("skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const canvas of document.querySelectorAll("canvas.plot")) canvas.redraw(); });
addEventListener("hashchange", show);
ask("/api/home").then((home) => { $("store").textContent = home.store; }).catch(() => {});
show();
