//! HTML report: one self-contained page.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::format::{scaled, show_byte_rate, show_count, show_iops, show_ns, show_ns_f64};
use super::page_style::STYLE;
use super::{baseline_line, error_rows, how_it_ended, latency_row, notes, plot, workload_line};
use crate::perf::outcome::{Baseline, DeviceOutcome, PerfOutcome, per_second};
use tenmil_base::text::show_size;

/// Renders the page. `command` is the command line that repeats the run.
pub fn render(outcome: &PerfOutcome, command: &str) -> String {
    let title = format!("tenmil perf: {}", show_iops(outcome.iops()));
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body { main {
                (header(outcome))
                (tiles(outcome))
                (trouble(outcome))
                (throughput(outcome))
                (latency(outcome))
                (null_blk(outcome))
                (devices(outcome))
                div.pair { (techniques(outcome)) (environment(outcome)) }
                (recommendations(outcome))
                footer {
                    "To repeat: " code { (command) }
                }
            } }
        }
    };
    page.into_string()
}

fn header(outcome: &PerfOutcome) -> Markup {
    let (number, prefix) = scaled(outcome.iops());
    let seconds = outcome.elapsed.as_secs_f64();
    html! {
        header {
            div.name { b { "tenmil perf" } " " (env!("CARGO_PKG_VERSION")) }
            h1 { (number) " " (prefix) " " small { "I/Os per second" } }
            p.workload { (workload_line(&outcome.options)) ", " (format!("{seconds:.2}")) " s" }
            @for sentence in notes(outcome) { p.note { (sentence) } }
            @for warning in outcome.warnings() { p.warning { "warning: " (warning) "." } }
            @if let Some(ended) = how_it_ended(outcome) { p.warning { (ended) } }
        }
    }
}

fn tiles(outcome: &PerfOutcome) -> Markup {
    let turns = &outcome.turns;
    let cycles = outcome.tsc_per_io().map(|ticks| format!("{ticks:.0} TSC cycles"));
    let p50 = show_ns(outcome.latency.percentile(500_000));
    let p9999 = show_ns(outcome.latency.percentile(999_900));
    html! {
        div.tiles {
            (tile("per I/O and thread", &show_ns_f64(outcome.ns_per_io()), cycles.as_deref()))
            @if let (Some(ratio), Some(baseline)) = (outcome.baseline_ratio(), outcome.baseline) {
                div.tile title=[baseline_line(outcome)] {
                    div.what { "of the " (limit_words(baseline.limit).0) }
                    div.value { (format!("{ratio:.2}")) }
                    div.meter { i style=(width(ratio)) {} }
                    div.more { (show_iops(baseline.iops)) (limit_words(baseline.limit).1) }
                }
            }
            (tile("median latency", &p50, Some(&format!("p99.99 {p9999}"))))
            (tile(
                "doorbells per I/O",
                &format!("{:.3}", turns.doorbells_per_io()),
                Some(&format!("{:.2} completions per poll", turns.completions_per_poll())),
            ))
            @if outcome.moves_data() {
                (tile("data", &show_byte_rate(outcome.bytes_per_second()), None))
            }
            @if let Some(ram) = &outcome.ram {
                (tile(
                    "with data transfers",
                    &show_iops(ram.iops()),
                    Some(&format!("{} over {}", show_byte_rate(ram.bytes_per_second()), ram.uri)),
                ))
            }
        }
    }
}

/// Name of a baseline, and the explanation of its rate.
fn limit_words(limit: Baseline) -> (&'static str, &'static str) {
    match limit {
        Baseline::Ring => ("ring micro-benchmark", " is the upper bound of these rings"),
        Baseline::Copies => ("copy micro-benchmark", " is the rate of the copy micro-benchmark"),
        Baseline::Messages(_) => ("bare messages", " is what bare messages over TCP do here"),
    }
}

fn tile(what: &str, value: &str, more: Option<&str>) -> Markup {
    html! {
        div.tile {
            div.what { (what) }
            div.value { (value) }
            @if let Some(more) = more { div.more { (more) } }
        }
    }
}

fn trouble(outcome: &PerfOutcome) -> Markup {
    html! {
        @if outcome.totals.errors > 0 {
            section {
                h2.bad { (show_count(outcome.totals.errors)) " errors" }
                table { tbody {
                    @for (status, count) in error_rows(outcome) {
                        tr { th { (status) } td { (show_count(count)) } }
                    }
                } }
            }
        }
        @if let Some(verified) = &outcome.verified {
            section {
                h2.bad[!verified.is_clean()] { "Verification" }
                (verified.words())
            }
        }
        @if let Some(open) = &outcome.open_loop {
            section {
                h2 { "Open loop" }
                (show_iops(outcome.iops())) " of " (show_count(open.intended_per_second))
                " I/Os per second, " (show_count(open.delayed)) " started late, "
                (show_count(open.backlog)) " still waiting at the end"
            }
        }
    }
}

fn throughput(outcome: &PerfOutcome) -> Markup {
    let drawing = plot::throughput(&outcome.series);
    html! {
        @if !drawing.is_empty() {
            section {
                h2 { "Throughput" small { "I/Os per second over time" } }
                (PreEscaped(drawing))
            }
        }
    }
}

fn latency(outcome: &PerfOutcome) -> Markup {
    let error = show_ns(outcome.time_stamp_error.ns);
    let start = if outcome.options.rate.is_some() { "intended start" } else { "submission" };
    html! {
        section {
            h2 {
                "Latency"
                small { "from " (start) ", accurate to within " (error)
                    "; height is the share of I/Os" }
            }
            (PreEscaped(plot::distribution(&outcome.latency)))
            table {
                thead { tr {
                    th { }
                    @for title in ["mean", "p50", "p99", "p99.9", "p99.99", "max"] {
                        th.number { (title) }
                    }
                } }
                tbody {
                    @if outcome.latency_by_operation.len() != 1 {
                        (latency_cells("all", latency_row(&outcome.latency)))
                    }
                    @for (operation, latency) in &outcome.latency_by_operation {
                        (latency_cells(operation.name(), latency_row(latency)))
                    }
                    @if let Some(ram) = &outcome.ram {
                        (latency_cells("over ram", latency_row(&ram.latency)))
                    }
                }
            }
        }
    }
}

fn latency_cells(name: &str, cells: [String; 6]) -> Markup {
    html! {
        tr { th { (name) } @for cell in cells { td.number { (cell) } } }
    }
}

fn null_blk(outcome: &PerfOutcome) -> Markup {
    html! {
        @if let Some(compared) = &outcome.null_blk {
            section {
                h2 {
                    "Block layer"
                    small { "I/Os per second over a null device by number of threads, depth "
                        (compared.depth) ", " (compared.time.as_secs_f64()) " s each" }
                }
                (PreEscaped(plot::by_threads(compared)))
                table {
                    thead { tr {
                        th { "mode" } th.number { "threads" } th.number { "IOPS" }
                        th.number { "waiting for the lock" }
                    } }
                    tbody { @for row in &compared.rows { @for point in &row.points {
                        tr {
                            td { (row.words()) }
                            td.number { (point.threads) }
                            td.number { (show_iops(point.iops)) }
                            td.number { (format!("{:.1} %", point.lock_wait_share * 100.0)) }
                        }
                    } } }
                }
            }
        }
    }
}

fn devices(outcome: &PerfOutcome) -> Markup {
    let most = outcome.devices.iter().map(|device| device.counts.ios).max().unwrap_or(0);
    html! {
        section {
            h2 { "Devices" small { (outcome.devices.len()) } }
            table {
                thead { tr {
                    th { "name" } th { "what it is" } th { "a write is" } th.number { "size" } th.number { "block" }
                    th.number { "IOPS" } th.number { "median" } th.number { "p99.9" }
                    th.number { "errors" } th { }
                } }
                tbody { @for device in &outcome.devices { (device_row(outcome, device, most)) } }
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "the length of a bar")]
fn device_row(outcome: &PerfOutcome, device: &DeviceOutcome, most: u64) -> Markup {
    let errors = device.counts.errors;
    let part = device.counts.ios as f64 / most.max(1) as f64;
    html! {
        tr {
            td { code { (device.name) } }
            td { (device.model) }
            td { (device.durability.describe()) }
            td.number { (show_size(device.size_bytes)) }
            td.number { (device.block_size) }
            td.number { (show_iops(per_second(device.counts.ios, outcome.elapsed))) }
            td.number { (show_ns(device.latency.percentile(500_000))) }
            td.number { (show_ns(device.latency.percentile(999_000))) }
            td.number.bad[errors > 0] { (show_count(errors)) }
            td.bar { i style=(width(part)) {} }
        }
    }
}

fn techniques(outcome: &PerfOutcome) -> Markup {
    html! {
        section {
            h2 { "Fast path" small { "each has its switch" } }
            table.wraps { tbody {
                @for technique in &outcome.techniques {
                    tr {
                        th { (technique.name) }
                        td { (technique.setting) }
                        td { code { (technique.switch) } }
                    }
                }
            } }
        }
    }
}

fn environment(outcome: &PerfOutcome) -> Markup {
    html! {
        section {
            h2 { "Environment" }
            table { tbody {
                @for (name, value) in outcome.environment.rows() {
                    tr { th { (name) } td { (value) } }
                }
                @for place in &outcome.threads {
                    tr {
                        th { (place.role) " thread" }
                        td {
                            @match place.core {
                                Some(core) => { "core " (core) }
                                None => "not pinned",
                            }
                        }
                    }
                }
            } }
        }
    }
}

fn recommendations(outcome: &PerfOutcome) -> Markup {
    let recommendations = outcome.environment.recommendations();
    html! {
        @if !recommendations.is_empty() {
            section {
                h2 { "To go faster" }
                ul { @for recommendation in recommendations { li { (in_code(&recommendation)) } } }
            }
        }
    }
}

/// Renders text between backquotes as code.
pub fn in_code(text: &str) -> Markup {
    html! {
        @for (index, part) in text.split('`').enumerate() {
            @if index % 2 == 1 { code { (part) } } @else { (part) }
        }
    }
}

/// Width of a bar as CSS.
fn width(part: f64) -> String {
    format!("width:{:.1}%", part.clamp(0.0, 1.0) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::{in_code, render};
    use crate::perf::report::sample::{bad_sample, sample};

    #[test]
    fn the_page_needs_nothing_but_itself() {
        for outcome in [sample(), bad_sample()] {
            let page = render(&outcome, "tenmil perf");
            for foreign in ["src=", "href=", "@import", "url(", "<script", "<link", "https://"] {
                assert!(!page.contains(foreign), "{foreign}");
            }
            let without_name = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
            assert!(!without_name.contains("http://"));
        }
    }

    #[test]
    fn every_part_of_the_report_is_on_the_page() {
        let page = render(&bad_sample(), "tenmil perf -t 4");
        for part in [
            "No data are transferred",
            "78.5 M",
            "of the ring micro-benchmark",
            "p99.99",
            "--no-doorbell-batching",
            "emu:null #20",
            "Fast One",
            "To go faster",
            "12 errors",
            "Unrecovered Read Error (SCT 0x2, SC 0x81)",
            "2 torn",
            "Interrupted",
            "tenmil perf -t 4",
            "core 1",
        ] {
            assert!(page.contains(part), "{part} is missing");
        }
        assert_eq!(page.matches("<svg").count(), 3);
    }

    #[test]
    fn the_plots_take_their_colours_from_the_style_sheet() {
        let page = render(&sample(), "tenmil perf");
        assert!(page.contains("stroke:var(--accent)") && page.contains("fill:var(--soft)"));
        for left in ["\"#01", "\"#02", "\"#03", "\"#04", "\"#05", "\"#06"] {
            assert!(!page.contains(left), "{left} was not replaced");
        }
    }

    #[test]
    fn names_cannot_break_out_of_the_page() {
        let mut outcome = sample();
        outcome.devices[0].model = "<script>alert(1)</script>".into();
        let page = render(&outcome, "tenmil perf 'emu:file:</style><b>'");
        assert!(!page.contains("<script>") && !page.contains("<b>'"));
    }

    #[test]
    fn what_stands_between_backquotes_is_code() {
        assert_eq!(in_code("run `x <y` now").into_string(), "run <code>x &lt;y</code> now");
    }

    #[test]
    fn a_run_without_a_single_io_is_a_page_too() {
        let mut outcome = sample();
        outcome.latency = tenmil_base::Histogram::new();
        outcome.series.ios.clear();
        outcome.totals.ios = 0;
        outcome.null_blk = None;
        assert_eq!(render(&outcome, "x").matches("<svg").count(), 0);
    }
}
