// Puts the page together: what is open, the timeline, marks, and the keys.

import { get, post } from "./server_api.js";
import { EpisodeList, span } from "./list.js";
import { Player } from "./player.js";
import { Curves, canvas } from "./curves.js";

const $ = (id) => document.getElementById(id);
const FPS_STEP = 0.02; // seconds around the cursor in which an event is named
const player = new Player(moved);
const curves = new Curves((t) => { player.pause(); player.seek(snapped(t)); });
const list = new EpisodeList((index) => { document.body.classList.remove("menu"); open(index); });
let about = {}, current = null, events = [], round = 0, cutFrom = null;

const shot = new URLSearchParams(location.search).has("shot");

async function start() {
  if (shot) { // the page is not loaded before this picture is, and it waits for `ready`
    const wait = new Image();
    wait.src = "api/ready";
    wait.hidden = true;
    document.body.append(wait);
  }
  about = await get("api/about");
  document.title = `${about.name} · penstock view`;
  $("name").textContent = about.name;
  $("kind").textContent = about.kind;
  $("marking").hidden = $("check").hidden = !about.can_mark;
  if (!about.can_mark) list.noun = "recordings";
  await list.reload();
  const [index, t] = location.hash.slice(1).split("@").map(Number);
  if (list.total) await open(index || 0, t || 0);
  else $("title").textContent = `No ${list.noun}`;
  if (about.can_mark) watchCheck();
  if (shot) await post("api/ready", {});
}

async function open(index, t = 0) {
  const mine = ++round;
  try {
    const episode = await get(`api/episode/${index}`);
    if (mine !== round) return;
    current = episode;
    cutFrom = null;
    events = [];
    history.replaceState(null, "", `#${index}`);
    $("title").textContent = about.can_mark ? `Episode ${index}` : `Recording ${index}`;
    $("notes").textContent = episode.notes.join(" · ");
    showMark();
    showFindings();
    list.select(index);
    const opened = [player.open(index, episode), curves.open(index, episode)];
    if (t) player.seek(t);
    drawTimeline();
    await Promise.all(opened);
    performance.mark("opened");
    const found = await get(`api/events/${index}`);
    if (mine !== round) return;
    events = found;
    drawTimeline();
    moved(player.t);
  } catch (error) { say(error.message, true); }
}

function snapped(t) { return current?.frames ? Math.round(t * current.fps) / current.fps : t; }

function moved(t) {
  if (!current) return;
  curves.move(t);
  const last = Math.max(current.seconds, 1e-9);
  $("timeline").querySelector(".cursor").style.left = `${(t / last) * 100}%`;
  $("timeline").setAttribute("aria-valuemax", last.toFixed(2));
  $("timeline").setAttribute("aria-valuenow", t.toFixed(2));
  $("clock").textContent = `${t.toFixed(2)} / ${current.seconds.toFixed(2)} s`;
  $("frame").textContent = current.frames ? `frame ${Math.min(player.frame, current.frames - 1)} of ${current.frames}` : "";
  $("play").textContent = player.playing ? "❚❚" : "▶";
  $("play").setAttribute("aria-label", player.playing ? "Pause" : "Play");
  const here = events.filter((event) => Math.abs(event[0] - t) < FPS_STEP);
  $("event").textContent = here.slice(0, 3).map((event) => `${event[1]}: ${event[2]}`).join(" · ") || summary();
}

function summary() {
  const counts = {};
  for (const [, kind] of events) counts[kind] = (counts[kind] || 0) + 1;
  return Object.entries(counts).map(([kind, count]) => `${count} ${kind}`).join(", ");
}

function drawTimeline() {
  const { width, height, pen } = canvas($("timeline").querySelector("canvas"));
  const style = getComputedStyle(document.documentElement);
  const ink = (name) => style.getPropertyValue(`--${name}`);
  const seconds = Math.max(current.seconds, 1e-9);
  pen.fillStyle = ink("soft");
  pen.fillRect(0, 0, width, height);
  for (const [t, kind] of events) {
    pen.fillStyle = ink(kind);
    pen.fillRect((t / seconds) * width - 0.75, height - 16, 1.5, 16);
  }
  if (current.findings.length) { pen.fillStyle = ink("found"); pen.fillRect(0, 0, width, 3); }
  const { trim, split, cut, reject } = current.mark;
  pen.fillStyle = ink("shade");
  if (reject) pen.fillRect(0, 0, width, height);
  else if (trim) {
    const [first, stop] = trim.map((frame) => (frame / current.frames) * width);
    pen.fillRect(0, 0, first, height);
    pen.fillRect(stop, 0, width - stop, height);
    pen.fillStyle = ink("accent");
    pen.fillRect(first, 0, 2, height);
    pen.fillRect(stop - 2, 0, 2, height);
  }
  if (!reject) for (const [first, stop] of cut) {
    pen.fillStyle = ink("shade");
    pen.fillRect((first / current.frames) * width, 0, ((stop - first) / current.frames) * width, height);
  }
  pen.fillStyle = ink("accent");
  if (cutFrom !== null) pen.fillRect((cutFrom / current.frames) * width, 0, 2, height / 2);
  for (const frame of split) pen.fillRect((frame / current.frames) * width - 1, 0, 2, height);
}

function showMark() {
  const { mark } = current;
  $("task").textContent = mark.task ?? current.task;
  const badges = [];
  if (mark.reject) badges.push(span("flag reject", "rejected"));
  if (mark.trim) badges.push(span("flag edit", `keep ${mark.trim[0]}–${mark.trim[1] - 1}`));
  if (mark.split.length) badges.push(span("flag edit", `split at ${mark.split.join(", ")}`));
  for (const [first, stop] of mark.cut) badges.push(span("flag edit", `without ${first}–${stop - 1}`));
  if (cutFrom !== null) badges.push(span("flag", `rejecting from ${cutFrom}: Shift+X ends it`));
  if (mark.task) badges.push(span("flag edit", "relabelled"));
  $("badges").replaceChildren(...badges);
  $("reject").setAttribute("aria-pressed", mark.reject);
}

// One change after the other: each is made of the marks that the one before left.
let saving = Promise.resolve();
function mark(change) {
  if (!about.can_mark || !current) return;
  const episode = current;
  saving = saving.then(async () => {
    episode.mark = await post(`api/mark/${episode.index}`, change(episode.mark));
    if (current === episode) { showMark(); drawTimeline(); }
    say("saved");
    await list.reload();
  }).catch((error) => say(error.message, true));
}

function trim(side) {
  if (!current?.frames) return;
  const [at, count] = [player.frame, current.frames];
  mark((old) => {
    const [first, stop] = old.trim ?? [0, count];
    return { trim: side === 0 ? [at, stop > at ? stop : count] : [first <= at ? first : 0, at + 1] };
  });
}

function split() {
  const at = player.frame;
  if (!current?.frames || at === 0) return;
  mark(({ split }) => ({ split: split.includes(at) ? split.filter((frame) => frame !== at) : [...split, at] }));
}

// Frames in the middle: from here on, and at the second call up to here; within some, takes them back.
function cut() {
  if (!about.can_mark || !current?.frames) return;
  const at = player.frame;
  const within = ([first, stop]) => first <= at && at < stop;
  if (cutFrom === null && !current.mark.cut.some(within)) cutFrom = at;
  else {
    const [from, to] = [Math.min(cutFrom ?? at, at), Math.max(cutFrom ?? at, at) + 1];
    const back = cutFrom === null;
    cutFrom = null;
    mark((old) => ({ cut: back ? old.cut.filter((range) => !within(range)) : [...old.cut, [from, to]] }));
  }
  showMark();
  drawTimeline();
}

function relabel() {
  if (!about.can_mark || !current) return;
  const dialog = $("relabel"), input = $("new-task");
  input.value = current.mark.task ?? current.task;
  dialog.returnValue = "";
  dialog.onclose = () => {
    const task = input.value.trim();
    if (dialog.returnValue === "ok" && task) mark(() => ({ task: task === current.task ? null : task }));
  };
  input.onkeydown = (event) => { if (event.key === "Enter") { event.preventDefault(); dialog.close("ok"); } };
  dialog.showModal();
  input.select();
}

function showFindings() {
  $("findings").replaceChildren(...current.findings.map((text) => {
    const line = document.createElement("p");
    line.textContent = text;
    return line;
  }));
}

async function watchCheck() {
  const found = await get("api/findings").catch(() => ({ state: "failed" }));
  const general = found.general?.length ?? 0;
  $("check").textContent = { none: "Check", running: "Checking…", failed: "Check failed", absent: "Not checked" }[found.state]
    ?? (found.episodes || general ? `Findings: ${found.episodes} episodes, ${general} general` : "Checked: ok");
  $("check").title = (found.general ?? []).join("\n");
  if (found.state === "running") { setTimeout(watchCheck, 1000); return; }
  if (found.state !== "done") return;
  await list.reload();
  if (!current) return;
  current.findings = (await get(`api/episode/${current.index}`)).findings;
  showFindings();
  drawTimeline();
}

async function check() {
  if (!about.can_mark) return;
  await post("api/check", {});
  await watchCheck();
  if ($("check").title) say($("check").title, true);
}

let quiet;
function say(text, bad = false) {
  $("say").textContent = text;
  $("say").classList.toggle("bad", bad);
  $("say").hidden = false;
  clearTimeout(quiet);
  quiet = setTimeout(() => { $("say").hidden = true; }, bad ? 6000 : 1200);
}

function nextEvent(step) {
  const after = step > 0 ? events.find((event) => event[0] > player.t + 1e-3)
    : events.findLast((event) => event[0] < player.t - 1e-3);
  if (after) { player.pause(); player.seek(snapped(after[0])); }
}

async function go(step) {
  const index = await list.neighbour(step);
  if (index !== null && index !== current?.index) await open(index);
}

function faster(step) {
  const speed = $("speed");
  speed.selectedIndex = Math.min(Math.max(speed.selectedIndex + step, 0), speed.options.length - 1);
  player.setSpeed(Number(speed.value));
}

const KEYS = {
  " ": () => player.toggle(),
  ArrowLeft: (event) => player.step(event.shiftKey ? -Math.round(current.fps) : -1),
  ArrowRight: (event) => player.step(event.shiftKey ? Math.round(current.fps) : 1),
  Home: () => { player.pause(); player.seek(0); },
  End: () => { player.pause(); player.seek(player.last); },
  ArrowUp: () => go(-1),
  ArrowDown: () => go(1),
  "-": () => faster(-1), "+": () => faster(1), "=": () => faster(1),
  m: () => nextEvent(1), M: () => nextEvent(-1),
  x: () => mark((old) => ({ reject: !old.reject })), X: cut,
  k: () => mark(() => ({ reject: false, trim: null, split: null, cut: null, task: null })),
  "[": () => trim(0), "]": () => trim(1),
  c: split, t: relabel,
  "/": () => { document.body.classList.add("menu"); $("text").focus(); },
  s: () => list.cycle("order"), w: () => list.cycle("which"), r: () => list.turn(),
  d: check,
  "?": () => $("keys").showModal(),
};

document.addEventListener("keydown", (event) => {
  const inText = event.target.matches("input, select, textarea");
  if (inText && event.key === "Escape") { event.target.blur(); document.body.classList.remove("menu"); }
  if (inText || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const work = KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
  if (!work || (!current && event.key !== "?")) return;
  if (event.key === " " && event.target.matches("button")) return;
  event.preventDefault();
  work(event);
});

$("play").addEventListener("click", () => player.toggle());
$("back").addEventListener("click", () => player.step(-1));
$("forth").addEventListener("click", () => player.step(1));
$("in").addEventListener("click", () => trim(0));
$("out").addEventListener("click", () => trim(1));
$("reject").addEventListener("click", () => KEYS.x());
$("check").addEventListener("click", check);
$("help").addEventListener("click", () => $("keys").showModal());
$("speed").addEventListener("change", () => player.setSpeed(Number($("speed").value)));
$("menu").addEventListener("click", () => {
  $("menu").setAttribute("aria-expanded", document.body.classList.toggle("menu"));
  list.draw();
});
const drag = (event) => {
  if (!current) return;
  const box = $("timeline").getBoundingClientRect();
  player.pause();
  player.seek(snapped(((event.clientX - box.left) / box.width) * current.seconds));
};
$("timeline").addEventListener("pointerdown", (event) => { $("timeline").setPointerCapture(event.pointerId); drag(event); });
$("timeline").addEventListener("pointermove", (event) => { if (event.buttons) drag(event); });
addEventListener("resize", () => { if (current) drawTimeline(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (current) drawTimeline(); });
addEventListener("hashchange", () => {
  const index = Number(location.hash.slice(1).split("@")[0]);
  if (index !== current?.index) open(index);
});

window.penstock = { player, list, curves, open }; // for tests, and for the curious
start().catch((error) => say(error.message, true));
