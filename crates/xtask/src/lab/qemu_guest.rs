//! QEMU guest without acceleration, with a parsed console and a time limit.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::check_totals::ScenarioError;
use super::guest_console::{self, CheckResult, CheckStatus, ConsoleLine};
use super::guest_images::GuestImage;
use super::qemu_monitor;
use super::scenario::LabScenario;

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
    pub(crate) fn failure_text(self, scenario: &LabScenario) -> Option<String> {
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
pub(crate) fn run_guest(
    scenario: &LabScenario,
    image: &GuestImage,
    room: &Path,
    reported: &mut dyn FnMut(&CheckResult),
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
    let mut beside = CompanionProcess::start(scenario, &image.tenmil, room)?;
    let mut machine = start_qemu(emulator, scenario, image, room)?;
    let mut lines = read_console(machine.stdout.take());
    let deadline = Instant::now() + Duration::from_secs(scenario.seconds_max);
    let mut end = VmExit::Crashed;
    let mut may_end = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match lines.recv_timeout(left) {
            Ok(line) => {
                // A failure to write the log does not end the run.
                _ = writeln!(log, "{line}");
                match guest_console::parse_console_line(&line) {
                    ConsoleLine::Check(check) => reported(&check),
                    ConsoleLine::Note(what) => println!("  note: {what}"),
                    ConsoleLine::KillBeside => {
                        // The new process replaces the socket that the old one leaves behind.
                        drop(beside);
                        let again = CompanionProcess::start(scenario, &image.tenmil, room);
                        beside = again.inspect_err(|_| kill_guest(&mut machine))?;
                        may_end = scenario.may_end_with_beside;
                    }
                    ConsoleLine::ColdStart => {
                        kill_guest(&mut machine);
                        machine =
                            start_qemu(scenario.emulator.command(room)?, scenario, image, room)?;
                        lines = read_console(machine.stdout.take());
                        may_end = false;
                    }
                    ConsoleLine::Do(name) => {
                        let done = qemu_monitor::execute_action(scenario.deeds, &name, room);
                        send_action_result(&mut machine, done);
                    }
                    ConsoleLine::End => end = VmExit::Completed,
                    ConsoleLine::Noise => {}
                }
            }
            Err(RecvTimeoutError::Disconnected) if may_end => {
                reported(&CheckResult {
                    verdict: CheckStatus::Skipped,
                    what: ENDED_WITH_BESIDE.to_owned(),
                });
                kill_guest(&mut machine);
                machine = start_qemu(scenario.emulator.command(room)?, scenario, image, room)?;
                lines = read_console(machine.stdout.take());
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
    kill_guest(&mut machine);
    drop(beside);
    Ok(end)
}

fn start_qemu(
    mut emulator: Command,
    scenario: &LabScenario,
    image: &GuestImage,
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
        .args(monitor_arguments(scenario, room))
        .args(restart)
        .args(scenario.devices.iter().map(|word| expand_path(word, room)))
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
fn monitor_arguments(scenario: &LabScenario, room: &Path) -> Vec<String> {
    if scenario.deeds.is_empty() {
        return Vec::new();
    }
    let socket = room.join(qemu_monitor::SOCKET);
    let place = format!("unix:{},server=on,wait=off", socket.display());
    vec!["-qmp".to_owned(), place]
}

/// Sends the result of a monitor action to the guest console.
fn send_action_result(machine: &mut Child, done: Result<(), String>) {
    let line = done.map_or_else(|why| format!("not done: {why}"), |()| "done".to_owned());
    if let Some(console) = &mut machine.stdin {
        // If the guest has exited, no reply is needed.
        _ = writeln!(console, "{line}");
    }
}

/// Companion tenmil process beside the guest, ended with it.
struct CompanionProcess(Option<Child>);

impl CompanionProcess {
    /// Starts the process, and waits until it prints `ready`.
    fn start(scenario: &LabScenario, tenmil: &Path, room: &Path) -> Result<Self, ScenarioError> {
        if scenario.beside.is_empty() {
            return Ok(Self(None));
        }
        let mut process = Command::new(tenmil)
            .args(scenario.beside.iter().map(|word| expand_path(word, room)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|why| ScenarioError::Failed(format!("start {}: {why}", tenmil.display())))?;
        let lines = read_console(process.stdout.take());
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

impl Drop for CompanionProcess {
    fn drop(&mut self) {
        if let Some(process) = &mut self.0 {
            kill_guest(process);
        }
    }
}

fn expand_path(word: &str, room: &Path) -> String {
    word.replace("ROOM", &room.to_string_lossy())
}

/// Reads the console on a thread of its own, so that receiving can time out.
fn read_console(console: Option<ChildStdout>) -> Receiver<String> {
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

fn kill_guest(machine: &mut Child) {
    // If the process has exited already, this only reaps it.
    _ = machine.kill();
    _ = machine.wait();
}

#[cfg(test)]
mod tests {
    use super::super::scenario::SCENARIOS;
    use super::*;

    #[test]
    fn companion_that_is_not_ready_fails_the_scenario() {
        let scenario = LabScenario { beside: &["serve"], ..SCENARIOS[0] };
        let start =
            |tenmil: &str| CompanionProcess::start(&scenario, Path::new(tenmil), Path::new("/tmp"));
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
        let alone = LabScenario { beside: &[], ..SCENARIOS[0] };
        assert!(CompanionProcess::start(&alone, Path::new("/nowhere"), Path::new("/tmp")).is_ok());
    }
}
