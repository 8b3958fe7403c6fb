//! Header lines: the watched process, its polling mode, and its overall load.

use ratatui::style::{Modifier, Style};

use super::app_state::{AppState, ConnectionStage};
use super::draw_screen::ScreenTheme;
use super::format::{escape, format_age, format_percent, format_rate};
use super::rates::TotalRates;
use super::table_grid::{percentage_bar, sparkline, text_width};

/// Maximum width of the bar.
const BAR_MAX: u16 = 24;

/// The header lines for a screen of this many columns.
pub(crate) fn header_lines(
    state: &AppState,
    columns: u16,
    theme: ScreenTheme,
) -> Vec<(String, Style)> {
    let mut lines = vec![(process_line(state), Style::new().add_modifier(Modifier::BOLD))];
    if state.shown.is_some() {
        lines.push((busy_line(state, columns), Style::new()));
    }
    let mind = match &state.stage {
        ConnectionStage::Exited(why) => {
            Some(format!("GONE: {}. Waiting for another; q quits.", escape(why)))
        }
        ConnectionStage::Silent(why) => {
            Some(format!("SILENT: {}. Asking again; q quits.", escape(why)))
        }
        _ if state.is_paused => Some("PAUSED: p goes on.".into()),
        _ => None,
    };
    lines.extend(mind.map(|text| (text, theme.alarm_style())));
    lines
}

/// `tenmil 0.1.0  process 4711  up 1:02:03  adaptive polling  dynamic scheduling  perf emu:null`.
pub(crate) fn process_line(state: &AppState) -> String {
    let Some(process) = &state.process else { return "tenmil top".into() };
    let mut text = format!("tenmil {}  process {}", escape(&process.version), process.pid);
    if let Some(up_ns) = process.uptime_ns {
        // The uptime advances with the clock of the samples.
        text += &format!("  up {}", format_age(up_ns.saturating_add(watched_time_ns(state))));
    }
    if let Some(mode) = common_poll_mode(state) {
        text += &format!("  {mode} polling");
    }
    if let Some(policy) = &state.policy {
        text += &format!("  {} scheduling", escape(policy));
    }
    let words: Vec<String> = process.command_line.iter().skip(1).map(|word| escape(word)).collect();
    text + "  " + &words.join(" ")
}

/// `busy 37.5 % [███▌      ] of 2 reactors  120 sleeps/s  3.2k msgs/s  0 migrations/s`, followed by the last
/// minute if it fits.
pub(crate) fn busy_line(state: &AppState, columns: u16) -> String {
    let Some(shown) = &state.shown else { return String::new() };
    let reactors = match shown.sample.reactors.len() {
        1 => "1 reactor".to_owned(),
        count => format!("{count} reactors"),
    };
    let Some(TotalRates { busy_percent, sleeps, messages, migrations }) =
        shown.rates.as_ref().map(|rates| rates.whole)
    else {
        return format!("busy - of {reactors}");
    };
    let begin = format!("busy {} % ", format_percent(busy_percent));
    let end = format!(
        " of {reactors}  {} sleeps/s  {} msgs/s  {} migrations/s",
        format_rate(sleeps),
        format_rate(messages),
        format_rate(migrations)
    );
    let room = columns.saturating_sub(text_width(&begin) + text_width(&end) + 2);
    let minute = match room.saturating_sub(BAR_MAX + 2) {
        0..20 => String::new(),
        room => format!("  {}", sparkline(&state.whole.busy_by_interval(room.min(60)))),
    };
    match room.min(BAR_MAX) {
        0..4 => format!("{}{end}", begin.trim_end()),
        room => format!("{begin}[{}]{end}{minute}", percentage_bar(busy_percent, room)),
    }
}

/// The polling mode, if all reactors have the same.
fn common_poll_mode(state: &AppState) -> Option<String> {
    let reactors = &state.shown.as_ref()?.sample.reactors;
    let mode = &reactors.first()?.mode;
    let is_same = reactors.iter().all(|reactor| reactor.mode == *mode);
    Some(if is_same { escape(mode) } else { "mixed".into() })
}

/// Time from the first sample to the displayed one.
fn watched_time_ns(state: &AppState) -> u64 {
    let shown_ns = state.shown.as_ref().map_or(0, |shown| shown.sample.monotonic_ns);
    shown_ns.saturating_sub(state.first_ns.unwrap_or(shown_ns))
}
