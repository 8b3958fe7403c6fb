//! csi-sanity: find or build it, run it, and read its result.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::processes::DriverStack;

/// The version of the tests, of CSI 1.13.
const PACKAGE: &str = "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity@v5.6.0";
/// Time limit for building csi-sanity, which is downloaded.
const BUILD_SECONDS_MAX: &str = "300";
/// Time limit for all tests.
const TIME_MAX: Duration = Duration::from_secs(600);
/// Size of volumes, small enough for quick file systems and large enough for two of them.
const VOLUME_BYTES: u64 = 64 << 20;
const EXPANDED_BYTES: u64 = 96 << 20;

/// Tests that are skipped: the limit of volumes of a node, which only the orchestrator enforces, and the topology of
/// snapshots, which is that of their volumes.
const SKIPPED_MAX: usize = 2;

/// Finds csi-sanity in PATH or `directory`, or builds it there with Go.
pub(crate) fn find_or_build(directory: &Path) -> Result<PathBuf, String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain([directory.join("bin")]);
    if let Some(found) = places.map(|place| place.join("csi-sanity")).find(|it| it.is_file()) {
        return Ok(found);
    }
    println!("csi: building {PACKAGE}");
    let bin = directory.join("bin");
    let built = Command::new("timeout")
        .args([BUILD_SECONDS_MAX, "go", "install", PACKAGE])
        .env("GOBIN", &bin)
        // It also runs in guests.
        .env("CGO_ENABLED", "0")
        .output()
        .map_err(|why| {
            format!("skipped: no csi-sanity, and `timeout go` cannot be started: {why}")
        })?;
    match built.status.success() {
        true => Ok(bin.join("csi-sanity")),
        false => {
            let said = String::from_utf8_lossy(&built.stderr);
            let last = said.lines().last().unwrap_or("no result in time");
            Err(format!("skipped: go install {PACKAGE}: {last}"))
        }
    }
}

/// Runs the tests; returns how many passed. Its output is in the directory of the stack.
pub(super) fn run(
    program: &Path,
    stack: &DriverStack,
    access: &str,
    focus: Option<&str>,
) -> Result<String, String> {
    let directory = stack.directory();
    let parameters = directory.join("mutable.yml");
    std::fs::write(&parameters, "iops: \"100000\"\n").map_err(|why| why.to_string())?;
    let log = directory.join(format!("csi-sanity-{access}.log"));
    let output = std::fs::File::create(&log).map_err(|why| why.to_string())?;
    let errors = output.try_clone().map_err(|why| why.to_string())?;
    let path = |name: &str| directory.join(name).display().to_string();
    let mut command = Command::new(program);
    command.arg("--csi.endpoint").arg(format!("unix://{}", stack.socket().display()));
    command.args(["--csi.mountdir", &path("mount"), "--csi.stagingdir", &path("staging")]);
    command.args(["--csi.testvolumeaccesstype", access]);
    command.args(["--csi.testvolumesize", &VOLUME_BYTES.to_string()]);
    command.args(["--csi.testvolumeexpandsize", &EXPANDED_BYTES.to_string()]);
    command.arg("--csi.testvolumemutableparameters").arg(&parameters);
    command.args(["--ginkgo.no-color", "--ginkgo.v"]);
    if let Some(focus) = focus {
        command.args(["--ginkgo.focus", focus]);
    }
    command.stdin(Stdio::null()).stdout(output).stderr(errors);
    let mut child = command.spawn().map_err(|why| format!("run csi-sanity: {why}"))?;
    let begun = Instant::now();
    while matches!(child.try_wait(), Ok(None)) {
        if begun.elapsed() > TIME_MAX {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("not ended after {} s, {}", TIME_MAX.as_secs(), log.display()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let said = std::fs::read_to_string(&log).map_err(|why| why.to_string())?;
    let counts = parse_counts(&said).ok_or_else(|| format!("no result, {}", log.display()))?;
    let text = format!(
        "{} passed, {} failed, {} pending, {} skipped",
        counts.passed, counts.failed, counts.pending, counts.skipped
    );
    let is_whole = focus.is_some() || counts.skipped <= SKIPPED_MAX;
    match counts.failed == 0 && counts.passed > 0 && is_whole {
        true => Ok(text),
        false => Err(format!("{text}, {}", log.display())),
    }
}

/// Numbers of the last line of ginkgo.
#[derive(Debug, PartialEq, Eq)]
struct TestCounts {
    passed: usize,
    failed: usize,
    pending: usize,
    skipped: usize,
}

/// Parses `SUCCESS! -- 75 Passed | 0 Failed | 1 Pending | 27 Skipped`.
fn parse_counts(text: &str) -> Option<TestCounts> {
    let line = text.lines().rev().find(|line| line.contains(" Passed | "))?;
    let mut counts = line.split(" -- ").nth(1)?.split(" | ");
    let mut next = |name: &str| {
        let (count, found) = counts.next()?.split_once(' ')?;
        count.parse::<usize>().ok().filter(|_| found.starts_with(name))
    };
    let (passed, failed, pending, skipped) =
        (next("Passed")?, next("Failed")?, next("Pending")?, next("Skipped")?);
    Some(TestCounts { passed, failed, pending, skipped })
}

#[cfg(test)]
mod tests {
    use super::{TestCounts, parse_counts};

    #[test]
    fn last_line_of_ginkgo_is_parsed() {
        let text = "Ran 75 of 103 Specs in 0.776 seconds\n\
                    SUCCESS! -- 75 Passed | 0 Failed | 1 Pending | 27 Skipped\nPASS\n";
        let expected = TestCounts { passed: 75, failed: 0, pending: 1, skipped: 27 };
        assert_eq!(parse_counts(text), Some(expected));
        assert_eq!(parse_counts("SUCCESS!"), None);
    }
}
