//! Progress of a copy: a line that is redrawn on a terminal, or a new line every few seconds elsewhere.

use std::io::Write;

use tenmil_base::{Instant, Span};

/// Progress line and its update schedule.
pub(in crate::commands) struct ProgressBar {
    is_terminal: bool,
    is_drawn: bool,
    next: Instant,
    /// Start time of this phase, and the bytes done before it.
    began: Option<(Instant, u64)>,
}

const REDRAW: Span = Span::from_ms(100);
const REPEAT: Span = Span::from_secs(5);
const CELLS: u64 = 24;

impl ProgressBar {
    pub(in crate::commands) fn new(is_terminal: bool, now: Instant) -> Self {
        let next = if is_terminal { now } else { now.after(REPEAT) };
        Self { is_terminal, is_drawn: false, next, began: None }
    }

    /// Starts a new phase.
    pub(in crate::commands) fn begin_phase(&mut self, now: Instant) {
        *self = Self { is_drawn: self.is_drawn, ..Self::new(self.is_terminal, now) };
    }

    /// Prints the progress if an update is due.
    pub(in crate::commands) fn update(
        &mut self,
        phase: &str,
        now: Instant,
        (done, size): (u64, u64),
        out: &mut dyn Write,
    ) {
        let began = *self.began.get_or_insert((now, done));
        if now < self.next {
            return;
        }
        let text = progress_text(phase, now.since(began.0), done - began.1.min(done), (done, size));
        // A closed terminal does not end the copy.
        let _ = if self.is_terminal {
            self.next = now.after(REDRAW);
            self.is_drawn = true;
            write!(out, "\r\x1b[2K{text}").and_then(|()| out.flush())
        } else {
            self.next = now.after(REPEAT);
            writeln!(out, "{text}")
        };
    }

    /// Prints a note above the progress line.
    pub(in crate::commands) fn note(&mut self, text: &str, out: &mut dyn Write) {
        self.clear(out);
        let _ = writeln!(out, "note: {text}");
    }

    /// Erases the progress line.
    pub(in crate::commands) fn clear(&mut self, out: &mut dyn Write) {
        if std::mem::take(&mut self.is_drawn) {
            let _ = write!(out, "\r\x1b[2K").and_then(|()| out.flush());
        }
    }
}

/// `copying  ██████░░░░  50.0 %  512 MiB of 1 GiB  210.0 MB/s  3 s left`.
fn progress_text(phase: &str, took: Span, moved: u64, (done, size): (u64, u64)) -> String {
    let permille = u64::try_from(u128::from(done) * 1000 / u128::from(size.max(1))).unwrap_or(1000);
    let filled = permille * CELLS / 1000;
    let bar: String = (0..CELLS).map(|cell| if cell < filled { '█' } else { '░' }).collect();
    let left = match moved {
        0 => String::new(),
        _ => {
            let left = u128::from(took.ns) * u128::from(size - done.min(size)) / u128::from(moved);
            format!("  {} s left", (left / 1_000_000_000).max(1))
        }
    };
    format!(
        "{phase:<9} {bar} {:>3}.{} %  {} of {}  {}{left}",
        permille / 10,
        permille % 10,
        bytes_text(done),
        bytes_text(size),
        rate_text(moved, took),
    )
}

/// `210.0 MB/s`.
pub(in crate::commands) fn rate_text(moved: u64, took: Span) -> String {
    let per_second = u128::from(moved) * 1_000_000_000 / u128::from(took.ns.max(1));
    let tenths = per_second / 100_000;
    format!("{}.{} MB/s", tenths / 10, tenths % 10)
}

/// `512 MiB`, or the exact byte count if it is not a whole number of a unit.
pub(in crate::commands) fn bytes_text(count: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.iter().find(|(_, shift)| count >> shift > 0) {
        Some((unit, shift)) => {
            let tenths = (u128::from(count) * 10) >> shift;
            match tenths % 10 {
                0 => format!("{} {unit}", tenths / 10),
                part => format!("{}.{part} {unit}", tenths / 10),
            }
        }
        None => format!("{count} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::{ProgressBar, bytes_text, progress_text, rate_text};

    fn instant_at_ms(ms: u64) -> Instant {
        Instant { ns: ms * 1_000_000 }
    }

    #[test]
    fn progress_line_shows_amount_rate_and_remaining_time() {
        let text = progress_text("copying", Span::from_secs(2), 256 << 20, (512 << 20, 1 << 30));
        assert_eq!(
            text,
            "copying   ████████████░░░░░░░░░░░░  50.0 %  512 MiB of 1 GiB  134.2 MB/s  4 s left"
        );
        let text = progress_text("copying", Span::from_secs(2), 0, (0, 0));
        assert!(text.ends_with("0.0 %  0 bytes of 0 bytes  0.0 MB/s"), "{text}");
    }

    #[test]
    fn terminal_line_is_redrawn_and_a_file_gets_periodic_lines() {
        for (is_terminal, expected) in [(true, 100), (false, 1)] {
            let mut line = ProgressBar::new(is_terminal, instant_at_ms(0));
            let mut count = 0;
            for ms in 0..10_000 {
                let mut out = Vec::new();
                line.update("copying", instant_at_ms(ms), (ms, 10_000), &mut out);
                count += usize::from(!out.is_empty());
            }
            assert_eq!(count, expected, "terminal: {is_terminal}");
            let mut out = Vec::new();
            line.clear(&mut out);
            assert_eq!(out.is_empty(), !is_terminal);
            line.clear(&mut out);
            assert!(out.len() < 10, "it is taken away once");
        }
    }

    #[test]
    fn displayed_amounts_are_rounded_down() {
        assert_eq!((bytes_text(1023), bytes_text(1536)), ("1023 bytes".into(), "1.5 KiB".into()));
        assert_eq!(bytes_text(u64::MAX), "16777215.9 TiB");
        assert_eq!(rate_text(1_000_000, Span::from_secs(1)), "1.0 MB/s");
        assert_eq!(rate_text(1, Span::default()), "1000.0 MB/s");
    }
}
