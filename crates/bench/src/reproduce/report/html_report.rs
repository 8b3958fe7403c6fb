//! HTML report: one self-contained page.

use crate::experiment::{
    COUNTED_LEAST, LOST_MAX, MedianAndRange, Metric, OTHERS_MAX, STEAL_MAX, TRIMMED_FROM, Variant,
    Verdict, median_and_range,
};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{VERDICTS, format_median_and_range, format_value, verdict_counts_text};
use crate::perf::report::plot::{self, PlotRow};
use crate::perf::report::{STYLE, machine_rows, render_code_spans};
use crate::reproduce::experiments::SOURCES;
use crate::reproduce::{BenchTask, ExperimentResult, ReproduceRun};

/// Style rules that the page of `perf` does not need.
const MORE_STYLE: &str = r"
h1.claims { font-size: 44px; }
a { color: inherit; }
.verdict { display: inline-block; padding: 1px 9px; border-radius: 9px; font-size: 13px;
  font-weight: 600; white-space: nowrap; border: 1px solid currentColor; }
.verdict.holds { color: #2b8a3e; } .verdict.does-not-hold { color: var(--bad); }
.verdict.open { color: var(--mark); } .verdict.missing { color: var(--muted); }
@media (prefers-color-scheme: dark) { .verdict.holds { color: #69db7c; } }
table.summary td { vertical-align: top; } table.summary .name { white-space: nowrap; }
section h2 .verdict { margin-left: 10px; }
.limits { color: var(--muted); font-size: 13.5px; margin: 10px 0 0; }
td code { font-size: 12px; overflow-wrap: anywhere; }
";

/// Renders the page.
pub fn render_page(evidence: &ReproduceRun) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "tenmil reproduce: " (verdict_counts_text(evidence)) }
                style { (PreEscaped(STYLE)) (PreEscaped(MORE_STYLE)) }
            }
            body { main {
                (page_header(evidence))
                (summary_section(evidence))
                @for experiment_result in &evidence.experiment_results { (experiment_section(evidence, experiment_result)) }
                div.pair { (machine_section(evidence)) (method_section(evidence)) }
                footer { "To repeat: " code { (evidence.command) } }
            } }
        }
    };
    page.into_string()
}

fn page_header(evidence: &ReproduceRun) -> Markup {
    let effort = &evidence.effort;
    html! {
        header {
            div.name { b { "tenmil reproduce" } " " (env!("CARGO_PKG_VERSION")) }
            h1.claims {
                (evidence.claim_count_with_verdict(Verdict::Confirmed)) " of " (evidence.experiment_results.len()) " "
                small { "claims hold on this machine" }
            }
            p.workload {
                "A " (effort.name) " run: " (effort.rounds) " rounds of each comparison, "
                (effort.trial_time.as_secs_f64()) " s for each side in each round"
            }
            p.note {
                "tenmil is a user-space NVMe stack. The claims are those of five talks and articles \
                 on such stacks; each was tried here, on the machine below, and not on theirs. \
                 There was no SSD and no network card in it: SSDs are emulated by a second thread, \
                 connections go over loopback. Each section names what that cannot show."
            }
            @for warning in evidence.warnings() { p.warning { "warning: " (warning) "." } }
        }
        div.tiles {
            @for verdict in VERDICTS {
                div.tile {
                    div.what { (verdict.text()) }
                    div.value { (evidence.claim_count_with_verdict(verdict)) }
                }
            }
        }
    }
}

fn summary_section(evidence: &ReproduceRun) -> Markup {
    html! {
        section {
            h2 { "Summary" small { "a claim, what they saw, and what was found here" } }
            table.summary {
                thead { tr {
                    th { "experiment" } th { "claim" } th { "seed" } th { "what they saw" }
                    th { "verdict here" } th { "found here: median (smallest–largest)" }
                } }
                tbody { @for experiment_result in &evidence.experiment_results { (summary_row(experiment_result)) } }
            }
            p.limits {
                "Seeds: "
                @for (index, seed) in SOURCES.iter().enumerate() {
                    @if index > 0 { "; " }
                    (index + 1) ": " (seed)
                }
                "."
            }
        }
    }
}

fn summary_row(experiment_result: &ExperimentResult) -> Markup {
    let experiment = &experiment_result.experiment;
    let rows = experiment_result.criterion_rows();
    html! {
        tr {
            td.name { a href={ "#" (experiment.name) } { (experiment.name) } }
            td { (experiment.claim) }
            td { (experiment_result.source_numbers()) }
            td { (experiment.seen) }
            td { (verdict_badge(experiment_result.claim_verdict())) }
            td { @if let Some(row) = rows.first() { (render_code_spans(&row.found)) } }
        }
    }
}

fn verdict_badge(verdict: Verdict) -> Markup {
    let class = match verdict {
        Verdict::Confirmed => "verdict holds",
        Verdict::Refuted => "verdict does-not-hold",
        Verdict::Inconclusive => "verdict open",
        Verdict::NotMeasured => "verdict missing",
    };
    html! { span class=(class) { (verdict.text()) } }
}

fn experiment_section(evidence: &ReproduceRun, experiment_result: &ExperimentResult) -> Markup {
    let experiment = &experiment_result.experiment;
    let saved = if experiment_result.is_reused { ", measured by an earlier run" } else { "" };
    html! {
        section id=(experiment.name) {
            h2 {
                (experiment.name) (verdict_badge(experiment_result.claim_verdict()))
                small { "seed " (experiment_result.source_numbers()) (saved) }
            }
            p { (experiment.claim) " They saw: " (experiment.seen) "." }
            (criteria_table(experiment_result))
            @if let Some(figure) = experiment.figures.first() { (metric_plot(experiment_result, figure)) }
            (variants_table(evidence, experiment_result))
            p.limits { (render_code_spans(experiment.limits)) }
        }
    }
}

fn criteria_table(experiment_result: &ExperimentResult) -> Markup {
    html! {
        table {
            thead { tr {
                th { "question" } th { "expected" } th { "found" } th { "verdict" }
            } }
            tbody { @for row in experiment_result.criterion_rows() {
                tr {
                    td { (row.question) }
                    td { (row.criterion) }
                    td { (render_code_spans(&row.found)) }
                    td { (verdict_badge(row.verdict)) }
                }
            } }
        }
    }
}

/// Plot of the values of every round and variant.
fn metric_plot(experiment_result: &ExperimentResult, figure: &Metric) -> Markup {
    let row = |side: &Variant<BenchTask>| {
        let values = experiment_result.record.metric_in_each_round(side.label, figure.key);
        (!values.is_empty()).then_some(PlotRow { label: side.label, values })
    };
    let rows: Vec<PlotRow<'_>> =
        experiment_result.experiment.sides.iter().filter_map(row).collect();
    let drawing = plot::rounds_plot(&rows, &|value| format_value(figure.unit, *value));
    html! {
        @if !drawing.is_empty() {
            p.limits { (figure.title) ", a dot for each round, a bar at the median" }
            (PreEscaped(drawing))
        }
    }
}

fn variants_table(evidence: &ReproduceRun, experiment_result: &ExperimentResult) -> Markup {
    let experiment = &experiment_result.experiment;
    let seconds = evidence.effort.trial_time.as_secs_f64();
    let cores = &evidence.machine.allowed;
    html! {
        table {
            thead { tr {
                th { "side" }
                @for figure in experiment.figures { th.number { (figure.title) } }
                th { "how to run it manually" }
            } }
            tbody { @for side in &experiment.sides {
                tr {
                    td { (side.label) }
                    @match experiment_result.record.missing.get(side.label) {
                        Some(why) => td colspan=(experiment.figures.len()) { (render_code_spans(why)) },
                        None => @for figure in experiment.figures {
                            td.number { (metric_cell(experiment_result, side.label, figure)) }
                        },
                    }
                    td { @for command in side.work.command_lines(cores, seconds) {
                        code { (command) } br;
                    } }
                }
            } }
        }
    }
}

fn metric_cell(experiment_result: &ExperimentResult, label: &str, figure: &Metric) -> String {
    let values: Option<MedianAndRange> =
        median_and_range(&experiment_result.record.metric_in_each_round(label, figure.key));
    values.map_or_else(String::new, |values| format_median_and_range(figure.unit, &values))
}

fn machine_section(evidence: &ReproduceRun) -> Markup {
    html! {
        section {
            h2 { "Environment" }
            table { tbody {
                @for (name, value) in machine_rows(&evidence.machine) {
                    tr { th { (name) } td { (value) } }
                }
            } }
            @let recommendations = evidence.machine.recommendations();
            @if !recommendations.is_empty() {
                p.limits { "To go faster, or `tenmil doctor`:" }
                ul { @for recommendation in recommendations { li { (render_code_spans(&recommendation)) } } }
            }
        }
    }
}

fn method_section(evidence: &ReproduceRun) -> Markup {
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    html! {
        section {
            h2 { "How a verdict is made" }
            ul {
                li { "The sides of a comparison alternate, A B A B …, so that a machine that becomes \
                      faster or slower meanwhile does so for all of them." }
                li { "Sides are compared within a round: a ratio for each round, then the median of \
                      the ratios." }
                li { "A round is disturbed if the host gave more than " (percent(STEAL_MAX)) " of the \
                      processors' time to other virtual machines, or other programs here used more than "
                     (percent(OTHERS_MAX)) " of it; up to " (evidence.effort.spare) " more are run \
                      beside such. In a disturbed round a side has lost at most what others had of \
                      one processor, and counts as all that it may have been without them. It does \
                      not count at all if that was more than " (percent(LOST_MAX)) ", or if the \
                      question is about the slowest few." }
                li { "If all rounds are on one side of the criterion, or all but one at each end where \
                      there are " (TRIMMED_FROM) " or more, the claim " b { "holds" } " or "
                     b { "does not hold" } " here. If they are on both sides, or may be, or if fewer \
                      than " (COUNTED_LEAST) " count, it is " b { "not conclusive" } "." }
                li { "What takes a tool, a right or a device that is not there is "
                     b { "not shown here" } ", with what it takes." }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::render_page;
    use crate::reproduce::report::sample_run::sample_run;

    #[test]
    fn page_is_self_contained() {
        let page = render_page(&sample_run());
        for foreign in ["src=", "@import", "url(", "<script", "<link", "https://"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        let links = page.matches("href=\"").count();
        assert_eq!(links, page.matches("href=\"#").count(), "links lead to the page itself");
        let without_name = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
        assert!(!without_name.replace("tcp://", "").contains("http://"));
    }

    #[test]
    fn every_opened_element_is_closed() {
        let page = render_page(&sample_run());
        for element in ["section", "table", "tr", "td", "th", "svg", "p", "ul", "li", "div", "span"]
        {
            let opened = page.matches(&format!("<{element}>")).count()
                + page.matches(&format!("<{element} ")).count();
            assert_eq!(opened, page.matches(&format!("</{element}>")).count(), "{element}");
        }
    }

    #[test]
    fn every_link_of_the_summary_has_a_target() {
        let page = render_page(&sample_run());
        for name in ["slot-layout", "block-layer", "random-block", "tcp-busy-poll"] {
            assert!(page.contains(&format!("href=\"#{name}\"")), "{name}");
            assert!(page.contains(&format!("id=\"{name}\"")), "{name}");
        }
    }

    #[test]
    fn page_contains_verdicts_numbers_and_reasons() {
        let page = render_page(&sample_run());
        for part in [
            "claims hold on this machine",
            "2.00 times (2.00–2.00)",
            "does not hold",
            "0 of 3 rounds count, expected 3; other programs used up to 60 % of the machine",
            "no &lt;card&gt; here",
            "measured by an earlier run",
            "at least 1.20 times",
            "a loop of its own: crates/bench/src/experiment/micro_benchmark_loops/slot_layouts.rs",
            "Fast One",
            "How a verdict is made",
            "tenmil reproduce --quick --out",
        ] {
            assert!(page.contains(part), "{part} is missing");
        }
        // One plot for each experiment that was measured.
        assert_eq!(page.matches("<svg").count(), 3);
        assert!(!page.contains("'<b>'"), "a name broke out of the page");
    }
}
