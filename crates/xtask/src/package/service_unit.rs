//! The systemd unit: its exposure, as `systemd-analyze security` computes it.

use std::process::Command;

use super::{is_installed, output_of};

/// The unit.
const UNIT: &str = "packaging/systemd/tenmil.service";
/// Highest exposure of the service, times ten.
const EXPOSURE_MAX: &str = "20";

/// Checks the unit without a running systemd; returns what is wrong with it.
pub(super) fn check_unit() -> Result<Option<String>, String> {
    if !is_installed("systemd-analyze") {
        println!(
            "package: {UNIT} is not checked: there is no systemd-analyze (apt-get install systemd)"
        );
        return Ok(None);
    }
    let mut analyze = Command::new("systemd-analyze");
    analyze.args(["security", "--offline=true", "--no-pager", "--threshold", EXPOSURE_MAX, UNIT]);
    let output = output_of("check the unit", &mut analyze);
    match output {
        Ok(table) => {
            let last = table.lines().last().unwrap_or_default();
            println!("package: {}", last.trim_start_matches(|c: char| !c.is_ascii_alphabetic()));
            Ok(None)
        }
        Err(why) => Ok(Some(format!("{UNIT}: exposure above {EXPOSURE_MAX} tenths: {why}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::{UNIT, check_unit};

    /// Lines of the unit that begin with a word.
    fn values(unit: &str, key: &str) -> Vec<String> {
        let values = unit.lines().filter_map(|line| line.strip_prefix(&format!("{key}=")));
        values.map(str::to_owned).collect()
    }

    #[test]
    fn exposure_of_the_service_is_at_most_2() {
        std::env::set_current_dir(crate::book::repository_root().unwrap()).unwrap();
        assert_eq!(check_unit(), Ok(None));
        let unit = std::fs::read_to_string(UNIT).unwrap();
        assert_eq!(values(&unit, "Type"), ["notify"]);
        assert_eq!(values(&unit, "User"), ["tenmil"]);
        assert_eq!(values(&unit, "CapabilityBoundingSet"), [""]);
        assert_eq!(values(&unit, "WatchdogSec").len(), 1);
    }
}
