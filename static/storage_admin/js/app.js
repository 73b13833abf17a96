// What pages do beyond htmx: the theme button, copy buttons, a log that stays at its end, and messages for a lost server.
"use strict";

(() => {
  const order = ["system", "light", "dark"];

  // Pages show times in the browser's zone, unless the user has chosen another.
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const secure = window.location.protocol === "https:" ? "; Secure" : "";
  document.cookie = `timezone=${zone}; Path=/; Max-Age=31536000; SameSite=Lax${secure}`;

  function label(button) {
    const name = button.querySelector("[data-theme-name]");
    name.textContent = name.dataset[window.storageAdminTheme.chosen()];
  }

  function atEnd(box) {
    return box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  }

  async function copy(button) {
    const text = document.getElementById(button.dataset.copy).textContent;
    const was = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = document.body.dataset.copied;
    } catch {
      // Without TLS the browser lends no clipboard: select the text instead.
      window.getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
      button.textContent = document.body.dataset.selected;
    }
    window.setTimeout(() => { button.textContent = was; }, 1500);
  }

  document.addEventListener("DOMContentLoaded", () => {
    const theme = document.querySelector("[data-theme-button]");
    if (theme) {
      theme.hidden = false;
      label(theme);
      theme.addEventListener("click", () => {
        const next = order[(order.indexOf(window.storageAdminTheme.chosen()) + 1) % order.length];
        window.storageAdminTheme.choose(next);
        label(theme);
      });
    }
    for (const box of document.querySelectorAll("[data-follow]")) box.scrollTop = box.scrollHeight;
  });

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (button) copy(button);
  });

  document.addEventListener("change", (event) => {
    const all = event.target.closest("[data-select-all]");
    if (!all) return;
    for (const box of document.querySelectorAll("input[name='image']")) box.checked = all.checked;
  });

  // Of a plan of many images, the button says for how many it stands.
  function countTicked() {
    const form = document.querySelector("[data-bulk]");
    const button = form && form.querySelector("[data-confirm]");
    if (!button) return;
    const boxes = [...form.querySelectorAll("input[type='checkbox'][name='image']")];
    const left = boxes.filter((box) => box.checked).length;
    button.dataset.word = button.dataset.word || button.textContent;
    const all = left === boxes.length;
    const again = left === 1 ? button.dataset.one : button.dataset.many.replace("{count}", left);
    button.textContent = all ? button.dataset.word : again;
    button.disabled = left === 0;
    document.getElementById("left-out").hidden = all;
  }
  document.addEventListener("change", (event) => {
    if (event.target.name === "image") countTicked();
  });
  document.addEventListener("htmx:afterSwap", countTicked);
  countTicked(); // a box may have been unticked while the page was loading

  // A page that refreshes itself is nobody who does something: a session may end of idleness beside it.
  document.addEventListener("htmx:configRequest", (event) => {
    const by = event.detail.triggeringEvent;
    if (!by || by.type === "jobs-changed") event.detail.headers["SA-Refresh"] = "1";
  });

  // An empty filter is no filter, and a zone without dates is none: they need not stand in the address bar.
  document.addEventListener("htmx:configRequest", (event) => {
    if (event.target.id !== "filters") return;
    for (const [name, value] of [...event.detail.formData.entries()]) {
      if (value === "") event.detail.formData.delete(name);
    }
    if (!event.detail.formData.has("from") && !event.detail.formData.has("to")) event.detail.formData.delete("zone");
  });

  // A look at the host may take a second. Where an option was changed meanwhile, what it found out for the old ones is not
  // shown: the plan of the new ones comes, and is looked at again.
  document.addEventListener("htmx:beforeSwap", (event) => {
    const { target, requestConfig } = event.detail;
    const options = target.id === "plan" && document.getElementById("options");
    if (!options || !requestConfig.formData) return;
    const now = new FormData(options);
    const asked = (field) => requestConfig.formData.getAll(field.name).join("\n");
    const fields = [...options.querySelectorAll("input:not([type='hidden']), select, textarea")];
    if (fields.every((field) => !field.name || asked(field) === now.getAll(field.name).join("\n"))) return;
    event.detail.shouldSwap = false;
    if (options.contains(requestConfig.elt)) return;
    const again = () => window.htmx.trigger(requestConfig.elt, "look-again");
    options.addEventListener("htmx:afterRequest", again, { once: true });
  });

  let follow = null;
  document.addEventListener("htmx:beforeSwap", (event) => {
    const box = event.target.closest("[data-follow]");
    follow = box && atEnd(box) ? box : null;
  });
  let announced = null;
  document.addEventListener("htmx:afterSwap", () => {
    if (follow) follow.scrollTop = follow.scrollHeight;
    const news = document.querySelector("[data-announce]");
    const place = document.getElementById("announce");
    // Readers of a screen hear a stage and each tenth, not every second.
    if (news && place && news.dataset.announce !== announced) {
      announced = news.dataset.announce;
      place.textContent = announced;
    }
  });

  // A job has begun or ended: what shows that is fetched anew, unless somebody is filling it in.
  async function refresh() {
    const held = document.activeElement;
    const filling = (place) => place.querySelector("tbody :checked")
      || (place.contains(held) && held.matches("input, select, textarea"));
    const places = [...document.querySelectorAll("[data-refresh]")].filter((place) => !filling(place));
    if (!places.length) return;
    let said;
    try {
      const answer = await fetch(window.location.href, { headers: { "SA-Refresh": "1" } });
      if (!answer.ok || answer.redirected) return;
      said = await answer.text();
    } catch {
      return; // the page is left, or the dashboard is away: the next change fetches it
    }
    const page = new DOMParser().parseFromString(said, "text/html");
    for (const place of places) {
      const now = page.getElementById(place.id);
      if (!now || filling(place)) continue;
      const link = place.contains(held) && held.getAttribute("href");
      place.innerHTML = now.innerHTML;
      window.htmx.process(place);
      if (link) place.querySelector(`a[href="${CSS.escape(link)}"]`)?.focus();
    }
  }
  document.addEventListener("jobs-changed", refresh);
  // A look at the host, made when the page was opened, has found something else than the page shows.
  document.addEventListener("facts-changed", refresh);

  // What the page calls a field: its label, without what is explained in it, or its group's name.
  function labelOf(field) {
    const group = field.type === "checkbox" || field.type === "radio" ? field.closest("fieldset") : null;
    const label = (group && group.querySelector("legend")) || (field.labels && field.labels[0]);
    if (!label) return "";
    const parts = [...label.childNodes].filter((part) => !(part.classList && part.classList.contains("sub")));
    return parts.map((part) => part.textContent).join("").trim();
  }

  // The field that a line is about: of the form that it stands in, else of the page.
  function fieldOf(line) {
    const named = (line.closest("form") || document).querySelectorAll(`[name="${CSS.escape(line.dataset.errorOf)}"]`);
    return [...named].find((one) => one.id && one.type !== "hidden");
  }

  // What is wrong with a field stands beside it as well, and a reader of the screen hears it there. Where all of it
  // stands, the field is called as its label calls it.
  function placeErrors() {
    for (const note of document.querySelectorAll("[data-placed-for]")) {
      const field = document.getElementById(note.dataset.placedFor);
      note.remove();
      if (!field) continue;
      field.removeAttribute("aria-invalid");
      const others = (field.getAttribute("aria-describedby") || "").split(" ").filter((id) => id !== note.id);
      field.setAttribute("aria-describedby", others.join(" "));
    }
    for (const line of document.querySelectorAll("[data-error-of]")) {
      const field = line.dataset.errorOf && fieldOf(line);
      if (!field) continue;
      const label = labelOf(field);
      if (label && line.dataset.error) {
        const all = line.parentElement.querySelector("[data-names]");
        const named = all.textContent.slice(0, -1).split(", ").map((name) => (name === line.dataset.errorOf ? label : name));
        all.textContent = `${named.join(", ")}.`;
      } else if (label && line.firstElementChild !== line.lastElementChild) {
        line.firstElementChild.textContent = `${label}:`;
      }
      if (document.getElementById(`${field.id}-wrong`)) continue;
      const note = document.createElement("div");
      note.className = "field-error";
      note.id = `${field.id}-wrong`;
      note.dataset.placedFor = field.id;
      note.textContent = line.dataset.error || line.lastElementChild.textContent;
      const group = field.type === "checkbox" ? field.closest("fieldset") : null;
      if (group) group.append(note);
      else (field.closest(".check") || field).after(note);
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", `${field.getAttribute("aria-describedby") || ""} ${note.id}`.trim());
      for (let box = field.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    }
  }
  // Where a form comes back, whoever filled it in goes on at what is wrong first.
  document.addEventListener("DOMContentLoaded", () => {
    placeErrors();
    const first = document.querySelector(".say.bad [data-error-of]");
    const field = first && fieldOf(first);
    if (field) field.focus();
  });
  document.addEventListener("htmx:afterSwap", placeErrors);

  function lost(isLost) {
    const note = document.getElementById("lost");
    if (note) note.hidden = !isLost;
  }
  document.addEventListener("htmx:sendError", () => lost(true));
  document.addEventListener("htmx:responseError", () => lost(true));
  document.addEventListener("htmx:afterRequest", (event) => {
    if (event.detail.successful) lost(false);
  });
})();
