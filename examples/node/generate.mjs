/**
 * Answers a prompt by any model with a tokenizer, with transformers.js in Node; without a chat
 * template it goes on with the prompt:
 *
 *     npm install --ignore-scripts @huggingface/transformers
 *     node generate.mjs models/my-model "Call me Ishmael." 80
 *
 * The folder is one of Hugging Face: configuration, tokenizer and chat template, and
 * onnx/model.onnx. Nothing is loaded from elsewhere. Prints JSON: the text and its tokens.
 */

import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, dirname, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, prompt, count = "80"] = process.argv.slice(2);
if (prompt === undefined) {
  console.error("usage: node generate.mjs FOLDER PROMPT [TOKENS]");
  process.exit(2);
}
// Packages are those of the folder that the script is run in.
const { resolve: find } = createRequire(join(process.cwd(), "package.json"));
const { AutoModelForCausalLM, AutoTokenizer, env } = (
  await import(pathToFileURL(find("@huggingface/transformers")))
);

env.allowRemoteModels = false;
env.localModelPath = dirname(resolve(folder));
const name = basename(resolve(folder));
const tokenizer = await AutoTokenizer.from_pretrained(name);
// transformers.js reads a template only in tokenizer_config.json; newer exports have it in a file.
const template = join(folder, "chat_template.jinja");
if (existsSync(template)) tokenizer.chat_template ??= readFileSync(template, "utf8");
const model = await AutoModelForCausalLM.from_pretrained(name, { dtype: "fp32" });
const messages = [{ role: "user", content: prompt }];
const inputs = tokenizer.chat_template
  ? tokenizer.apply_chat_template(messages, { add_generation_prompt: true, return_dict: true })
  : tokenizer(prompt);
const output = await model.generate({ ...inputs, max_new_tokens: Number(count), do_sample: false });
const tokens = output.tolist()[0].slice(inputs.input_ids.dims[1]).map(Number);
const text = tokenizer.decode(tokens, { skip_special_tokens: true });
console.log(JSON.stringify({ text, tokens }));
