//! Text report.

use super::verdict_counts_text;
use crate::reproduce::ReproduceRun;

/// Renders one line per claim, and the summary.
pub fn render_text(evidence: &ReproduceRun, written: &[String]) -> String {
    let mut text = String::new();
    for experiment_result in &evidence.experiment_results {
        for (index, row) in experiment_result.criterion_rows().iter().enumerate() {
            let name = if index == 0 { experiment_result.experiment.name } else { "" };
            text += &format!("{name:<24}{:<16}{}\n", row.verdict.text(), row.question);
            text += &format!("{:<40}{}", "", row.found);
            text += &format!("; expected {}\n", row.criterion);
        }
    }
    text += &format!("\n{}.\n", verdict_counts_text(evidence));
    let saved = evidence
        .experiment_results
        .iter()
        .filter(|experiment_result| experiment_result.is_reused)
        .count();
    if saved > 0 {
        text += &format!("{saved} of them are results of an earlier run.\n");
    }
    for warning in evidence.warnings() {
        text += &format!("warning: {warning}.\n");
    }
    for path in written {
        text += &format!("Written: {path}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::render_text;
    use crate::reproduce::report::sample_run::sample_run;

    #[test]
    fn every_claim_has_a_verdict_and_a_number_only_if_measured() {
        let text = render_text(&sample_run(), &["out/report.html".into()]);
        let line = |name: &str| {
            let mut lines = text.lines().skip_while(|line| !line.starts_with(name));
            (lines.next().unwrap().to_owned(), lines.next().unwrap().trim().to_owned())
        };
        let (holds, by) = line("slot-layout");
        assert!(holds.contains("holds"), "{holds}");
        assert_eq!(by, "2.00 times (2.00–2.00); expected at least 1.20 times");
        assert!(line("block-layer").0.contains("does not hold"));
        let (open, why) = line("random-block");
        assert!(open.contains("not conclusive"), "{open}");
        assert!(why.starts_with("0 of 3 rounds count, expected 3; other programs used"), "{why}");
        assert_eq!(line("tcp-busy-poll").1.split(';').next(), Some("no <card> here"));
        assert!(
            text.contains("1 of 4 claims hold here, 1 do not, 1 could not be decided, 1 cannot")
        );
        assert!(text.contains("1 of them are results of an earlier run"));
        assert!(text.ends_with("Written: out/report.html\n"));
    }
}
