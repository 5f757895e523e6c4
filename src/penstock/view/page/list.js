// The list of episodes: as many lines as fit the window are in the page, whatever their number.

import { get } from "./server_api.js";

const HEIGHT = 34, PAGE = 200, MOST_PAGES = 20;

export class EpisodeList {
  constructor(choose) {
    this.choose = choose;
    this.box = document.getElementById("list");
    this.rows = document.getElementById("rows");
    this.query = { text: "", order: "index", down: false, which: "all" };
    this.pages = new Map();
    this.total = 0;
    this.noun = "episodes";
    this.current = null;
    this.round = 0;
    this.box.addEventListener("scroll", () => this.draw());
    this.box.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.choose(Number(row.dataset.index));
    });
    new ResizeObserver(() => this.draw()).observe(this.box);
    const text = document.getElementById("text");
    let pause;
    text.addEventListener("input", () => {
      clearTimeout(pause);
      pause = setTimeout(() => this.change({ text: text.value }), 120);
    });
    for (const name of ["order", "which"]) {
      const select = document.getElementById(name);
      select.addEventListener("change", () => this.change({ [name]: select.value }));
    }
    document.getElementById("down").addEventListener("click", () => this.turn());
  }

  change(values) {
    Object.assign(this.query, values);
    document.getElementById("down").textContent = this.query.down ? "↓" : "↑";
    this.box.scrollTop = 0;
    return this.reload();
  }

  turn() { return this.change({ down: !this.query.down }); }

  cycle(name) {
    const select = document.getElementById(name);
    select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
    return this.change({ [name]: select.value });
  }

  // The lines that are there stay until the new ones have come: keys find their way meanwhile.
  async reload() {
    const round = ++this.round, pages = new Map();
    await this.load(Math.floor(this.box.scrollTop / HEIGHT / PAGE), pages);
    if (round !== this.round) return;
    this.pages = pages;
    this.draw();
  }

  async load(number, pages = this.pages) {
    if (!pages.has(number)) {
      const page = { rows: [] };
      pages.set(number, page);
      page.loaded = this.fill(number, page, pages);
    }
    await pages.get(number).loaded;
  }

  async fill(number, page, pages) {
    const round = this.round;
    const words = new URLSearchParams({
      ...this.query, down: this.query.down ? "1" : "0", first: number * PAGE, count: PAGE,
    });
    const found = await get(`api/episodes?${words}`).catch(() => null);
    if (!found || round !== this.round) { pages.delete(number); return; }
    page.rows = found.rows;
    this.total = found.total;
    const of = found.total === found.of ? "" : ` of ${found.of}`;
    document.getElementById("count").textContent = `${found.total}${of} ${this.noun}`;
    this.rows.style.height = `${found.total * HEIGHT}px`;
    while (pages.size > MOST_PAGES) pages.delete(pages.keys().next().value);
    if (pages === this.pages) this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / HEIGHT) - 4);
    const last = Math.min(this.total, first + Math.ceil(this.box.clientHeight / HEIGHT) + 8);
    const lines = [];
    for (let place = first; place < last; place++) {
      const page = Math.floor(place / PAGE);
      const row = this.pages.get(page)?.rows[place % PAGE];
      if (row) lines.push(this.line(row, place));
      else this.load(page);
    }
    this.rows.replaceChildren(...lines);
  }

  line(row, place) {
    const line = document.createElement("div");
    line.className = `row ${row.mark}`;
    line.dataset.index = row.index;
    line.id = `row-${row.index}`;
    line.setAttribute("role", "option");
    line.setAttribute("aria-selected", row.index === this.current);
    line.style.top = `${place * HEIGHT}px`;
    const flags = span("flags");
    if (row.findings) flags.append(span("flag found", row.findings));
    if (row.mark) flags.append(span(`flag ${row.mark}`, row.mark === "reject" ? "✕" : "✎"));
    const length = row.seconds === null ? bytes(row.size) : `${row.seconds.toFixed(1)} s`;
    line.append(span("number", row.index), span("task", row.task), flags, span("length", length));
    line.title = `${row.index}: ${row.task}`;
    return line;
  }

  // Shows which one is open, and brings it into view.
  async select(index) {
    this.current = index;
    const place = await this.place(index);
    if (place !== null) {
      const top = place * HEIGHT;
      if (top < this.box.scrollTop) this.box.scrollTop = top - 2 * HEIGHT;
      if (top + HEIGHT > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top + 3 * HEIGHT - this.box.clientHeight;
    }
    this.box.setAttribute("aria-activedescendant", `row-${index}`);
    this.draw();
  }

  async place(index) {
    for (const [page, { rows }] of this.pages) {
      const at = rows.findIndex((row) => row.index === index);
      if (at >= 0) return page * PAGE + at;
    }
    const { text, order, down, which } = this.query;
    return text === "" && order === "index" && !down && which === "all" ? index : null;
  }

  // The episode that is so many lines further in the list, as it is sorted.
  async neighbour(step) {
    const pages = this.pages, place = await this.place(this.current);
    const next = Math.min(Math.max((place ?? -1) + step, 0), this.total - 1);
    const page = Math.floor(next / PAGE);
    await this.load(page, pages);
    return pages.get(page)?.rows[next % PAGE]?.index ?? null;
  }
}

export function span(className, text = "") {
  const found = document.createElement("span");
  found.className = className;
  found.textContent = text;
  return found;
}

function bytes(size) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (size >= 1000 && unit < 4) { size /= 1000; unit += 1; }
  return `${size.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}
