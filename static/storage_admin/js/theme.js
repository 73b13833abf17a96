// Runs before the page is drawn: the theme is the one that was chosen here, else the system's.
"use strict";

(() => {
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  function chosen() {
    try {
      return window.localStorage.getItem("theme") || "system";
    } catch {
      return "system"; // storage is switched off: follow the system
    }
  }

  function apply() {
    const choice = chosen();
    const theme = choice === "system" ? (system.matches ? "dark" : "light") : choice;
    document.documentElement.dataset.bsTheme = theme;
    document.documentElement.dataset.themeChoice = choice;
    document.dispatchEvent(new Event("theme"));
  }

  window.storageAdminTheme = {
    chosen,
    choose(choice) {
      try {
        window.localStorage.setItem("theme", choice);
      } catch {
        document.documentElement.dataset.bsTheme = choice;
        return;
      }
      apply();
    },
  };
  system.addEventListener("change", apply);
  apply();
})();
