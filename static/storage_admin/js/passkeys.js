// Passkeys: what needs them is shown where the browser has them, and what goes wrong with one is said on the page.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const there = Boolean(window.PublicKeyCredential);
  for (const part of document.querySelectorAll("[data-passkeys]")) part.hidden = !there;
  for (const part of document.querySelectorAll("[data-no-passkeys]")) part.hidden = there;
});

document.addEventListener("allauth.error", (event) => {
  const box = document.getElementById("passkey_error");
  if (!box) return;
  event.preventDefault();
  const stopped = event.detail.exception && event.detail.exception.name === "NotAllowedError";
  box.querySelector("div").textContent = stopped ? box.dataset.stopped : box.dataset.missing;
  box.hidden = false;
});
