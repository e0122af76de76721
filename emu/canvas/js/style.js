// The page's style. It lives in a shadow root: nothing of it leaks out, and no notebook's style leaks in.

export const STYLE = `
:host { all: initial; display: block; }
.emu { --ink: #222; --faint: #5f5f5f; --line: #dcdcdc; --ground: #fff; --tint: #eef3f9; --cursor: #c0392b; --focus: #1a5fb4;
  --alert: #fdecea; color: var(--ink); background: var(--ground); font: 13px/1.45 "DejaVu Sans", Verdana, system-ui, sans-serif;
  padding: 10px 12px 14px; border: 1px solid var(--line); border-radius: 6px; container-type: inline-size; box-sizing: border-box;
  position: relative; text-align: left; }
.emu[data-theme="dark"] { --ink: #e8e8e8; --faint: #a9afb7; --line: #363c44; --ground: #171a1e; --tint: #222a34; --cursor: #ff7a68;
  --focus: #78aeed; --alert: #47211d; color-scheme: dark; }
.emu *, .emu *::before { box-sizing: border-box; }
.emu:focus-visible, .emu :focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; }
[hidden] { display: none !important; }
h2, h3, p, ul { margin: 0; padding: 0; font: inherit; }
ul { list-style: none; }
h2 { font-weight: bold; font-size: 14px; }
h3 { font-weight: bold; }
button, input, select { font: inherit; color: inherit; background: var(--ground); border: 1px solid var(--faint); border-radius: 4px;
  padding: 3px 8px; min-height: 28px; }
button { cursor: pointer; }
button:hover:not([aria-disabled]) { background: var(--tint); }
button[aria-disabled], select:disabled { opacity: 0.45; cursor: default; }
button.small { padding: 0 7px; min-height: 22px; font-size: 12px; }
button.link { border: 0; padding: 0; min-height: 0; text-decoration: underline; text-align: left; background: none; font-family: monospace; }
button.fold { border: 0; padding: 2px 4px 2px 0; font-weight: bold; background: none; }
button.fold .sign { display: inline-block; width: 1.2em; }
.row { display: flex; flex-wrap: wrap; gap: 6px 8px; align-items: center; }
.group { display: flex; gap: 3px; }
.slider { display: flex; align-items: center; gap: 8px; margin: 6px 0; }
.slider input[type="range"] { flex: 1; min-width: 80px; padding: 0; accent-color: var(--focus); }
.slider input[type="number"] { width: 6.5em; }
.status { min-height: 2.9em; margin: 4px 0 6px; overflow-wrap: anywhere; }
.status .where { font-weight: bold; }
.status .what { white-space: pre-line; }
.status .code { display: block; min-height: 1.4em; margin-top: 4px; font-family: ui-monospace, monospace; white-space: pre-wrap; }
.alert { background: var(--alert); border-left: 4px solid var(--cursor); padding: 6px 10px; margin: 6px 0; overflow-wrap: anywhere; }
.emu span, .emu button, .emu option { unicode-bidi: isolate; }
.busy { color: var(--faint); }
.note, .caption { color: var(--faint); font-size: 12px; overflow-wrap: anywhere; }
.panel { margin-top: 14px; min-width: 0; }
.head { display: flex; flex-wrap: wrap; gap: 2px 10px; align-items: baseline; border-top: 1px solid var(--line); padding-top: 5px; margin-bottom: 5px; }
.head .note { flex: 1; min-width: 8em; }
.columns { display: grid; grid-template-columns: minmax(0, 1fr); column-gap: 20px; }
@container (min-width: 820px) { .columns { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); } }
.plotbox { position: relative; min-width: 0; }
.plotbox.wide { overflow-x: auto; }
canvas.plot { display: block; }
canvas.grab { cursor: crosshair; touch-action: pan-y; }
canvas.pick { cursor: pointer; }
.tip { position: absolute; z-index: 2; max-width: 24em; pointer-events: none; background: var(--ground); border: 1px solid var(--faint);
  border-radius: 4px; padding: 4px 8px; font-size: 12px; overflow-wrap: anywhere; box-shadow: 0 2px 6px #0003; }
.tip div:first-child { font-weight: bold; }
.legend { display: flex; flex-wrap: wrap; gap: 3px 14px; font-size: 12px; margin: 3px 0; }
.legend li { display: inline-flex; align-items: center; gap: 5px; }
.cursor-mark { width: 0; height: 14px; border-left: 1px dashed var(--faint); margin: 0 3px; }
.cursor-mark.next { border-left: 3px solid var(--cursor); }
.peak-mark { width: 0; height: 13px; border-left: 2px solid var(--ink); margin: 0 3px; }
.sign-solid, .sign-dashed { width: 22px; border-top: 2px solid var(--ink); }
.sign-dashed { border-top-style: dashed; }
.sign-dot, .sign-ring { width: 9px; height: 9px; border-radius: 50%; border: 1.5px solid var(--ink); }
.sign-dot { background: var(--ink); }
ul.plain li { padding: 1px 0; font-size: 12px; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(250px, 100%), 1fr)); gap: 7px; align-items: start; }
.card { border: 1px solid var(--line); border-left: 4px solid var(--line); border-radius: 4px; padding: 5px 8px; font-size: 12px; min-width: 0;
  overflow-wrap: anywhere; cursor: pointer; }
.card[data-state="next"], .card[data-state="failed"] { border-left-color: var(--cursor); }
.card[data-state="waiting"] { border-left-style: dashed; border-left-color: var(--faint); }
.card[data-selected] { background: var(--tint); border-color: var(--focus); }
.card[data-state="next"] .next, .card[data-state="failed"] .next { font-weight: bold; }
.cardhead { display: flex; gap: 6px; align-items: baseline; }
.cardhead .who { font-weight: bold; white-space: nowrap; }
.cardhead .state { flex: 1; min-width: 0; }
.cardhead .sign { width: 1em; text-align: center; }
.card[data-state="next"] .sign, .card[data-state="failed"] .sign { color: var(--cursor); }
.line, .streams, .works, .cardhead .state { color: var(--faint); }
.streams:empty, .works:empty { display: none; }
.says { margin: 6px 0; min-height: 1.5em; }
.scroll { overflow: auto; max-height: 330px; }
table { border-collapse: collapse; font-size: 12px; }
table.list { width: 100%; }
th, td { text-align: left; padding: 2px 10px 2px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
table.list th { position: sticky; top: 0; background: var(--ground); }
tr.chosen { background: var(--tint); }
table.numbers { margin: 4px 14px 8px 0; display: inline-table; }
table.numbers td { text-align: right; font-variant-numeric: tabular-nums; padding: 1px 8px; border: 1px solid var(--line); white-space: nowrap; }
table.numbers caption { text-align: left; color: var(--faint); }
.help { position: absolute; z-index: 3; right: 12px; top: 44px; max-width: calc(100% - 24px); background: var(--ground); border: 1px solid var(--faint);
  border-radius: 6px; padding: 10px 14px; box-shadow: 0 4px 16px #0004; }
.help td { border: 0; padding: 1px 12px 1px 0; }
.help td:first-child { font-family: monospace; white-space: nowrap; }
@media print {
  .emu { border: 0; padding: 0; }
  .controls, .slider, button, .help { display: none !important; }
  .panel, .card { break-inside: avoid; }
}
`;
