//! Disks of ublk: for each volume a process `tenmil serve tcp://… --listen ublk:`.
//!
//! ```text
//!   STATE/disk-KEY.uri     the volume: a disk is wanted
//!   STATE/disk-KEY.ready   first line of the process: its disk
//!   STATE/disk-KEY.log     messages of the process
//! ```
//!
//! A process is found by its arguments, so that one that was started just before the driver was killed is found,
//! too. A disk whose process has ended waits for the next one, which continues it.

use std::fs::{File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{DEVICE_TIME_MAX, POLL_INTERVAL};
use crate::connection::{Connection, NAMESPACE};
use crate::names::hash_text;
use crate::status::{CallResult, Code, Status};

/// Disks that processes of this node serve.
#[derive(Clone, Debug)]
pub(crate) struct DiskServers {
    program: PathBuf,
    state: PathBuf,
    /// Control device of ublk.
    control: PathBuf,
    processes: PathBuf,
}

/// Processes that this one has started, by the names of their disks. One that has just been started has no
/// arguments yet.
static STARTED: Mutex<Vec<(String, Child)>> = Mutex::new(Vec::new());

/// Time limit for the end of a process: it completes requests first.
const STOP_TIME_MAX: Duration = Duration::from_secs(30);
const KEY_DIGITS: usize = 24;
const URI: &str = "uri";
const READY: &str = "ready";

impl DiskServers {
    pub(super) fn new(program: PathBuf, state: PathBuf) -> Self {
        let (control, processes) = ("/dev/ublk-control".into(), "/proc".into());
        Self { program, state, control, processes }
    }

    /// Why no volume can be attached. A server other than the default is asked for no device.
    pub(super) fn problem(&self) -> Option<String> {
        let program = self.program.display();
        if self.program == Path::new("tenmil") && !self.control.exists() {
            let control = self.control.display();
            return Some(format!("ublk is not loaded ({control} is missing): modprobe ublk_drv"));
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let is_there = self.program.is_file()
            || std::env::split_paths(&path)
                .any(|directory| directory.join(&self.program).is_file());
        (!is_there).then(|| format!("{program}: no such program, expected it for disks of ublk"))
    }

    /// Starts the processes of all disks again that have none.
    pub(super) fn restart_all(&self) -> Vec<String> {
        let Ok(listed) = std::fs::read_dir(&self.state) else { return Vec::new() };
        let names = listed.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let key =
            |name: String| name.strip_prefix("disk-")?.strip_suffix(".uri").map(str::to_owned);
        let restart = |key: String| -> CallResult<()> {
            let uri = std::fs::read_to_string(self.file(&key, URI))
                .map_err(|error| file_error("read", &self.file(&key, URI), &error))?;
            self.ensure_disk(&key, &uri).map(drop)
        };
        names
            .filter_map(key)
            .filter_map(|key| restart(key).err())
            .map(|it| it.to_string())
            .collect()
    }

    pub(super) fn attached_device(&self, nqn: &str) -> CallResult<Option<PathBuf>> {
        let key = key_of(nqn);
        Ok(self.find_process(&key)?.and_then(|_| self.ready_disk(&key)))
    }

    pub(super) fn attach(&self, connection: &Connection) -> CallResult<PathBuf> {
        let Connection { nqn, addresses, host } = connection;
        let uri = format!("tcp://{}/{nqn}/{NAMESPACE}?hostnqn={host}", addresses.join(","));
        let key = key_of(nqn);
        std::fs::write(self.file(&key, URI), &uri)
            .map_err(|error| file_error("write", &self.file(&key, URI), &error))?;
        self.ensure_disk(&key, &uri)
    }

    /// The disk of a process, which is started if there is none.
    fn ensure_disk(&self, key: &str, uri: &str) -> CallResult<PathBuf> {
        if self.find_process(key)?.is_none() {
            self.start_process(key, uri)?;
        }
        let begun = Instant::now();
        loop {
            let is_running = self.find_process(key)?.is_some();
            match self.ready_disk(key) {
                Some(disk) if is_running && disk.exists() => return Ok(disk),
                _ if !is_running => {
                    let said = std::fs::read_to_string(self.file(key, "log")).unwrap_or_default();
                    let last = said.lines().last().unwrap_or_default();
                    return Err(Status::unavailable(format!("attach {uri}: {last}")));
                }
                _ if begun.elapsed() > DEVICE_TIME_MAX => {
                    let seconds = DEVICE_TIME_MAX.as_secs();
                    let text = format!("attach {uri}: no disk after {seconds} s");
                    return Err(Status::new(Code::DeadlineExceeded, text));
                }
                _ => sleep(POLL_INTERVAL),
            }
        }
    }

    fn start_process(&self, key: &str, uri: &str) -> CallResult<()> {
        let (ready, log) = (self.file(key, READY), self.file(key, "log"));
        let output = File::create(&ready).map_err(|error| file_error("create", &ready, &error))?;
        let messages = OpenOptions::new().create(true).append(true).open(&log);
        let messages = messages.map_err(|error| file_error("create", &log, &error))?;
        let mut command = Command::new(&self.program);
        command.args([
            "serve",
            uri,
            "--listen",
            "ublk:",
            "--json",
            "--instance",
            &instance_of(key),
        ]);
        command.stdin(Stdio::null()).stdout(output).stderr(messages).process_group(0);
        let child = command.spawn().map_err(|error| {
            Status::failed_precondition(format!("run {}: {error}", self.program.display()))
        })?;
        let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
        started.push((instance_of(key), child));
        Ok(())
    }

    pub(super) fn detach(&self, nqn: &str) -> CallResult<()> {
        let key = key_of(nqn);
        let begun = Instant::now();
        if let Some(pid) = self.find_process(&key)? {
            // It may have ended meanwhile.
            let _ = kill_process(pid, Signal::TERM);
        }
        while self.find_process(&key)?.is_some() {
            if begun.elapsed() > STOP_TIME_MAX {
                let seconds = STOP_TIME_MAX.as_secs();
                let text =
                    format!("detach {nqn}: the server of its disk has not ended in {seconds} s");
                return Err(Status::new(Code::DeadlineExceeded, text));
            }
            sleep(POLL_INTERVAL);
        }
        // The URI is the last one: without it the others mean nothing.
        for kind in [READY, "log", URI] {
            let path = self.file(&key, kind);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(file_error("remove", &path, &error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The disk that a process has reported.
    fn ready_disk(&self, key: &str) -> Option<PathBuf> {
        let text = std::fs::read_to_string(self.file(key, READY)).ok()?;
        let (line, _) = text.split_once('\n')?;
        let ready: Value = serde_json::from_str(line).ok()?;
        Some(ready.get("connect")?.get(0)?.as_str()?.into())
    }

    /// The process that serves a disk.
    fn find_process(&self, key: &str) -> CallResult<Option<Pid>> {
        let (instance, program) = (instance_of(key), self.program.to_string_lossy().into_owned());
        if let Some(pid) = find_started(&instance) {
            return Ok(Some(pid));
        }
        let failed = |error: std::io::Error| file_error("list", &self.processes, &error);
        for entry in std::fs::read_dir(&self.processes).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // One that has ended has no arguments.
            let arguments = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let mut words = arguments.split(|byte| *byte == 0);
            let is_program = words.next() == Some(program.as_bytes());
            if is_program && words.any(|word| word == instance.as_bytes()) {
                return Ok(Pid::from_raw(pid));
            }
        }
        Ok(None)
    }

    fn file(&self, key: &str, kind: &str) -> PathBuf {
        self.state.join(format!("disk-{key}.{kind}"))
    }
}

/// A process that this one has started. Those that have ended are waited for.
fn find_started(instance: &str) -> Option<Pid> {
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    started.retain_mut(|(_, child)| matches!(child.try_wait(), Ok(None)));
    let found = started.iter().find(|(other, _)| other == instance);
    found.map(|(_, child)| Pid::from_child(child))
}

fn key_of(nqn: &str) -> String {
    hash_text(nqn, KEY_DIGITS)
}

/// Name of the process, also for `tenmil get --instance`.
fn instance_of(key: &str) -> String {
    format!("csi-{key}")
}

fn file_error(doing: &str, path: &Path, error: &std::io::Error) -> Status {
    Status::internal(format!("{doing} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::DiskServers;
    use crate::connection::Connection;

    /// A server that reports /dev/null as its disk, and ends at SIGTERM.
    fn server(directory: &Path, script: &str) -> DiskServers {
        let program = directory.join("server");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        // A script is run by its shell, whose name is the first argument.
        let mut servers = DiskServers::new(program, directory.to_owned());
        servers.control = "/dev/null".into();
        servers
    }

    fn connection() -> Connection {
        Connection {
            nqn: format!("nqn.2026-01.org.tenmil:csi:{}:a", std::process::id()),
            addresses: vec!["192.0.2.1:4420".into()],
            host: "nqn.2014-08.org.example:node".into(),
        }
    }

    #[test]
    fn what_a_server_says_when_it_ends_is_the_error() {
        let directory = tempfile::tempdir().unwrap();
        let servers = server(directory.path(), "echo no such target >&2; exit 1");
        let refused = servers.attach(&connection()).unwrap_err();
        assert!(refused.message.ends_with("no such target"), "{refused}");
        assert_eq!(servers.attached_device(&connection().nqn), Ok(None));
        servers.detach(&connection().nqn).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "the program alone");
    }

    #[test]
    fn program_that_is_missing_is_named() {
        let servers = DiskServers::new("/no/such/program".into(), "/tmp".into());
        assert!(servers.problem().unwrap().contains("/no/such/program"));
    }
}
