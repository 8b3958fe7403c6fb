//! HTML report: one self-contained page.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::number_format::{
    scale_to_prefix, show_byte_rate, show_count, show_iops, show_ns, show_ns_f64,
};
use super::page_style::STYLE;
use super::{
    baseline_line, end_reason_text, error_rows, latency_texts, plot, result_notes, workload_line,
};
use crate::perf::perf_result::{Baseline, DeviceResult, PerfResult, per_second};
use tenmil_base::text::format_size;

/// Renders the page. `command` is the command line that repeats the run.
pub fn render_page(result: &PerfResult, command: &str) -> String {
    let title = format!("tenmil perf: {}", show_iops(result.iops()));
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
                (page_header(result))
                (headline_tiles(result))
                (error_section(result))
                (throughput_section(result))
                (latency_section(result))
                (null_blk_section(result))
                (device_section(result))
                div.pair { (driver_option_section(result)) (environment_section(result)) }
                (recommendation_section(result))
                footer {
                    "To repeat: " code { (command) }
                }
            } }
        }
    };
    page.into_string()
}

fn page_header(result: &PerfResult) -> Markup {
    let (number, prefix) = scale_to_prefix(result.iops());
    let seconds = result.elapsed.as_secs_f64();
    html! {
        header {
            div.name { b { "tenmil perf" } " " (env!("CARGO_PKG_VERSION")) }
            h1 { (number) " " (prefix) " " small { "I/Os per second" } }
            p.workload { (workload_line(&result.options)) ", " (format!("{seconds:.2}")) " s" }
            @for sentence in result_notes(result) { p.note { (sentence) } }
            @for warning in result.warnings() { p.warning { "warning: " (warning) "." } }
            @if let Some(ended) = end_reason_text(result) { p.warning { (ended) } }
        }
    }
}

fn headline_tiles(result: &PerfResult) -> Markup {
    let counters = &result.counters;
    let cycles = result.tsc_per_io().map(|ticks| format!("{ticks:.0} TSC cycles"));
    let p50 = show_ns(result.latency.percentile(500_000));
    let p9999 = show_ns(result.latency.percentile(999_900));
    html! {
        div.tiles {
            (headline_tile("per I/O and thread", &show_ns_f64(result.thread_ns_per_io()), cycles.as_deref()))
            @if let (Some(ratio), Some(baseline)) = (result.baseline_ratio(), result.baseline) {
                div.tile title=[baseline_line(result)] {
                    div.what { "of the " (baseline_name_and_explanation(baseline.limit).0) }
                    div.value { (format!("{ratio:.2}")) }
                    div.meter { i style=(css_width(ratio)) {} }
                    @if result.is_above_baseline() {
                        div.more { (show_iops(baseline.iops)) ": a disturbed run, repeat it" }
                    } @else {
                        div.more { (show_iops(baseline.iops)) (baseline_name_and_explanation(baseline.limit).1) }
                    }
                }
            }
            (headline_tile("median latency", &p50, Some(&format!("p99.99 {p9999}"))))
            (headline_tile(
                "doorbells per I/O",
                &format!("{:.3}", counters.doorbells_per_io()),
                Some(&format!("{:.2} completions per poll", counters.completions_per_nonempty_poll())),
            ))
            @if result.transfers_data() {
                (headline_tile("data", &show_byte_rate(result.bytes_per_second()), None))
            }
            @if let Some(ram) = &result.ram {
                (headline_tile(
                    "with data transfers",
                    &show_iops(ram.iops()),
                    Some(&format!("{} over {}", show_byte_rate(ram.bytes_per_second()), ram.uri)),
                ))
            }
        }
    }
}

/// Name of a baseline, and the explanation of its rate.
fn baseline_name_and_explanation(limit: Baseline) -> (&'static str, &'static str) {
    match limit {
        Baseline::Ring => ("ring micro-benchmark", " is the upper bound of these rings"),
        Baseline::Copies => ("copy micro-benchmark", " is the rate of the copy micro-benchmark"),
        Baseline::Messages(_) => ("bare messages", " is what bare messages over TCP do here"),
    }
}

fn headline_tile(what: &str, value: &str, more: Option<&str>) -> Markup {
    html! {
        div.tile {
            div.what { (what) }
            div.value { (value) }
            @if let Some(more) = more { div.more { (more) } }
        }
    }
}

fn error_section(result: &PerfResult) -> Markup {
    html! {
        @if result.totals.errors > 0 {
            section {
                h2.bad { (show_count(result.totals.errors)) " errors" }
                table { tbody {
                    @for (status, count) in error_rows(result) {
                        tr { th { (status) } td { (show_count(count)) } }
                    }
                } }
            }
        }
        @if let Some(verified) = &result.verified {
            section {
                h2.bad[!verified.has_no_bad_blocks()] { "Verification" }
                (verified.text())
            }
        }
        @if let Some(open) = &result.open_loop {
            section {
                h2 { "Open loop" }
                (show_iops(result.iops())) " of " (show_count(open.intended_per_second))
                " I/Os per second, " (show_count(open.delayed)) " started late, "
                (show_count(open.backlog)) " still waiting at the end"
            }
        }
    }
}

fn throughput_section(result: &PerfResult) -> Markup {
    let drawing = plot::throughput_plot(&result.series);
    html! {
        @if !drawing.is_empty() {
            section {
                h2 { "Throughput" small { "I/Os per second over time" } }
                (PreEscaped(drawing))
            }
        }
    }
}

fn latency_section(result: &PerfResult) -> Markup {
    let error = show_ns(result.time_stamp_error.ns);
    let start = if result.options.rate.is_some() { "intended start" } else { "submission" };
    html! {
        section {
            h2 {
                "Latency"
                small { "from " (start) ", accurate to within " (error)
                    "; height is the share of I/Os" }
            }
            (PreEscaped(plot::latency_distribution_plot(&result.latency)))
            table {
                thead { tr {
                    th { }
                    @for title in ["mean", "p50", "p99", "p99.9", "p99.99", "max"] {
                        th.number { (title) }
                    }
                } }
                tbody {
                    @if result.latency_by_operation.len() != 1 {
                        (latency_cells("all", latency_texts(&result.latency)))
                    }
                    @for (operation, latency) in &result.latency_by_operation {
                        (latency_cells(operation.name(), latency_texts(latency)))
                    }
                    @if let Some(ram) = &result.ram {
                        (latency_cells("over ram", latency_texts(&ram.latency)))
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

fn null_blk_section(result: &PerfResult) -> Markup {
    html! {
        @if let Some(compared) = &result.null_blk {
            section {
                h2 {
                    "Block layer"
                    small { "I/Os per second over a null device by number of threads, depth "
                        (compared.depth) ", " (compared.time.as_secs_f64()) " s each" }
                }
                (PreEscaped(plot::iops_by_threads_plot(compared)))
                table {
                    thead { tr {
                        th { "mode" } th.number { "threads" } th.number { "IOPS" }
                        th.number { "waiting for the lock" }
                    } }
                    tbody { @for row in &compared.rows { @for point in &row.points {
                        tr {
                            td { (row.mode_text()) }
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

fn device_section(result: &PerfResult) -> Markup {
    let most = result.devices.iter().map(|device| device.counts.ios).max().unwrap_or(0);
    html! {
        section {
            h2 { "Devices" small { (result.devices.len()) } }
            table {
                thead { tr {
                    th { "name" } th { "what it is" } th { "a write is" } th.number { "size" } th.number { "block" }
                    th.number { "IOPS" } th.number { "median" } th.number { "p99.9" }
                    th.number { "errors" } th { }
                } }
                tbody { @for device in &result.devices { (device_row(result, device, most)) } }
            }
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "the length of a bar")]
fn device_row(result: &PerfResult, device: &DeviceResult, most: u64) -> Markup {
    let errors = device.counts.errors;
    let part = device.counts.ios as f64 / most.max(1) as f64;
    html! {
        tr {
            td { code { (device.name) } }
            td { (device.model) }
            td { (device.durability.describe()) }
            td.number { (format_size(device.size_bytes)) }
            td.number { (device.block_size) }
            td.number { (show_iops(per_second(device.counts.ios, result.elapsed))) }
            td.number { (show_ns(device.latency.percentile(500_000))) }
            td.number { (show_ns(device.latency.percentile(999_000))) }
            td.number.bad[errors > 0] { (show_count(errors)) }
            td.bar { i style=(css_width(part)) {} }
        }
    }
}

fn driver_option_section(result: &PerfResult) -> Markup {
    html! {
        section {
            h2 { "Fast path" small { "each has its switch" } }
            table.wraps { tbody {
                @for technique in &result.techniques {
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

fn environment_section(result: &PerfResult) -> Markup {
    html! {
        section {
            h2 { "Environment" }
            table { tbody {
                @for (name, value) in result.environment.table_rows() {
                    tr { th { (name) } td { (value) } }
                }
                @for place in &result.threads {
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

fn recommendation_section(result: &PerfResult) -> Markup {
    let recommendations = result.environment.recommendations();
    html! {
        @if !recommendations.is_empty() {
            section {
                h2 { "To go faster" }
                ul { @for recommendation in recommendations { li { (render_code_spans(&recommendation)) } } }
            }
        }
    }
}

/// Renders text between backquotes as code.
pub fn render_code_spans(text: &str) -> Markup {
    html! {
        @for (index, part) in text.split('`').enumerate() {
            @if index % 2 == 1 { code { (part) } } @else { (part) }
        }
    }
}

/// Width of a bar as CSS.
fn css_width(part: f64) -> String {
    format!("width:{:.1}%", part.clamp(0.0, 1.0) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::{render_code_spans, render_page};
    use crate::perf::report::sample_result::{failed_sample_result, sample_result};

    #[test]
    fn page_is_self_contained() {
        for result in [sample_result(), failed_sample_result()] {
            let page = render_page(&result, "tenmil perf");
            for foreign in ["src=", "href=", "@import", "url(", "<script", "<link", "https://"] {
                assert!(!page.contains(foreign), "{foreign}");
            }
            let without_name = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
            assert!(!without_name.contains("http://"));
        }
    }

    #[test]
    fn every_part_of_the_result_is_on_the_page() {
        let page = render_page(&failed_sample_result(), "tenmil perf -t 4");
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
    fn plots_use_colors_of_the_style_sheet() {
        let page = render_page(&sample_result(), "tenmil perf");
        assert!(page.contains("stroke:var(--accent)") && page.contains("fill:var(--soft)"));
        for left in ["\"#01", "\"#02", "\"#03", "\"#04", "\"#05", "\"#06"] {
            assert!(!page.contains(left), "{left} was not replaced");
        }
    }

    #[test]
    fn names_are_escaped() {
        let mut result = sample_result();
        result.devices[0].model = "<script>alert(1)</script>".into();
        let page = render_page(&result, "tenmil perf 'emu:file:</style><b>'");
        assert!(!page.contains("<script>") && !page.contains("<b>'"));
    }

    #[test]
    fn backquoted_text_is_rendered_as_code() {
        assert_eq!(
            render_code_spans("run `x <y` now").into_string(),
            "run <code>x &lt;y</code> now"
        );
    }

    #[test]
    fn run_without_any_io_is_rendered() {
        let mut result = sample_result();
        result.latency = tenmil_base::Histogram::new();
        result.series.ios.clear();
        result.totals.ios = 0;
        result.null_blk = None;
        assert_eq!(render_page(&result, "x").matches("<svg").count(), 0);
    }
}
