"use strict";
// The page: takes images, asks the model one after the other, shows what it says.

const MOST_AT_ONCE = 100; // images; more would make the page slow
const SHOWN = 5; // classes of each image
const THUMBNAIL = 320; // pixels of the longer side

const byId = (id) => document.getElementById(id);

// What the scripts before this one leave; one that is missing leaves nothing.
const LEFT = {
  "resampling.js": () => Resampling,
  "images.js": () => Images,
  "model.js": () => Model,
  "manifest.js": () => Bundle.manifest.description,
  "runtime/ort.wasm.min.js": () => ort,
};
let description;

function element(tag, className = "", text = "") {
  const found = document.createElement(tag);
  if (className) found.className = className;
  found.textContent = text; // never as HTML: names of files and classes are anybody's
  return found;
}

function runScript(file) {
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = file;
    script.onload = () => resolve(script.remove());
    script.onerror = () => reject(new Error(`${file} is missing; copy the whole folder`));
    document.head.append(script);
  });
}

function moduleAddress(bytes) {
  return URL.createObjectURL(new Blob([bytes], { type: "text/javascript" }));
}

// Lets the browser draw what has changed.
function drawn() {
  return new Promise((resolve) => setTimeout(resolve, 0));
}

// ---- the model

async function openModel() {
  const words = byId("loading-text");
  const progress = byId("progress");
  const started = performance.now();
  const model = await Model.open({
    load: runScript,
    address: moduleAddress,
    progress(part) {
      progress.value = part;
      words.textContent = part < 1 ? `Loading the model: ${Math.round(100 * part)} %` : "Starting the model …";
      return drawn();
    },
  });
  const { channels, height, width } = description.image;
  await model.run(new Float32Array(channels * height * width), 1); // what cannot run shall say so now
  byId("loading").hidden = true;
  say(`The model is ready after ${((performance.now() - started) / 1000).toFixed(1)} s.`);
  return model;
}

function say(words, wrong = false) {
  const status = byId("status");
  status.textContent = words;
  status.classList.toggle("wrong", wrong);
}

let model; // a promise: images may come before it is there

function failed(error) {
  byId("loading").hidden = true;
  byId("choose").disabled = true;
  document.body.dataset.state = "failed";
  say(`The model cannot be started: ${error.message}`, true);
}

// ---- images

let queue = Promise.resolve();

function take(files) {
  const taken = [...files].slice(0, MOST_AT_ONCE);
  if (!taken.length) {
    say("There is no image in that; drop, choose or paste files of images.", true);
    return;
  }
  const left = files.length - taken.length;
  say(left ? `The first ${taken.length} images are taken; ${left} more are left out.` : "", left > 0);
  const cards = taken.map((file) => newCard(file));
  byId("answers").prepend(...cards);
  byId("results").hidden = false;
  taken.forEach((file, i) => {
    queue = queue.then(() => answer(file, cards[i]));
  });
  queue = queue.then(() => {
    if (document.body.dataset.state === "failed" || left || cards.every((card) => !card.isConnected)) return;
    const unread = cards.filter((card) => card.classList.contains("failed")).length;
    const done = `${counted(taken.length - unread, "image")} done`;
    say(unread ? `${done}, ${unread} could not be read.` : `${done}.`, unread > 0);
  });
}

function newCard(file) {
  const card = element("li", "card waiting");
  card.append(element("h3", "", file.name || "pasted image"), element("p", "note", "Waiting …"));
  return card;
}

async function answer(file, card) {
  await drawn();
  if (!card.isConnected) return; // cleared away meanwhile
  const name = file.name || "pasted image";
  let image;
  try {
    const asked = await model;
    const began = performance.now();
    image = await Images.decode(file);
    const numbers = Images.prepare(Images.source(image), description.image.channels, description.preprocessing);
    const prepared = performance.now();
    const found = await asked.run(numbers, 1);
    const ended = performance.now();
    const best = Model.top(found[description.outputs[0]].data, SHOWN);
    const times = `model ${ms(ended - prepared)}, reading ${ms(prepared - began)}`;
    card.replaceChildren(
      thumbnail(image, name),
      element("h3", "", name),
      bars(best),
      element("p", "note", `${image.width} × ${image.height} px · ${times}`),
    );
    card.className = "card done";
  } catch (error) {
    card.replaceChildren(element("h3", "", name), element("p", "wrong", error.message));
    card.className = "card failed";
  } finally {
    image?.close();
  }
}

function ms(time) {
  return `${time < 10 ? time.toFixed(1) : time.toFixed(0)}\u00a0ms`;
}

function counted(number, thing) {
  return `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;
}

function thumbnail(image, name) {
  const frame = element("div", "frame");
  const canvas = element("canvas");
  const scale = Math.min(1, THUMBNAIL / Math.max(image.width, image.height));
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", name);
  const context = canvas.getContext("2d");
  context.scale(canvas.width / image.width, canvas.height / image.height);
  image.draw(context);
  frame.append(canvas);
  return frame;
}

function className(place) {
  return description.classes?.[place] ?? `class ${place}`;
}

function bars(best) {
  const list = element("ol", "bars");
  for (const [place, probability] of best) {
    const item = element("li");
    const share = element("data", "share", `${(100 * probability).toFixed(1)} %`);
    share.value = String(probability);
    const bar = element("span", "bar");
    const filled = element("i");
    filled.style.width = `${100 * probability}%`;
    bar.append(filled);
    bar.setAttribute("aria-hidden", "true");
    item.append(element("span", "name", className(place)), share, bar);
    list.append(item);
  }
  return list;
}

// ---- what the model is

function describe() {
  const { packed, made } = Bundle.manifest;
  const { title, image, preprocessing, provenance, quantised, classes } = description;
  document.title = `${title} · broadsight`;
  byId("title").textContent = title;
  const rows = [["image", `${image.width} × ${image.height} px, ${image.channels === 1 ? "grey" : "colour"}`]];
  if (classes) rows.unshift(["classes", classes.length.toLocaleString("en")]);
  if (provenance.parameters) rows.push(["parameters", millions(provenance.parameters)]);
  rows.push(["numbers", quantised ? "int8" : "float32"]);
  rows.push(["model", `${(packed.model.bytes / 1e6).toFixed(1)} MB`]);
  fill(byId("card"), rows);
  const { mean, std, ...seen } = preprocessing;
  fill(byId("origin"), [
    ["source", description.source],
    ...Object.entries(provenance),
    ...Object.entries(seen),
    ["mean", mean],
    ["std", std],
    ["page", made],
  ]);
  byId("int8-part").hidden = !quantised;
  if (quantised) fill(byId("int8"), Object.entries(quantised));
  byId("classes-part").hidden = !classes;
  if (classes) byId("classes").append(...classes.map((name) => element("li", "", name)));
}

function fill(list, rows) {
  for (const [name, value] of rows) {
    if (value === null || value === undefined || value === "") continue;
    const group = typeof value === "object" && !Array.isArray(value);
    const said = element("dd", group ? "group" : "");
    if (group) {
      const inner = element("dl");
      fill(inner, Object.entries(value));
      said.append(inner);
    } else {
      said.textContent = words(value);
    }
    list.append(element("dt", group ? "group" : "", name.replaceAll("_", " ")), said);
  }
}

function words(value) {
  if (value === null) return "–";
  if (Array.isArray(value)) return value.map(words).join(", ");
  if (typeof value === "object") {
    const pairs = Object.entries(value).map(([name, inner]) => `${name.replaceAll("_", " ")} ${words(inner)}`);
    return pairs.join(", ");
  }
  if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(6)));
  if (typeof value === "boolean") return value ? "yes" : "no";
  return String(value);
}

function millions(number) {
  return number < 1e5 ? number.toLocaleString("en") : `${(number / 1e6).toFixed(number < 1e7 ? 2 : 1)} million`;
}

// ---- what somebody does

function listen() {
  const files = byId("files");
  byId("choose").addEventListener("click", () => files.click());
  files.addEventListener("change", () => {
    take(files.files);
    files.value = ""; // or the same file could not be chosen again
  });
  byId("clear").addEventListener("click", () => {
    byId("answers").replaceChildren();
    byId("results").hidden = true;
    say("");
    byId("choose").focus();
  });
  let inside = 0; // dragging over a child leaves its parent
  const hover = (change) => {
    inside = change ? inside + change : 0;
    byId("drop").classList.toggle("over", inside > 0);
  };
  addEventListener("dragenter", () => hover(1));
  addEventListener("dragleave", () => hover(-1));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    hover(0);
    take(event.dataTransfer.files);
  });
  addEventListener("paste", (event) => {
    event.preventDefault();
    take(event.clipboardData.files);
  });
}

function start() {
  for (const [file, left] of Object.entries(LEFT)) {
    try {
      left();
    } catch {
      failed(new Error(`${file} is missing; copy the whole folder`));
      return;
    }
  }
  ({ description } = Bundle.manifest);
  describe();
  listen();
  model = openModel();
  model.then(() => (document.body.dataset.state = "ready"), failed);
}

start();
