"use strict";
// Draws one fabric at a time and shows the cable that was clicked. What comes from the plane is put in as text; the
// drawing is parsed as SVG and only its known shapes are taken over.

const PERIOD = 5000, PATIENCE = 30000;
const byId = id => document.getElementById(id);
const SHAPES = new Set(["svg", "g", "a", "title", "rect", "line", "text"]);

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text != null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function span(seconds) {
  if (seconds == null) return "";
  const s = Math.max(0, seconds);
  if (s < 100) return Math.round(s) + " s";
  if (s < 6000) return Math.round(s / 60) + " min";
  return s < 172800 ? Math.round(s / 3600) + " h" : Math.round(s / 86400) + " d";
}

const clock = seconds => new Date(seconds * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
const errors = counters => Object.entries(counters).map(([name, count]) => `${name} ${count}`).join(", ");

function rows(id, items, cells) {
  byId(id).replaceChildren(...items.map(item => {
    const row = element("tr");
    for (const cell of cells(item)) {
      const made = element("td", cell.n ?? cell.mark ?? cell, cell.n != null ? "n" : "");
      if (cell.mark != null) made.replaceChildren(element("span", cell.mark, "mark " + cell.kind));
      row.append(made);
    }
    return row;
  }));
}

class Refused extends Error {}

async function ask(path, query) {
  const answer = await fetch(`/api/v1/${path}?${new URLSearchParams(query)}`, { signal: AbortSignal.timeout(PATIENCE) });
  if (answer.status === 401) { location.href = "/login"; throw new Refused("signed out"); }
  if (!answer.ok) throw new Refused((await answer.json()).error.message);
  return answer;
}

function say(state, words) {
  byId("live").dataset.state = state;
  byId("live").textContent = words;
}

const wanted = () => new URLSearchParams(location.search).get("name");

// Only shapes, no scripts, handlers or references outside: whatever a name may hold, it stays words.
function taken(node) {
  if (node.nodeType === Node.TEXT_NODE) return document.createTextNode(node.data);
  if (node.nodeType !== Node.ELEMENT_NODE || !SHAPES.has(node.localName)) return null;
  const made = document.createElementNS("http://www.w3.org/2000/svg", node.localName);
  for (const { name, value } of node.attributes) {
    if (name.startsWith("on") || name === "style" || name === "xmlns") continue;
    if (name === "href" && !/^#[0-9a-f]{16}\/\d+$/.test(value)) continue;
    made.setAttribute(name, value);
  }
  for (const child of node.childNodes) { const copy = taken(child); if (copy) made.append(copy); }
  return made;
}

let drawn = "", shown = "", name = null;

async function draw(fabric) {
  const mark = JSON.stringify([fabric.fabric.name, fabric.fabric.scan?.id, fabric.faults]);
  if (mark === drawn) return;
  if (!fabric.fabric.scan) { byId("drawing").replaceChildren(element("p", "No map of this fabric has been made yet.", "quiet")); drawn = mark; return; }
  const text = await (await ask("fabric/map.svg", { name: fabric.fabric.name })).text();
  const parsed = new DOMParser().parseFromString(text, "image/svg+xml");
  byId("drawing").replaceChildren(taken(parsed.documentElement));
  drawn = mark;
  choose();
}

function choose() {
  for (const link of byId("drawing").querySelectorAll("a.chosen")) link.classList.remove("chosen");
  const end = location.hash;
  if (end) byId("drawing").querySelector(`a[href="${CSS.escape(end)}"]`)?.classList.add("chosen");
}

async function cable() {
  const end = location.hash.slice(1);
  choose();
  byId("cable").hidden = !end;
  if (!end || name == null || shown === end + drawn) return;
  let link;
  try {
    link = await (await ask("fabric/link", { name, end })).json();
  } catch (error) {
    byId("cable-title").textContent = end;
    byId("cable-pace").textContent = error.message;
    for (const id of ["cable-faults", "cable-ends", "cable-history"]) byId(id).replaceChildren();
    return;
  }
  shown = end + drawn;
  byId("cable-title").textContent = link.ends.map(e => e.kind === "switch" ? `${e.name} port ${e.port}` : e.owner || e.name).join(" – ");
  byId("cable-pace").textContent = link.pace ? `${link.pace}${link.rate_gbps ? `, ${Math.round(link.rate_gbps)} Gb/s` : ""}` : "not on the newest map";
  byId("cable-faults").replaceChildren(...link.faults.map(f => element("li", f.text)));
  rows("cable-ends", link.ends, e => [`${e.guid}/${e.port}`, e.owner || e.name, errors(e.counters) || "none"]);
  rows("cable-history", [...link.history].reverse(), m => [
    clock(m.clock), m.pace || (m.complete ? "not there" : "not seen"), m.peer, { n: errors(m.counters) || "0" },
  ]);
}

async function look() {
  const all = (await (await ask("fabrics", {})).json()).fabrics;
  const current = all.find(f => f.name === wanted()) ?? all[0];
  byId("fabrics").replaceChildren(...all.map(f => {
    const link = element("a", f.name, f.faults.bad || f.troubles.length || f.error ? "bad" : f.faults.warn ? "warn" : "");
    link.href = "?" + new URLSearchParams({ name: f.name });
    if (f === current) link.setAttribute("aria-current", "page");
    return link;
  }));
  if (!current) {
    byId("drawing").replaceChildren(element("p", "No InfiniBand fabric is known: no node has an active InfiniBand port.", "quiet"));
    return;
  }
  name = current.name;
  const fabric = await (await ask("fabric", { name })).json();
  const scan = fabric.fabric.scan, counts = scan?.counts;
  const trouble = [...fabric.fabric.troubles, fabric.fabric.error, ...(scan?.holes ?? []).slice(0, 3)].filter(Boolean);
  byId("trouble").hidden = !trouble.length;
  byId("trouble").textContent = trouble.join(" · ");
  byId("sums").replaceChildren(...[
    ["Map", scan ? span(scan.age) + " old" : "none", scan ? (scan.complete ? "complete" : "partial") : ""],
    ["Switches", counts?.switches ?? "", ""],
    ["Hosts", counts?.hosts ?? "", counts ? `${counts.adapters} adapters` : ""],
    ["Cables", counts?.links ?? "", ""],
    ["Faults", fabric.faults.length, Object.entries(fabric.fabric.faults).map(([g, n]) => `${n} ${g}`).join(", ")],
    ["Master", fabric.fabric.master || "none", `${fabric.fabric.managers} managers`],
  ].map(([term, value, note]) => {
    const box = element("div"), number = element("dd", String(value));
    number.append(element("small", note));
    box.append(element("dt", term), number);
    return box;
  }));
  byId("faults-section").hidden = !fabric.faults.length;
  rows("faults", fabric.faults, f => [{ mark: f.grade, kind: f.grade === "bad" ? "bad" : "wait" }, f.kind, f.text, f.replicas.join(", ")]);
  rows("managers", fabric.managers, m => [
    m.guid, { n: m.lid ?? "" }, { n: m.priority ?? "" },
    { mark: m.state || "no answer", kind: m.state === "master" ? "good" : m.state ? "" : "wait" },
    [m.silent_for != null ? `silent for ${span(m.silent_for)}` : "", m.error].filter(Boolean).join(", "),
  ]);
  rows("scans", fabric.scans, s => [
    { n: s.id }, clock(s.clock), s.vantage, { n: s.error ? "" : s.counts.links }, { n: s.changes || "" },
    s.error || (s.complete ? "complete" : "partial: " + s.holes.slice(0, 2).join("; ")),
  ]);
  await draw(fabric);
  await cable();
}

addEventListener("hashchange", cable);
byId("close").addEventListener("click", () => { location.hash = ""; });

(async () => {
  for (;;) {
    try {
      await look();
      say("live", "live");
    } catch (error) {
      say("gone", error instanceof Refused ? error.message : "the plane does not answer");
    }
    await new Promise(done => setTimeout(done, PERIOD));
  }
})();
