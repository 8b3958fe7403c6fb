//! Samples of metrics and their text: Prometheus text format 0.0.4 and OpenMetrics 1.0.
//!
//! ```text
//!   # HELP tenmil_io_operations_total Successful commands      # TYPE tenmil_io_operations counter
//!   # TYPE tenmil_io_operations_total counter                  # HELP tenmil_io_operations Successful commands
//!   tenmil_io_operations_total{operation="read"} 7             tenmil_io_operations_total{operation="read"} 7
//!                                                              # EOF
//! ```
//!
//! Label values may come from peers. Quotes, backslashes and line feeds are escaped as both formats
//! require, and other control characters are written as `\xNN`, since a collector may end a line at them.

#[cfg(feature = "otlp")]
mod otlp;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use tenmil_base::CoarseHistogram;

/// Definition of a metric.
#[derive(Debug)]
pub(super) struct Family {
    /// Name without the suffix that its type adds.
    pub(super) name: &'static str,
    pub(super) kind: MetricKind,
    /// Unit, which the name ends with.
    pub(super) unit: Unit,
    /// Description, as a phrase.
    pub(super) help: &'static str,
    /// Names of its labels; a label without a value is omitted.
    pub(super) labels: &'static [&'static str],
}

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MetricKind {
    /// Sum since the start of the process.
    Counter,
    /// Present value.
    Gauge,
    /// Distribution of latencies.
    Histogram,
    /// Facts as labels.
    Info,
}

/// Unit of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// A number of things.
    None,
    Bytes,
    /// Values are given in nanoseconds and shown in seconds.
    Seconds,
}

/// Samples of all metrics.
#[derive(Debug, Default)]
pub(super) struct MetricsText {
    families: BTreeMap<&'static str, FamilySamples>,
}

#[derive(Debug)]
struct FamilySamples {
    family: &'static Family,
    /// By the text of their labels. Two that become equal, of hosts that share a label, are added.
    numbers: BTreeMap<String, u64>,
    histograms: BTreeMap<String, BucketCounts>,
}

/// Cumulative buckets of a histogram.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct BucketCounts {
    at_most: [u64; BOUNDS.len()],
    count: u64,
    sum_ns: u64,
}

/// Upper bounds of the buckets of latencies, in nanoseconds and as text in seconds.
///
/// A value is counted below a bound if all values of its bucket in the [`CoarseHistogram`] are, so one that
/// is less than 1/16 below a bound may be counted above it.
pub(super) const BOUNDS: [(u64, &str); 20] = [
    (5_000, "5e-06"),
    (10_000, "1e-05"),
    (20_000, "2e-05"),
    (50_000, "5e-05"),
    (100_000, "0.0001"),
    (200_000, "0.0002"),
    (500_000, "0.0005"),
    (1_000_000, "0.001"),
    (2_000_000, "0.002"),
    (5_000_000, "0.005"),
    (10_000_000, "0.01"),
    (20_000_000, "0.02"),
    (50_000_000, "0.05"),
    (100_000_000, "0.1"),
    (200_000_000, "0.2"),
    (500_000_000, "0.5"),
    (1_000_000_000, "1.0"),
    (2_000_000_000, "2.0"),
    (5_000_000_000, "5.0"),
    (10_000_000_000, "10.0"),
];

impl MetricsText {
    /// Adds a number, in the order of the labels of the family.
    pub(super) fn add<const N: usize>(
        &mut self,
        family: &'static Family,
        labels: [&str; N],
        value: u64,
    ) {
        let labels = label_text(family, &labels);
        let numbers = &mut self.samples_of(family).numbers;
        let sum = numbers.entry(labels).or_default();
        *sum = sum.saturating_add(value);
    }

    /// Adds the values of a histogram.
    pub(super) fn add_histogram<const N: usize>(
        &mut self,
        family: &'static Family,
        labels: [&str; N],
        values: &CoarseHistogram,
    ) {
        let labels = label_text(family, &labels);
        let samples = self.samples_of(family);
        samples.histograms.entry(labels).or_default().merge(values);
    }

    fn samples_of(&mut self, family: &'static Family) -> &mut FamilySamples {
        self.families.entry(family.name).or_insert_with(|| FamilySamples {
            family,
            numbers: BTreeMap::new(),
            histograms: BTreeMap::new(),
        })
    }

    /// Prometheus text format 0.0.4.
    pub(super) fn prometheus(&self) -> String {
        let mut out = String::new();
        for samples in self.families.values() {
            let Family { kind, help, .. } = samples.family;
            let name = samples.family.sample_name();
            let kind = if *kind == MetricKind::Info { MetricKind::Gauge } else { *kind };
            let _ = writeln!(out, "# HELP {name} {help}");
            let _ = writeln!(out, "# TYPE {name} {}", kind.name());
            samples.write(&mut out);
        }
        out
    }

    /// OpenMetrics 1.0.
    pub(super) fn open_metrics(&self) -> String {
        let mut out = String::new();
        for samples in self.families.values() {
            let Family { name, kind, unit, help, .. } = samples.family;
            let _ = writeln!(out, "# TYPE {name} {}", kind.name());
            if let Some(unit) = unit.name() {
                let _ = writeln!(out, "# UNIT {name} {unit}");
            }
            let _ = writeln!(out, "# HELP {name} {help}");
            samples.write(&mut out);
        }
        out + "# EOF\n"
    }
}

impl FamilySamples {
    fn write(&self, out: &mut String) {
        let (name, unit) = (self.family.sample_name(), self.family.unit);
        for (labels, value) in &self.numbers {
            let braces = if labels.is_empty() { ["", ""] } else { ["{", "}"] };
            let _ = writeln!(out, "{name}{}{labels}{} {}", braces[0], braces[1], unit.text(*value));
        }
        for (labels, buckets) in &self.histograms {
            buckets.write(out, &name, labels);
        }
    }
}

impl BucketCounts {
    fn merge(&mut self, values: &CoarseHistogram) {
        for (most, count) in values.buckets() {
            self.count += count;
            for ((bound, _), at_most) in BOUNDS.iter().zip(&mut self.at_most) {
                *at_most += if most <= *bound { count } else { 0 };
            }
        }
        self.sum_ns = self.sum_ns.saturating_add(values.sum());
    }

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        let comma = if labels.is_empty() { "" } else { "," };
        for ((_, bound), count) in BOUNDS.iter().zip(&self.at_most) {
            let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"{bound}\"}} {count}");
        }
        let _ = writeln!(out, "{name}_bucket{{{labels}{comma}le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "{name}_sum{{{labels}}} {}", Unit::Seconds.text(self.sum_ns));
        let _ = writeln!(out, "{name}_count{{{labels}}} {}", self.count);
    }
}

impl Family {
    /// Name of its samples.
    pub(super) fn sample_name(&self) -> String {
        let suffix = match self.kind {
            MetricKind::Counter => "_total",
            MetricKind::Info => "_info",
            MetricKind::Gauge | MetricKind::Histogram => "",
        };
        format!("{}{suffix}", self.name)
    }
}

impl MetricKind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Info => "info",
        }
    }
}

impl Unit {
    pub(super) const fn name(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Bytes => Some("bytes"),
            Self::Seconds => Some("seconds"),
        }
    }

    /// Value as text, exact.
    fn text(self, value: u64) -> String {
        if self != Self::Seconds {
            return value.to_string();
        }
        let (seconds, ns) = (value / 1_000_000_000, value % 1_000_000_000);
        let text = format!("{seconds}.{ns:09}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

/// Labels without braces.
fn label_text(family: &Family, values: &[&str]) -> String {
    debug_assert_eq!(family.labels.len(), values.len(), "labels of {}", family.name);
    let mut text = String::new();
    for (name, value) in family.labels.iter().zip(values).filter(|(_, value)| !value.is_empty()) {
        if !text.is_empty() {
            text.push(',');
        }
        let _ = write!(text, "{name}=\"");
        escape_label_value(&mut text, value);
        text.push('"');
    }
    text
}

fn escape_label_value(text: &mut String, value: &str) {
    for character in value.chars() {
        match character {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            control if control.is_control() => {
                let _ = write!(text, "\\\\x{:02x}", u32::from(control));
            }
            other => text.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{CoarseHistogram, Random};

    use super::{BOUNDS, Family, MetricKind, MetricsText, Unit};

    const COUNTED: Family = Family {
        name: "tenmil_things",
        kind: MetricKind::Counter,
        unit: Unit::None,
        help: "Things that were counted",
        labels: &["kind", "owner"],
    };
    const TIMED: Family = Family {
        name: "tenmil_wait_seconds",
        kind: MetricKind::Histogram,
        unit: Unit::Seconds,
        help: "Time waited",
        labels: &["kind"],
    };
    const FACT: Family = Family {
        name: "tenmil_build",
        kind: MetricKind::Info,
        unit: Unit::None,
        help: "Version",
        labels: &["version"],
    };

    /// Undoes the escapes of a label value as the exposition formats define them.
    fn parse_label_value(text: &str) -> Option<(String, &str)> {
        let mut value = String::new();
        let mut rest = text.char_indices();
        while let Some((at, character)) = rest.next() {
            match character {
                '"' => return Some((value, &text[at + 1..])),
                '\n' => return None,
                '\\' => match rest.next()?.1 {
                    'n' => value.push('\n'),
                    escaped @ ('\\' | '"') => value.push(escaped),
                    _ => return None,
                },
                other => value.push(other),
            }
        }
        None
    }

    #[test]
    fn both_formats_have_their_headings_and_suffixes() {
        let mut text = MetricsText::default();
        text.add(&COUNTED, ["a", ""], 7);
        text.add(&COUNTED, ["a", "x"], 1);
        text.add(&COUNTED, ["a", "x"], 2);
        text.add(&FACT, ["1.2"], 1);
        let expected = "\
# HELP tenmil_build_info Version
# TYPE tenmil_build_info gauge
tenmil_build_info{version=\"1.2\"} 1
# HELP tenmil_things_total Things that were counted
# TYPE tenmil_things_total counter
tenmil_things_total{kind=\"a\"} 7
tenmil_things_total{kind=\"a\",owner=\"x\"} 3
";
        assert_eq!(text.prometheus(), expected);
        let expected = "\
# TYPE tenmil_build info
# HELP tenmil_build Version
tenmil_build_info{version=\"1.2\"} 1
# TYPE tenmil_things counter
# HELP tenmil_things Things that were counted
tenmil_things_total{kind=\"a\"} 7
tenmil_things_total{kind=\"a\",owner=\"x\"} 3
# EOF
";
        assert_eq!(text.open_metrics(), expected);
    }

    #[test]
    fn buckets_are_cumulative_and_their_error_is_one_sided() {
        let mut values = CoarseHistogram::new();
        let mut exact = [0_u64; BOUNDS.len()];
        let mut random = Random::new(5);
        let mut sum = 0;
        for _ in 0..5_000 {
            let value = random.next_u64() >> (30 + random.below(34));
            values.record(value);
            sum += value;
            for ((bound, _), count) in BOUNDS.iter().zip(&mut exact) {
                *count += u64::from(value <= *bound - *bound / 16);
            }
        }
        let mut text = MetricsText::default();
        text.add_histogram(&TIMED, ["a"], &values);
        let text = text.open_metrics();
        assert!(text.contains("# UNIT tenmil_wait_seconds seconds\n"), "{text}");
        let number = |name: &str| -> f64 {
            let line = text
                .lines()
                .find(|line| line.starts_with(name))
                .unwrap_or_else(|| panic!("{name}: {text}"));
            line.rsplit_once(' ').unwrap().1.parse().unwrap()
        };
        let mut before = 0.0;
        for ((_, bound), exact) in BOUNDS.iter().zip(exact) {
            let found = number(&format!("tenmil_wait_seconds_bucket{{kind=\"a\",le=\"{bound}\"}}"));
            #[expect(clippy::cast_precision_loss, reason = "at most 5000")]
            let exact = exact as f64;
            assert!(found >= before && found >= exact, "{bound}: {found}, {exact}");
            before = found;
        }
        let all = number("tenmil_wait_seconds_bucket{kind=\"a\",le=\"+Inf\"}");
        assert!(
            (all - 5_000.0).abs() < 0.5 && (number("tenmil_wait_seconds_count") - all).abs() < 0.5
        );
        #[expect(clippy::cast_precision_loss, reason = "compared with a tolerance")]
        let sum = sum as f64 / 1e9;
        assert!((number("tenmil_wait_seconds_sum") - sum).abs() < 1e-6);
    }

    #[test]
    fn seconds_are_exact_decimals() {
        for (ns, text) in [
            (0, "0"),
            (1, "0.000000001"),
            (1_500_000_000, "1.5"),
            (10_000_000_000, "10"),
            (u64::MAX, "18446744073.709551615"),
        ] {
            assert_eq!(Unit::Seconds.text(ns), text);
        }
        assert_eq!(Unit::Bytes.text(100), "100");
    }

    #[test]
    fn any_label_value_is_one_line_that_parses_back() {
        let mut random = Random::new(11);
        let alphabet: Vec<char> =
            "ab\\\"\n\r\t\0\u{1b}\u{85}{},=# \u{202e}ä一\u{7f}".chars().collect();
        for _ in 0..5_000 {
            let len = random.below(12);
            let count = alphabet.len() as u64;
            let value: String =
                (0..len).map(|_| alphabet[usize::try_from(random.below(count)).unwrap()]).collect();
            let mut text = MetricsText::default();
            text.add(&COUNTED, ["k", &value], 1);
            let shown = text.open_metrics();
            assert_eq!(shown.lines().count(), 4, "{value:?}: {shown}");
            assert!(!shown.chars().any(|one| one.is_control() && one != '\n'), "{value:?}");
            let line = shown.lines().nth(2).unwrap();
            let Some(rest) = line.strip_prefix("tenmil_things_total{kind=\"k\",owner=\"") else {
                assert!(value.is_empty(), "{line}");
                continue;
            };
            let (parsed, rest) = parse_label_value(rest).unwrap();
            assert_eq!(rest, "} 1");
            let expected: String = value
                .chars()
                .map(|one| match one {
                    '\n' => "\n".to_owned(),
                    one if one.is_control() => format!("\\x{:02x}", u32::from(one)),
                    one => one.to_string(),
                })
                .collect();
            assert_eq!(parsed, expected);
        }
    }
}
