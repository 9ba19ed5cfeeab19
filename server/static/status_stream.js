// The connection: server-sent events over fetch, since an EventSource cannot send a key. Comes back by itself.
"use strict";

const WAITS_S = [1, 2, 4, 8, 15];
// The server speaks every second: after so long a silence the connection is dead, even if nobody has said so.
const SILENCE_MS = 8000;
const KEY_NAME = "pointsman-key";

/** Refused by the server, with its status and its sentence. */
class RefusedError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * Read a stream of events to its end.
 * @param {Response} response
 * @param {function(Object): void} onDocument Gets each event's value.
 * @param {function(): void} onBytes Called whenever anything comes.
 */
async function readEvents(response, onDocument, onBytes) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    onBytes();
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: {")) continue; // a ping, or the mark of the end
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new Error(data.error.message);
      onDocument(data);
    }
  }
}

/** Keeps a stream open while somebody looks. */
class StatusStream {
  /**
   * @param {function(Object): void} onDocument Gets each document.
   * @param {function(string, string, string=): void} onState Told "connecting", "live", "lost", "full", "key" or
   *     "paused", with a few words and perhaps some more.
   */
  constructor(onDocument, onState) {
    this._onDocument = onDocument;
    this._onState = onState;
    /** @type {?AbortController} */
    this._open = null;
    this._numFailures = 0;
    this._timer = 0;
    this._silence = 0;
  }

  /** Connect, unless it is connected. */
  start() {
    clearInterval(this._timer);
    if (this._open === null) this._run();
  }

  /** Disconnect until told to start. */
  stop() {
    clearInterval(this._timer);
    clearTimeout(this._silence);
    this._open?.abort();
    this._open = null;
    this._onState("paused", "paused");
  }

  /**
   * Use another key from now on.
   * @param {string} key
   */
  useKey(key) {
    sessionStorage.setItem(KEY_NAME, key);
    this._numFailures = 0;
    this.start();
  }

  async _run() {
    const connection = (this._open = new AbortController());
    if (this._numFailures === 0) this._onState("connecting", "connecting");
    let failure = new Error("The server has ended the stream.");
    try {
      await this._read(connection);
    } catch (error) {
      failure = error;
    }
    clearTimeout(this._silence);
    connection.abort();
    if (this._open !== connection) return; // stopped, or another one is open
    this._open = null;
    this._fail(failure);
  }

  async _read(connection) {
    this._watchSilence(connection);
    const key = sessionStorage.getItem(KEY_NAME);
    const response = await fetch("status/events", {
      headers: key ? { Authorization: `Bearer ${key}` } : {},
      cache: "no-store",
      signal: connection.signal,
    });
    if (!response.ok) throw new RefusedError(response.status, await readRefusal(response));
    const take = (data) => {
      this._numFailures = 0;
      this._onState("live", "live");
      this._onDocument(data);
    };
    await readEvents(response, take, () => this._watchSilence(connection));
  }

  _watchSilence(connection) {
    clearTimeout(this._silence);
    this._silence = setTimeout(() => connection.abort(), SILENCE_MS);
  }

  _fail(error) {
    if (error.status === 401 || error.status === 403) {
      this._onState("key", sessionStorage.getItem(KEY_NAME) ? error.message : "");
      return;
    }
    const waitS = WAITS_S[Math.min(this._numFailures, WAITS_S.length - 1)];
    this._numFailures += 1;
    this._countDown(error instanceof RefusedError ? error.message : "", waitS);
  }

  /** Show how long it takes until the next try, then try; with some chance, so that not all pages come back at once. */
  _countDown(reason, seconds) {
    const due = performance.now() + seconds * (1 + Math.random() / 5) * 1000;
    const tell = () => {
      const leftS = Math.ceil((due - performance.now()) / 1000);
      if (leftS <= 0) return this.start();
      this._onState(reason ? "full" : "lost", reason || "connection lost", ` · again in ${leftS} s`);
    };
    clearInterval(this._timer);
    this._timer = setInterval(tell, 250);
    tell();
  }
}

/**
 * @param {Response} response
 * @returns {Promise<string>} What the server says is wrong.
 */
async function readRefusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answers with status ${response.status}.`;
  }
}
