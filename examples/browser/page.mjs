/** The page: loads the model, goes on with a prompt, and tells what it took. */

import * as ort from "./ort.wasm.min.mjs";
import { Decoder, greedy } from "./decoder.mjs";

const TOKENS = 120;
const END_OF_TEXT = 256; // of the bundled model, whose other ids are the bytes of UTF-8
const FLOAT_BYTES = 4;

const element = (id) => document.getElementById(id);
const query = new URLSearchParams(location.search);

/** Opens model.onnx with its data file; threads need a page that is isolated from others. */
async function open() {
  if (!crossOriginIsolated) ort.env.wasm.numThreads = 1;
  const begun = performance.now();
  const externalData = [{ path: "model.onnx.data", data: "model.onnx.data" }];
  const session = await ort.InferenceSession.create("model.onnx", { externalData });
  return [new Decoder(session, ort.Tensor), performance.now() - begun];
}

/** Writes rows of two columns. */
function show(figures) {
  element("figures").replaceChildren(
    ...Object.entries(figures).map(([name, figure]) => {
      const row = document.createElement("tr");
      row.append(...[name, figure].map((text) => {
        const cell = document.createElement("td");
        cell.textContent = text;
        return cell;
      }));
      return row;
    }),
  );
}

/** Bytes of the caches if they held floats. */
function floatBytes({ num_hidden_layers, num_key_value_heads, head_dim }, tokens) {
  return 2 * num_hidden_layers * num_key_value_heads * head_dim * FLOAT_BYTES * tokens;
}

const count = (number) => number.toLocaleString("en");

/** Goes on with the prompt and shows text and figures as they come. */
async function complete(decoder, config, opened) {
  const prompt = element("prompt").value || " ";
  const bold = document.createElement("b");
  const made = document.createTextNode("");
  bold.textContent = prompt;
  element("text").replaceChildren(bold, made);
  element("go").disabled = true;
  element("state").textContent = "Reading ...";
  decoder.reset();
  const bytes = [];
  const utf8 = new TextDecoder();
  const ids = [...new TextEncoder().encode(prompt)];
  const tokens = Number(query.get("tokens") ?? TOKENS);
  let first = 0;
  for await (const token of greedy(decoder, ids, tokens, [END_OF_TEXT])) {
    const now = performance.now();
    first ||= now;
    bytes.push(token);
    made.textContent = utf8.decode(new Uint8Array(bytes));
    const floats = floatBytes(config, decoder.length);
    show({
      "model opened in": `${(opened / 1000).toFixed(2)} s`,
      "tokens per second": bytes.length > 1 ? ((bytes.length - 1) / ((now - first) / 1000)).toFixed(1) : "",
      "tokens in the cache": count(decoder.length),
      "bytes of the cache": count(decoder.cacheBytes),
      "the same in float32": `${count(floats)} (${(floats / decoder.cacheBytes).toFixed(2)} times)`,
    });
    await new Promise((painted) => setTimeout(painted));
  }
  element("state").textContent = "Done.";
  element("go").disabled = false;
}

try {
  const config = await (await fetch("config.json")).json();
  const [decoder, opened] = await open();
  element("state").textContent = "Ready.";
  element("go").disabled = false;
  document.forms[0].addEventListener("submit", (event) => {
    event.preventDefault();
    complete(decoder, config, opened);
  });
  if (query.has("prompt")) {
    element("prompt").value = query.get("prompt");
    await complete(decoder, config, opened);
  }
} catch (error) {
  element("state").textContent = `Failed: ${error.message ?? error}`;
}
