// Runs the model of an exported folder under node, with the folder's own files: node check.mjs FOLDER SCRATCH.
// Says {"ready": true} when it is loaded, then answers every line {"count", "channels", "height", "width"}: the images
// are in SCRATCH/images (numbers of single precision), those of all outputs go to SCRATCH/outputs one after the other,
// and their shapes are the answer. What goes wrong is answered by {"error": words}.

import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";
import { runInThisContext } from "node:vm";

const [folder, scratch] = process.argv.slice(2);
const say = (answer) => process.stdout.write(`${JSON.stringify(answer)}\n`);
const reason = (error) => ({ error: String(error?.message ?? error).split("\n")[0] });

function evaluate(file) {
  return runInThisContext(readFileSync(join(folder, file), "utf8"), { filename: file });
}

function address(bytes) {
  writeFileSync(join(scratch, "glue.mjs"), bytes);
  return pathToFileURL(join(scratch, "glue.mjs")).href;
}

async function open() {
  evaluate("model.js");
  evaluate("manifest.js");
  // A copy: beside a package.json that says "module" node would read the original as one.
  writeFileSync(join(scratch, "ort.cjs"), readFileSync(join(folder, "runtime/ort.wasm.min.js")));
  globalThis.ort = createRequire(import.meta.url)(join(scratch, "ort.cjs"));
  return runInThisContext("Model").open({ load: evaluate, address });
}

async function answer(model, { count, ...image }) {
  const numbers = new Float32Array(Uint8Array.from(readFileSync(join(scratch, "images"))).buffer);
  const found = await model.run(numbers, count, image);
  const outputs = runInThisContext("Bundle").manifest.description.outputs.map((name) => found[name]);
  const bytes = outputs.map(({ data }) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  writeFileSync(join(scratch, "outputs"), Buffer.concat(bytes));
  return { shapes: outputs.map(({ dims }) => dims) };
}

try {
  const model = await open();
  say({ ready: true });
  for await (const line of createInterface({ input: process.stdin })) {
    say(await answer(model, JSON.parse(line)).catch(reason));
  }
} catch (error) {
  say(reason(error));
}
process.exit(); // the runtime would keep node alive
