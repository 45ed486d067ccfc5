// Shows the answer of GET /cluster, which is polled every two seconds while the page is visible.

import { AskError, request } from "./asking.js";
import { reason } from "./timing.js";

const EVERY_MS = 2000;
const KEPT = 60;
const SHOWN = 4; // values from which on a line is drawn
const TITLES = { Ingress: "Ingress", Encoder: "Encoders", LLM: "Language models" };
const CLOSED = "Closed: this server shows it to loopback only, or where ingress.auth.management_routes is open.";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });
const bytes = (number) => (number >= 1e9 ? `${(number / 1e9).toFixed(1)} GB` : `${(number / 1e6).toFixed(1)} MB`);
const plural = (number, what) => `${whole.format(number)} ${what}${number === 1 ? "" : "s"}`;

// Appends `value` and returns the last KEPT values.
function kept(history, value) {
  history.push(value);
  if (history.length > KEPT) history.shift();
  return history;
}

// A sparkline of the values on a scale that starts at 0. The current value is shown next to it as a number.
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

  // Starts polling, or restarts it after a key was entered.
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
  card.append(made("h3", `${TITLES[deployment.name] ?? deployment.name}: ${deployment.running} of ${deployment.target} running`));
  const target = made("p", undefined, "why");
  if (deployment.autoscaling) {
    target.append("Autoscaler target ", made("strong", String(deployment.target)), ` (${deployment.min_replicas} to ${deployment.max_replicas} allowed).`);
  } else {
    target.append(`No autoscaling: num_replicas is ${deployment.target}.`);
  }
  const load = totals(deployment.replicas);
  if (load) target.append(` ${load}.`);
  card.append(target);
  if (deployment.message) card.append(made("p", `${deployment.status}: ${deployment.message}`, "error"));
  const list = made("ul");
  list.append(...deployment.replicas.map(replicaRow));
  card.append(list);
  return card;
}

// Backlog and measured speed of all replicas.
function totals(replicas) {
  const reports = replicas.map((replica) => replica.report).filter(Boolean);
  const sum = (name) => reports.reduce((total, report) => total + (report[name] ?? 0), 0);
  if (reports.some((report) => "backlog_tokens" in report)) {
    return `Backlog ${whole.format(sum("backlog_tokens"))} visual tokens, ${whole.format(sum("arriving_tokens_per_s"))}/s arriving, ${whole.format(sum("tokens_per_s"))}/s measured`;
  }
  if (reports.some((report) => "engine_running_requests" in report)) {
    return `${plural(sum("engine_running_requests"), "request")} running, ${whole.format(sum("engine_waiting_requests"))} waiting`;
  }
  return "";
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
    const slow = report.fusion_fallback ? `Slow, no fused kernels: ${reason(report.fusion_fallback)} · ` : "";
    return `${slow}${whole.format(report.backlog_tokens)} tokens wait · ${speed} · ${plural(report.cached_images, "embedding")} cached, ${bytes(report.cache_bytes)}`;
  }
  if ("engine_running_requests" in report) {
    return `${plural(report.engine_running_requests, "request")} running, ${whole.format(report.engine_waiting_requests)} waiting · KV cache ${percent.format(report.kv_cache_use)}`;
  }
  return "";
}
