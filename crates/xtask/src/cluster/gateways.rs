//! The gateways.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::relay::Relay;
use super::services::{DEVICES, ServiceKind, Services, free_address};
use crate::operate::run_program;

/// Names of the gateways.
pub(super) const NAMES: [&str; 3] = ["a", "b", "c"];
const NQN: &str = "nqn.2026-01.org.example:disks";
/// Time for a process to start, and for the group to be whole again.
const START_MAX: Duration = Duration::from_secs(30);

/// All processes.
pub(super) struct Gateways {
    tenmil: PathBuf,
    directory: PathBuf,
    /// Ends before the services that it uses.
    gateways: Vec<Gateway>,
    services: Services,
}

/// A gateway.
pub(super) struct Gateway {
    process: Option<Process>,
    address: SocketAddr,
    /// In front of etcd.
    relay: Option<Relay>,
    starts: u32,
}

/// Process that is killed when it is dropped.
pub(super) struct Process {
    child: Child,
    log: PathBuf,
}

impl Gateways {
    /// Starts everything, and waits until the group is whole.
    pub(super) fn start(
        binary: &Path,
        directory: &Path,
        kind: ServiceKind,
    ) -> Result<Self, String> {
        let tenmil = binary
            .canonicalize()
            .map_err(|why| format!("no program at {}: {why}; `cargo build`", binary.display()))?;
        let _ = std::fs::remove_dir_all(directory);
        let of_file = |why: std::io::Error| format!("{}: {why}", directory.display());
        std::fs::create_dir_all(directory.join("run")).map_err(of_file)?;
        let services = Services::start(kind, &tenmil, directory)?;
        let directory = directory.to_owned();
        let mut all = Self { tenmil, directory, gateways: Vec::new(), services };
        for _ in NAMES {
            let relay = match &all.services {
                Services::Etcd(services) => Some(Relay::start(services.etcd_address)?),
                Services::Ceph(_) => None,
            };
            let address = free_address()?;
            all.gateways.push(Gateway { process: None, address, relay, starts: 0 });
        }
        (0..NAMES.len()).try_for_each(|at| all.start_gateway(at))?;
        all.wait_until_whole()?;
        Ok(all)
    }

    pub(super) fn store_uri(&self) -> String {
        self.services.store_uri()
    }

    /// Cuts a gateway off from its store, or ends that.
    pub(super) fn set_cut(&self, at: usize, is_cut: bool) {
        if let Some(relay) = &self.gateways[at].relay {
            relay.set_cut(is_cut);
        }
    }

    /// The blocklist of the Ceph cluster.
    pub(super) fn blocklist(&self) -> Result<String, String> {
        self.services.blocklist()
    }

    /// Whether the devices are images of a Ceph cluster.
    pub(super) const fn has_images(&self) -> bool {
        matches!(self.services, Services::Ceph(_))
    }

    /// Starts a gateway.
    pub(super) fn start_gateway(&mut self, at: usize) -> Result<(), String> {
        let Gateway { address, relay, starts, .. } = &self.gateways[at];
        let (name, starts) = (NAMES[at], starts + 1);
        let store = relay.as_ref().map(|relay| format!("etcd:http://{}", relay.address()));
        let store = store.unwrap_or_else(|| self.store_uri());
        let namespaces: String = (1..=DEVICES)
            .map(|nsid| {
                let uri = self.services.device_uri(nsid);
                format!("[[subsystem.namespace]]\nuri = \"{uri}\"\nana-group = {nsid}\n")
            })
            .collect();
        let text = format!(
            "[group]\nname = \"disks\"\nmember = \"{name}\"\nstore = \"{store}\"\n\
             [[listener]]\naddress = \"{address}\"\n[[subsystem]]\nnqn = \"{NQN}\"\n{namespaces}"
        );
        let file = self.directory.join(format!("{name}.toml"));
        std::fs::write(&file, text).map_err(|why| format!("{}: {why}", file.display()))?;
        let mut command = Command::new(&self.tenmil);
        command.arg("serve").arg("--config").arg(&file);
        command.arg("--control").arg(self.control(at));
        let process = Process::start(command, &self.directory, &format!("{name}-{starts}"))?;
        process.wait_for("ready")?;
        let gateway = &mut self.gateways[at];
        (gateway.process, gateway.starts) = (Some(process), starts);
        Ok(())
    }

    /// Kills a gateway.
    pub(super) fn kill_gateway(&mut self, at: usize) {
        drop(self.gateways[at].process.take());
    }

    /// Ends a gateway as a service manager does, and waits for it.
    pub(super) fn stop_gateway(&mut self, at: usize) -> Result<(), String> {
        let Some(mut process) = self.gateways[at].process.take() else { return Ok(()) };
        process.signal("TERM")?;
        let ended = process.child.wait().map_err(|why| format!("wait: {why}"))?;
        match ended.success() {
            true => Ok(()),
            false => Err(format!("gateway {}: {ended}, expected success", NAMES[at])),
        }
    }

    /// Sends a signal to a gateway.
    pub(super) fn signal_gateway(&self, at: usize, signal: &str) -> Result<(), String> {
        self.gateways[at].process.as_ref().map_or(Ok(()), |process| process.signal(signal))
    }

    /// Log of the last start of a gateway.
    pub(super) fn log_of(&self, at: usize) -> String {
        let process = self.gateways[at].process.as_ref();
        process.map_or_else(String::new, Process::text)
    }

    /// Has the store not answer for a time.
    pub(super) fn interrupt_store(&mut self, time: Duration) -> Result<(), String> {
        self.services.interrupt_store(&self.directory, time)
    }

    /// Drains a gateway, or ends that.
    pub(super) fn set_draining(&self, at: usize, is_draining: bool) -> Result<(), String> {
        let verb = if is_draining { "drain" } else { "rebalance" };
        let mut command = Command::new(&self.tenmil);
        command.args(["group", verb, "--control"]).arg(self.control(at));
        run_program(&mut command).map(drop)
    }

    /// State of the group, as a gateway knows it.
    pub(super) fn status(&self, at: usize) -> Result<Value, String> {
        let mut command = Command::new(&self.tenmil);
        command.args(["group", "status", "--json", "--control"]).arg(self.control(at));
        let text = run_program(&mut command)?;
        serde_json::from_str(&text).map_err(|why| format!("group status: {why}"))
    }

    /// Index of the owner of an ANA group.
    pub(super) fn owner_of(&self, group: u64) -> Option<usize> {
        let status = (0..NAMES.len()).find_map(|at| self.status(at).ok())?;
        let groups = status["ana_groups"].as_array()?;
        let found = groups.iter().find(|it| it["ana_group"] == group)?;
        NAMES.iter().position(|name| found["owner"] == *name && found["is_open"] == true)
    }

    /// Waits until every gateway is a member and knows that every group is open.
    pub(super) fn wait_until_whole(&self) -> Result<(), String> {
        let is_whole = |status: &Value| {
            let groups = status["ana_groups"].as_array();
            let are_open = groups.is_some_and(|all| all.iter().all(|it| it["is_open"] == true));
            let members = status["members"].as_array().map_or(0, Vec::len);
            are_open && members == NAMES.len() && status["state"] == "member"
        };
        let end = Instant::now() + START_MAX;
        loop {
            let statuses: Vec<_> = (0..NAMES.len()).map(|at| self.status(at)).collect();
            if statuses.iter().all(|status| status.as_ref().is_ok_and(is_whole)) {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(format!("the group is {statuses:?}, expected three members"));
            }
            sleep(Duration::from_millis(100));
        }
    }

    /// Starts a verified load on both namespaces over all paths. Its report goes to the file of that name.
    pub(super) fn start_load(&self, seconds: u32) -> Result<Process, String> {
        let addresses: Vec<String> =
            self.gateways.iter().map(|gateway| gateway.address.to_string()).collect();
        let uri = |nsid| format!("tcp://{}/{NQN}/{nsid}", addresses.join(","));
        let mut command = Command::new(&self.tenmil);
        command.args([
            "perf",
            "-w",
            "randrw",
            "--verify",
            "--overwrite",
            "--json",
            "-q",
            "8",
            "-t",
        ]);
        command.arg(seconds.to_string()).args([uri(1), uri(2)]);
        Process::start(command, &self.directory, "load")
    }

    fn control(&self, at: usize) -> PathBuf {
        self.directory.join("run").join(NAMES[at])
    }
}

impl Process {
    pub(super) fn start(
        mut command: Command,
        directory: &Path,
        name: &str,
    ) -> Result<Self, String> {
        let log = directory.join(format!("{name}.log"));
        let of_log = |why: std::io::Error| format!("{}: {why}", log.display());
        let output = std::fs::File::create(&log).map_err(of_log)?;
        let errors = std::fs::File::create(log.with_extension("err")).map_err(of_log)?;
        command.stdout(output).stderr(errors).stdin(Stdio::null());
        let child = command.spawn().map_err(|why| format!("start {name}: {why}"))?;
        Ok(Self { child, log })
    }

    /// What it has printed, errors behind.
    pub(super) fn text(&self) -> String {
        let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
        read(&self.log) + &read(&self.log.with_extension("err"))
    }

    pub(super) fn wait_for(&self, word: &str) -> Result<(), String> {
        let end = Instant::now() + START_MAX;
        while !self.text().contains(word) {
            if Instant::now() > end {
                return Err(format!("{}: no `{word}`: {}", self.log.display(), self.text()));
            }
            sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Kills it.
    pub(super) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn signal(&self, signal: &str) -> Result<(), String> {
        let pid = self.child.id().to_string();
        run_program(Command::new("kill").args(["-s", signal, &pid])).map(drop)
    }

    /// Waits for its end. Returns its standard output if it succeeded.
    pub(super) fn wait(mut self, limit: Duration) -> Result<String, String> {
        let end = Instant::now() + limit;
        loop {
            match self.child.try_wait().map_err(|why| format!("wait: {why}"))? {
                Some(status) if status.success() => {
                    return std::fs::read_to_string(&self.log).map_err(|why| why.to_string());
                }
                Some(status) => return Err(format!("{status}: {}", self.text())),
                None if Instant::now() > end => {
                    return Err(format!("it has not ended within {} s", limit.as_secs()));
                }
                None => sleep(Duration::from_millis(50)),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
