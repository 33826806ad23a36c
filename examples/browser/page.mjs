/** What both pages do: open a model, let it write, and show the text and what it took. */

const TOKENS = 120;

const element = (id) => document.getElementById(id);

/** What is behind the ? in the address. */
export const query = new URLSearchParams(location.search);

export const count = (number) => number.toLocaleString("en");

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

/** Lets the model write, and shows text and figures as they come. */
async function answer(write, opened) {
  const prompt = element("prompt").value || " ";
  const bold = document.createElement("b");
  const made = document.createTextNode("");
  bold.textContent = prompt;
  element("text").replaceChildren(bold, made);
  element("go").disabled = true;
  element("state").textContent = "Reading ...";
  let first = 0;
  await write(prompt, Number(query.get("tokens") ?? TOKENS), (text, tokens, figures) => {
    const now = performance.now();
    first ||= now;
    made.textContent = text;
    show({
      "model opened in": `${(opened / 1000).toFixed(2)} s`,
      "tokens per second": tokens > 1 ? ((tokens - 1) / ((now - first) / 1000)).toFixed(1) : "",
      ...figures,
    });
    return new Promise((painted) => setTimeout(painted));
  });
  element("state").textContent = "Done.";
  element("go").disabled = false;
}

/**
 * Runs the page.
 *
 * @param open opens the model. It returns a function of a prompt, the most tokens to write, and a
 *     function that shows the text, the number of its tokens, and rows of further figures.
 */
export async function run(open) {
  const fail = (error) => (element("state").textContent = `Failed: ${error.message ?? error}`);
  try {
    const begun = performance.now();
    const write = await open();
    const opened = performance.now() - begun;
    element("state").textContent = "Ready.";
    element("go").disabled = false;
    document.forms[0].addEventListener("submit", (event) => {
      event.preventDefault();
      answer(write, opened).catch(fail);
    });
    if (query.has("prompt")) {
      element("prompt").value = query.get("prompt");
      await answer(write, opened);
    }
  } catch (error) {
    fail(error);
  }
}
