/**
 * Times models in a JavaScript runtime, for javascript.py. Prints one JSON document.
 *
 * Arguments: the folder of the npm packages, the runtime (node or web), the size of a head, and a
 * JSON list of contexts, steps to time and models. Models take turns at every step, and when they are
 * opened, so that what else the machine does meets all of them.
 */

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname, join } from "node:path";

import { Decoder, largest } from "../examples/browser/decoder.mjs";

const PIECE = 256; // tokens of a call that fills caches
const UNTIMED = 2;
const OPENINGS = 3;
const FIRST_ID = 32;
const IDS = 90;

const [packages, runtime, given] = process.argv.slice(2);
const { contexts, steps, headSize, models } = JSON.parse(given);
const ort = createRequire(join(packages, "package.json"))(`onnxruntime-${runtime}`);
if (runtime === "web") ort.env.wasm.numThreads = 1;

/** Opens a model; WebAssembly reads no files, so it is given their bytes. */
async function open(path) {
  if (runtime === "node") return ort.InferenceSession.create(path, { intraOpNumThreads: 1 });
  const data = `${basename(path)}.data`;
  const externalData = [];
  for (const name of ["model.onnx.data", data]) {
    try {
      externalData.push({ path: name, data: readFileSync(join(dirname(path), name)) });
    } catch {
      // The weights are in the other one, or in the model.
    }
  }
  return ort.InferenceSession.create(readFileSync(path), { externalData });
}

const median = (numbers) => numbers.toSorted((a, b) => a - b)[numbers.length >> 1];

const opened = models.map(() => []);
const decoders = [];
for (let round = 1; round <= OPENINGS; round++) {
  for (const [index, path] of models.entries()) {
    const begun = performance.now();
    const session = await open(path);
    opened[index].push((performance.now() - begun) / 1000);
    if (round < OPENINGS) await session.release();
    else decoders.push(new Decoder(session, ort.Tensor, headSize));
  }
}
const decode = [];
for (const context of contexts) {
  const ids = Array.from({ length: context }, (_, index) => FIRST_ID + ((index * 7919) % IDS));
  const times = models.map(() => []);
  const tokens = models.map(() => []);
  for (const decoder of decoders) {
    decoder.reset();
    for (let at = 0; at < context; at += PIECE) await decoder.feed(ids.slice(at, at + PIECE));
  }
  for (let step = 0; step < steps + UNTIMED; step++) {
    for (const [index, decoder] of decoders.entries()) {
      const begun = performance.now();
      const logits = await decoder.feed([tokens[index].at(-1) ?? FIRST_ID]);
      if (step >= UNTIMED) times[index].push(performance.now() - begun);
      tokens[index].push(largest(logits));
    }
  }
  const ratios = times.map((own) => median(own.map((ms, step) => times[0][step] / ms)));
  decode.push({
    context,
    ms: times.map(median),
    times_original: ratios,
    cache_bytes: decoders.map((decoder) => decoder.cacheBytes),
    tokens,
  });
}
console.log(JSON.stringify({ opened: opened.map(median), decode }));
