//! fio as a comparison.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::process::Command;

use serde_json::Value;

/// Runs `fio` with these arguments and returns its reads per second.
pub(super) fn run_fio(words: &[String]) -> Result<BTreeMap<String, f64>, String> {
    let output = Command::new("fio").args(words).arg("--output-format=json").output();
    let output = output.map_err(|error| match error.kind() {
        ErrorKind::NotFound => "fio is not installed; `apt-get install fio`".to_owned(),
        _ => format!("run fio: {error}"),
    })?;
    let said = String::from_utf8_lossy(&output.stdout);
    let iops = parse_iops(&said).ok_or_else(|| {
        let errors = String::from_utf8_lossy(&output.stderr);
        format!("fio: {}, expected a report", errors.trim())
    })?;
    Ok(BTreeMap::from([("iops".to_owned(), iops)]))
}

/// Reads per second of the only job. Messages may precede the JSON report.
fn parse_iops(said: &str) -> Option<f64> {
    let report: Value = serde_json::from_str(said.get(said.find('{')?..)?).ok()?;
    report["jobs"][0]["read"]["iops"].as_f64().filter(|iops| *iops > 0.0)
}

#[cfg(test)]
mod tests {
    use super::parse_iops;

    #[test]
    fn fio_report_is_parsed_after_leading_messages() {
        let report = r#"{ "fio version": "3", "jobs": [ { "read": { "iops": 2500.5 } } ] }"#;
        assert_eq!(parse_iops(&format!("note: slow\n{report}\n")), Some(2500.5));
        assert_eq!(parse_iops("fio: no such engine"), None);
        assert_eq!(parse_iops(r#"{ "jobs": [ { "read": { "iops": 0 } } ] }"#), None);
        assert_eq!(parse_iops(r#"{ "jobs": [] }"#), None);
    }
}
