/**
 * A decoder with key/value caches on onnxruntime's JavaScript interface, in Node or a browser.
 *
 * It reads names, element types and sizes off the session, so that an original with caches of
 * floats and a converted one with caches of bytes are driven by the same lines.
 */

const PAST = "past_key_values.";
const PRESENT = "present.";
const ARRAYS = { float32: Float32Array, float16: Uint16Array, uint8: Uint8Array };

export class Decoder {
  /**
   * @param session an InferenceSession of onnxruntime-node or onnxruntime-web.
   * @param Tensor the class of the same package.
   * @param headSize of caches whose size is not in the graph, as onnxruntime-genai writes them.
   */
  constructor(session, Tensor, headSize = 0) {
    this.session = session;
    this.Tensor = Tensor;
    this.caches = session.inputMetadata.filter(({ name }) => name.startsWith(PAST));
    this.headSize = headSize;
    this.inputs = new Set(session.inputNames);
    this.reset();
  }

  /** Forgets all tokens. */
  reset() {
    this.length = 0;
    this.past = {};
    for (const { name, type, shape } of this.caches) {
      const [, heads, rows, last] = shape;
      const width = typeof last === "number" ? last : this.headSize;
      // A cache with an exact window has so many rows in front of those of its tokens.
      const first = Number(/\+ (\d+)$/.exec(rows)?.[1] ?? 0);
      const empty = new ARRAYS[type](heads * first * width);
      this.past[name] = new this.Tensor(type, empty, [1, heads, first, width]);
    }
  }

  /** Bytes of all caches. */
  get cacheBytes() {
    return Object.values(this.past).reduce((sum, cache) => sum + cache.data.byteLength, 0);
  }

  /**
   * Feeds tokens.
   *
   * @param tokens ids, at least one.
   * @returns the logits after the last one.
   */
  async feed(tokens) {
    const total = this.length + tokens.length;
    const positions = tokens.map((_, index) => this.length + index);
    const feeds = { ...this.past, input_ids: this.#integers(tokens) };
    if (this.inputs.has("attention_mask")) feeds.attention_mask = this.#integers(Array(total).fill(1));
    if (this.inputs.has("position_ids")) feeds.position_ids = this.#integers(positions);
    const results = await this.session.run(feeds);
    for (const { name } of this.caches) {
      this.past[name] = results[name.replace(PAST, PRESENT)];
    }
    this.length = total;
    const { data, dims } = results.logits;
    return data.slice(data.length - dims.at(-1));
  }

  #integers(numbers) {
    return new this.Tensor("int64", BigInt64Array.from(numbers, BigInt), [1, numbers.length]);
  }
}

/** The place of the largest number. */
export function largest(numbers) {
  let best = 0;
  numbers.forEach((number, index) => {
    if (number > numbers[best]) best = index;
  });
  return best;
}

/**
 * Yields the tokens that a decoder goes on with, the most likely one each time.
 *
 * @param decoder a Decoder.
 * @param prompt ids of the prompt.
 * @param count how many tokens at most.
 * @param stops ids that end the text.
 */
export async function* greedy(decoder, prompt, count, stops = []) {
  let tokens = prompt;
  for (let made = 0; made < count; made++) {
    const token = largest(await decoder.feed(tokens));
    if (stops.includes(token)) return;
    yield token;
    tokens = [token];
  }
}
