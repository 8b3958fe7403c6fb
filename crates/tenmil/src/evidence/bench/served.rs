//! Targets in processes of their own, for the length of an experiment.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use base::Span;
use host::process::family_time;

use crate::evidence::work::NQN;

/// Targets that serve, by the words that they were started with.
#[derive(Default)]
pub(super) struct Targets(Vec<(Vec<String>, Target)>);

/// A process that serves. Dropped, it is ended: it keeps no data.
struct Target {
    child: Child,
    uri: String,
}

impl Targets {
    /// Where the target with these words serves; it is started if it does not.
    pub(super) fn get(&mut self, words: &[String]) -> Result<String, String> {
        if let Some((_, target)) = self.0.iter().find(|(known, _)| known == words) {
            return Ok(target.uri.clone());
        }
        let target = Target::start(words)?;
        let uri = target.uri.clone();
        self.0.push((words.to_vec(), target));
        Ok(uri)
    }

    /// Time on processors of all of them.
    pub(super) fn time(&self) -> Span {
        let times = self.0.iter().filter_map(|(_, target)| family_time(target.child.id()));
        Span { ns: times.map(|time| time.ns).sum() }
    }

    /// Ends all of them.
    pub(super) fn end(&mut self) {
        self.0.clear();
    }
}

impl Target {
    fn start(words: &[String]) -> Result<Self, String> {
        let refuse = |error: &dyn std::fmt::Display| format!("serve a target: {error}");
        let program = std::env::current_exe().map_err(|error| refuse(&error))?;
        let mut command = Command::new(program);
        command.args(["serve", "null:?size=1g", "--listen", "tcp://127.0.0.1:0"]).args(words);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut target = Self { child: child.map_err(|error| refuse(&error))?, uri: String::new() };
        let mut ready = String::new();
        if let Some(out) = target.child.stdout.as_mut() {
            // It ends, and the line with it, if it cannot listen.
            BufReader::new(out).read_line(&mut ready).map_err(|error| refuse(&error))?;
        }
        let listens = ready.split_whitespace().nth(1).filter(|_| ready.starts_with("ready "));
        let listens = listens.ok_or_else(|| refuse(&"it ended before it listened"))?;
        target.uri = format!("{listens}/{NQN}");
        Ok(target)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // One that has ended by itself cannot be ended again.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
