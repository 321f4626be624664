"use strict";
// One replica on one page: its members, what they reach each other by, what they wait for, how it failed.

const REPLICA = byId("replica").dataset.replica;
const hidden = (id, none) => { byId(id + "-section").hidden = none; };

function state(member) {
  const shard = member.shard, progress = shard.progress;
  const words = [
    shard.want === "run" ? "" : `to ${shard.want}`,
    progress ? `${progress.what} ${bytes(progress.done)}${progress.total ? " of " + bytes(progress.total) : ""}` : "",
    shard.retry_in == null ? "" : `again in ${span(shard.retry_in)}`,
    shard.stop_in == null ? "" : `${span(shard.stop_in)} left`,
  ];
  return [mark(shard.state), words.filter(Boolean).join(", ")];
}

function ports(member) {
  const all = Object.entries(member.ports);
  if (member.shard.port) all.unshift(["http", member.shard.port]);
  return all.map(([purpose, port]) => `${purpose} ${port}`).join(", ");
}

// Each variable once where all members have it alike, else by rank.
function variables(members) {
  const found = new Map();
  for (const member of members) {
    for (const one of member.environment) {
      const key = JSON.stringify([one.name, one.value, one.by, one.instead]);
      if (!found.has(key)) found.set(key, { ...one, key, ranks: [] });
      found.get(key).ranks.push(member.shard.rank);
    }
  }
  return [...found.values()].sort((a, b) => a.name.localeCompare(b.name) || a.ranks[0] - b.ranks[0])
    .map(one => ({ ...one, who: one.ranks.length === members.length ? "all" : one.ranks.join(", ") }));
}

function tested(evidence) {
  if (evidence.age == null) return "never";
  return [`${span(evidence.age)} ago`, evidence.stale ? mark("too old to count", "wait") : ""];
}

function failures(reply) {
  const same = (a, b) => a.shard === b.shard && a.failure.generation === b.failure.generation;
  const found = [];
  if (reply.first) found.push({ which: "first", ...reply.first });
  if (reply.last && !(reply.first && same(reply.first, reply.last))) found.push({ which: "last", ...reply.last });
  return found;
}

function show(reply) {
  const replica = reply.replica;
  const waiting = byId("waiting"), warning = byId("warning");
  waiting.hidden = !reply.waiting.length;
  waiting.textContent = reply.waiting.length ? `Waits for ${reply.waiting.join("; ")}` : "";
  warning.hidden = !replica.warning;
  warning.textContent = replica.warning;
  const wanted = reply.wanted_revision;
  sums([
    ["State", replica.state, [reply.want === "run" ? "" : `to ${reply.want}`, replica.ready_age == null ? "" : `for ${span(replica.ready_age)}`].filter(Boolean).join(", ")],
    ["Model", replica.model, `${reply.engine}, ${reply.source}`],
    ["Revision", replica.revision, wanted == null ? "its model is wanted no more" : replica.outdated ? `outdated: ${wanted} is wanted` : "the wanted one"],
    ["Generation", replica.generation, reply.why],
    ["In flight", replica.in_flight ?? "–", replica.port ? `at ${replica.address}:${replica.port}` : ""],
    ["Failed", reply.restarts, reply.restarts === 1 ? "once" : reply.restarts ? "times in a row" : "never in a row"],
  ]);
  table("members", reply.members, m => m.shard.id, m => [
    { n: m.shard.rank }, m.shard.id, [linked(m.shard.node), m.stage && m.stage !== "ready" ? mark(m.stage) : ""], state(m),
    { n: span(m.shard.state_age) }, m.shard.address, ports(m), { n: m.shard.pid ?? "" }, { n: percent(m.shard.cpu_percent) },
    { n: bytes(m.shard.rss_bytes) }, { n: bytes(m.shard.gpu_memory_bytes) }, m.shard.detail,
  ], "No member is placed.");
  hidden("network", !reply.members.some(m => m.rdma.length || m.shard.network || m.shard.warning));
  table("network", reply.members, m => m.shard.id, m => [
    { n: m.shard.rank }, m.shard.node, m.rdma.join(", ") || "sockets",
    [m.shard.network || (m.shard.state === "ready" ? "nothing of it" : "nothing yet"), m.shard.warning ? mark(m.shard.warning, "bad") : ""],
  ], "");
  const written = variables(reply.members);
  hidden("environment", !written.length);
  table("environment", written, v => v.key, v => [
    { n: v.who }, v.name, v.value, v.by === "profile" ? `${v.instead} (the profile says so)` : "",
  ], "");
  hidden("evidence", !reply.evidence.length);
  table("evidence", reply.evidence, e => `${e.a} ${e.b}`, e => [
    `${e.a} – ${e.b}`, tested(e), e.good.join(", "), e.bad.map(rail => mark(e.figures[rail] ? `${rail}: ${e.figures[rail]}` : rail, "bad")),
    e.age == null ? `llmgw ctl fabric-test ${e.a} ${e.b}` : e.text,
  ], "");
  const failed = failures(reply);
  hidden("failures", !failed.length);
  table("failures", failed, f => f.which, f => [
    f.which, new Date(f.failure.clock * 1000).toLocaleString(), `${f.shard} on ${f.node}, generation ${f.failure.generation}`,
    f.log, [f.failure.cause || "none known", ...f.failure.lines.slice(-5)].join("\n"),
  ], "");
  table("commands", reply.members.filter(m => m.shard.command.length), m => m.shard.id, m => [m.shard.id, m.shard.command.join(" ")], "Nothing runs yet.");
}

watch("replicas/" + encodeURIComponent(REPLICA), show);
