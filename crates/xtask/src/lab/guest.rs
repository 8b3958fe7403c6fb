//! QEMU guest without acceleration, with a parsed console and a time limit.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::console::{self, CheckResult, CheckStatus, ConsoleLine};
use super::monitor;
use super::parts::Image;
use super::scenario::Scenario;
use super::totals::ScenarioError;

/// Time limit for the companion process to become ready.
const READY: Duration = Duration::from_secs(60);

/// Name of the check that is skipped because QEMU exited together with the companion.
const ENDED_WITH_BESIDE: &str = "what a guest does without its server: QEMU has ended with it";

/// How a guest ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VmExit {
    /// The script finished.
    Completed,
    /// The guest exited before that.
    Crashed,
    /// The time limit expired and the guest was killed.
    TimedOut,
}

impl VmExit {
    /// Failure message, unless the guest completed.
    pub(crate) fn complaint(self, scenario: &Scenario) -> Option<String> {
        match self {
            Self::Completed => None,
            Self::Crashed => Some("the guest ended before its script did".to_owned()),
            Self::TimedOut => {
                Some(format!("the guest took longer than {} s", scenario.seconds_max))
            }
        }
    }
}

/// Boots `scenario` and reports each check as it is made; the console log is written to `room`.
pub(crate) fn run(
    scenario: &Scenario,
    image: &Image,
    room: &Path,
    told: &mut dyn FnMut(&CheckResult),
) -> Result<VmExit, ScenarioError> {
    // Prepared first, because it may have to be downloaded.
    let emulator = scenario.emulator.command(room)?;
    if let Some(version) = scenario.emulator.version(room) {
        println!("  note: {version}");
    }
    let log = room.join(format!("{}.log", scenario.name));
    let mut log = File::create(&log).map_err(|why| format!("create {}: {why}", log.display()))?;
    if scenario.disk_bytes > 0 {
        for name in scenario.disks {
            let disk = room.join(name);
            let made = File::create(&disk).and_then(|disk| disk.set_len(scenario.disk_bytes));
            made.map_err(|why| format!("create {}: {why}", disk.display()))?;
        }
    }
    let mut beside = Companion::start(scenario, &image.tenmil, room)?;
    let mut machine = start(emulator, scenario, image, room)?;
    let mut lines = listen(machine.stdout.take());
    let deadline = Instant::now() + Duration::from_secs(scenario.seconds_max);
    let mut end = VmExit::Crashed;
    let mut may_end = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match lines.recv_timeout(left) {
            Ok(line) => {
                // A failure to write the log does not end the run.
                _ = writeln!(log, "{line}");
                match console::read(&line) {
                    ConsoleLine::Check(check) => told(&check),
                    ConsoleLine::Note(what) => println!("  note: {what}"),
                    ConsoleLine::KillBeside => {
                        // The new process replaces the socket that the old one leaves behind.
                        drop(beside);
                        let again = Companion::start(scenario, &image.tenmil, room);
                        beside = again.inspect_err(|_| stop(&mut machine))?;
                        may_end = scenario.may_end_with_beside;
                    }
                    ConsoleLine::ColdStart => {
                        stop(&mut machine);
                        machine = start(scenario.emulator.command(room)?, scenario, image, room)?;
                        lines = listen(machine.stdout.take());
                        may_end = false;
                    }
                    ConsoleLine::Do(name) => {
                        let done = monitor::carry_out(scenario.deeds, &name, room);
                        answer(&mut machine, done);
                    }
                    ConsoleLine::End => end = VmExit::Completed,
                    ConsoleLine::Noise => {}
                }
            }
            Err(RecvTimeoutError::Disconnected) if may_end => {
                told(&CheckResult {
                    verdict: CheckStatus::Skipped,
                    what: ENDED_WITH_BESIDE.to_owned(),
                });
                stop(&mut machine);
                machine = start(scenario.emulator.command(room)?, scenario, image, room)?;
                lines = listen(machine.stdout.take());
                may_end = false;
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                if end != VmExit::Completed {
                    end = VmExit::TimedOut;
                }
                break;
            }
        }
    }
    stop(&mut machine);
    drop(beside);
    Ok(end)
}

fn start(
    mut emulator: Command,
    scenario: &Scenario,
    image: &Image,
    room: &Path,
) -> Result<Child, String> {
    // On a busy host, the kernel's timer check may fail for lack of CPU time (no_timer_check).
    let line = format!(
        "console=ttyS0 no_timer_check quiet loglevel=1 panic=-1 random.trust_cpu=on lab={} lab_short={} {}",
        scenario.name,
        u8::from(scenario.is_short),
        scenario.kernel_line
    );
    let restart: &[&str] = if scenario.may_restart { &[] } else { &["-no-reboot"] };
    emulator
        .args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "2G"])
        .args(["-machine", scenario.machine, "-display", "none", "-monitor", "none"])
        .args(["-serial", "stdio", "-nic", "none"])
        .args(monitored(scenario, room))
        .args(restart)
        .args(scenario.devices.iter().map(|word| placed(word, room)))
        .arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.initramfs)
        .args(["-append", &line])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|why| format!("start QEMU: {why}"))
}

/// QEMU arguments of the monitor, for scenarios with monitor actions.
fn monitored(scenario: &Scenario, room: &Path) -> Vec<String> {
    if scenario.deeds.is_empty() {
        return Vec::new();
    }
    let socket = room.join(monitor::SOCKET);
    let place = format!("unix:{},server=on,wait=off", socket.display());
    vec!["-qmp".to_owned(), place]
}

/// Sends the result of a monitor action to the guest console.
fn answer(machine: &mut Child, done: Result<(), String>) {
    let line = done.map_or_else(|why| format!("not done: {why}"), |()| "done".to_owned());
    if let Some(console) = &mut machine.stdin {
        // If the guest has exited, no reply is needed.
        _ = writeln!(console, "{line}");
    }
}

/// Companion tenmil process beside the guest, ended with it.
struct Companion(Option<Child>);

impl Companion {
    /// Starts the process, and waits until it prints `ready`.
    fn start(scenario: &Scenario, tenmil: &Path, room: &Path) -> Result<Self, ScenarioError> {
        if scenario.beside.is_empty() {
            return Ok(Self(None));
        }
        let mut process = Command::new(tenmil)
            .args(scenario.beside.iter().map(|word| placed(word, room)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|why| ScenarioError::Failed(format!("start {}: {why}", tenmil.display())))?;
        let lines = listen(process.stdout.take());
        let beside = Self(Some(process));
        let said = match lines.recv_timeout(READY) {
            Ok(line) if line.starts_with("ready") => return Ok(beside),
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => "ended before it was ready".to_owned(),
            Err(RecvTimeoutError::Timeout) => format!("is not ready within {} s", READY.as_secs()),
        };
        Err(ScenarioError::Failed(format!("tenmil {}: {said}", scenario.beside.join(" "))))
    }
}

impl Drop for Companion {
    fn drop(&mut self) {
        if let Some(process) = &mut self.0 {
            stop(process);
        }
    }
}

fn placed(word: &str, room: &Path) -> String {
    word.replace("ROOM", &room.to_string_lossy())
}

/// Reads the console on a thread of its own, so that receiving can time out.
fn listen(console: Option<ChildStdout>) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        let Some(console) = console else { return };
        for line in BufReader::new(console).split(b'\n') {
            let Ok(line) = line else { return };
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

fn stop(machine: &mut Child) {
    // If the process has exited already, this only reaps it.
    _ = machine.kill();
    _ = machine.wait();
}

#[cfg(test)]
mod tests {
    use super::super::scenario::SCENARIOS;
    use super::*;

    #[test]
    fn a_tenmil_beside_that_is_not_ready_has_failed() {
        let scenario = Scenario { beside: &["serve"], ..SCENARIOS[0] };
        let start =
            |tenmil: &str| Companion::start(&scenario, Path::new(tenmil), Path::new("/tmp"));
        // A process with other output, one that exits silently, and a missing program.
        for (tenmil, said) in [
            ("echo", "tenmil serve: serve"),
            ("false", "ended before"),
            ("/nowhere", "start /nowhere"),
        ] {
            match start(tenmil) {
                Err(ScenarioError::Failed(why)) => assert!(why.contains(said), "{why}"),
                Err(ScenarioError::Unavailable(why)) => panic!("{tenmil}: lacking {why}"),
                Ok(_) => panic!("{tenmil} is said to be ready"),
            }
        }
        let alone = Scenario { beside: &[], ..SCENARIOS[0] };
        assert!(Companion::start(&alone, Path::new("/nowhere"), Path::new("/tmp")).is_ok());
    }
}
