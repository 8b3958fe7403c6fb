//! Samples as metrics of OTLP, in its JSON encoding.
//!
//! | type | metric of OTLP |
//! |---|---|
//! | counter | `sum`, monotonic and cumulative |
//! | gauge, info | `gauge` |
//! | histogram | `histogram`, cumulative, with the bounds of the text formats |
//!
//! Names are those of the families, to which a collector for Prometheus adds the suffixes that the text formats
//! have. Values of a unit in seconds are floating-point numbers of seconds.

use serde_json::{Value, json};

use super::{BOUNDS, BucketCounts, FamilySamples, MetricKind, MetricsText, Unit};

/// Temporality (opentelemetry-proto, `AggregationTemporality`).
const CUMULATIVE: u8 = 2;

impl MetricsText {
    /// All metrics, with the start of the process and the present time in nanoseconds since 1970.
    pub(in crate::metrics) fn to_otlp(&self, start_ns: u64, now_ns: u64) -> Vec<Value> {
        self.families.values().map(|samples| samples.to_otlp(start_ns, now_ns)).collect()
    }

    /// The only number of a family without labels.
    pub(in crate::metrics) fn number_of(&self, name: &str) -> Option<u64> {
        self.families.get(name)?.numbers.get("").copied()
    }
}

impl FamilySamples {
    fn to_otlp(&self, start_ns: u64, now_ns: u64) -> Value {
        let family = self.family;
        let unit = match family.unit {
            Unit::None => "",
            Unit::Bytes => "By",
            Unit::Seconds => "s",
        };
        let (start, now) = (start_ns.to_string(), now_ns.to_string());
        let point = |labels: &str| {
            json!({
                "attributes": attributes(labels),
                "startTimeUnixNano": start,
                "timeUnixNano": now,
            })
        };
        let numbers = self.numbers.iter().map(|(labels, value)| {
            let mut point = point(labels);
            match family.unit {
                Unit::Seconds => point["asDouble"] = json!(seconds(*value)),
                // A number is an `sfixed64`.
                _ => point["asInt"] = json!(i64::try_from(*value).unwrap_or(i64::MAX).to_string()),
            }
            point
        });
        let numbers: Vec<Value> = numbers.collect();
        let name = match family.kind {
            MetricKind::Info => family.sample_name(),
            _ => family.name.to_owned(),
        };
        let mut metric = json!({ "name": name, "description": family.help, "unit": unit });
        match family.kind {
            MetricKind::Counter => {
                metric["sum"] = json!({
                    "aggregationTemporality": CUMULATIVE,
                    "isMonotonic": true,
                    "dataPoints": numbers,
                });
            }
            MetricKind::Gauge | MetricKind::Info => {
                metric["gauge"] = json!({ "dataPoints": numbers })
            }
            MetricKind::Histogram => {
                let points = self.histograms.iter().map(|(labels, buckets)| {
                    let mut point = point(labels);
                    buckets.add_to(&mut point);
                    point
                });
                metric["histogram"] = json!({
                    "aggregationTemporality": CUMULATIVE,
                    "dataPoints": points.collect::<Vec<_>>(),
                });
            }
        }
        metric
    }
}

impl BucketCounts {
    /// Adds the counts to a data point: one for each bucket, and one above the last bound.
    fn add_to(&self, point: &mut Value) {
        let mut before = 0;
        let counts = self.at_most.iter().chain([&self.count]).map(|at_most| {
            let count = at_most - before;
            before = *at_most;
            count.to_string()
        });
        point["bucketCounts"] = counts.collect();
        point["explicitBounds"] = BOUNDS.iter().map(|(bound, _)| json!(seconds(*bound))).collect();
        point["count"] = json!(self.count.to_string());
        point["sum"] = json!(seconds(self.sum_ns));
    }
}

#[expect(clippy::cast_precision_loss, reason = "a double is what the protocol has")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Labels without braces, as attributes.
fn attributes(labels: &str) -> Vec<Value> {
    let mut all = Vec::new();
    let mut rest = labels;
    while let Some((name, after)) = rest.split_once("=\"") {
        let mut value = String::new();
        let mut characters = after.char_indices();
        let mut end = after.len();
        while let Some((at, character)) = characters.next() {
            match character {
                '"' => {
                    end = at + 1;
                    break;
                }
                '\\' => match characters.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, escaped)) => value.push(escaped),
                    None => {}
                },
                other => value.push(other),
            }
        }
        all.push(json!({ "key": name, "value": { "stringValue": value } }));
        rest = after[end..].trim_start_matches(',');
    }
    all
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tenmil_base::CoarseHistogram;

    use super::super::{BOUNDS, Family, MetricKind, MetricsText, Unit};

    const fn family(name: &'static str, kind: MetricKind, unit: Unit) -> Family {
        Family { name, kind, unit, help: "A thing", labels: &["kind", "owner"] }
    }

    static COUNTED: Family = family("tenmil_things", MetricKind::Counter, Unit::None);
    static SIZE: Family = family("tenmil_size_bytes", MetricKind::Gauge, Unit::Bytes);
    static TIMED: Family = family("tenmil_wait_seconds", MetricKind::Histogram, Unit::Seconds);

    #[test]
    fn metrics_have_type_unit_and_attributes() {
        let mut text = MetricsText::default();
        text.add(&COUNTED, ["a", "quote \" and \\ and\nline, b=\"c\""], 7);
        text.add(&SIZE, ["a", ""], u64::MAX);
        let metrics = text.to_otlp(5, 9);
        let [size, counted] = &metrics[..] else { panic!("{metrics:?}") };
        let point = &counted["sum"]["dataPoints"][0];
        assert_eq!(
            (&counted["name"], &counted["sum"]["isMonotonic"]),
            (&json!("tenmil_things"), &json!(true))
        );
        assert_eq!(point["asInt"], "7");
        assert_eq!(
            (&point["startTimeUnixNano"], &point["timeUnixNano"]),
            (&json!("5"), &json!("9"))
        );
        let expected = json!([
            { "key": "kind", "value": { "stringValue": "a" } },
            { "key": "owner", "value": { "stringValue": "quote \" and \\ and\nline, b=\"c\"" } },
        ]);
        assert_eq!(point["attributes"], expected);
        assert_eq!((&size["unit"], &size["sum"]), (&json!("By"), &Value::Null));
        assert_eq!(size["gauge"]["dataPoints"][0]["asInt"], i64::MAX.to_string());
    }

    #[test]
    fn buckets_of_a_histogram_are_separate_and_add_up() {
        let mut values = CoarseHistogram::new();
        for ns in [1_000, 7_000, 7_500, 3_000_000, 60_000_000_000] {
            values.record(ns);
        }
        let mut text = MetricsText::default();
        text.add_histogram(&TIMED, ["a", ""], &values);
        let metrics = text.to_otlp(5, 9);
        let point = &metrics[0]["histogram"]["dataPoints"][0];
        let counts: Vec<u64> = point["bucketCounts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|count| count.as_str().unwrap().parse().unwrap())
            .collect();
        assert_eq!((counts.len(), counts.iter().sum::<u64>()), (BOUNDS.len() + 1, 5));
        assert_eq!((counts[0], counts[1], counts[9], counts[20]), (1, 2, 1, 1));
        assert_eq!((&point["count"], &point["explicitBounds"][0]), (&json!("5"), &json!(5e-6)));
        assert_eq!(
            (&metrics[0]["unit"], &point["explicitBounds"][19]),
            (&json!("s"), &json!(10.0))
        );
        assert!((point["sum"].as_f64().unwrap() - 60.003_015_5).abs() < 1e-9);
    }
}
