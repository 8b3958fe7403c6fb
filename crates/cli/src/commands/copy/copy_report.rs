//! Report of a finished copy, as text and JSON.

use std::fmt::Write as _;

use serde_json::json;
use tenmil_base::{Durability, Span};

use super::progress_bar::{bytes_text, rate_text};
use crate::copy::{CompareResult, CopyAbort, CopyStats};

/// Summary of a copy that has ended, successfully or not.
pub(super) struct CopyReport {
    pub(super) source: String,
    pub(super) target: String,
    pub(super) size_bytes: u64,
    /// Byte offset at which the copy was resumed.
    pub(super) resumed_at: u64,
    pub(super) tally: CopyStats,
    pub(super) ending: Option<CopyAbort>,
    pub(super) comparison: Option<CompareResult>,
    pub(super) durability: Durability,
    /// Duration of the copy without the comparison.
    pub(super) took: Span,
}

/// Maximum number of ranges listed.
const RANGES_MAX: usize = 10;

impl CopyReport {
    /// Whether the target holds all data.
    pub(super) fn is_copied(&self) -> bool {
        self.tally.until == self.size_bytes
    }

    pub(super) fn as_text(&self) -> String {
        let CopyStats { until, read, written, zeroed, kept, lost, .. } = &self.tally;
        let mut text = String::new();
        let took = self.took.as_secs_f64();
        let _ = writeln!(
            text,
            "{} of {} copied in {took:.1} s ({})",
            bytes_text(*until),
            bytes_text(self.size_bytes),
            rate_text(until.saturating_sub(self.resumed_at), self.took)
        );
        let _ = writeln!(
            text,
            "  read {}, written {}, made zeroes {}, zeroes already {}",
            bytes_text(*read),
            bytes_text(*written),
            bytes_text(*zeroed),
            bytes_text(*kept)
        );
        let _ = writeln!(text, "  {}", self.durability_text());
        for range in lost.iter().take(RANGES_MAX) {
            let (first, last) = (range.start, range.end - 1);
            let _ = writeln!(text, "  could not be read, zeroes now: bytes {first} to {last}");
        }
        if lost.len() > RANGES_MAX {
            let _ = writeln!(text, "  and {} ranges more", lost.len() - RANGES_MAX);
        }
        if let Some(comparison) = &self.comparison {
            let _ = writeln!(text, "  {}", comparison_text(comparison, self.ending.is_none()));
        }
        if self.ending == Some(CopyAbort::Interrupted) {
            text += "  interrupted\n";
        }
        text
    }

    /// Durability of the copied data on the target.
    fn durability_text(&self) -> &'static str {
        match (self.durability, self.tally.is_flushed) {
            (Durability::NonPersistent, _) => {
                "volatile: the target is memory, and lost when the process exits"
            }
            (_, true) => "flushed: all of it is on stable media",
            (Durability::Persistent, false) if self.is_copied() => {
                "no flush is needed: completed writes are persistent"
            }
            _ => "not all of it is flushed: later data may be lost",
        }
    }

    pub(super) fn as_json(&self) -> String {
        let tally = &self.tally;
        let lost: Vec<[u64; 2]> = tally.lost.iter().map(|range| [range.start, range.end]).collect();
        let compared = self.comparison.as_ref().map(|found| {
            json!({
                "compared_bytes": found.compared,
                "block_size": found.block,
                "different_blocks": found.different,
                "first_different_byte": found.first,
            })
        });
        let document = json!({
            "source": self.source,
            "target": self.target,
            "size_bytes": self.size_bytes,
            "copied_bytes": tally.until,
            "resumed_at_byte": self.resumed_at,
            "read_bytes": tally.read,
            "written_bytes": tally.written,
            "zeroed_bytes": tally.zeroed,
            "already_zero_bytes": tally.kept,
            "lost_ranges": lost,
            "flushed": tally.is_flushed,
            "durability": self.durability_text(),
            "took_s": self.took.as_secs_f64(),
            "ended_early": self.ending.as_ref().map(ToString::to_string),
            "verified": compared,
        });
        format!("{document:#}\n")
    }
}

fn comparison_text(found: &CompareResult, is_whole: bool) -> String {
    let CompareResult { compared, block, different, first } = found;
    let amount = bytes_text(*compared);
    match first {
        Some(first) => format!(
            "compared: {different} blocks of {block} bytes differ, the first at byte {first}"
        ),
        None if is_whole => format!("compared: both hold the same {amount}"),
        None => format!("compared: the same as far as it went, {amount}"),
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Durability, Span};

    use super::CopyReport;
    use crate::copy::{CompareResult, CopyAbort, CopyStats};

    fn test_report() -> CopyReport {
        CopyReport {
            source: "ram:1m".into(),
            target: "ram:2m".into(),
            size_bytes: 1 << 20,
            resumed_at: 1 << 19,
            tally: CopyStats { until: 1 << 20, is_flushed: true, ..CopyStats::default() },
            ending: None,
            comparison: None,
            durability: Durability::VolatileCache,
            took: Span::from_secs(1),
        }
    }

    #[test]
    fn report_text_describes_the_copy() {
        let text = test_report().as_text();
        assert!(text.starts_with("1 MiB of 1 MiB copied in 1.0 s (0.5 MB/s)\n"), "{text}");
        assert!(text.contains("flushed: all of it is on stable media"), "{text}");
        let memory = CopyReport { durability: Durability::NonPersistent, ..test_report() };
        assert!(memory.as_text().contains("volatile: the target is memory"));
        let unflushed = || CopyStats { is_flushed: false, ..test_report().tally };
        let stable =
            CopyReport { durability: Durability::Persistent, tally: unflushed(), ..test_report() };
        assert!(stable.as_text().contains("no flush is needed"));
        let part = CopyStats { until: 512, ..unflushed() };
        let part = CopyReport { durability: Durability::Persistent, tally: part, ..test_report() };
        assert!(part.as_text().contains("not all of it is flushed"));
    }

    #[test]
    fn report_names_differences_and_lost_ranges() {
        let comparison =
            CompareResult { compared: 1 << 20, block: 512, different: 3, first: Some(512) };
        let lost = (0..12).map(|index| index * 2..index * 2 + 1).collect();
        let tally = CopyStats { lost, ..test_report().tally };
        let comparison = Some(comparison);
        let text = CopyReport { tally, comparison, ..test_report() }.as_text();
        assert!(text.contains("3 blocks of 512 bytes differ, the first at byte 512"), "{text}");
        assert!(text.contains("zeroes now: bytes 18 to 18") && text.contains("and 2 ranges more"));
        let ending = Some(CopyAbort::Interrupted);
        let early =
            CopyReport { ending, comparison: Some(CompareResult::default()), ..test_report() };
        let text = early.as_text();
        assert!(text.ends_with("the same as far as it went, 0 bytes\n  interrupted\n"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&early.as_json()).unwrap();
        assert_eq!(
            (&json["ended_early"], &json["copied_bytes"]),
            (&"interrupted".into(), &(1 << 20).into())
        );
    }
}
