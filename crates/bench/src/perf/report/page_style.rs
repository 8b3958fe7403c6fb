//! Style sheet of the HTML reports.

/// Style sheet with color schemes for light and dark screens and for print.
pub const STYLE: &str = r#"
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #16181d; --muted: #667080; --grid: #e3e6eb;
  --accent: #0b6bcb; --soft: rgba(11, 107, 203, .13); --mark: #d9480f; --bad: #c92a2a;
  --shadow: 0 1px 2px rgba(20, 24, 33, .06), 0 4px 16px rgba(20, 24, 33, .05);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1115; --card: #181b21; --ink: #e8eaee; --muted: #97a1b1; --grid: #2b3039;
    --accent: #5db0ff; --soft: rgba(93, 176, 255, .16); --mark: #ff9254; --bad: #ff8787;
    --shadow: none;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
header .name { color: var(--muted); font-size: 14px; letter-spacing: .02em; }
header .name b { color: var(--ink); }
h1 { margin: 6px 0 0; font-size: 68px; line-height: 1.05; font-weight: 750; letter-spacing: -.03em; }
h1 small { font-size: 24px; font-weight: 500; color: var(--muted); letter-spacing: 0; }
.workload { margin: 6px 0 18px; font-size: 17px; color: var(--muted); }
.note, .warning {
  margin: 0 0 8px; padding: 9px 14px; border-left: 3px solid var(--accent); background: var(--soft);
  border-radius: 0 6px 6px 0;
}
.warning { border-color: var(--mark); background: none; }
.bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 22px 0; }
.tile, section {
  background: var(--card); border: 1px solid var(--grid); border-radius: 10px; box-shadow: var(--shadow);
}
.tile { padding: 12px 16px 13px; }
.tile .what { color: var(--muted); font-size: 13px; }
.tile .value { font-size: 25px; font-weight: 650; letter-spacing: -.01em; white-space: nowrap; }
.tile .more { color: var(--muted); font-size: 12.5px; line-height: 1.35; }
.meter { height: 5px; margin: 5px 0 4px; border-radius: 3px; background: var(--grid); overflow: hidden; }
.meter i { display: block; height: 100%; background: var(--accent); }
section { padding: 16px 20px 18px; margin: 14px 0; overflow-x: auto; }
h2 { margin: 0 0 8px; font-size: 16px; font-weight: 650; }
h2 small { font-weight: 400; font-size: 13px; color: var(--muted); margin-left: 8px; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 14px; }
.pair section { margin: 0; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 500; color: var(--muted); font-size: 13px; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--grid); vertical-align: baseline; }
tr:last-child td, tbody tr:last-child th { border-bottom: 0; }
tbody th { color: var(--muted); white-space: nowrap; width: 1%; }
.number { text-align: right; white-space: nowrap; }
table.wraps th { white-space: normal; width: 34%; }
table.wraps code { overflow-wrap: anywhere; }
td.bar { width: 22%; vertical-align: middle; padding-right: 0; }
td.bar i { display: block; height: 8px; border-radius: 2px; background: var(--accent); opacity: .75; }
code { font: 13px ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
ul { margin: 0; padding-left: 20px; }
footer { margin-top: 22px; color: var(--muted); font-size: 13px; }
@media (max-width: 560px) { h1 { font-size: 46px; } .pair { grid-template-columns: 1fr; } }
@media print { :root { --page: #fff; } section, .tile { break-inside: avoid; box-shadow: none; } }
"#;
