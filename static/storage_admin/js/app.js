// What pages do beyond htmx: the theme button, copy buttons, a log that stays at its end, and messages for a lost server.
"use strict";

(() => {
  const order = ["system", "light", "dark"];

  function label(button) {
    button.querySelector("[data-theme-name]").textContent = window.storageAdminTheme.chosen();
  }

  function atEnd(box) {
    return box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  }

  async function copy(button) {
    const text = document.getElementById(button.dataset.copy).textContent;
    const was = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      // Without TLS the browser lends no clipboard: select the text instead.
      window.getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
      button.textContent = "Selected";
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

  // A page that refreshes itself is nobody who does something: a session may end of idleness beside it.
  document.addEventListener("htmx:configRequest", (event) => {
    if (!event.detail.triggeringEvent) event.detail.headers["SA-Refresh"] = "1";
  });

  // An empty filter is no filter: it need not stand in the address bar.
  document.addEventListener("htmx:configRequest", (event) => {
    if (event.target.id !== "filters") return;
    for (const [name, value] of [...event.detail.formData.entries()]) {
      if (value === "") event.detail.formData.delete(name);
    }
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
