"use strict";
// The model, from scripts that lie beside the page. A page opened by double-click may load scripts and nothing else,
// so that the model and its runtime are packed into some: gzip, then base64, in parts.

const Bundle = {
  manifest: null, // set by manifest.js
  arrived: new Map(),
  part(file, text) {
    this.arrived.set(file, text);
  },
};

const Model = (() => {
  function bytesOf(text) {
    const letters = atob(text);
    const bytes = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
    return bytes;
  }

  function unzipped(bytes) {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).arrayBuffer();
  }

  // All parts of one file, in order -> its bytes.
  async function unpack(name, load, arrived) {
    const { parts, bytes } = Bundle.manifest.packed[name];
    const whole = new Uint8Array(bytes);
    let at = 0;
    for (const file of parts) {
      await load(file);
      const text = Bundle.arrived.get(file);
      if (text === undefined) throw new Error(`${file} is damaged; copy the whole folder again`);
      Bundle.arrived.delete(file); // or the text would stay in memory beside the bytes
      const part = new Uint8Array(await unzipped(bytesOf(text)));
      if (at + part.length > bytes) throw new Error(`${file} belongs to another page; copy the whole folder again`);
      whole.set(part, at);
      at += part.length;
      await arrived(part.length);
    }
    if (at !== bytes) throw new Error(`${name} is ${at} bytes long instead of ${bytes}; copy the whole folder again`);
    return whole;
  }

  // load(file) runs a script of the folder; address(bytes) gives a place that a module can be imported from;
  // progress(part) is told how much of the loading is done, from 0 to 1, and waited for.
  async function open({ load, address, progress = () => {} }) {
    const { packed, description } = Bundle.manifest;
    const total = Object.values(packed).reduce((sum, { bytes }) => sum + bytes, 0);
    let done = 0;
    const arrived = (bytes) => progress((done += bytes) / total);
    const glue = await unpack("glue", load, arrived);
    const wasm = await unpack("wasm", load, arrived);
    const model = await unpack("model", load, arrived);
    ort.env.logLevel = "error";
    ort.env.wasm.numThreads = 1; // more would need headers that a plain host of files does not send
    ort.env.wasm.wasmPaths = { mjs: await address(glue) };
    ort.env.wasm.wasmBinary = wasm.buffer;
    const session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"] });
    ort.env.wasm.wasmBinary = undefined; // the runtime has compiled it

    // Numbers of `count` images (count, channels, height, width) -> an array of numbers for each output, by its name,
    // with its dims.
    async function run(numbers, count, { channels, height, width } = description.image) {
      const images = new ort.Tensor("float32", numbers, [count, channels, height, width]);
      const found = await session.run({ images }, description.outputs);
      images.dispose();
      return found;
    }
    return { run };
  }

  // Logits -> [place, probability] of the `most` likely classes; of equals the first one leads.
  function top(logits, most) {
    if (!logits.every(Number.isFinite)) throw new Error("The model answers with numbers that are not finite.");
    const largest = logits.reduce((a, b) => Math.max(a, b));
    const powers = Array.from(logits, (logit) => Math.exp(logit - largest));
    const sum = powers.reduce((a, b) => a + b);
    return powers
      .map((power, place) => [place, power / sum])
      .sort((a, b) => logits[b[0]] - logits[a[0]])
      .slice(0, most);
  }

  return { open, top };
})();
