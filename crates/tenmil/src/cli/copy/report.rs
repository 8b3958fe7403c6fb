//! What is said of a copy when it has ended.

use std::fmt::Write as _;

use base::{Durability, Span};
use serde_json::json;

use super::line::{bytes, rate};
use crate::copy::{Comparison, Ending, Tally};

/// A copy that has ended, one way or the other.
pub(super) struct Report {
    pub(super) source: String,
    pub(super) target: String,
    pub(super) size_bytes: u64,
    /// Where it went on.
    pub(super) resumed_at: u64,
    pub(super) tally: Tally,
    pub(super) ending: Option<Ending>,
    pub(super) comparison: Option<Comparison>,
    pub(super) durability: Durability,
    /// How long the copying took, without the comparing.
    pub(super) took: Span,
}

/// Ranges that are named.
const RANGES_MAX: usize = 10;

impl Report {
    /// Whether all is on the target.
    pub(super) fn is_copied(&self) -> bool {
        self.tally.until == self.size_bytes
    }

    pub(super) fn as_text(&self) -> String {
        let Tally { until, read, written, zeroed, kept, lost, .. } = &self.tally;
        let mut text = String::new();
        let took = self.took.as_secs_f64();
        let _ = writeln!(
            text,
            "{} of {} copied in {took:.1} s ({})",
            bytes(*until),
            bytes(self.size_bytes),
            rate(until.saturating_sub(self.resumed_at), self.took)
        );
        let _ = writeln!(
            text,
            "  read {}, written {}, made zeroes {}, zeroes already {}",
            bytes(*read),
            bytes(*written),
            bytes(*zeroed),
            bytes(*kept)
        );
        let _ = writeln!(text, "  {}", self.promise());
        for range in lost.iter().take(RANGES_MAX) {
            let (first, last) = (range.start, range.end - 1);
            let _ = writeln!(text, "  could not be read, zeroes now: bytes {first} to {last}");
        }
        if lost.len() > RANGES_MAX {
            let _ = writeln!(text, "  and {} ranges more", lost.len() - RANGES_MAX);
        }
        if let Some(comparison) = &self.comparison {
            let _ = writeln!(text, "  {}", compared(comparison, self.ending.is_none()));
        }
        if self.ending == Some(Ending::Interrupted) {
            text += "  interrupted\n";
        }
        text
    }

    /// What the target makes of what it was given.
    fn promise(&self) -> &'static str {
        match (self.durability, self.tally.is_flushed) {
            (Durability::None, _) => "nothing survives: the target is memory",
            (_, true) => "flushed: all of it is on stable media",
            (Durability::Stable, false) if self.is_copied() => {
                "no flush is needed: an answered write is stable"
            }
            _ => "not all of it is flushed: what is copied survives, what came after may not",
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
            "kept_zero_bytes": tally.kept,
            "lost_ranges": lost,
            "flushed": tally.is_flushed,
            "durability": self.promise(),
            "took_s": self.took.as_secs_f64(),
            "ended_early": self.ending.as_ref().map(ToString::to_string),
            "verified": compared,
        });
        format!("{document:#}\n")
    }
}

fn compared(found: &Comparison, is_whole: bool) -> String {
    let Comparison { compared, block, different, first } = found;
    let amount = bytes(*compared);
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
    use base::{Durability, Span};

    use super::Report;
    use crate::copy::{Comparison, Ending, Tally};

    fn report() -> Report {
        Report {
            source: "ram:1m".into(),
            target: "ram:2m".into(),
            size_bytes: 1 << 20,
            resumed_at: 1 << 19,
            tally: Tally { until: 1 << 20, is_flushed: true, ..Tally::default() },
            ending: None,
            comparison: None,
            durability: Durability::VolatileCache,
            took: Span::from_secs(1),
        }
    }

    #[test]
    fn what_was_had_is_said_as_it_is() {
        let text = report().as_text();
        assert!(text.starts_with("1 MiB of 1 MiB copied in 1.0 s (0.5 MB/s)\n"), "{text}");
        assert!(text.contains("flushed: all of it is on stable media"), "{text}");
        let memory = Report { durability: Durability::None, ..report() };
        assert!(memory.as_text().contains("nothing survives"));
        let unflushed = || Tally { is_flushed: false, ..report().tally };
        let stable = Report { durability: Durability::Stable, tally: unflushed(), ..report() };
        assert!(stable.as_text().contains("no flush is needed"));
        let part = Tally { until: 512, ..unflushed() };
        let part = Report { durability: Durability::Stable, tally: part, ..report() };
        assert!(part.as_text().contains("not all of it is flushed"));
    }

    #[test]
    fn a_difference_and_what_was_lost_are_named() {
        let comparison =
            Comparison { compared: 1 << 20, block: 512, different: 3, first: Some(512) };
        let lost = (0..12).map(|index| index * 2..index * 2 + 1).collect();
        let tally = Tally { lost, ..report().tally };
        let comparison = Some(comparison);
        let text = Report { tally, comparison, ..report() }.as_text();
        assert!(text.contains("3 blocks of 512 bytes differ, the first at byte 512"), "{text}");
        assert!(text.contains("zeroes now: bytes 18 to 18") && text.contains("and 2 ranges more"));
        let ending = Some(Ending::Interrupted);
        let early = Report { ending, comparison: Some(Comparison::default()), ..report() };
        let text = early.as_text();
        assert!(text.ends_with("the same as far as it went, 0 bytes\n  interrupted\n"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&early.as_json()).unwrap();
        assert_eq!(
            (&json["ended_early"], &json["copied_bytes"]),
            (&"interrupted".into(), &(1 << 20).into())
        );
    }
}
