// The page's frame: panels as tabs, the model picker, the theme, the settings' drawer.

import "./chat.js";
import "./compare.js";
import "./diffusion.js";
import "./fim.js";
import "./template.js";
import "./tokens.js";
import { find, options } from "./dom.js";
import { firstModels } from "./settings.js";
import { change, hear, ofKind, settings, tell } from "./state.js";

const THEME = "stagecoach-theme";
const tabs = [...document.querySelectorAll("[role=tab]")];
const panelOf = (tab) => find(tab.getAttribute("aria-controls"));

function open(tab, focus = false) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", chosen);
    other.tabIndex = chosen ? 0 : -1;
    panelOf(other).hidden = !chosen;
  }
  history.replaceState(null, "", `#${panelOf(tab).id}`);
  if (focus) tab.focus();
  tell("panel", panelOf(tab).id);
}

function byKey(event) {
  const shown = tabs.filter((tab) => !tab.hidden);
  const at = shown.indexOf(event.target);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
  if (to === undefined || at < 0) return;
  event.preventDefault();
  open(shown[(to + shown.length) % shown.length], true);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  find("theme").setAttribute("aria-pressed", name === "dark");
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(localStorage.getItem(THEME) ?? (prefersDark.matches ? "dark" : "light"));
prefersDark.addEventListener("change", () => localStorage.getItem(THEME) ?? setTheme(prefersDark.matches ? "dark" : "light"));
find("theme").addEventListener("click", () => {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, name);
  setTheme(name);
});

function showSettings(is) {
  find("settings").hidden = !is;
  find("settings-button").setAttribute("aria-expanded", is);
}

find("settings-button").addEventListener("click", () => showSettings(find("settings").hidden));
find("settings").addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  showSettings(false);
  find("settings-button").focus();
});
showSettings(matchMedia("(min-width: 1200px)").matches);

for (const tab of tabs) tab.addEventListener("click", () => open(tab));
find("tabs").addEventListener("keydown", byKey);
open(tabs.find((tab) => `#${panelOf(tab).id}` === location.hash && !tab.hidden) ?? tabs[0]);

const picker = find("model");
picker.addEventListener("change", () => change("model", picker.value));
hear("models", () => {
  options(picker, ofKind("causal", "diffusion").map((model) => model.id), settings.model);
  find("tab-diffusion").hidden = ofKind("diffusion").length === 0;
});
firstModels();
