//! Metrics of processes with parts: what is shown, under which names, and how much of it.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::sync::Arc;

use tenmil_block::{Bdev, BdevOptions, Opener, QosLimits, RateLimit};
use tenmil_dma::RegionTable;
use tenmil_drivers::NullDevice;
use tenmil_linux::Clock;
use tenmil_nvme_fabrics::{PathChange, PathTable};
use tenmil_serve::nbd::{ExportConfig, ExportedDevice};
use tenmil_serve::tcp::{Service, ServiceLimits};

use super::families::ALL;
use super::metrics_text::{Family, MetricKind};
use super::{prefers_open_metrics, render};
use crate::event::event_channel;
use crate::methods::{DeviceControls, NbdExports, NvmeConnections, ProgramInfo};
use crate::pool_commands::PoolCommands;
use crate::process_parts::ProcessParts;

/// A process with an NVMe/TCP target, an NBD export of this name, a path and a mirror.
fn process_parts(export: &str) -> (ProcessParts, tenmil_block::OpenedDevice) {
    let (clock, regions) = (Clock::start(), RegionTable::new(64));
    let limits =
        ServiceLimits { connections_max: 1, memory_bytes: 4 << 20, ..ServiceLimits::default() };
    let service = Service::new(&regions, limits).unwrap();
    let device = Arc::new(NullDevice::new(512, 2048).unwrap());
    let device = Bdev::new("null0", device, BdevOptions::new(clock, 1)).unwrap();
    let served = ExportedDevice::new(ExportConfig {
        name: export.into(),
        description: String::new(),
        uri: "null:?size=1m".into(),
        device: &device,
        limits: QosLimits {
            reads: RateLimit { iops: NonZeroU64::new(7), bytes: None },
            ..QosLimits::default()
        },
        is_read_only: true,
        allows_resize: false,
        regions: &regions,
    });
    let paths = PathTable::default();
    let path = paths.add("tcp://a/disk".into(), std::iter::once("192.0.2.1:4420".to_owned()));
    path.record_change(PathChange::Up(0, "optimized"));
    std::mem::forget(path);
    let directory = tempfile::tempdir().unwrap();
    let leg = |name| format!("file:{}?size=4m", directory.path().join(name).display());
    let opener = Opener { regions: &regions, clock, seed: 1, kinds: tenmil_drivers::KINDS };
    let legs = [leg("a"), leg("b")].map(|uri| uri.parse().unwrap());
    tenmil_drivers::mirror::create_mirror(&opener, &legs, false).unwrap();
    let opened = opener.open(&format!("mirror:[{}],[{}]", leg("a"), leg("b")).parse().unwrap());
    let opened = opened.unwrap();
    let (events, _) = event_channel().unwrap();
    let parts = ProcessParts::new()
        .with_part(ProgramInfo { version: "1.2.3", log: None })
        .with_part(NvmeConnections(service))
        .with_part(NbdExports::new(vec![Arc::new(served.unwrap())]))
        .with_part(paths)
        .with_part(DeviceControls::new(opened.handles.clone()))
        .with_part(PoolCommands::new(tenmil_drivers::KINDS, events));
    (parts, opened)
}

/// Lines without those of pools, which are of all tests that run now.
fn own_lines(text: &str) -> Vec<&str> {
    let others = ["tenmil_pool", "tenmil_volume", "tenmil_storage"];
    text.lines().filter(|line| !others.iter().any(|one| line.contains(one))).collect()
}

#[test]
fn both_formats_have_the_same_samples() {
    let (parts, _opened) = process_parts("disk");
    let is_stable = |line: &&str| !line.starts_with('#') && !line.starts_with("process_");
    let text = render(&parts, false);
    let open = render(&parts, true);
    let lines: Vec<&str> = own_lines(&text).into_iter().filter(is_stable).collect();
    assert_eq!(lines, own_lines(&open).into_iter().filter(is_stable).collect::<Vec<_>>());
    assert!(open.ends_with("\n# EOF\n") && !text.contains("# EOF"));
    for line in [
        "tenmil_build_info{version=\"1.2.3\"} 1",
        "tenmil_io_operations_total{protocol=\"nbd\",export=\"disk\",operation=\"read\"} 0",
        "tenmil_io_failed_operations_total{protocol=\"nbd\",export=\"disk\",operation=\"write\"} 0",
        "tenmil_io_duration_seconds_bucket{protocol=\"nbd\",export=\"disk\",operation=\"read\",le=\"+Inf\"} 0",
        "tenmil_nvme_disconnects_total{reason=\"keep-alive-expired\"} 0",
        "tenmil_nvme_refusals_total{reason=\"authentication-failed\"} 0",
        "tenmil_path_up{device=\"tcp://a/disk\",path=\"0\",address=\"192.0.2.1:4420\"} 1",
        "tenmil_io_limited_operations_total{protocol=\"nbd\",export=\"disk\"} 0",
        "tenmil_limit_operations_per_second{of=\"export\",export=\"disk\",direction=\"read\"} 7",
        "tenmil_limit_burst_seconds{of=\"export\",export=\"disk\"} 0.02",
        "tenmil_nvme_queues{tls=\"true\",authenticated=\"false\"} 0",
    ] {
        assert!(lines.contains(&line), "{line} in {text}");
    }
    let health = lines.iter().find(|line| line.contains("state=\"healthy\"")).unwrap();
    assert!(health.starts_with("tenmil_mirror_health{") && health.ends_with(" 1"), "{health}");
}

#[test]
fn process_without_parts_has_its_own_metrics() {
    let text = render(&ProcessParts::new(), false);
    assert!(text.contains("\nprocess_cpu_seconds_total "), "{text}");
    assert!(!text.contains("tenmil_io"), "{text}");
    let start = |text: &str| {
        let line = text.lines().find(|line| line.starts_with("process_start_time_seconds "));
        line.map(str::to_owned)
    };
    assert!(start(&text).is_some() && start(&text) == start(&render(&ProcessParts::new(), true)));
}

/// What the naming rules of both formats demand, and `promtool check metrics` with them.
#[test]
fn names_of_metrics_follow_the_rules() {
    let names: BTreeSet<&str> = ALL.iter().map(|family| family.name).collect();
    assert_eq!(names.len(), ALL.len(), "each name once");
    for Family { name, kind, unit, help, labels } in ALL {
        let is_name = |name: &str| {
            name.starts_with(|first: char| first.is_ascii_lowercase())
                && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'))
        };
        assert!(is_name(name) && labels.iter().all(|label| is_name(label)), "{name}");
        assert!(!labels.contains(&"le"), "{name}: it is of buckets");
        let suffixes = ["_total", "_info", "_count", "_sum", "_bucket", "_created"];
        assert!(!suffixes.iter().any(|suffix| name.ends_with(suffix)), "{name}");
        assert!(unit.name().is_none_or(|unit| name.ends_with(&format!("_{unit}"))), "{name}");
        assert!(*kind != MetricKind::Histogram || unit.name() == Some("seconds"), "{name}");
        let is_phrase = help.starts_with(|one: char| one.is_ascii_uppercase() || one == '1');
        assert!(is_phrase && !help.ends_with('.') && !help.contains(['\n', '\\']), "{name}");
    }
}

/// The page is the list of stable names: a metric that is renamed or removed fails here.
#[test]
#[expect(clippy::disallowed_methods, reason = "it reads the tree it holds true")]
fn every_metric_is_documented_with_its_labels() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operator/metrics.md");
    let page = String::from_utf8(std::fs::read(path).unwrap()).unwrap();
    let mut rows = page.lines().filter(|line| line.starts_with("| `")).collect::<BTreeSet<_>>();
    for family in ALL {
        let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
        let (name, kind, help) = (family.sample_name(), family.kind.name(), family.help);
        let row = format!("| `{name}` | {kind} | {} | {help} |", labels.join(", "));
        assert!(rows.remove(&*row), "docs/operator/metrics.md lacks\n{row}");
    }
    assert!(rows.is_empty(), "docs/operator/metrics.md has more: {rows:#?}");
}

#[test]
fn hostile_export_name_adds_no_line_and_no_label() {
    let name = "a\"} 7\ntenmil_evil_total 1\n# EOF\r\u{1b}[2J\\";
    let (parts, _opened) = process_parts(name);
    let (plain, _plain) = process_parts("disk");
    for open_metrics in [false, true] {
        let text = render(&parts, open_metrics);
        let plain = render(&plain, open_metrics);
        assert_eq!(own_lines(&text).len(), own_lines(&plain).len());
        assert!(!text.lines().any(|line| line.starts_with("tenmil_evil")));
        assert!(!text.chars().any(|one| one.is_control() && one != '\n'));
        let shown = "export=\"a\\\"} 7\\ntenmil_evil_total 1\\n# EOF\\\\x0d\\\\x1b[2J\\\\\"";
        assert!(text.contains(shown), "{text}");
    }
}

#[test]
fn open_metrics_is_for_clients_that_ask_for_it() {
    // Prometheus 2.42 and 3.5, a browser, curl, and clients that prefer the text format.
    let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
    let newer = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
    assert!(prefers_open_metrics(prometheus) && prefers_open_metrics(newer));
    assert!(prefers_open_metrics("Application/OpenMetrics-Text"));
    for accept in [
        "",
        "*/*",
        "text/html,application/xhtml+xml,*/*;q=0.8",
        "text/plain;version=0.0.4",
        "application/openmetrics-text;q=0",
        "application/openmetrics-text;q=0.2,text/plain;q=0.9",
        "application/openmetrics-text;q=x",
    ] {
        assert!(!prefers_open_metrics(accept), "{accept}");
    }
}

/// `promtool` of PATH, or of the variable PROMTOOL; `None`, with a note, if there is none.
fn promtool() -> Option<std::process::Command> {
    let program = std::env::var("PROMTOOL").unwrap_or_else(|_| "promtool".to_owned());
    let found = std::process::Command::new(&program).arg("--version").output();
    if found.is_err() {
        eprintln!("skipped: no promtool; apt-get install prometheus");
        return None;
    }
    Some(std::process::Command::new(program))
}

#[test]
fn promtool_finds_nothing_wrong_with_the_text_format() {
    for name in ["disk", "a\"} 7\ntenmil_evil_total 1\r\u{1b}[2J\\"] {
        let Some(mut command) = promtool() else { return };
        let (parts, _opened) = process_parts(name);
        let mut text = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut text, render(&parts, false).as_bytes()).unwrap();
        std::io::Seek::rewind(&mut text).unwrap();
        let output = command.args(["check", "metrics"]).stdin(text).output().unwrap();
        let problems = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && problems.is_empty(), "{name:?}: {problems}");
    }
}

#[test]
fn alert_rules_pass_their_tests_and_each_has_one() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/prometheus");
    let read = |name: &str| std::fs::read_to_string(format!("{directory}/{name}")).unwrap();
    let (rules, tests) = (read("tenmil-alerts.yml"), read("tenmil-alerts.test.yml"));
    let metrics: BTreeSet<String> = ALL.iter().map(|family| family.sample_name()).collect();
    let is_word = |byte: char| byte.is_ascii_alphanumeric() || byte == '_';
    for name in rules.split(|byte| !is_word(byte)).filter(|word| word.starts_with("tenmil_")) {
        let name = name.trim_end_matches("_bucket");
        assert!(metrics.contains(name), "{name} is no metric");
    }
    for alert in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        assert!(tests.contains(&format!("alertname: {alert}\n")), "{alert} has no test");
    }
    let Some(mut command) = promtool() else { return };
    let output = command.args(["test", "rules", "tenmil-alerts.test.yml"]).current_dir(directory);
    let output = output.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
