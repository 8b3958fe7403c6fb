//! A cluster of one node: a monitor and an OSD, in a directory, without systemd.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::operate::run_program;

/// Where the OSD stores objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ObjectStore {
    /// In memory
    Memstore,
    /// In a sparse file
    Bluestore,
}

/// A running cluster, which ends when it is dropped.
pub(crate) struct Cluster {
    directory: PathBuf,
    store: ObjectStore,
    version: String,
}

/// Time for a daemon to start.
const START_MAX: Duration = Duration::from_secs(60);
const STOP_MAX: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(100);
/// Bytes of the store.
const STORE_BYTES: u64 = 4 << 30;

impl ObjectStore {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Memstore => "memstore",
            Self::Bluestore => "bluestore",
        }
    }
}

impl Cluster {
    /// Makes a new cluster in `directory`, whose files are deleted, and starts it.
    pub(crate) fn start(directory: &Path, store: ObjectStore) -> Result<Self, String> {
        let mut cluster = Self { directory: directory.to_owned(), store, version: String::new() };
        // Of an earlier run that was killed.
        cluster.stop_daemons();
        let _ = std::fs::remove_dir_all(directory);
        for name in ["mon", "osd", "run", "log"] {
            let path = directory.join(name);
            std::fs::create_dir_all(&path).map_err(|why| format!("{}: {why}", path.display()))?;
        }
        let fsid = new_uuid()?;
        let port = crate::operate::free_port()?;
        let conf = configuration(directory, store, &fsid, port);
        std::fs::write(cluster.conf(), conf).map_err(|why| format!("ceph.conf: {why}"))?;
        let map = directory.join("monmap").display().to_string();
        let address = format!("[v2:127.0.0.1:{port}]");
        let made = ["--create", "--clobber", "--fsid", &fsid, "--addv", "a", &address, &map];
        run_program(Command::new("monmaptool").args(made))?;
        cluster.run("ceph-mon", &["--mkfs", "-i", "a", "--monmap", &map])?;
        cluster.run("ceph-mon", &["-i", "a"])?;
        let uuid = new_uuid()?;
        cluster.run("ceph", &["--connect-timeout", "60", "osd", "new", &uuid])?;
        cluster.run("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", &uuid])?;
        cluster.start_osd()?;
        cluster.run("ceph", &["osd", "pool", "create", "rbd", "8", "8"])?;
        cluster
            .run("ceph", &["osd", "pool", "set", "rbd", "size", "1", "--yes-i-really-mean-it"])?;
        cluster.run("rbd", &["pool", "init", "rbd"])?;
        cluster.version = cluster.run("ceph", &["--version"])?.trim().to_owned();
        Ok(cluster)
    }

    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The configuration file.
    pub(crate) fn conf(&self) -> PathBuf {
        self.directory.join("ceph.conf")
    }

    /// The URI of an image of the pool `rbd`, with options.
    pub(crate) fn uri(&self, image: &str, options: &str) -> String {
        format!("rbd:rbd/{image}?conf={}{options}", self.conf().display())
    }

    /// Runs a program of Ceph to its end, and returns its standard output.
    pub(crate) fn run(&self, program: &str, arguments: &[&str]) -> Result<String, String> {
        run_program(Command::new(program).arg("-c").arg(self.conf()).args(arguments))
    }

    /// Starts the OSD, and waits until it serves.
    pub(crate) fn start_osd(&self) -> Result<(), String> {
        self.run("ceph-osd", &["-i", "0"])?;
        let end = Instant::now() + START_MAX;
        loop {
            let state = self.run("ceph", &["osd", "stat"])?;
            if state.contains("1 up") {
                return Ok(());
            }
            if Instant::now() > end {
                return Err(format!("ceph-osd: `{}` after 60 s, expected 1 up", state.trim()));
            }
            sleep(PAUSE);
        }
    }

    /// Whether a killed OSD finds its objects again.
    pub(crate) fn is_persistent(&self) -> bool {
        self.store == ObjectStore::Bluestore
    }

    /// Ends the OSD, which stores its objects first.
    pub(crate) fn stop_osd(&self) {
        self.stop_daemon("osd.0", "ceph-osd");
    }

    /// Ends the OSD as a crash does.
    pub(crate) fn kill_osd(&self) -> Result<(), String> {
        let pid = self.daemon_pid("osd.0").ok_or("no pid file of the OSD")?;
        run_program(Command::new("kill").args(["-9", &pid])).map(drop)
    }

    /// Sends a signal to the OSD.
    pub(crate) fn signal_osd(&self, signal: &str) -> Result<(), String> {
        let pid = self.daemon_pid("osd.0").ok_or("no pid file of the OSD")?;
        run_program(Command::new("kill").args(["-s", signal, &pid])).map(drop)
    }

    fn daemon_pid(&self, name: &str) -> Option<String> {
        let path = self.directory.join("run").join(format!("{name}.pid"));
        Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
    }

    /// Ends the daemons that the pid files in the directory name.
    fn stop_daemons(&self) {
        self.stop_daemon("osd.0", "ceph-osd");
        self.stop_daemon("mon.a", "ceph-mon");
    }

    fn stop_daemon(&self, name: &str, program: &str) {
        let Some(pid) = self.daemon_pid(name) else { return };
        // A pid file of an earlier run may name another process by now.
        let is_daemon = || {
            let running = std::fs::read_to_string(format!("/proc/{pid}/comm"));
            running.is_ok_and(|running| running.trim() == program)
        };
        let end = Instant::now() + STOP_MAX;
        for signal in ["-TERM", "-KILL"] {
            if is_daemon() {
                let _ = run_program(Command::new("kill").args([signal, &pid]));
            }
            while signal == "-TERM" && is_daemon() && Instant::now() < end {
                sleep(PAUSE);
            }
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop_daemons();
    }
}

fn new_uuid() -> Result<String, String> {
    let path = "/proc/sys/kernel/random/uuid";
    let uuid = std::fs::read_to_string(path).map_err(|why| format!("{path}: {why}"))?;
    Ok(uuid.trim().to_owned())
}

/// Loopback only, one copy of each object, no authentication.
fn configuration(directory: &Path, store: ObjectStore, fsid: &str, port: u16) -> String {
    let directory = directory.display();
    let store = store.name();
    format!(
        "[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{port}]
public_addr = 127.0.0.1
ms_bind_ipv6 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
run_dir = {directory}/run
admin_socket = {directory}/run/$name.$pid.asok
pid_file = {directory}/run/$name.pid
log_file = {directory}/log/$name.log
crash_dir = {directory}/run
mon_data = {directory}/mon
osd_data = {directory}/osd
osd_objectstore = {store}
memstore_device_bytes = {STORE_BYTES}
bluestore_block_size = {STORE_BYTES}
osd_memory_target = 939524096
osd_class_update_on_start = false
osd_fast_shutdown = false
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
mon_data_avail_crit = 1
mon_data_avail_warn = 2
"
    )
}
