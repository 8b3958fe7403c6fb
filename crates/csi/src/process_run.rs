//! Programs of the distribution that are run to their end, with a deadline.

use std::ffi::OsStr;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::status::{CallResult, Code, Status};

/// Result of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProcessResult {
    pub(crate) exit_code: i32,
    pub(crate) stdout: String,
    /// The messages on standard error, or else standard output, on one line.
    pub(crate) messages: String,
}

const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Longest messages in an error.
const MESSAGES_LEN_MAX: usize = 400;
/// Most output of a program that is kept.
const OUTPUT_MAX: u64 = 1 << 20;

/// Runs a program. At the deadline it is killed.
pub(crate) fn run_process<A: AsRef<OsStr>>(
    program: &str,
    arguments: &[A],
    time_max: Duration,
) -> CallResult<ProcessResult> {
    let mut command = Command::new(program);
    command.args(arguments).env("LC_ALL", "C").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| {
        let text = format!("run {program}: {error}, expected the program in PATH");
        Status::failed_precondition(text)
    })?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    // A program that writes much must not wait for a reader.
    let readers = [read_in_background(stdout), read_in_background(stderr)];
    let exit_code = wait_for_exit(program, &mut child, time_max)?;
    let [stdout, stderr] = readers.map(|reader| reader.join().unwrap_or_default());
    let messages = on_one_line(if stderr.trim().is_empty() { &stdout } else { &stderr });
    Ok(ProcessResult { exit_code, stdout, messages })
}

/// Runs a program that has to succeed, and returns what it prints.
pub(crate) fn run_successfully<A: AsRef<OsStr>>(
    program: &str,
    arguments: &[A],
    time_max: Duration,
) -> CallResult<String> {
    let ProcessResult { exit_code, stdout, messages } = run_process(program, arguments, time_max)?;
    match exit_code {
        0 => Ok(stdout),
        code => Err(Status::internal(format!("{program}: exit status {code}: {messages}"))),
    }
}

fn on_one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("; ").chars().take(MESSAGES_LEN_MAX).collect()
}

fn read_in_background<R: Read + Send + 'static>(
    stream: Option<R>,
) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(stream) = stream {
            // What was read before an error is kept.
            let _ = stream.take(OUTPUT_MAX).read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn wait_for_exit(program: &str, child: &mut Child, time_max: Duration) -> CallResult<i32> {
    let begun = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status.code().unwrap_or(-1)),
            Ok(None) if begun.elapsed() > time_max => {
                // It may wait for a device in the kernel; then it ends when that does.
                let _ = child.kill();
                let text = format!("{program}: not ended within {} s", time_max.as_secs());
                return Err(Status::new(Code::DeadlineExceeded, text));
            }
            Ok(None) => sleep(POLL_INTERVAL),
            Err(error) => return Err(Status::internal(format!("wait for {program}: {error}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{run_process, run_successfully};
    use crate::status::Code;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn exit_status_and_messages_are_reported() {
        let script = "echo out; echo first >&2; echo last >&2; exit 3";
        let ended = run_process("sh", &["-c", script], LONG).unwrap();
        let found = (ended.exit_code, ended.stdout.as_str(), ended.messages.as_str());
        assert_eq!(found, (3, "out\n", "first; last"));
        let refused = run_successfully("sh", &["-c", script], LONG).unwrap_err();
        assert_eq!(refused.message, "sh: exit status 3: first; last");
        assert_eq!(
            run_process("no-such-program", &[""], LONG).unwrap_err().code,
            Code::FailedPrecondition
        );
    }

    #[test]
    fn program_that_does_not_end_is_killed_at_the_deadline() {
        let begun = Instant::now();
        let refused = run_process("sleep", &["100"], Duration::from_millis(50)).unwrap_err();
        assert_eq!(refused.code, Code::DeadlineExceeded);
        assert!(begun.elapsed() < Duration::from_secs(50));
    }
}
