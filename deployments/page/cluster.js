// The cluster as GET /cluster tells it, asked for every two seconds while the page is seen.

import { AskError, request } from "./asking.js";
import { reason } from "./timing.js";

const EVERY_MS = 2000;
const KEPT = 60;
const SHOWN = 4; // values that make a line
const TITLES = { Ingress: "Ingress", Encoder: "Encoders", LLM: "Language models" };
const POLICIES = { requests: "By requests", VisualWork: "By visual work", EngineWork: "By the engines' work", Proportion: "In proportion" };
const CLOSED = "Closed: this server shows it to loopback only, or where ingress.door.management_routes is open.";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });
const bytes = (number) => (number >= 1e9 ? `${(number / 1e9).toFixed(1)} GB` : `${(number / 1e6).toFixed(1)} MB`);
const plural = (number, what) => `${whole.format(number)} ${what}${number === 1 ? "" : "s"}`;

// The values seen last, this one among them.
function kept(history, value) {
  history.push(value);
  if (history.length > KEPT) history.shift();
  return history;
}

// A line through the values, from 0 up; what it shows stands beside it as a number.
function line(values) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${values.length - 1} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const drawn = svg.appendChild(document.createElementNS(space, "polyline"));
  const most = Math.max(1, ...values);
  drawn.setAttribute("points", values.map((value, place) => `${place},${20 - (19 * value) / most}`).join(" "));
  return svg;
}

function made(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

export class ClusterView {
  #timer = null;
  #asking = false;
  #history = { tokens: [], requests: [] };

  constructor({ state, figures, deployments }) {
    this.state = state;
    this.figures = figures;
    this.deployments = deployments;
    document.addEventListener("visibilitychange", () => this.start());
  }

  // Now, and again from time to time; also after a key was given.
  start() {
    clearTimeout(this.#timer);
    if (document.visibilityState === "visible" && !this.#asking) this.#ask();
  }

  async #ask() {
    this.#asking = true;
    let again = true;
    try {
      this.#show(await (await request("cluster")).json());
      this.state.textContent = "live";
      this.state.classList.add("live");
    } catch (error) {
      this.state.classList.remove("live");
      again = ![401, 404].includes(error.status);
      this.state.textContent = error.status === 404 ? CLOSED : error.status === 401 ? "Wants an API key." : told(error);
      if (!again) { this.figures.replaceChildren(); this.deployments.replaceChildren(); }
    }
    this.#asking = false;
    if (again) this.#timer = setTimeout(() => this.start(), EVERY_MS);
  }

  #show({ deployments, queue, packing }) {
    const waiting = queue.line_tokens + queue.in_flight_tokens;
    const eager = Object.entries(packing.eager_runs);
    const eagerRuns = eager.reduce((sum, [, runs]) => sum + runs, 0);
    const why = eager.map(([name, runs]) => `${whole.format(runs)} eager: ${reason(name)}`);
    const padding = packing.replays ? `${whole.format(packing.padding_tokens)} tokens of padding` : "nothing padded: no graph has run";
    const figures = [
      ["Queue, visual tokens", whole.format(waiting), `${whole.format(queue.line_tokens)} in line here, ${whole.format(queue.encoder_tokens)} at encoders`, kept(this.#history.tokens, waiting)],
      ["Requests on their way", whole.format(queue.unaccepted_requests), "not yet at a language model", kept(this.#history.requests, queue.unaccepted_requests)],
      ["Packing efficiency", packing.efficiency === null ? "–" : percent.format(packing.efficiency), `${whole.format(packing.encoded_tokens)} tokens encoded, ${padding}`],
      ["Batches", whole.format(packing.replays + eagerRuns), [plural(packing.replays, "graph replay"), ...why].join(", ")],
    ];
    this.figures.replaceChildren(...figures.map(([name, value, note, history]) => {
      const box = made("div");
      const number = made("dd", value);
      number.append(made("small", note));
      if (history?.length >= SHOWN) number.append(line(history));
      box.append(made("dt", name), number);
      return box;
    }));
    this.deployments.replaceChildren(...deployments.map(deploymentCard));
  }
}

const told = (error) => (error instanceof AskError ? error.message : "The answer could not be read.");

function deploymentCard(deployment) {
  const card = made("article");
  card.dataset.deployment = deployment.name;
  card.append(made("h3", `${TITLES[deployment.name] ?? deployment.name}: ${deployment.running} of ${deployment.asked_for} running`));
  const why = made("p", undefined, "why");
  if (deployment.policy === "fixed") {
    why.append(`No autoscaling: ${deployment.why}.`);
  } else {
    why.append("The autoscaler wants ", made("strong", String(deployment.asked_for)), deployment.least === deployment.most ? " (no other number is allowed)" : ` (${deployment.least} to ${deployment.most} allowed)`);
    if (deployment.needed !== null) why.append("; this moment alone asks for ", made("strong", String(deployment.needed)));
    why.append(`. ${POLICIES[deployment.policy] ?? deployment.policy}: ${deployment.why}.`);
  }
  card.append(why);
  if (deployment.message) card.append(made("p", `${deployment.status}: ${deployment.message}`, "error"));
  const list = made("ul");
  list.append(...deployment.replicas.map(replicaRow));
  card.append(list);
  return card;
}

function replicaRow(replica) {
  const row = made("li");
  row.append(made("span", undefined, `dot${replica.state === "RUNNING" ? " running" : ""}`), made("code", replica.name));
  row.append(` ${replica.state.toLowerCase()}${replica.node ? ` on node ${replica.node}` : ""}`);
  const facts = reported(replica.report);
  if (facts) row.append(made("br"), made("span", facts, "quiet"));
  return row;
}

function reported(report) {
  if (!report) return "";
  if ("backlog_tokens" in report) {
    const speed = report.tokens_per_s ? `${whole.format(report.tokens_per_s)} tokens/s` : "no speed measured yet";
    return `${whole.format(report.backlog_tokens)} tokens wait · ${speed} · ${plural(report.cached_images, "embedding")} cached, ${bytes(report.cache_bytes)}`;
  }
  if ("engine_running_requests" in report) {
    return `${plural(report.engine_running_requests, "request")} running, ${whole.format(report.engine_waiting_requests)} waiting · KV cache ${percent.format(report.kv_cache_use)}`;
  }
  return "";
}
