// The cameras of an episode on one clock: videos play by themselves and are held to it, pictures
// are asked for one by one. While a video waits for data, the clock waits, too.

import { getTimes } from "./server_api.js";
import { span } from "./list.js";

const DRIFT_S = 0.12;

export class Player {
  constructor(moved) {
    this.moved = moved; // told the time whenever it changes
    this.box = document.getElementById("cameras");
    this.cameras = [];
    this.t = 0;
    this.speed = 1;
    this.playing = false;
    this.episode = null;
  }

  async open(index, episode) {
    this.pause();
    this.episode = episode;
    this.t = 0;
    const old = this.cameras;
    this.cameras = episode.cameras.map((camera, number) => {
      const same = old.find((one) => one.camera.name === camera.name && one.camera.file && one.camera.file === camera.file && one.camera.mode === camera.mode);
      if (same) { same.use(index, number, camera); return same; }
      return camera.mode === "video" ? new VideoCamera(index, number, camera, this) : new FrameCamera(index, number, camera);
    });
    for (const one of old) if (!this.cameras.includes(one)) one.close();
    this.box.replaceChildren(...this.cameras.map((one) => one.element));
    this.box.classList.toggle("both", new Set(episode.cameras.map((camera) => camera.origin)).size > 1);
    this.seek(0);
    await Promise.all(this.cameras.map((one) => one.first));
  }

  // A browser that cannot play a video gets its frames as pictures.
  replace(old) {
    const at = this.cameras.indexOf(old);
    if (at < 0) return;
    const frames = new FrameCamera(old.index, old.number, { ...old.camera, mode: "frames", fps: this.episode.fps });
    frames.first.then(old.arrived, old.arrived);
    this.cameras[at] = frames;
    old.element.replaceWith(frames.element);
    old.close();
    frames.show(this.t, false);
  }

  get last() { return Math.max(0, this.episode.frames ? (this.episode.frames - 1) / this.episode.fps : this.episode.seconds); }
  get frame() { return Math.round(this.t * this.episode.fps); }

  seek(t) {
    if (!this.episode) return;
    this.t = Math.min(Math.max(t, 0), this.last);
    for (const camera of this.cameras) camera.show(this.t, this.playing);
    this.moved(this.t);
  }

  step(frames) {
    if (!this.episode) return;
    this.pause();
    const at = this.episode.frames ? this.frame : Math.floor(this.t * this.episode.fps + 1e-6);
    this.seek((at + frames) / this.episode.fps);
  }

  toggle() { this.playing ? this.pause() : this.play(); }

  play() {
    if (!this.episode || this.playing) return;
    if (this.t >= this.last - 1e-6) this.seek(0);
    this.playing = true;
    document.body.classList.add("playing");
    for (const camera of this.cameras) camera.play(this.speed);
    let before = performance.now();
    const tick = (now) => {
      if (!this.playing) return;
      const passed = Math.min((now - before) / 1000, 0.25) * this.speed;
      before = now;
      if (!this.cameras.some((camera) => camera.waits)) this.t += passed;
      if (this.t >= this.last) { this.pause(); this.seek(this.last); return; }
      for (const camera of this.cameras) camera.follow(this.t);
      this.moved(this.t);
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
    this.moved(this.t);
  }

  pause() {
    const was = this.playing;
    this.playing = false;
    document.body.classList.remove("playing");
    for (const camera of this.cameras) camera.pause();
    if (was) {
      if (this.episode.frames) this.t = Math.min(this.frame / this.episode.fps, this.last);
      this.seek(this.t);
    }
  }

  setSpeed(speed) {
    this.speed = speed;
    if (this.playing) for (const camera of this.cameras) camera.play(speed);
  }
}

class ShownCamera {
  constructor(index, number, camera) {
    this.element = document.createElement("figure");
    this.element.className = `camera ${camera.origin}`;
    this.screen = document.createElement("div");
    this.screen.className = "screen";
    this.caption = document.createElement("figcaption");
    this.element.append(this.screen, this.caption);
    this.first = new Promise((resolve) => { this.arrived = resolve; });
    this.waits = false;
    this.use(index, number, camera);
  }

  use(index, number, camera) {
    [this.index, this.number, this.camera] = [index, number, camera];
    this.caption.replaceChildren(span("name", camera.name.replace(/^observation\.(images\.)?/, "")));
    this.element.title = camera.name;
    if (camera.depth_mm) this.caption.append(span("flag", camera.depth_mm.map((mm) => (mm / 1000).toFixed(1)).join("–") + " m"));
  }

  trouble(text) {
    const said = document.createElement("p");
    said.className = "trouble";
    said.textContent = text;
    this.screen.replaceChildren(said);
    this.arrived();
  }

  fit(width, height) { if (width && height) this.screen.style.aspectRatio = `${width} / ${height}`; }
}

class VideoCamera extends ShownCamera {
  constructor(index, number, camera, player) {
    super(index, number, camera);
    const video = document.createElement("video");
    this.video = video;
    video.muted = true;
    video.playsInline = true;
    video.preload = "auto";
    video.addEventListener("loadeddata", () => { this.fit(video.videoWidth, video.videoHeight); });
    video.addEventListener("seeked", () => { this.arrived(); this.again(); });
    video.addEventListener("error", () => player.replace(this), { once: true });
    video.src = `video/${index}/${number}`;
    this.screen.append(video);
    this.wanted = null;
  }

  // The middle of the frame: its borders are rounded differently by every browser.
  place(t) { return this.camera.from_s + t + 0.5 / this.camera.fps; }

  show(t) {
    this.wanted = this.place(t);
    if (!this.video.seeking) this.again();
  }

  again() {
    if (this.wanted === null) return;
    if (Math.abs(this.video.currentTime - this.wanted) > 1e-4) this.video.currentTime = this.wanted;
    else if (this.video.readyState >= 2) this.arrived();
    this.wanted = null;
  }

  play(speed) {
    this.video.playbackRate = Math.min(Math.max(speed, 0.0625), 16);
    this.video.play().catch(() => {});
  }

  follow(t) {
    const video = this.video;
    this.waits = video.seeking || video.readyState < 3;
    if (this.waits) return;
    const drift = video.currentTime - (this.camera.from_s + t);
    if (Math.abs(drift) > DRIFT_S + 1 / this.camera.fps) this.show(t);
  }

  pause() { this.video.pause(); this.waits = false; }

  close() { this.video.removeAttribute("src"); this.video.load(); }
}

class FrameCamera extends ShownCamera {
  constructor(index, number, camera) {
    super(index, number, camera);
    this.image = document.createElement("img");
    this.image.alt = camera.name;
    this.image.decoding = "async";
    this.screen.append(this.image);
    this.image.addEventListener("load", () => { this.fit(this.image.naturalWidth, this.image.naturalHeight); this.done(); });
    this.image.addEventListener("error", () => this.done());
    this.shown = -1;
    this.busy = false;
  }

  use(index, number, camera) {
    super.use(index, number, camera);
    this.times = null;
    this.shown = -1;
    if (camera.fps === null) {
      getTimes(`times/${index}/${number}`).then((times) => { this.times = times; this.show(this.t ?? 0); }, (error) => this.trouble(error.message));
    }
  }

  frameAt(t) {
    const { fps, count } = this.camera;
    if (fps !== null) return Math.min(Math.max(Math.round(t * fps - 1e-6), 0), count - 1);
    if (!this.times) return -1;
    let [low, high] = [0, this.times.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] <= t + 1e-4) low = middle + 1; else high = middle;
    }
    return Math.max(0, low - 1);
  }

  show(t) {
    this.t = t;
    const frame = this.frameAt(t);
    if (frame < 0 || frame === this.shown || this.busy) return;
    this.shown = frame;
    this.busy = true;
    const width = Math.min(1280, Math.max(320, Math.round(this.screen.clientWidth * devicePixelRatio / 160) * 160 || 640));
    this.image.src = `frame/${this.index}/${this.number}/${frame}?width=${width}`;
  }

  done() {
    this.busy = false;
    this.arrived();
    if (this.frameAt(this.t) !== this.shown) this.show(this.t);
  }

  follow(t) { this.show(t); }
  play() {}
  pause() {}
  close() { this.image.removeAttribute("src"); }
}
