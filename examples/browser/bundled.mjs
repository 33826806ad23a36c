/** The page of the bundled model: onnxruntime-web runs model.onnx, whose tokens are bytes. */

import * as ort from "./ort.wasm.min.mjs";
import { Decoder, greedy } from "./decoder.mjs";
import { count, run } from "./page.mjs";

const END_OF_TEXT = 256; // of the bundled model, whose other ids are the bytes of UTF-8
const FLOAT_BYTES = 4;

run(async () => {
  const { num_hidden_layers, num_key_value_heads, head_dim } = await (await fetch("config.json")).json();
  const floats = 2 * num_hidden_layers * num_key_value_heads * head_dim * FLOAT_BYTES; // of a token
  // Threads need a page that is isolated from others.
  if (!crossOriginIsolated) ort.env.wasm.numThreads = 1;
  const externalData = [{ path: "model.onnx.data", data: "model.onnx.data" }];
  const session = await ort.InferenceSession.create("model.onnx", { externalData });
  const decoder = new Decoder(session, ort.Tensor);
  return async (prompt, most, show) => {
    decoder.reset();
    const bytes = [];
    const utf8 = new TextDecoder();
    const ids = [...new TextEncoder().encode(prompt)];
    for await (const token of greedy(decoder, ids, most, [END_OF_TEXT])) {
      bytes.push(token);
      const { length, cacheBytes } = decoder;
      await show(utf8.decode(new Uint8Array(bytes)), bytes.length, {
        "tokens in the cache": count(length),
        "bytes of the cache": count(cacheBytes),
        "the same in float32": `${count(floats * length)} (${(floats * length / cacheBytes).toFixed(2)} times)`,
      });
    }
  };
});
