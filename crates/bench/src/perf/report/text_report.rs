//! Text report: headline, test, then all details.

use core::fmt::{self, Write};

use super::number_format::{show_byte_rate, show_count, show_iops, show_ns, show_ns_f64};
use super::{
    baseline_line, end_reason_text, error_rows, latency_texts, result_notes, workload_line,
};
use crate::perf::perf_result::PerfResult;

/// Renders the report, with the paths of the other reports.
pub fn render_text(result: &PerfResult, written: &[String]) -> String {
    let mut out = String::new();
    write_report(&mut out, result, written).expect("a string takes everything");
    out
}

fn write_report(out: &mut String, result: &PerfResult, written: &[String]) -> fmt::Result {
    write_headline(out, result)?;
    write_latency(out, result)?;
    write_fast_path(out, result)?;
    write_errors(out, result)?;
    write_null_blk(out, result)?;
    write_rows(out, "driver options", &driver_option_rows(result))?;
    write_rows(out, "environment", &result.environment.table_rows())?;
    let recommendations = result.environment.recommendations();
    if !recommendations.is_empty() {
        writeln!(out, "\nrecommendations")?;
        recommendations
            .iter()
            .try_for_each(|recommendation| writeln!(out, "  - {recommendation}"))?;
    }
    if !written.is_empty() {
        writeln!(out)?;
        written.iter().try_for_each(|path| writeln!(out, "report: {path}"))?;
    }
    Ok(())
}

fn write_headline(out: &mut String, result: &PerfResult) -> fmt::Result {
    let seconds = result.elapsed.as_secs_f64();
    writeln!(out, "{}, {seconds:.2} s", workload_line(&result.options))?;
    write!(out, "\n  {}", show_iops(result.iops()))?;
    write!(out, "   {} per I/O and thread", show_ns_f64(result.thread_ns_per_io()))?;
    if let Some(ticks) = result.tsc_per_io() {
        write!(out, "   {ticks:.0} TSC cycles")?;
    }
    if result.transfers_data() {
        write!(out, "   {}", show_byte_rate(result.bytes_per_second()))?;
    }
    writeln!(out, "\n")?;
    let sentences = result_notes(result);
    sentences.iter().try_for_each(|sentence| writeln!(out, "  {sentence}"))?;
    for warning in result.warnings() {
        writeln!(out, "  warning: {warning}.")?;
    }
    if let Some(ended) = end_reason_text(result) {
        writeln!(out, "  {ended}")?;
    }
    if let Some(line) = baseline_line(result) {
        writeln!(out, "  {line}.")?;
    }
    if let Some(ram) = &result.ram {
        writeln!(
            out,
            "  With data transfers ({}): {}, {}, median {}.",
            ram.uri,
            show_iops(ram.iops()),
            show_byte_rate(ram.bytes_per_second()),
            show_ns(ram.latency.percentile(500_000))
        )?;
    }
    Ok(())
}

fn write_latency(out: &mut String, result: &PerfResult) -> fmt::Result {
    let error = show_ns(result.time_stamp_error.ns);
    let start = if result.options.rate.is_some() { "intended start" } else { "submission" };
    writeln!(out, "\nlatency from {start}, accurate to within {error}")?;
    let titles = ["mean", "p50", "p99", "p99.9", "p99.99", "max"];
    write!(out, "  {:<18}", "")?;
    titles.iter().try_for_each(|title| write!(out, "{title:>10}"))?;
    writeln!(out)?;
    let mut line = |name: &str, cells: [String; 6]| {
        write!(out, "  {name:<18}")?;
        cells.iter().try_for_each(|cell| write!(out, "{cell:>10}"))?;
        writeln!(out)
    };
    if result.latency_by_operation.len() != 1 {
        line("all", latency_texts(&result.latency))?;
    }
    for (operation, latency) in &result.latency_by_operation {
        line(operation.name(), latency_texts(latency))?;
    }
    Ok(())
}

fn write_fast_path(out: &mut String, result: &PerfResult) -> fmt::Result {
    let counters = &result.counters;
    let idle = counters.idle_polls.saturating_mul(100).checked_div(counters.polls).unwrap_or(0);
    writeln!(out, "\nfast path")?;
    writeln!(
        out,
        "  {:.2} completions per poll, {:.3} doorbells per I/O, {idle} % of the polls found nothing",
        counters.completions_per_nonempty_poll(),
        counters.doorbells_per_io()
    )?;
    let sleeps = show_count(result.sleeps);
    writeln!(out, "  polling {}: {sleeps} sleeps", result.options.poll)
}

fn write_errors(out: &mut String, result: &PerfResult) -> fmt::Result {
    if result.totals.errors > 0 {
        writeln!(out, "\nerrors: {}", show_count(result.totals.errors))?;
        for (status, count) in error_rows(result) {
            writeln!(out, "  {:>12}  {status}", show_count(count))?;
        }
    }
    if let Some(verified) = &result.verified {
        writeln!(out, "\nverification: {}", verified.text())?;
    }
    if let Some(open) = &result.open_loop {
        writeln!(
            out,
            "\nopen loop: {} of {} I/Os per second, {} started late, {} still waiting at the end",
            show_iops(result.iops()),
            show_count(open.intended_per_second),
            show_count(open.delayed),
            show_count(open.backlog)
        )?;
    }
    Ok(())
}

fn write_null_blk(out: &mut String, result: &PerfResult) -> fmt::Result {
    let Some(compared) = &result.null_blk else { return Ok(()) };
    let seconds = compared.time.as_secs_f64();
    writeln!(
        out,
        "\nblock layer over a null device, depth {}, {seconds:.2} s each: IOPS, and time waiting \
         for the lock",
        compared.depth
    )?;
    let threads = compared.rows.iter().map(|row| row.points.len()).max().unwrap_or(0);
    write!(out, "  {:<20}", "threads")?;
    (1..=threads).try_for_each(|count| write!(out, "{count:>22}"))?;
    writeln!(out)?;
    for row in &compared.rows {
        write!(out, "  {:<20}", row.mode_text())?;
        for point in &row.points {
            let rate = show_iops(point.iops);
            let cell = format!("{rate} {:>5.1} %", point.lock_wait_share * 100.0);
            write!(out, "{cell:>22}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn driver_option_rows(result: &PerfResult) -> Vec<(&'static str, String)> {
    let rows = result.techniques.iter();
    let width = rows.clone().map(|technique| technique.setting.len()).max().unwrap_or(0);
    rows.map(|technique| {
        (technique.name, format!("{:<width$}  {}", technique.setting, technique.switch))
    })
    .collect()
}

/// Two-column table; the width of the first column fits its contents.
fn write_rows(out: &mut String, title: &str, rows: &[(&str, String)]) -> fmt::Result {
    if rows.is_empty() {
        return Ok(());
    }
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    writeln!(out, "\n{title}")?;
    rows.iter().try_for_each(|(name, value)| writeln!(out, "  {name:<width$}  {value}"))
}

#[cfg(test)]
mod tests {
    use super::render_text;
    use crate::perf::report::sample_result::{failed_sample_result, sample_result};

    #[test]
    fn headline_comes_first_and_then_the_workload() {
        let text = render_text(&sample_result(), &["tenmil-perf.html".into()]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "21 SSDs, random reads of 4 KiB, depth 128, 1 submitting thread, 10.00 s"
        );
        assert_eq!(lines[2], "  31.4 M IOPS   31.8 ns per I/O and thread   83 TSC cycles");
        assert_eq!(
            lines[4],
            "  No data are transferred: this is the cost of the driver and of an emulated \
             controller that only completes commands."
        );
        assert_eq!(
            lines[5],
            "  0.42 of the ring micro-benchmark: 74.8 M IOPS through 21 rings with 128 entries in flight \
             each, in the same run."
        );
        assert!(lines[6].starts_with("  With data transfers (emu:ram?count=21): 4.5 M IOPS,"));
        assert_eq!(lines.last(), Some(&"report: tenmil-perf.html"));
    }

    #[test]
    fn block_device_is_named_once() {
        let mut result = sample_result();
        result.options.uris = vec!["null:".parse().unwrap()];
        let device = &mut result.devices[0];
        (device.name, device.model) =
            ("null:".into(), "null: no data is transferred, in mode mq".into());
        let text = render_text(&result, &[]);
        assert!(
            text.contains("  `null:`: no data is transferred, in mode mq; some or all of"),
            "{text}"
        );
    }

    #[test]
    fn model_device_is_labeled_and_bytes_shown_only_if_transferred() {
        let mut result = sample_result();
        result.options.uris = vec!["emu:model:p4600".parse().unwrap()];
        let text = render_text(&result, &[]);
        assert!(text.contains("`p4600` is a model of that device's timing, not the device"));
        assert!(text.contains("128.6 GB/s") && !text.contains("No data are transferred"));
        assert!(!render_text(&sample_result(), &[]).contains("128.6 GB/s"));
    }

    #[test]
    fn doorbell_cost_is_labeled_as_a_model() {
        let mut result = sample_result();
        result.options.uris = vec!["emu:null?doorbell-cost=250".parse().unwrap()];
        let text = render_text(&result, &[]);
        assert!(text.contains("Each doorbell costs 250 ns of processor time: a model of a posted"));
        assert!(!render_text(&sample_result(), &[]).contains("posted across"));
    }

    #[test]
    fn first_column_fits_the_longest_name() {
        let text = render_text(&sample_result(), &[]);
        assert!(
            text.contains("  submission doorbell per iteration  on     --no-doorbell-batching\n")
        );
        assert!(text.contains("  huge pages                         on     --no-huge-pages\n"));
    }

    #[test]
    fn null_blk_modes_are_aligned_by_thread_count() {
        let text = render_text(&sample_result(), &[]);
        assert!(text.contains("block layer over a null device, depth 128, 1.00 s each"), "{text}");
        for (name, cell) in
            [("  single ", "20.0 M IOPS   2.0 %"), ("  mq, 2 contexts ", "30.0 M IOPS   0.0 %")]
        {
            let line = text.lines().find(|line| line.starts_with(name));
            assert!(line.is_some_and(|line| line.contains(cell)), "{name} in {text}");
        }
    }

    #[test]
    fn errors_are_reported() {
        let text = render_text(&failed_sample_result(), &[]);
        for expected in [
            "Interrupted: these are the first 4.00 s of 10.00 s.",
            "errors: 12",
            "Unrecovered Read Error (SCT 0x2, SC 0x81)",
            "verification: 2 of 1 002 blocks are bad: 2 torn; first: block 7 of SSD 3: torn: \
             another write from byte 512 on",
            "warning: 5.0 % of the time was steal time",
            "recommendations",
        ] {
            assert!(text.contains(expected), "{expected} is missing in\n{text}");
        }
    }
}
