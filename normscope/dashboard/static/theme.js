// Light or dark: as the system has it, unless the address or the button says otherwise.

import { byId } from "./element.js";
import { onView, show, view } from "./view.js";

const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = [];

export function isDark() {
  return view.theme === "" ? system.matches : view.theme === "dark";
}

export function onTheme(listener) {
  listeners.push(listener);
}

function apply() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  const button = byId("theme");
  button.textContent = isDark() ? "☀ Light" : "☾ Dark";
  button.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  for (const listener of listeners) listener();
}

export function start() {
  byId("theme").addEventListener("click", () => show({ theme: isDark() ? "light" : "dark" }));
  onView((before) => before.theme !== view.theme && apply());
  system.addEventListener("change", apply);
  apply();
}
