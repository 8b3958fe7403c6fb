//! The programs of a run, and processes in the background.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::operate::run_program;

/// The programs of a run.
pub(super) struct Programs {
    /// `tenmil`.
    pub(super) tenmil: PathBuf,
}

/// A process in the background, which ends when it is dropped. Its output is in a file.
pub(super) struct Background {
    child: Child,
    output: PathBuf,
}

/// A running `tenmil serve`.
pub(super) struct Server {
    process: Background,
    /// URI of the namespace for `tenmil perf`.
    pub(super) uri: String,
}

/// Time for a server to start, a wait for a lock included.
const START_MAX: Duration = Duration::from_secs(90);

impl Programs {
    /// Finds the programs.
    pub(super) fn find(binary: &Path, with_speed: bool) -> Result<Self, String> {
        let tenmil = binary
            .canonicalize()
            .map_err(|why| format!("no program at {}: {why}; `cargo build`", binary.display()))?;
        let mut missing = missing_packages();
        let engines = || run_program(Command::new("fio").arg("--enghelp")).unwrap_or_default();
        if with_speed && !engines().lines().any(|line| line.trim() == "rbd") {
            missing.push("fio");
        }
        if with_speed && !is_in_path("perf") {
            missing.push("linux-perf");
        }
        reject_missing(&missing)?;
        Ok(Self { tenmil })
    }

    /// Runs tenmil to its end, and returns its standard output.
    pub(super) fn run(&self, arguments: &[&str]) -> Result<String, String> {
        run_program(Command::new(&self.tenmil).args(arguments))
    }

    /// Runs tenmil to its end, and returns whether it succeeded and all that it printed.
    pub(super) fn run_to_end(&self, arguments: &[&str]) -> (bool, String) {
        match Command::new(&self.tenmil).args(arguments).output() {
            Err(why) => (false, format!("run tenmil: {why}")),
            Ok(output) => {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                (output.status.success(), text(&output.stdout) + &text(&output.stderr))
            }
        }
    }

    /// Runs tenmil to its end, which must fail, and returns what it printed.
    pub(super) fn run_refused(&self, arguments: &[&str]) -> Result<String, String> {
        match self.run_to_end(arguments) {
            (true, _) => {
                Err(format!("tenmil {} succeeded, expected an error", arguments.join(" ")))
            }
            (false, text) => Ok(text),
        }
    }

    /// Starts tenmil with its output in a file of `directory`.
    pub(super) fn start(
        &self,
        directory: &Path,
        name: &str,
        arguments: &[&str],
    ) -> Result<Background, String> {
        let mut command = Command::new(&self.tenmil);
        command.args(arguments);
        Background::start(command, directory, name)
    }

    /// Starts a server of a device over NVMe/TCP.
    pub(super) fn serve(&self, directory: &Path, name: &str, uri: &str) -> Result<Server, String> {
        let arguments = ["serve", uri, "--listen", "tcp://127.0.0.1:0"];
        let process = self.start(directory, name, &arguments)?;
        let end = Instant::now() + START_MAX;
        loop {
            let text = process.text();
            let address = text.split_whitespace().find_map(|word| word.strip_prefix("tcp://"));
            if let Some(address) = address.filter(|_| text.contains("ready")) {
                let nqn = "nqn.2026-01.org.tenmil:disk";
                let uri = format!("tcp://{}/{nqn}/1", address.split('/').next().unwrap_or(address));
                return Ok(Server { process, uri });
            }
            if Instant::now() > end || process.has_ended() {
                return Err(format!("serve {uri}: `{}`, expected `ready`", text.trim()));
            }
            sleep(Duration::from_millis(50));
        }
    }
}

impl Server {
    /// What the server has printed.
    pub(super) fn text(&self) -> String {
        self.process.text()
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Ends it as a crash does.
    pub(super) fn kill(self) {
        self.process.kill();
    }
}

impl Background {
    fn start(mut command: Command, directory: &Path, name: &str) -> Result<Self, String> {
        let output = directory.join(format!("{name}.out"));
        let file = std::fs::File::create(&output);
        let file = file.map_err(|why| format!("{}: {why}", output.display()))?;
        let errors = file.try_clone().map_err(|why| format!("{}: {why}", output.display()))?;
        command.stdout(file).stderr(errors).stdin(Stdio::null());
        let child = command.spawn().map_err(|why| format!("start {name}: {why}"))?;
        Ok(Self { child, output })
    }

    /// What it has printed.
    pub(super) fn text(&self) -> String {
        let Ok(file) = std::fs::File::open(&self.output) else { return String::new() };
        let lines = BufReader::new(file).lines().map_while(Result::ok);
        lines.map(|line| line + "\n").collect()
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn has_ended(&self) -> bool {
        !Path::new(&format!("/proc/{}/exe", self.child.id())).exists()
    }

    /// Ends it as a crash does.
    pub(super) fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for its end, and returns whether it succeeded and what it printed.
    pub(super) fn wait(mut self) -> (bool, String) {
        let succeeded = self.child.wait().is_ok_and(|status| status.success());
        (succeeded, self.text())
    }
}

impl Drop for Background {
    /// Ends it as Ctrl-C does, and waits for it.
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = run_program(Command::new("kill").args(["-INT", &self.child.id().to_string()]));
        }
        let _ = self.child.wait();
    }
}

/// Checks that the programs of a cluster are installed.
pub(crate) fn check_programs() -> Result<(), String> {
    reject_missing(&missing_packages())
}

/// Packages of a cluster that are not installed.
fn missing_packages() -> Vec<&'static str> {
    let mut missing: Vec<&str> = Vec::new();
    for (program, package) in [
        ("ceph-mon", "ceph-mon"),
        ("ceph-osd", "ceph-osd"),
        ("ceph", "ceph-common"),
        ("rbd", "ceph-common"),
        ("monmaptool", "ceph-common"),
    ] {
        if !is_in_path(program) && !missing.contains(&package) {
            missing.push(package);
        }
    }
    missing
}

fn reject_missing(missing: &[&str]) -> Result<(), String> {
    if missing.is_empty() {
        return Ok(());
    }
    let missing = missing.join(" ");
    Err(format!(
        "skipped: packages are missing, expected `apt-get install --no-install-recommends {missing}`"
    ))
}

fn is_in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program).exists())
}

/// Waits until something is true. Returns false if it is not in time.
pub(super) fn wait_for(limit: Duration, mut is_true: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    while !is_true() {
        if Instant::now() > end {
            return false;
        }
        sleep(Duration::from_millis(200));
    }
    true
}
