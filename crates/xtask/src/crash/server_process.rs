//! The `tenmil serve` processes of a world.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Time limit for the start of a process. A debug build on a busy machine takes a second.
const START_MAX: Duration = Duration::from_secs(40);
/// Time limit for a killed process to be reaped.
const REAP_MAX: Duration = Duration::from_secs(20);
/// Time limit for threads of a killed process that are not blocked to end.
const STRIKE_MAX: Duration = Duration::from_millis(10);
const PAUSE: Duration = Duration::from_millis(2);

/// Process that is restarted with the same output files.
#[derive(Clone, Debug)]
pub(super) struct ServerProcess {
    name: &'static str,
    directory: PathBuf,
    child: Arc<Mutex<Option<Child>>>,
    /// Whether it was killed and not started again.
    is_struck: Arc<AtomicBool>,
}

impl ServerProcess {
    pub(super) fn new(name: &'static str, directory: &Path) -> Self {
        Self {
            name,
            directory: directory.to_owned(),
            child: Arc::default(),
            is_struck: Arc::default(),
        }
    }

    fn lock_child(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn output_file(&self, kind: &str) -> PathBuf {
        self.directory.join(format!("{}.{kind}", self.name))
    }

    /// Starts `tenmil serve` and waits until it listens. Returns its ready message.
    pub(super) fn start(&self, tenmil: &Path, arguments: &[String]) -> Result<Value, String> {
        self.kill_and_reap();
        let (out, err) = (self.output_file("out"), self.output_file("err"));
        let doing = |why| format!("start {}: {why}", self.name);
        self.is_struck.store(false, Ordering::Relaxed);
        let stdout = File::create(&out).map_err(doing)?;
        let stderr = OpenOptions::new().create(true).append(true).open(&err).map_err(doing)?;
        let mut command = Command::new(tenmil);
        command.arg("serve").args(arguments).args(["--json", "--exit-with-parent"]);
        command.current_dir(&self.directory).stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        *self.lock_child() = Some(command.spawn().map_err(doing)?);
        let begun = Instant::now();
        loop {
            let printed = std::fs::read_to_string(&out).unwrap_or_default();
            if let Some((line, _)) = printed.split_once('\n') {
                return serde_json::from_str(line).map_err(|why| format!("{}: {why}", self.name));
            }
            let gone = !self.is_running();
            if gone || begun.elapsed() > START_MAX {
                let how = if gone { "has ended" } else { "does not listen" };
                let said = std::fs::read_to_string(&err).unwrap_or_default();
                let last = said.lines().last().unwrap_or_default().to_owned();
                let seconds = begun.elapsed().as_secs_f32();
                return Err(format!("start {}: it {how} after {seconds:.1} s: {last}", self.name));
            }
            std::thread::sleep(PAUSE);
        }
    }

    pub(super) fn process_name(&self) -> &'static str {
        self.name
    }

    /// Copies its standard error to `folder`.
    pub(super) fn keep_output(&self, folder: &Path) {
        let _ = std::fs::copy(self.output_file("err"), folder.join(format!("{}.err", self.name)));
    }

    /// The last lines of its standard error.
    pub(super) fn stderr_tail(&self) -> Vec<String> {
        let said = std::fs::read_to_string(self.output_file("err")).unwrap_or_default();
        let lines: Vec<&str> = said.lines().collect();
        let first = lines.len().saturating_sub(4);
        lines[first..].iter().map(|line| (*line).to_owned()).collect()
    }

    pub(super) fn is_running(&self) -> bool {
        let is_struck = self.is_struck.load(Ordering::Relaxed);
        !is_struck
            && self.lock_child().as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.lock_child().as_ref().map(Child::id)
    }

    /// Sends SIGKILL, and waits until no thread can run any more: a thread blocked on a disk ends when
    /// its request completes, without processing the result. Returns whether it was running.
    pub(super) fn kill_without_wait(&self) -> bool {
        let was_running = self.is_running();
        self.is_struck.store(true, Ordering::Relaxed);
        if let Some(child) = self.lock_child().as_mut() {
            let _ = child.kill();
            await_exit(child, STRIKE_MAX);
        }
        was_running
    }

    /// Sends SIGKILL, and waits for a limited time until the process is reaped.
    pub(super) fn kill_and_reap(&self) {
        let Some(mut child) = self.lock_child().take() else { return };
        let _ = child.kill();
        if !await_exit(&mut child, REAP_MAX) {
            // It is blocked in the kernel by a request that will complete soon.
            *self.lock_child() = Some(child);
        }
    }

    /// Sends SIGTERM; returns whether the process ended within `most`.
    pub(super) fn terminate(&self, most: Duration) -> bool {
        let Some(mut child) = self.lock_child().take() else { return true };
        let _ = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
        let ended = await_exit(&mut child, most);
        if !ended {
            let _ = child.kill();
            let _ = child.wait();
        }
        ended
    }
}

fn await_exit(child: &mut Child, most: Duration) -> bool {
    let begun = Instant::now();
    while matches!(child.try_wait(), Ok(None)) {
        if begun.elapsed() > most {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}

/// Runs a tenmil command to its end.
pub(super) fn run_tenmil(
    tenmil: &Path,
    directory: &Path,
    arguments: &[&str],
) -> Result<Output, String> {
    let mut command = Command::new(tenmil);
    command.args(arguments).current_dir(directory).stdin(Stdio::null());
    command.output().map_err(|why| format!("run tenmil {}: {why}", arguments.join(" ")))
}

/// Runs a tenmil command that has to succeed. Returns its output.
pub(super) fn run_tenmil_successfully(
    tenmil: &Path,
    directory: &Path,
    arguments: &[&str],
) -> Result<String, String> {
    let output = run_tenmil(tenmil, directory, arguments)?;
    let (out, err) = (&output.stdout, String::from_utf8_lossy(&output.stderr));
    let out = String::from_utf8_lossy(out).into_owned();
    if output.status.success() {
        return Ok(out);
    }
    let status = output.status.code().unwrap_or(-1);
    let said = format!("{} {}", out.trim(), err.trim());
    Err(format!("tenmil {}: exit status {status}: {}", arguments.join(" "), said.trim()))
}
