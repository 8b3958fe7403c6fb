//! One guest: QEMU without acceleration, a console that is read line by line, a limit in time.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::console::{self, Check, Verdict, Word};
use super::monitor;
use super::parts::Image;
use super::scenario::Scenario;
use super::tally::Trouble;

/// How long a tenmil beside a guest may take until it is ready.
const READY: Duration = Duration::from_secs(60);

/// What is said of a machine that ended so.
const ENDED_WITH_BESIDE: &str = "what a guest does without its server: QEMU has ended with it";

/// How a guest ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Its script came to its end.
    Whole,
    /// It was there no more before that.
    Early,
    /// It took too long, and was ended.
    Late,
}

impl End {
    /// What is wrong with that, if anything is.
    pub(crate) fn complaint(self, scenario: &Scenario) -> Option<String> {
        match self {
            Self::Whole => None,
            Self::Early => Some("the guest ended before its script did".to_owned()),
            Self::Late => Some(format!("the guest took longer than {} s", scenario.seconds_max)),
        }
    }
}

/// Boots `scenario` and tells of every check as it is made; the console is kept in `room`.
pub(crate) fn run(
    scenario: &Scenario,
    image: &Image,
    room: &Path,
    told: &mut dyn FnMut(&Check),
) -> Result<End, Trouble> {
    // First, for it may have to be fetched.
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
    let mut beside = Beside::start(scenario, &image.tenmil, room)?;
    let mut machine = start(emulator, scenario, image, room)?;
    let mut lines = listen(machine.stdout.take());
    let deadline = Instant::now() + Duration::from_secs(scenario.seconds_max);
    let mut end = End::Early;
    let mut may_end = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match lines.recv_timeout(left) {
            Ok(line) => {
                // A console that cannot be kept is still read.
                _ = writeln!(log, "{line}");
                match console::read(&line) {
                    Word::Check(check) => told(&check),
                    Word::Note(what) => println!("  note: {what}"),
                    Word::KillBeside => {
                        // The socket that it leaves behind is replaced by the next.
                        drop(beside);
                        let again = Beside::start(scenario, &image.tenmil, room);
                        beside = again.inspect_err(|_| stop(&mut machine))?;
                        may_end = scenario.may_end_with_beside;
                    }
                    Word::ColdStart => {
                        stop(&mut machine);
                        machine = start(scenario.emulator.command(room)?, scenario, image, room)?;
                        lines = listen(machine.stdout.take());
                        may_end = false;
                    }
                    Word::Do(name) => {
                        let done = monitor::carry_out(scenario.deeds, &name, room);
                        answer(&mut machine, done);
                    }
                    Word::End => end = End::Whole,
                    Word::Noise => {}
                }
            }
            Err(RecvTimeoutError::Disconnected) if may_end => {
                told(&Check { verdict: Verdict::Skipped, what: ENDED_WITH_BESIDE.to_owned() });
                stop(&mut machine);
                machine = start(scenario.emulator.command(room)?, scenario, image, room)?;
                lines = listen(machine.stdout.take());
                may_end = false;
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                if end != End::Whole {
                    end = End::Late;
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
    // A kernel that checks the timer against a processor which others use as well may find that there is
    // none.
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

/// What QEMU is told of a monitor, for machines that something is done to.
fn monitored(scenario: &Scenario, room: &Path) -> Vec<String> {
    if scenario.deeds.is_empty() {
        return Vec::new();
    }
    let socket = room.join(monitor::SOCKET);
    let place = format!("unix:{},server=on,wait=off", socket.display());
    vec!["-qmp".to_owned(), place]
}

/// Tells the guest, on its console, how it went.
fn answer(machine: &mut Child, done: Result<(), String>) {
    let line = done.map_or_else(|why| format!("not done: {why}"), |()| "done".to_owned());
    if let Some(console) = &mut machine.stdin {
        // A guest that has gone wants no answer.
        _ = writeln!(console, "{line}");
    }
}

/// A tenmil beside the guest. It is ended with it.
struct Beside(Option<Child>);

impl Beside {
    /// Starts it, and waits until it says that it is ready.
    fn start(scenario: &Scenario, tenmil: &Path, room: &Path) -> Result<Self, Trouble> {
        if scenario.beside.is_empty() {
            return Ok(Self(None));
        }
        let mut process = Command::new(tenmil)
            .args(scenario.beside.iter().map(|word| placed(word, room)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|why| Trouble::Failed(format!("start {}: {why}", tenmil.display())))?;
        let lines = listen(process.stdout.take());
        let beside = Self(Some(process));
        let said = match lines.recv_timeout(READY) {
            Ok(line) if line.starts_with("ready") => return Ok(beside),
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => "ended before it was ready".to_owned(),
            Err(RecvTimeoutError::Timeout) => format!("is not ready within {} s", READY.as_secs()),
        };
        Err(Trouble::Failed(format!("tenmil {}: {said}", scenario.beside.join(" "))))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if let Some(process) = &mut self.0 {
            stop(process);
        }
    }
}

fn placed(word: &str, room: &Path) -> String {
    word.replace("ROOM", &room.to_string_lossy())
}

/// Has the console read beside us, so that silence can be noticed.
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
    // It may have ended by itself; then there is nothing to end, and only its status to take.
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
        let start = |tenmil: &str| Beside::start(&scenario, Path::new(tenmil), Path::new("/tmp"));
        // One that says something else, one that ends without a word, and none at all.
        for (tenmil, said) in [
            ("echo", "tenmil serve: serve"),
            ("false", "ended before"),
            ("/nowhere", "start /nowhere"),
        ] {
            match start(tenmil) {
                Err(Trouble::Failed(why)) => assert!(why.contains(said), "{why}"),
                Err(Trouble::Lacking(why)) => panic!("{tenmil}: lacking {why}"),
                Ok(_) => panic!("{tenmil} is said to be ready"),
            }
        }
        let alone = Scenario { beside: &[], ..SCENARIOS[0] };
        assert!(Beside::start(&alone, Path::new("/nowhere"), Path::new("/tmp")).is_ok());
    }
}
