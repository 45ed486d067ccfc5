// Stages of a request's time: the server's Server-Timing header, and the times that the page measures.

const STAGES = [
  ["page", "Around it", "browser, network, proxy, and what no stage counts"],
  ["fetch", "Fetch", "reading and measuring the files"],
  ["admission", "Admission", "waiting for its turn"],
  ["preprocess", "Preprocess", "decoding and resizing"],
  ["queue", "Queue", "waiting for the encoder"],
  ["encode", "Encode", "the vision tower"],
  ["transfer", "Transfer", "the embeddings' way to the language model"],
  ["first-token", "First token", "prefill, up to the first token"],
  ["decode", "Decode", "the rest of the answer, as it came here"],
];

// Parses `fetch;dur=1.5, image-1;desc="tokens=4 cached"` to a Map from name to {dur, desc}.
export function parsed(header) {
  const found = new Map();
  for (const [, name, parameters] of header.matchAll(/([\w-]+)((?:;\w+=(?:"[^"]*"|[^,;]*))*)(?:,\s*|$)/g)) {
    const values = {};
    for (const [, key, quoted, bare] of parameters.matchAll(/;(\w+)=(?:"([^"]*)"|([^,;]*))/g)) values[key] = quoted ?? bare;
    found.set(name, { dur: Number.parseFloat(values.dur), desc: values.desc ?? "" });
  }
  return found;
}

// Returns the milliseconds of each stage. `headMs`: from the request to the answer's head; `totalMs`: to its end or now.
export function durations(metrics, headMs, totalMs) {
  const times = new Map(STAGES.map(([name]) => [name, metrics.get(name)?.dur || 0]));
  const told = [...times.values()].reduce((sum, ms) => sum + ms, 0);
  times.set("page", Math.max(0, (headMs ?? totalMs) - told));
  times.set("decode", headMs === null ? 0 : Math.max(0, totalMs - headMs));
  return times;
}

const shown = (ms) => (ms >= 99.95 ? ms.toFixed(0) : ms.toFixed(1));

export class TimeBar {
  constructor(bar, rows, total) {
    this.total = total;
    this.parts = STAGES.map(([name, label, note]) => {
      const part = bar.appendChild(document.createElement("span"));
      part.className = name;
      const row = rows.appendChild(document.createElement("tr"));
      const head = row.appendChild(document.createElement("th"));
      head.scope = "row";
      const swatch = head.appendChild(document.createElement("span"));
      swatch.className = `swatch ${name}`;
      head.append(label);
      const ms = row.appendChild(document.createElement("td"));
      ms.className = "number";
      ms.textContent = "–";
      row.dataset.stage = name;
      row.appendChild(document.createElement("td")).textContent = note;
      return { name, part, row, ms };
    });
  }

  clear() {
    this.total.textContent = "–";
    for (const { part, row, ms } of this.parts) {
      part.style.flexGrow = "0";
      ms.textContent = "–";
      row.classList.remove("zero");
    }
  }

  show(times) {
    let sum = 0;
    for (const { name, part, row, ms } of this.parts) {
      const value = times.get(name) ?? 0;
      sum += value;
      part.style.flexGrow = String(value);
      ms.textContent = shown(value);
      row.classList.toggle("zero", value < 0.05);
    }
    this.total.textContent = `${shown(sum)} ms`;
  }
}

// Parses `tokens=140 replica=x8 graph=512 batch=420/3 cached` to {tokens, frames, replica, graph, eager, batch, cached}.
export function imageFacts(desc) {
  return Object.fromEntries(desc.split(" ").filter(Boolean).map((part) => {
    const [name, value] = part.split(/=(.*)/s);
    return [name, value ?? true];
  }));
}

// Why a batch ran without a CUDA graph.
const REASONS = {
  cpu_device: "no GPU",
  over_largest_budget: "over the largest budget",
  not_captured_yet: "graph not captured yet",
  cheaper_eagerly: "measured faster so",
  graphs_off: "graphs are switched off",
  memory_bound: "no memory for its graph",
};

export const reason = (name) => REASONS[name] ?? name.replaceAll("_", " ");

export function ranAs(facts) {
  const [tokens, images] = String(facts.batch ?? "").split("/");
  const batch = images > 1 ? `, batch of ${images}` : "";
  if (facts.graph) return `graph, budget ${facts.graph} (${Math.round((100 * tokens) / facts.graph)} % used)${batch}`;
  if (facts.eager) return `eager: ${reason(facts.eager)}${batch}`;
  return "not told";
}

// Returns the metrics of each distinct file, in the order of the request: a video has one for each chunk of its frames.
function metricsOf(files, metrics) {
  const told = [];  // by number, with holes for items that were not encoded
  for (const [name, { desc }] of metrics) {
    const number = /^(?:image|audio|video)-(\d+)$/.exec(name)?.[1];
    if (number) told[number - 1] = imageFacts(desc);
  }
  return new Map([...new Set(files.map(({ data }) => data))].map((data) => {
    const parts = told.splice(0, 1);
    const next = () => told.find(Boolean)?.frames;
    while (data.startsWith("data:video/") && next() && !next().startsWith("1-")) parts.push(told.shift());
    return [data, parts.filter(Boolean)];
  }));
}

// One row per file or chunk of a video's frames. Files with equal bytes are one item to the server.
export function showItems(rows, files, metrics) {
  const found = metricsOf(files, metrics);
  rows.replaceChildren(...files.flatMap(({ name, data }, place) => {
    const parts = found.get(data);
    return (parts.length ? parts : [null]).map((facts) => {
      const frames = facts?.frames ? `, frames ${facts.frames.replace("-", "–")}` : "";
      return rowOf(`${place + 1}. ${name}${frames}`, facts);
    });
  }));
}

function rowOf(title, facts) {
  const row = document.createElement("tr");
  const head = row.appendChild(document.createElement("th"));
  head.scope = "row";
  head.textContent = title;
  row.appendChild(document.createElement("td")).textContent = facts?.tokens ?? "–";
  row.lastChild.className = "number";
  row.appendChild(document.createElement("td")).appendChild(document.createElement("code")).textContent = facts?.replica ?? "–";
  row.appendChild(document.createElement("td")).textContent = facts ? ranAs(facts) : "not told";
  const tag = row.appendChild(document.createElement("td")).appendChild(document.createElement("span"));
  tag.className = facts?.cached ? "tag hit" : "tag miss";
  tag.textContent = !facts ? "not told" : facts.cached ? "hit" : "miss";
  return row;
}
