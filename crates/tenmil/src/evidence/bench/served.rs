//! Targets in processes of their own, for the length of an experiment.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use base::Span;
use host::Thread;
use host::process::family_time;
use host::socket::Placement;

use crate::evidence::work::NQN;

use super::wire::Wire;

/// Targets that serve, by the words that they were started with.
#[derive(Default)]
pub(super) struct Targets {
    all: Vec<(Vec<String>, Target)>,
    /// What those are behind that are not on loopback, once one was asked for.
    wire: Option<Wire>,
}

/// How long a target may take until it listens.
const READY_MAX: Duration = Duration::from_secs(30);
/// How long a connection may take.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// A process that serves. Dropped, it is ended: it keeps no data.
struct Target {
    child: Child,
    uri: String,
}

impl Targets {
    /// Where the target with these words serves; it is started if it does not.
    pub(super) fn get(&mut self, words: &[String]) -> Result<String, String> {
        self.at(&[], "tcp://127.0.0.1:0", words)
    }

    /// The same of one at the other end of a wire.
    pub(super) fn get_far(&mut self, words: &[String]) -> Result<String, String> {
        let wire = match self.wire.take() {
            Some(wire) => wire,
            None => Wire::lay()?,
        };
        let (runner, address) = (wire.runner(), wire.address());
        self.wire = Some(wire);
        let words = [words, &["--allow-any-host".to_owned()]].concat();
        let uri = self.at(&runner, &address, &words)?;
        has_queue(&uri)?;
        Ok(uri)
    }

    fn at(&mut self, runner: &[String], place: &str, words: &[String]) -> Result<String, String> {
        if let Some((_, target)) = self.all.iter().find(|(known, _)| known == words) {
            return Ok(target.uri.clone());
        }
        let target = Target::start(runner, place, words)?;
        let uri = target.uri.clone();
        self.all.push((words.to_vec(), target));
        Ok(uri)
    }

    /// Time on processors of all of them.
    pub(super) fn time(&self) -> Span {
        let times = self.all.iter().filter_map(|(_, target)| family_time(target.child.id()));
        Span { ns: times.map(|time| time.ns).sum() }
    }

    /// Ends all of them.
    pub(super) fn end(&mut self) {
        self.all.clear();
        self.wire = None;
    }
}

impl Target {
    fn start(runner: &[String], place: &str, words: &[String]) -> Result<Self, String> {
        let refuse = |error: &dyn std::fmt::Display| format!("serve a target: {error}");
        let program = std::env::current_exe().map_err(|error| refuse(&error))?;
        let mut command = match runner {
            [] => Command::new(program),
            [runner, its_words @ ..] => {
                let mut command = Command::new(runner);
                command.args(its_words).arg(program);
                command
            }
        };
        command.args(["serve", "null:?size=1g", "--with-parent", "--listen", place]).args(words);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut target = Self { child: child.map_err(|error| refuse(&error))?, uri: String::new() };
        let out = target.child.stdout.take().ok_or_else(|| refuse(&"it has no output"))?;
        let (tell, told) = mpsc::channel();
        // It ends, and the line with it, if it cannot listen; and with the target at the latest.
        let reading = Thread::spawn("ready", None, move |_| {
            let mut ready = String::new();
            let read = BufReader::new(out).read_line(&mut ready);
            // Nobody may wait any more.
            let _ = tell.send(read.map(|_| ready));
        });
        let _reading = reading.map_err(|error| refuse(&error))?;
        let Ok(ready) = told.recv_timeout(READY_MAX) else {
            drop(target);
            return Err(refuse(&format!("it is not ready after {} s", READY_MAX.as_secs())));
        };
        let ready = ready.map_err(|error| refuse(&error))?;
        let listens = ready.split_whitespace().nth(1).filter(|_| ready.starts_with("ready "));
        let listens = listens.ok_or_else(|| refuse(&"it ended before it listened"))?;
        target.uri = format!("{listens}/{NQN}");
        Ok(target)
    }
}

/// Whether sockets to this target are behind a receive queue that has a number.
fn has_queue(uri: &str) -> Result<(), String> {
    let place = uri.trim_start_matches("tcp://").split('/').next().unwrap_or_default();
    let refuse = |error: &dyn std::fmt::Display| format!("connect to {place}: {error}");
    let address = place.parse().map_err(|error| refuse(&error))?;
    let stream =
        TcpStream::connect_timeout(&address, CONNECT_MAX).map_err(|error| refuse(&error))?;
    match Placement::of(stream.as_fd()).napi_id {
        Some(_) => Ok(()),
        None => Err(format!(
            "sockets to {place}, over a veth pair that merges packets, are behind no receive queue \
             with a number (SO_INCOMING_NAPI_ID is 0): this kernel has nothing to poll there"
        )),
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // One that has ended by itself cannot be ended again.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
