// Sends a file in pieces, each with its SHA-256, and the whole file's with the last one. What breaks off goes on.
"use strict";

(() => {
  const PIECE = 16 * 1024 * 1024;
  const WAITS = [1, 2, 5, 10, 20, 30];
  const box = document.querySelector("[data-send]");
  if (!box) return;
  const input = box.querySelector("input[type='file']");
  const bar = box.querySelector("progress");
  const said = box.querySelector("[data-said]");
  let leaving = null;

  function amount(bytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let step = 0;
    let value = bytes;
    while (value >= 1024 && step < units.length - 1) { value /= 1024; step += 1; }
    return `${step ? value.toFixed(1) : value} ${units[step]}`;
  }

  function say(text) { said.textContent = text; }

  function base64(bytes) { return window.btoa(String.fromCharCode(...bytes)); }

  function header(digest) { return `sha-256=:${base64(digest)}:`; }

  async function read(file, from, to) { return new Uint8Array(await file.slice(from, to).arrayBuffer()); }

  // How many bytes are on the host's disk; null where the job waits for none any more.
  async function arrived(address) {
    const answer = await fetch(address, { headers: { "SA-Refresh": "1" } });
    if (!answer.ok) throw new Error(answer.statusText);
    const { state, received } = await answer.json();
    return state === "queued" ? received : null;
  }

  async function send(job, file) {
    const address = `/api/v1/uploads/${job}/`;
    const token = JSON.parse(document.body.getAttribute("hx-headers"))["X-CSRFToken"];
    let whole = window.sha256.create();
    let hashed = 0;
    let tries = 0;
    input.disabled = true;
    bar.hidden = false;
    // Closing the page would break the upload off: the browser asks before.
    leaving = (event) => event.preventDefault();
    window.addEventListener("beforeunload", leaving);
    for (;;) {
      try {
        const at = await arrived(address);
        if (at === null || at >= file.size) break;
        if (hashed > at) {
          whole = window.sha256.create();
          hashed = 0;
        }
        if (hashed < at) say(box.dataset.reading);
        while (hashed < at) {
          const end = Math.min(hashed + PIECE, at);
          whole.update(await read(file, hashed, end));
          hashed = end;
        }
        const piece = await read(file, at, Math.min(at + PIECE, file.size));
        whole.update(piece);
        hashed += piece.length;
        bar.value = (100 * at) / file.size;
        say(box.dataset.sending.replace("%s", amount(at)).replace("%s", amount(file.size)));
        const headers = {
          "Content-Type": "application/offset+octet-stream", "Upload-Offset": String(at), "X-CSRFToken": token,
          "Content-Digest": header(window.sha256.create().update(piece).array()),
        };
        if (hashed === file.size) headers["Repr-Digest"] = header(whole.array());
        const answer = await fetch(address, { method: "PATCH", headers, body: piece });
        if (answer.ok) {
          tries = 0;
          continue;
        }
        const told = await answer.json().catch(() => ({ detail: answer.statusText, code: "" }));
        // Another request was faster, a piece came damaged, or the server is busy: look again where it stands.
        const passing = ["stale_plan", "wrong_digest", "busy", "overloaded", "host_unreachable"].includes(told.code);
        if (!passing || tries >= WAITS.length) {
          stop(told.detail);
          return;
        }
        say(told.detail);
      } catch {
        say(box.dataset.again);
      }
      await new Promise((wake) => { window.setTimeout(wake, 1000 * WAITS[Math.min(tries, WAITS.length - 1)]); });
      tries += 1;
    }
    bar.value = 100;
    stop(box.dataset.sent);
    window.location.assign(`/jobs/${job}/`);
  }

  function stop(text) {
    window.removeEventListener("beforeunload", leaving);
    input.disabled = false;
    say(text);
  }

  input.addEventListener("change", () => {
    const [file] = input.files;
    if (!file) return;
    if (box.dataset.job) {
      if (file.size !== Number(box.dataset.size)) say(box.dataset.other);
      else send(box.dataset.job, file);
      return;
    }
    const { form } = input;
    form.elements.size.value = file.size;
    if (!form.elements.name.value) form.elements.name.value = file.name;
  });

  // A new upload: the file stays chosen, while the plan beside it is asked for, and then the job.
  document.addEventListener("submit", async (event) => {
    if (event.target !== input.form || box.dataset.job) return;
    event.preventDefault();
    const form = event.target;
    const given = new FormData(form, event.submitter);
    given.delete("file");
    const answer = await fetch(form.action, { method: "POST", body: new URLSearchParams(given) });
    const begun = answer.redirected && /\/jobs\/(\d+)\/$/.exec(new URL(answer.url).pathname);
    if (begun && input.files.length) {
      send(begun[1], input.files[0]);
      for (const button of document.querySelectorAll("button[form='options'], #options button")) button.disabled = true;
    } else if (answer.redirected) {
      window.location.assign(answer.url);
    } else {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const shown = document.querySelector(".split > .stack");
      shown.innerHTML = page.querySelector(".split > .stack").innerHTML;
      document.dispatchEvent(new CustomEvent("htmx:afterSwap"));
    }
  });
})();
