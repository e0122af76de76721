// Light or dark, as the notebook or the system says; light on paper; and sharp when the page moves to another screen.

/** Whether the page is to be dark: JupyterLab says so at the body, elsewhere the system does. */
export function isDark() {
  const notebook = document.body?.dataset.jpThemeLight;
  if (notebook !== undefined) return notebook === "false";
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/**
 * Calls back when looks change.
 * @param {Undo} undo ends it
 * @param {(dark: boolean) => void} changed
 */
export function watchLooks(undo, changed) {
  const now = () => changed(isDark());
  undo.on(matchMedia("(prefers-color-scheme: dark)"), "change", now);
  undo.on(window, "beforeprint", () => changed(false)); // dark paper wastes ink
  undo.on(window, "afterprint", now);
  const observer = new MutationObserver(now);
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  undo.add(() => observer.disconnect());
  let screen = null;
  const watchScreen = () => {
    screen?.removeEventListener("change", moved);
    screen = matchMedia(`(resolution: ${window.devicePixelRatio}dppx)`);
    screen.addEventListener("change", moved);
  };
  function moved() {
    watchScreen();
    now();
  }
  watchScreen();
  undo.add(() => screen.removeEventListener("change", moved));
}
