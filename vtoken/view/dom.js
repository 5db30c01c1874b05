/** Making elements, and saying numbers. Text only ever becomes text: nothing here parses HTML. */

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Set a text, where it is another one. */
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function whole(number) {
  return WHOLE.format(number);
}

/** A share as "12.5 %"; null, which nothing has a share of, as a dash. */
function percent(share) {
  return share === null ? "–" : `${(100 * share).toFixed(1)} %`;
}

function count(number, one, many = `${one}s`) {
  return `${whole(number)} ${number === 1 ? one : many}`;
}

/** With as many decimals as tell times apart in so long a span. */
function seconds(time, span = time) {
  return `${time.toFixed(span < 1 ? 3 : span < 100 ? 1 : 0)} s`;
}

function clockTime(epoch) {
  return new Date(1000 * epoch).toLocaleTimeString("en-GB");
}
