// Entry point of the page: connects its forms to requests and views.

import { AskError, ask, chatBody, firstModel, key, setKey } from "./asking.js";
import { ClusterView } from "./cluster.js";
import { drawnPicture } from "./drawing.js";
import { Files, dataUrl } from "./files.js";
import { TimeBar, durations, parsed, showItems } from "./timing.js";

const part = (id) => document.getElementById(id);
const answer = part("answer");
const question = part("question");
const drop = part("drop");

const say = (text) => { part("status").textContent = text; };
const files = new Files(part("pictures"), (number) => say(number ? `${number} file${number === 1 ? "" : "s"} to ask about.` : "No files."));
const bar = new TimeBar(part("bar"), part("stages"), part("total"));
const cluster = new ClusterView({ state: part("cluster-state"), figures: part("figures"), deployments: part("deployments") });

let model = null;
let running = null;

function showError(error) {
  const wait = error.retryAfter ? ` Ask again in ${error.retryAfter} s.` : "";
  part("error").textContent = (error instanceof AskError ? error.message : `The page failed: ${error.message}`) + wait;
  part("error").hidden = false;
  if (error.status === 401) {
    part("key-box").open = true;
    part("key").focus();
  }
}

async function findModel() {
  try {
    model = await firstModel();
    part("model").textContent = model;
    part("error").hidden = true;
  } catch (error) {
    part("model").textContent = "not known yet";
    showError(error);
  }
}

// --- files --------------------------------------------------------------------------------------------------------

function addFiles(chosen) {
  if (chosen.length && !files.add(chosen)) say("That is no picture, video or sound.");
}

part("choose").addEventListener("click", () => part("files").click());
part("files").addEventListener("change", (event) => {
  addFiles(event.target.files);
  event.target.value = "";
});
let drawn = 0;
part("draw").addEventListener("click", async () => addFiles([await drawnPicture((drawn += 1))]));
document.addEventListener("paste", (event) => {
  if (event.clipboardData?.files.length) {
    event.preventDefault();
    addFiles(event.clipboardData.files);
  }
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  drop.classList.add("over");
});
for (const end of ["dragleave", "dragend"]) document.addEventListener(end, () => drop.classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  addFiles(event.dataTransfer?.files ?? []);
});

// --- the question -------------------------------------------------------------------------------------------------

question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    part("form").requestSubmit();
  }
});
part("stop").addEventListener("click", () => running?.abort());
part("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) askNow();
});

function busy(is) {
  answer.setAttribute("aria-busy", String(is));
  part("stop").hidden = !is;
  part("ask").disabled = is;
}

async function askNow() {
  running = new AbortController();
  busy(true);
  answer.replaceChildren();
  part("error").hidden = true;
  part("images-table").hidden = true;
  part("images-none").hidden = false;
  bar.clear();
  say("Asking …");
  let metrics = new Map();
  let started = null;
  let headMs = null;
  let frame = 0;
  const now = () => performance.now() - started;
  const tick = () => {
    bar.show(durations(metrics, headMs, now()));
    frame = requestAnimationFrame(tick);
  };
  try {
    if (model === null) await findModel();
    if (model === null) return say("Not answered.");
    const asked = await Promise.all(files.items.map(async ({ name, kind, file }) => ({ name, kind, data: await dataUrl(file) })));
    started = performance.now();
    tick();
    const told = await ask(chatBody(model, question.value, asked), {
      signal: running.signal,
      head: (header) => {
        headMs = now();
        metrics = parsed(header);
        showItems(part("images"), asked, metrics);
        part("images-table").hidden = part("images-none").hidden = asked.length > 0;
        part("images-table").hidden = asked.length === 0;
      },
      piece: (text) => answer.append(text),
    });
    bar.show(durations(metrics, headMs, now()));
    const long = told.finish === "length" ? " It was cut at the longest answer allowed." : "";
    say(`Answered${told.tokens === null ? "" : ` with ${told.tokens} tokens`} in ${(now() / 1000).toFixed(2)} s.${long}`);
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped." : "Not answered.");
    if (error.name !== "AbortError") showError(error);
  } finally {
    cancelAnimationFrame(frame);
    running = null;
    busy(false);
  }
}

// --- the key ------------------------------------------------------------------------------------------------------

part("key").value = key();
part("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey(part("key").value.trim());
  await findModel();
  if (model !== null) {
    part("key-box").open = false;
    question.focus();
  }
  cluster.start();
});

findModel();
cluster.start();
