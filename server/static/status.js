// The page: each document that comes is shown, in place.
"use strict";

const byId = (id) => document.getElementById(id);
// Hidden for so long, a page lets go of its stream.
const HIDDEN_MS = 5000;
const MAX_STEPS = 60;
// So old a look at the engine is worth a word.
const OLD_LOOK_S = 3;

/** Shows documents. */
class Board {
  constructor() {
    this._colours = new ColourBook();
    this._grid = new BlockGrid(byId("blocks"));
    this._pinnedId = null;
    this._document = null;
    const pick = (id) => this._pin(id);
    this._running = new RowSet(
      byId("running-rows"), ["key", "num", "num prompt", "num", "num less", "num less", "why"], pick,
    );
    this._waiting = new RowSet(byId("waiting-rows"), ["key", "num", "num prompt", "num", "num less", "why"], pick);
    byId("blocks").addEventListener("mousemove", (event) => this._point(this._grid.find(event)));
    byId("blocks").addEventListener("mouseleave", () => this._point(null));
    addEventListener("resize", () => this.redraw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  /** @param {Object} data As server/status/document.py builds it. */
  show(data) {
    this._document = data;
    document.body.classList.remove("empty");
    this._showServer(data);
    this._showFigures(data);
    this._showSteps(data.steps);
    if (data.engine) this._showEngine(data);
    fillErrors(byId("error-rows"), data.errors);
    byId("errors-none").hidden = data.errors.length > 0;
  }

  /** Draw again what there is, for another size or other colours. */
  redraw() {
    if (this._document) this.show(this._document);
  }

  _showServer({ server, figures, engine }) {
    setText(byId("model"), server.model);
    document.title = `${server.model} · Pointsman`;
    setText(byId("phase"), server.phase.replace("_", " "));
    byId("phase").dataset.phase = server.phase;
    setText(byId("version"), server.version);
    setText(byId("context"), server.max_model_len ? `${formatCount(server.max_model_len)} tokens` : DASH);
    setText(byId("uptime"), formatSpan(server.uptime_s));
    const ended = figures.ended_stop + figures.ended_length + figures.ended_abort;
    const failed = figures.ended_error ? `, ${formatCount(figures.ended_error)} failed` : "";
    setText(byId("ended"), `${formatCount(ended)}${failed}`);
    setText(byId("preemptions"), formatCount(figures.preemptions));
    showNotice(...describeNotice(server, engine));
  }

  _showFigures({ figures, latency, seconds, engine, blocks }) {
    const oldest = engine?.waiting.length ? `oldest ${formatAge(engine.waiting[0].age_s)}` : "";
    const worst = ([, longest]) => (longest === null ? "last minute" : `worst ${formatMs(longest)}`);
    const spark = (name, colour, atLeast) => [seconds[name], colour, [], atLeast];
    const pairs = (name) => [seconds[name].map(([mean]) => mean), "output", seconds[name].map(([, longest]) => longest)];
    showFigure("running", formatCount(figures.running), engine ? `of ${formatCount(engine.max_num_seqs)}` : "",
      spark("running", "output", engine?.max_num_seqs));
    showFigure("waiting", formatCount(figures.waiting), oldest, spark("waiting", "warn", 4));
    showFigure("output", formatRate(figures.output_tokens_per_s), "tokens/s", spark("output_tokens", "output", 1));
    showFigure("prompt", formatRate(figures.prompt_tokens_per_s), "tokens/s", spark("prompt_tokens", "prompt", 1));
    showFigure("first_token", formatMs(latency.first_token_ms[0]), worst(latency.first_token_ms), pairs("first_token_ms"));
    showFigure("token_gap", formatMs(latency.token_gap_ms[0]), worst(latency.token_gap_ms), pairs("token_gap_ms"));
    showFigure("kv", formatShare(figures.kv_usage), blocks ? `of ${formatCount(blocks.total)} blocks` : "",
      spark("kv_usage", "output", 1));
    showFigure("prefix", formatShare(figures.prefix_hit_ratio), "of prompt tokens", spark("prefix_hit_ratio", "output", 1));
  }

  _showSteps(steps) {
    const topTokens = roundUp(Math.max(8, ...steps.map(([prompt, output]) => prompt + output)));
    const topMs = roundUp(Math.max(1, ...steps.map(([, , ms]) => ms)));
    drawBars(byId("steps-tokens"), steps.map(([prompt, output]) => [output, prompt]), ["output", "prompt"], topTokens,
      MAX_STEPS);
    drawBars(byId("steps-time"), steps.map(([, , ms]) => [ms]), ["time"], topMs, MAX_STEPS);
    setText(byId("steps-tokens-max"), `${formatCount(topTokens)} tokens`);
    setText(byId("steps-time-max"), formatMs(topMs));
    const last = steps.at(-1);
    setText(byId("steps-note"), last
      ? `the last: ${formatCount(last[0])} prompt, ${formatCount(last[1])} output, ${formatMs(last[2])}`
      : "none yet");
  }

  _showEngine({ engine, blocks }) {
    const { running, waiting } = engine;
    this._colours.update(running.map((request) => request.id));
    if (![...running, ...waiting].some((request) => request.id === this._pinnedId)) this._pinnedId = null;
    const colourOf = (id) => this._colours.name(id);
    this._running.update(running, describeRunning, this._pinnedId, colourOf);
    this._waiting.update(waiting, describeWaiting, this._pinnedId, () => "");
    const hasKeys = [...running, ...waiting].some((request) => request.key_id);
    document.body.classList.toggle("without-keys", !hasKeys);
    showCount("running", running.length, engine.num_running);
    showCount("waiting", waiting.length, engine.num_waiting);
    if (blocks) this._showBlocks(blocks, running);
  }

  _showBlocks(blocks, running) {
    const pinned = running.findIndex((request) => request.id === this._pinnedId);
    const colourOf = (place) => (running[place] ? this._colours.name(running[place].id) : "r0");
    this._grid.draw(blocks.cells, colourOf, pinned < 0 ? null : pinned);
    const cell = blocks.per_cell === 1 ? "a square is a block" : `a square is ${formatCount(blocks.per_cell)} blocks`;
    setText(byId("blocks-note"), `${cell} of ${blocks.block_size} tokens`);
    for (const what of ["used", "cached", "free"]) setText(byId(`blocks-${what}`), formatCount(blocks[what]));
    byId("blocks").setAttribute("aria-label",
      `KV blocks: ${blocks.used} in use, ${blocks.cached} cached, ${blocks.free} free`);
  }

  /** Tell what lies under the pointer. */
  _point(cell) {
    const { blocks, engine } = this._document ?? {};
    if (!cell || !blocks || !engine) return setText(byId("blocks-pointed"), "");
    const first = cell.index * blocks.per_cell + 1;
    const last = Math.min(first + blocks.per_cell - 1, blocks.total);
    const names = { [FREE]: "free", [CACHED]: "cached: a prompt may still find it" };
    const holder = cell.what >= 0 ? engine.running[cell.what]?.id ?? "in use" : names[cell.what] ?? "shared by several";
    setText(byId("blocks-pointed"), `${first === last ? `block ${first}` : `blocks ${first} to ${last}`}: ${holder}`);
  }

  /** Let a request stand out, or, picked again, no more. */
  _pin(id) {
    this._pinnedId = this._pinnedId === id ? null : id;
    this.redraw();
  }
}

/**
 * @param {Object} request Running.
 * @returns {string[]} Its columns.
 */
function describeRunning(request) {
  const isReading = request.prompt_computed < request.prompt_tokens;
  return [
    request.key_id,
    formatAge(request.age_s),
    isReading
      ? `${formatCount(request.prompt_computed)} of ${formatCount(request.prompt_tokens)}`
      : formatCount(request.prompt_tokens),
    formatCount(request.output_tokens),
    formatCount(request.blocks),
    request.preemptions ? `${request.preemptions}×` : "",
    request.waits_for || (isReading ? "computing its prompt" : "writing"),
  ];
}

/**
 * @param {Object} request Waiting.
 * @returns {string[]} Its columns.
 */
function describeWaiting(request) {
  return [
    request.key_id,
    formatAge(request.age_s),
    formatCount(request.prompt_tokens),
    formatCount(request.output_tokens),
    request.preemptions ? `${request.preemptions}×` : "",
    request.waits_for,
  ];
}

/**
 * @param {string} name Of the figure.
 * @param {string} value
 * @param {string} note
 * @param {Array} spark Arguments of drawSparkline after the canvas.
 */
function showFigure(name, value, note, spark) {
  const figure = document.querySelector(`[data-figure="${name}"]`);
  setText(figure.querySelector("b"), value);
  setText(figure.querySelector("small"), note);
  drawSparkline(figure.querySelector("canvas"), ...spark);
}

/**
 * @param {string} name Of the table.
 * @param {number} numShown
 * @param {number} num
 */
function showCount(name, numShown, num) {
  setText(byId(`${name}-note`), numShown < num ? `the first ${numShown} of ${formatCount(num)}` : formatCount(num));
  byId(`${name}-none`).hidden = num > 0;
}

/**
 * @param {Object} server
 * @param {?Object} engine
 * @returns {[string, boolean]} A sentence where something is not as usual, and whether it is bad.
 */
function describeNotice(server, engine) {
  const phase = server.phase;
  if (phase === "loading") return [`Loading: ${formatShare(server.progress)}, ${server.detail}`, false];
  if (phase === "dead") return [`The engine has died: ${server.detail}`, true];
  if (phase.endsWith("stuck")) return [`A step has been running for ${formatAge(server.stalled_s)}.`, true];
  if (phase === "draining") return ["The server takes no new requests and ends when those it has are done.", false];
  if (engine && engine.age_s > OLD_LOOK_S) return [`Requests and blocks are as they were ${formatAge(engine.age_s)} ago.`, false];
  return ["", false];
}

/**
 * @param {string} text Empty = nothing.
 * @param {boolean} isBad
 */
function showNotice(text, isBad) {
  const notice = byId("notice");
  setText(notice, text);
  notice.hidden = !text;
  notice.classList.toggle("bad", isBad);
}

/**
 * @param {string} state Of the stream.
 * @param {string} words
 * @param {string} [more] That need not be read out each time it changes.
 */
function showConnection(state, words, more = "") {
  const connection = byId("connection");
  connection.dataset.state = state;
  setText(connection.firstChild, state === "key" ? "needs a key" : words);
  setText(connection.lastChild, more);
  document.body.classList.toggle("lost", state === "lost" || state === "full");
  byId("board").hidden = state === "key";
  byId("key-form").hidden = state !== "key";
  if (state === "key") {
    byId("notice").hidden = true;
    setText(byId("key-error"), words);
    byId("key").focus();
  }
}

/** Set everything going. */
function main() {
  const board = new Board();
  const stream = new StatusStream((data) => board.show(data), showConnection);
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    stream.useKey(byId("key").value.trim());
    byId("key").value = "";
  });
  let hiding = 0;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) hiding = setTimeout(() => stream.stop(), HIDDEN_MS);
    else if (byId("connection").dataset.state === "paused") stream.start();
  });
  stream.start();
}

main();
