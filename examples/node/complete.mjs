/**
 * Goes on with a text by the bundled model, in Node:
 *
 *     npm install --ignore-scripts onnxruntime-node
 *     node complete.mjs model.onnx "Call me Ishmael." 80
 *
 * Prints JSON: the text, its tokens, seconds that the model took to open, tokens per second, and
 * bytes of the cache.
 */

import { createRequire } from "node:module";
import { join } from "node:path";

import { Decoder, greedy } from "../browser/decoder.mjs";

const END_OF_TEXT = 256; // of the bundled model, whose other ids are the bytes of UTF-8

const [path, prompt, count = "80"] = process.argv.slice(2);
if (prompt === undefined) {
  console.error("usage: node complete.mjs MODEL PROMPT [TOKENS]");
  process.exit(2);
}
// Packages are those of the folder that the script is run in.
const ort = createRequire(join(process.cwd(), "package.json"))("onnxruntime-node");

const begun = performance.now();
const session = await ort.InferenceSession.create(path);
const opened = performance.now();
const decoder = new Decoder(session, ort.Tensor);
const tokens = [];
let first = 0;
for await (const token of greedy(decoder, [...Buffer.from(prompt)], Number(count), [END_OF_TEXT])) {
  first ||= performance.now();
  tokens.push(token);
}
const seconds = (performance.now() - first) / 1000;
console.log(
  JSON.stringify({
    text: Buffer.from(tokens).toString(),
    tokens,
    seconds_to_open: (opened - begun) / 1000,
    tokens_per_second: (tokens.length - 1) / seconds,
    cache_bytes: decoder.cacheBytes,
  }),
);
