// Curves of every feature, loaded when they come into view; the action is drawn over the state.

import { getCurve } from "./server_api.js";
import { span } from "./list.js";

const HUES = [174, 24, 262, 212, 340, 48, 128, 0, 290, 90];
const PAD = { left: 46, right: 6, top: 6, bottom: 6 };

export class Curves {
  constructor(seek) {
    this.box = document.getElementById("curves");
    this.seek = seek;
    this.panels = [];
    this.watch = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const panel = this.panels.find((one) => one.element === entry.target);
        if (!panel) continue;
        panel.visible = entry.isIntersecting;
        if (entry.isIntersecting) panel.load().then(() => panel.move(this.t));
      }
    }, { rootMargin: "200px" });
    this.t = 0;
    addEventListener("resize", () => this.panels.forEach((panel) => panel.draw()));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.panels.forEach((panel) => panel.draw()));
  }

  open(index, episode) {
    this.watch.disconnect();
    this.panels = [];
    episode.curves.forEach((curve, number) => {
      if (curve.under !== null) return;
      const over = episode.curves.findIndex((one) => one.under === number);
      const panel = new Panel(index, episode, curve, number, over, this.seek);
      this.panels.push(panel);
    });
    this.box.replaceChildren(...this.panels.map((panel) => panel.element));
    for (const panel of this.panels) this.watch.observe(panel.element);
    return Promise.all(this.panels.slice(0, 2).map((panel) => panel.load()));
  }

  move(t) {
    this.t = t;
    for (const panel of this.panels) if (panel.visible) panel.move(t);
  }
}

class Panel {
  constructor(index, episode, curve, number, over, seek) {
    [this.index, this.number, this.over, this.seconds] = [index, number, over, episode.seconds];
    this.element = document.createElement("article");
    this.element.className = "curve";
    const head = document.createElement("header");
    head.append(span("", over < 0 ? curve.name : `${curve.name} and ${episode.curves[over].name}`));
    this.hint = span("dim", over < 0 ? "" : "solid and dashed");
    head.append(this.hint);
    if (curve.origin === "recording" && episode.frames) head.append(span("dim", "recording"));
    this.plot = document.createElement("div");
    this.plot.className = "plot";
    this.canvas = document.createElement("canvas");
    this.cursor = document.createElement("i");
    this.cursor.className = "cursor";
    this.plot.append(this.canvas, this.cursor);
    this.chips = document.createElement("div");
    this.chips.className = "chips";
    this.element.append(head, this.plot, this.chips);
    this.lines = [];
    this.solo = null;
    this.visible = false;
    const go = (event) => {
      const box = this.plot.getBoundingClientRect();
      const width = box.width - PAD.left - PAD.right;
      seek(((event.clientX - box.left - PAD.left) / width) * this.seconds);
    };
    this.plot.addEventListener("pointerdown", (event) => { this.plot.setPointerCapture(event.pointerId); go(event); });
    this.plot.addEventListener("pointermove", (event) => { if (event.buttons) go(event); });
  }

  load() {
    this.loading ??= this.fetch().catch((error) => { this.hint.textContent = error.message; });
    return this.loading;
  }

  async fetch() {
    const numbers = this.over < 0 ? [this.number] : [this.number, this.over];
    this.lines = await Promise.all(numbers.map((number) => getCurve(`curve/${this.index}/${number}`)));
    const { labels } = this.lines[0];
    this.values = labels.map((label, k) => {
      const chip = document.createElement("button");
      chip.className = "chip";
      const line = document.createElement("i");
      line.style.background = colour(k);
      const value = document.createElement("b");
      chip.append(line, span("", label), value);
      chip.addEventListener("click", () => {
        this.solo = this.solo === k ? null : k;
        [...this.chips.children].forEach((one, at) => one.classList.toggle("off", this.solo !== null && at !== this.solo));
        this.draw();
      });
      this.chips.append(chip);
      return value;
    });
    this.draw();
  }

  draw() {
    if (!this.lines.length) return;
    const { width, height, pen } = canvas(this.canvas);
    let [least, most] = [Infinity, -Infinity];
    this.each((line, k) => {
      for (let at = k; at < line.low.length; at += line.elements) {
        if (line.low[at] < least) least = line.low[at];
        if (line.high[at] > most) most = line.high[at];
      }
    });
    const style = getComputedStyle(document.documentElement);
    pen.font = `11px ${style.fontFamily}`;
    pen.fillStyle = style.getPropertyValue("--dim");
    if (!(least <= most)) { pen.fillText("no numbers", PAD.left, height / 2); return; }
    if (least === most) { least -= 0.5; most += 0.5; }
    const x = (t) => PAD.left + (t / this.seconds) * (width - PAD.left - PAD.right);
    const y = (value) => PAD.top + ((most - value) / (most - least)) * (height - PAD.top - PAD.bottom);
    pen.strokeStyle = style.getPropertyValue("--line");
    pen.textAlign = "right";
    for (const value of [least, (least + most) / 2, most]) {
      const place = Math.round(y(value)) + 0.5;
      pen.beginPath(); pen.moveTo(PAD.left, place); pen.lineTo(width - PAD.right, place); pen.stroke();
      pen.fillText(number(value), PAD.left - 6, Math.min(Math.max(place + 4, 10), height - 2));
    }
    pen.save();
    pen.beginPath(); pen.rect(PAD.left, 0, width - PAD.left - PAD.right, height); pen.clip();
    this.each((line, k, which) => {
      pen.strokeStyle = colour(k);
      pen.lineWidth = which ? 1.1 : 1.5;
      pen.setLineDash(which ? [4, 3] : []);
      pen.beginPath();
      let pen_down = false;
      for (let point = 0; point < line.points; point++) {
        const at = point * line.elements + k;
        const [low, high] = [line.low[at], line.high[at]];
        if (Number.isNaN(low)) { pen_down = false; continue; }
        const across = x(line.t[point]);
        if (!pen_down) pen.moveTo(across - 1.5, y(low)); // a lone point is seen, too
        pen.lineTo(pen_down ? across : across + 1.5, y(low));
        if (high !== low) pen.lineTo(across, y(high));
        pen_down = true;
      }
      pen.stroke();
    });
    pen.restore();
  }

  each(work) {
    this.lines.forEach((line, which) => {
      for (let k = 0; k < line.elements; k++) if (this.solo === null || this.solo === k) work(line, k, which);
    });
  }

  move(t) {
    const width = this.plot.clientWidth - PAD.left - PAD.right;
    this.cursor.style.transform = `translateX(${PAD.left + (t / (this.seconds || 1)) * width}px)`;
    const [line] = this.lines;
    if (!line || !this.values) return;
    let [low, high] = [0, line.points];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (line.t[middle] <= t + 1e-4) low = middle + 1; else high = middle;
    }
    const at = Math.max(0, low - 1) * line.elements;
    this.values.forEach((value, k) => { value.textContent = number(line.low[at + k]); });
  }
}

export function canvas(element) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [element.clientWidth, element.clientHeight];
  element.width = width * ratio;
  element.height = height * ratio;
  const pen = element.getContext("2d");
  pen.scale(ratio, ratio);
  return { width, height, pen };
}

function colour(k) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return `hsl(${HUES[k % HUES.length]} ${dark ? 65 : 62}% ${dark ? 62 : 42}%)`;
}

function number(value) {
  if (value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e5 || size < 1e-3)) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 1 : 3);
}
