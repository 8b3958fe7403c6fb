//! Target processes for the duration of an experiment.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use tenmil_base::Span;
use tenmil_linux::NamedThread;
use tenmil_linux::process_stats::cpu_time_with_reaped_children;
use tenmil_linux::socket::RxPlacement;

use crate::reproduce::bench_task::NQN;

use super::veth_pair::VethPair;

/// Running targets, by their arguments.
#[derive(Default)]
pub(super) struct TargetProcesses {
    all: Vec<(Vec<String>, TargetProcess)>,
    /// Veth pair in front of the targets that are not on loopback, created on first use.
    wire: Option<VethPair>,
}

/// Time limit until a target listens.
const READY_MAX: Duration = Duration::from_secs(30);
/// Time limit of a connection attempt.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// A target process. It keeps no data, so dropping it kills it.
struct TargetProcess {
    child: Child,
    uri: String,
}

impl TargetProcesses {
    /// URI of the target with these arguments, which is started if necessary.
    pub(super) fn start_or_find_target(&mut self, words: &[String]) -> Result<String, String> {
        self.start_or_find_target_at(&[], "tcp://127.0.0.1:0", words)
    }

    /// Like [`start_or_find_target`](Self::start_or_find_target), for a target behind a veth pair.
    pub(super) fn start_or_find_remote_target(
        &mut self,
        words: &[String],
    ) -> Result<String, String> {
        let wire = match self.wire.take() {
            Some(wire) => wire,
            None => VethPair::create()?,
        };
        let (runner, address) = (wire.namespace_command_prefix(), wire.listen_address());
        self.wire = Some(wire);
        let words = [words, &["--allow-any-host".to_owned()]].concat();
        let uri = self.start_or_find_target_at(&runner, &address, &words)?;
        check_napi_receive_queue(&uri)?;
        Ok(uri)
    }

    fn start_or_find_target_at(
        &mut self,
        runner: &[String],
        place: &str,
        words: &[String],
    ) -> Result<String, String> {
        if let Some((_, target)) = self.all.iter().find(|(known, _)| known == words) {
            return Ok(target.uri.clone());
        }
        let target = TargetProcess::start_process(runner, place, words)?;
        let uri = target.uri.clone();
        self.all.push((words.to_vec(), target));
        Ok(uri)
    }

    /// CPU time of all targets.
    pub(super) fn cpu_time(&self) -> Span {
        let times = self
            .all
            .iter()
            .filter_map(|(_, target)| cpu_time_with_reaped_children(target.child.id()));
        Span { ns: times.map(|time| time.ns).sum() }
    }

    /// Ends all targets.
    pub(super) fn stop_all(&mut self) {
        self.all.clear();
        self.wire = None;
    }
}

impl TargetProcess {
    fn start_process(runner: &[String], place: &str, words: &[String]) -> Result<Self, String> {
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
        command
            .args(["serve", "null:?size=1g", "--exit-with-parent", "--listen", place])
            .args(words);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut target = Self { child: child.map_err(|error| refuse(&error))?, uri: String::new() };
        let out = target.child.stdout.take().ok_or_else(|| refuse(&"it has no output"))?;
        let (tell, reported) = mpsc::channel();
        // The thread ends when the target closes its output: on failure to listen, or when it is
        // killed.
        let reading = NamedThread::spawn("ready", None, move |_| {
            let mut ready = String::new();
            let read = BufReader::new(out).read_line(&mut ready);
            // The receiver is dropped after the timeout.
            let _ = tell.send(read.map(|_| ready));
        });
        let _reading = reading.map_err(|error| refuse(&error))?;
        let Ok(ready) = reported.recv_timeout(READY_MAX) else {
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

/// Checks that sockets to this target have a receive queue with a NAPI identifier.
fn check_napi_receive_queue(uri: &str) -> Result<(), String> {
    let place = uri.trim_start_matches("tcp://").split('/').next().unwrap_or_default();
    let refuse = |error: &dyn std::fmt::Display| format!("connect to {place}: {error}");
    let address = place.parse().map_err(|error| refuse(&error))?;
    let stream =
        TcpStream::connect_timeout(&address, CONNECT_MAX).map_err(|error| refuse(&error))?;
    match RxPlacement::of_socket(stream.as_fd()).napi_id {
        Some(_) => Ok(()),
        None => Err(format!(
            "sockets to {place}, over a veth pair that merges packets, are behind no receive queue \
             with a number (SO_INCOMING_NAPI_ID is 0): this kernel has nothing to poll there"
        )),
    }
}

impl Drop for TargetProcess {
    fn drop(&mut self) {
        // Fails if the process has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
