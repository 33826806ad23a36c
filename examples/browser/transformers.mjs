/**
 * The page of any model with a tokenizer: transformers.js runs the folder models/NAME of Hugging
 * Face's form, where NAME is ?model=NAME in the address. Nothing is loaded from elsewhere.
 */

import { AutoModelForCausalLM, AutoTokenizer, TextStreamer, env } from "./transformers.min.js";
import { count, query, run } from "./page.mjs";

env.allowRemoteModels = false;
env.allowLocalModels = true;
env.localModelPath = "models/";
env.useBrowserCache = false; // it would keep models that were converted again
env.backends.onnx.wasm.wasmPaths = new URL(".", location).href;
env.backends.onnx.wasm.proxy = true; // a worker computes, so that the page can show tokens

const name = query.get("model") ?? "model";
const folder = `${env.localModelPath}${name}`;

run(async () => {
  const isThere = (await fetch(`${folder}/config.json`)).ok;
  if (!isThere) throw new Error(`there is no ${folder}/config.json; name another folder by ?model=`);
  const tokenizer = await AutoTokenizer.from_pretrained(name);
  // transformers.js reads a template only in tokenizer_config.json; newer exports have it in a file.
  const template = tokenizer.chat_template ? null : await fetch(`${folder}/chat_template.jinja`);
  if (template?.ok) tokenizer.chat_template = await template.text();
  const model = await AutoModelForCausalLM.from_pretrained(name, { dtype: "fp32", device: "wasm" });
  return async (prompt, most, show) => {
    const messages = [{ role: "user", content: prompt }];
    const inputs = tokenizer.chat_template
      ? tokenizer.apply_chat_template(messages, { add_generation_prompt: true, return_dict: true })
      : tokenizer(prompt);
    const tokens = [];
    const gap = tokenizer.chat_template ? "\n" : "";
    const text = () => gap + tokenizer.decode(tokens, { skip_special_tokens: true });
    const streamer = new TextStreamer(tokenizer, {
      skip_prompt: true,
      callback_function: () => {},
      token_callback_function: ([token]) => {
        tokens.push(token);
        show(text(), tokens.length);
      },
    });
    const { past_key_values: caches } = await model.generate({
      ...inputs,
      max_new_tokens: most,
      do_sample: false,
      return_dict_in_generate: true,
      streamer,
    });
    const bytes = Object.values(caches).reduce((sum, { data }) => sum + data.byteLength, 0);
    await show(text(), tokens.length, {
      "tokens in the cache": count(caches.get_seq_length()),
      "bytes of the cache": count(bytes),
    });
  };
});
