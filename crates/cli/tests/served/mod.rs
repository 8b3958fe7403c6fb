//! A process that serves, and tools that talk to it.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A process that serves. Dropping it ends it.
pub(crate) struct ServeProcess {
    child: Option<Child>,
    /// Where it listens.
    pub(crate) socket: PathBuf,
    /// What it said when it listened.
    pub(crate) ready: String,
    root: tempfile::TempDir,
}

/// Seconds that a tool may take.
const TIME_LIMIT: &str = "60";

impl ServeProcess {
    /// Serves `uri` at a socket of its own.
    pub(crate) fn start(uri: &str, more: &[&str]) -> Self {
        let root = tempfile::tempdir().unwrap();
        let socket = root.path().join("socket");
        Self::start_in(root, &socket, uri, more)
    }

    /// Serves `uri` at `socket`.
    pub(crate) fn start_at(socket: &Path, uri: &str, more: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), socket, uri, more)
    }

    fn start_in(root: tempfile::TempDir, socket: &Path, uri: &str, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(["serve", uri, "--listen", &format!("nbd:{}", socket.display())]).args(more);
        Self::spawn(root, socket, command)
    }

    /// A line of a shell that serves.
    pub(crate) fn start_shell_line(line: &str) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec {line}")]);
        Self::spawn(tempfile::tempdir().unwrap(), Path::new(""), command)
    }

    fn spawn(root: tempfile::TempDir, socket: &Path, mut command: Command) -> Self {
        command.env("XDG_RUNTIME_DIR", root.path()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut ready = String::new();
        // It ends, and the line with it, if it cannot listen.
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
        assert!(ready.contains("ready"), "{ready}");
        Self { child: Some(child), socket: socket.into(), ready, root }
    }

    /// The number of its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Where a client connects.
    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// A command that asks this process.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(arguments).env("XDG_RUNTIME_DIR", self.root.path());
        command
    }

    /// Its control socket.
    pub(crate) fn control_socket(&self) -> PathBuf {
        self.root.path().join(format!("tenmil/{}.sock", self.pid()))
    }

    /// What a command that asks this process says.
    pub(crate) fn stdout_of_rpc_command(&self, line: &str) -> String {
        let words: Vec<&str> = line.split(' ').collect();
        let output = self.command(&words).output().unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What the process reports about its rights, which it must have dropped on all of its threads, and
    /// without a denied system call.
    pub(crate) fn rights_after_drop(&self) -> serde_json::Value {
        let report: serde_json::Value =
            serde_json::from_str(&self.stdout_of_rpc_command("get sandbox --json")).unwrap();
        assert_eq!(report["calls_denied"], serde_json::json!([]), "{report}");
        let kept = report["capabilities_kept"].as_array().unwrap();
        // Kept where locked memory is limited and root may not lift the limit.
        let kept = match kept.as_slice() {
            [] => "0000000000000000",
            [only] if only == "CAP_IPC_LOCK" => "0000000000004000",
            others => panic!("{others:?}"),
        };
        for status in threads_of(self.pid()) {
            let line = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
            // The kernel's own threads are not the program's.
            if line("Name:").trim().starts_with("iou-") {
                continue;
            }
            for key in ["CapInh:", "CapAmb:"] {
                assert_eq!(line(key).trim(), "0000000000000000", "{key} {status}");
            }
            for key in ["CapPrm:", "CapEff:"] {
                assert_eq!(line(key).trim(), kept, "{key} {status}");
            }
            assert_eq!(line("NoNewPrivs:").trim(), "1", "{status}");
            // The kernel may lack it, which the report says.
            let seccomp = if report["seccomp"] == "in force" { "2" } else { "0" };
            assert_eq!(line("Seccomp:").trim(), seccomp, "{status}");
            if report["bounding_set"] == "in force" {
                assert_eq!(line("CapBnd:").trim(), kept, "{status}");
            }
        }
        report
    }

    /// Ends it as a service manager would, and says with which exit code it did. It has 5 seconds.
    pub(crate) fn stop_with_sigterm(mut self) -> Option<i32> {
        let mut child = self.child.take().unwrap();
        let killed = format!("kill -TERM {}", child.id());
        assert!(Command::new("sh").args(["-c", &killed]).status().unwrap().success());
        // What is still there then is ended the hard way, and has no exit code.
        let last = format!(
            "for _ in $(seq 50); do kill -0 {0} 2>&- || exit 0; sleep 0.1; done; kill -KILL {0}",
            child.id()
        );
        let last = Command::new("sh").args(["-c", &last]).spawn();
        let status = child.wait().unwrap();
        last.unwrap().wait().unwrap();
        status.code()
    }
}

impl Drop for ServeProcess {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The status of each thread of a process, as the kernel shows it.
pub(crate) fn threads_of(pid: u32) -> Vec<String> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let statuses = threads
        .filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("status")).ok());
    statuses.collect()
}

/// Whether all these tools are there. If not, says so, or fails where they are required.
pub(crate) fn are_tools_installed(names: &[&str]) -> bool {
    let is_missing = |name: &&&str| {
        let found = Command::new("sh").args(["-c", &format!("command -v {name}")]).output();
        !found.unwrap().status.success()
    };
    let Some(name) = names.iter().find(is_missing) else { return true };
    assert!(std::env::var_os("TENMIL_REQUIRE_TOOLS").is_none(), "{name} is missing");
    println!("skipped: there is no {name}");
    false
}

/// Runs a tool, which must succeed in time, and returns what it says.
pub(crate) fn run(tool: &str, arguments: &[&str]) -> String {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new("timeout")
        .args(["-k", "5", TIME_LIMIT, tool])
        .args(arguments)
        // Some leave files where they are.
        .current_dir(directory.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{tool} {arguments:?}: {}\n{said}{errors}", output.status);
    said
}
