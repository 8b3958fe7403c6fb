//! Client of the QEMU Machine Protocol (QMP): JSON lines over a socket, with a greeting, then one
//! command and its response at a time, and events in between.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Monitor socket, in the directory of the lab.
pub(super) const SOCKET: &str = "monitor.sock";
/// Response timeout of QEMU.
const PATIENCE: Duration = Duration::from_secs(10);
/// Command that leaves the negotiation mode.
const OPEN: &str = r#"{"execute":"qmp_capabilities"}"#;

/// QMP command that a guest may request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MonitorAction {
    /// Name used by the guest.
    pub(crate) name: &'static str,
    /// QMP command.
    pub(crate) command: &'static str,
}

/// Executes the action `name` on the machine whose monitor is in `room`.
pub(super) fn execute_action(
    deeds: &[MonitorAction],
    name: &str,
    room: &Path,
) -> Result<(), String> {
    let Some(deed) = deeds.iter().find(|deed| deed.name == name) else {
        let known: Vec<_> = deeds.iter().map(|deed| deed.name).collect();
        let known = if known.is_empty() { "nothing".to_owned() } else { known.join(", ") };
        return Err(format!("the guest asked for '{name}', expected {known}"));
    };
    let path = room.join(SOCKET);
    let stream = UnixStream::connect(&path)
        .map_err(|why| format!("connect to {}: {why}", path.display()))?;
    exchange_commands(stream, deed.command, PATIENCE).map_err(|why| format!("{name}: QEMU: {why}"))
}

/// Waits for the greeting, and sends two commands, each after the response to the one before.
fn exchange_commands(stream: UnixStream, command: &str, patience: Duration) -> Result<(), String> {
    let about = |why: std::io::Error| why.to_string();
    let mut out = stream.try_clone().map_err(about)?;
    let mut lines = BufReader::new(stream);
    let end = Instant::now() + patience;
    read_until(&mut lines, end, |line| line.get("QMP").map(|_| Ok(())))?;
    for command in [OPEN, command] {
        writeln!(out, "{command}").map_err(about)?;
        read_until(&mut lines, end, command_result)?;
    }
    Ok(())
}

/// Result of the last command in a line; `None` if the line is an event.
fn command_result(line: &Value) -> Option<Result<(), String>> {
    if line.get("return").is_some() {
        return Some(Ok(()));
    }
    line.get("error").map(|error| Err(error["desc"].as_str().unwrap_or("an error").to_owned()))
}

/// Reads lines until one matches.
fn read_until(
    lines: &mut BufReader<UnixStream>,
    end: Instant,
    is_it: impl Fn(&Value) -> Option<Result<(), String>>,
) -> Result<(), String> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("it did not answer in time".to_owned());
        }
        lines.get_ref().set_read_timeout(Some(left)).map_err(|why| why.to_string())?;
        let mut line = String::new();
        match lines.read_line(&mut line) {
            Ok(0) => return Err("it hung up".to_owned()),
            Ok(_) => {}
            Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => {
                return Err("it did not answer in time".to_owned());
            }
            Err(why) => return Err(why.to_string()),
        }
        let value: Value =
            serde_json::from_str(&line).map_err(|why| format!("'{}': {why}", line.trim()))?;
        if let Some(found) = is_it(&value) {
            return found;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::thread;

    use super::*;

    const GREETING: &str = r#"{"QMP": {"version": {}, "capabilities": []}}"#;
    const DONE: &str = r#"{"return": {}}"#;
    const EVENT: &str = r#"{"event": "DEVICE_DELETED", "data": {}, "timestamp": {}}"#;

    /// Runs the client against a monitor that greets with the first of `lines` and responds with the
    /// others.
    fn exchange_with_test_monitor(answers: [&'static str; 3]) -> (Result<(), String>, Vec<String>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let monitor = thread::spawn(move || {
            let mut out = theirs.try_clone().unwrap();
            let mut heard = BufReader::new(theirs).lines();
            writeln!(out, "{}", answers[0]).unwrap();
            let mut commands = Vec::new();
            for answer in &answers[1..] {
                let Some(Ok(command)) = heard.next() else { break };
                commands.push(command);
                if !answer.is_empty() {
                    writeln!(out, "{EVENT}\n{answer}").unwrap();
                }
            }
            // The client gives up by itself if there is no response.
            heard.next();
            commands
        });
        let result = exchange_commands(ours, r#"{"execute":"stop"}"#, Duration::from_millis(300));
        (result, monitor.join().unwrap())
    }

    #[test]
    fn command_is_sent_after_the_greeting() {
        let (result, commands) = exchange_with_test_monitor([GREETING, DONE, DONE]);
        assert_eq!(result, Ok(()));
        assert_eq!(commands, [OPEN, r#"{"execute":"stop"}"#]);
    }

    #[test]
    fn monitor_error_silence_and_garbage_are_reported() {
        let refused = r#"{"error": {"class": "GenericError", "desc": "no such device"}}"#;
        assert_eq!(
            exchange_with_test_monitor([GREETING, DONE, refused]).0,
            Err("no such device".to_owned())
        );
        assert_eq!(
            exchange_with_test_monitor([GREETING, refused, DONE]).0,
            Err("no such device".to_owned())
        );
        assert_eq!(
            exchange_with_test_monitor([GREETING, DONE, ""]).0,
            Err("it did not answer in time".to_owned())
        );
        assert_eq!(
            exchange_with_test_monitor([EVENT, DONE, DONE]).0,
            Err("it did not answer in time".to_owned())
        );
        assert!(
            exchange_with_test_monitor([GREETING, "what", DONE])
                .0
                .unwrap_err()
                .starts_with("'what': ")
        );
    }

    #[test]
    fn only_listed_actions_are_executed() {
        let deeds = [MonitorAction { name: "pull", command: "{}" }];
        let refused = execute_action(&deeds, "quit", Path::new("/")).unwrap_err();
        assert_eq!(refused, "the guest asked for 'quit', expected pull");
        let refused = execute_action(&[], "quit", Path::new("/")).unwrap_err();
        assert!(refused.ends_with("expected nothing"), "{refused}");
        let refused = execute_action(&deeds, "pull", Path::new("/nowhere")).unwrap_err();
        assert!(refused.starts_with("connect to /nowhere/monitor.sock: "), "{refused}");
    }
}
