"use strict";
// Draws who can reach whom by each pair's newest result, and the kept results of the pair that was chosen. What comes
// from the plane is only ever put in as text.

const PERIOD = 10000, PATIENCE = 30000;
const GRADES = ["good", "measured", "suspicious", "fair", "bad", "failed"];
const byId = id => document.getElementById(id);

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text != null) made.textContent = text;
  if (className) made.className = className;
  return made;
}

class Refused extends Error {}

async function ask(path) {
  const answer = await fetch(`/api/v1/${path}`, { signal: AbortSignal.timeout(PATIENCE) });
  if (answer.status === 401) { location.href = "/login"; throw new Refused("signed out"); }
  if (!answer.ok) throw new Refused((await answer.json()).error.message);
  return answer.json();
}

function say(state, words) {
  byId("live").dataset.state = state;
  byId("live").textContent = words;
}

const moment = seconds => new Date(seconds * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
const percent = share => share == null ? "" : Math.round(share * 100) + "%";
const known = word => GRADES.includes(word) ? word : "";

let drawn = "";

function draw(matrix) {
  const seen = JSON.stringify(matrix);
  if (seen === drawn) return;  // a drawing that did not change keeps its focus and its place
  drawn = seen;
  byId("none").hidden = matrix.nodes.length > 0;
  const squares = new Map();
  for (const s of matrix.squares) for (const key of [[s.a, s.b], [s.b, s.a]]) squares.set(JSON.stringify(key), s);
  const head = element("thead"), top = element("tr"), body = element("tbody");
  top.append(element("td"), ...matrix.nodes.map(name => Object.assign(element("th", name), { scope: "col" })));
  head.append(top);
  for (const a of matrix.nodes) {
    const row = element("tr");
    row.append(Object.assign(element("th", a), { scope: "row" }));
    for (const b of matrix.nodes) {
      const s = squares.get(JSON.stringify([a, b])), cell = element("td", a === b ? "–" : null, s ? known(s.grade) : "");
      if (s) {
        const link = element("a", s.share ? percent(s.share) : s.grade === "failed" ? "✗" : "·");
        link.href = "#" + new URLSearchParams({ a: s.a, b: s.b });
        link.title = `${s.a} > ${s.b}: ${s.grade}, ${moment(s.clock)}\n${s.text}`;
        link.setAttribute("aria-label", `${s.a} to ${s.b}: ${s.grade} ${percent(s.share)}`);
        cell.append(link);
      }
      row.append(cell);
    }
    body.append(row);
  }
  byId("heat").replaceChildren(head, body);
  byId("legend").replaceChildren(...GRADES.map(word => element("span", word, word)));
}

async function pair() {
  const chosen = new URLSearchParams(location.hash.slice(1)), a = chosen.get("a"), b = chosen.get("b");
  byId("pair").hidden = !a || !b;
  if (!a || !b) return;
  const { results = [] } = await ask(`fabric-test/${encodeURIComponent(a)}/${encodeURIComponent(b)}`);
  byId("pair-title").textContent = `${a} and ${b}`;
  byId("rails").replaceChildren(...results.flatMap(result => {
    const rails = result.rails ?? [];
    if (!rails.length) return [line([moment(result.clock), "", result.a, result.b, "", "", "", { grade: "failed" }, result.error])];
    return rails.map(rail => line([
      moment(result.clock), rail.rail, `${rail.a.node} ${rail.a.device}`, `${rail.b.node} ${rail.b.device}`,
      { n: rail.gbps != null ? rail.gbps.toPrecision(4) + " Gb/s" : rail.latency_us != null ? rail.latency_us.toPrecision(4) + " µs" : "" },
      { n: rail.verdict.ceiling_gbps?.toPrecision(4) ?? "" }, { n: percent(rail.verdict.share) }, { grade: rail.verdict.grade },
      [...(rail.verdict.why ?? []), rail.failure?.remedy].filter(Boolean).join("; "),
    ]));
  }));
}

function line(cells) {
  const row = element("tr");
  for (const cell of cells) {
    const made = element("td", cell?.n ?? (cell?.grade != null ? null : cell ?? ""), cell?.n != null ? "n" : "");
    if (cell?.grade != null) {
      const kind = { good: "good", fair: "wait", suspicious: "wait", bad: "bad", failed: "bad" }[cell.grade] ?? "";
      made.append(element("span", cell.grade, "mark " + kind));
    }
    row.append(made);
  }
  return row;
}

async function look() {
  try {
    draw(await ask("fabric-test/matrix"));
    await pair();
    say("live", "live");
  } catch (error) {
    say("gone", error instanceof Refused ? error.message : "the plane does not answer");
  }
}

addEventListener("hashchange", look);

(async () => {
  for (;;) {
    await look();
    await new Promise(done => setTimeout(done, PERIOD));
  }
})();
